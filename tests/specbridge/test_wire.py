"""Domain messages survive the wire: through bytes and back they are equal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import common_pb2, draft_pb2, target_pb2
from specbridge import errors, wire
from specbridge import rounds as r
from specbridge.tree import DraftTree

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
number = st.floats(-1e6, 1e6, width=32)
text = st.text(max_size=20)
instance = st.binary(min_size=16, max_size=16)
tokens = st.lists(u32, max_size=6).map(tuple)
keys = st.builds(r.SessionKey, instance, u64, u32)
sampling = st.builds(
    r.SamplingParams,
    temperature=st.floats(0, 100, width=32),
    top_k=u32,
    top_p=st.floats(0.0009765625, 1, width=32),
    min_p=st.floats(0, 0.5, width=32),
    seed=u64,
    choice=u32,
    repetition_penalty=st.floats(0.5, 2, width=32),
    presence_penalty=number,
    frequency_penalty=number,
    logit_bias=st.dictionaries(u32, number, max_size=3),
)
stop = st.builds(r.StopParams, u32, tokens, u32, st.booleans())
trees = st.lists(st.tuples(u32, st.integers(-1, 2**31 - 1), number), max_size=5).map(
    lambda nodes: DraftTree(*map(tuple, zip(*nodes, strict=True))) if nodes else DraftTree()
)
costs = st.lists(st.builds(r.CostPoint, u32, u32, u64), max_size=3).map(tuple)
# These two travel as their general kind: only a process's own edge tells them apart.
EDGE_ONLY = (errors.ConfigError, errors.DeadlineExceeded)
problems = st.sampled_from([kind for kind, _ in errors.TABLE if kind not in EDGE_ONLY]).flatmap(
    lambda kind: st.text(min_size=1, max_size=20).map(kind)
)


def many(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=3).map(tuple)


verify = st.builds(r.Verify, keys, u32, trees, st.booleans())
propose = st.builds(r.Propose, keys, u32, u32, u32, u32, st.booleans())
salt = st.binary(max_size=9)
priorities = st.integers(-(2**31), 2**31 - 1)
target_open = st.builds(
    r.TargetOpen,
    keys,
    tokens,
    u32,
    sampling,
    stop,
    u32,
    st.booleans(),
    salt,
    u32,
    priorities,
    u32,
    st.booleans(),
)
draft_open = st.builds(r.DraftOpen, keys, tokens, u32, sampling, salt, st.booleans(), u32)
logprobs = st.builds(r.TokenLogprobs, number, tokens, st.lists(number, max_size=3).map(tuple))
target_result = st.builds(
    r.TargetResult,
    session=keys,
    kind=st.sampled_from(r.TargetResultKind),
    base=u32,
    kv_length=u32,
    tokens=tokens,
    accepted=tokens,
    finish_reason=st.sampled_from(r.FinishReason),
    cached_tokens=u32,
    draft_has_context=st.booleans(),
    error=st.none() | problems,
    logprobs=many(logprobs),
)
draft_result = st.builds(
    r.DraftResult, keys, st.sampled_from(r.DraftResultKind), u32, trees, u32, st.none() | problems, u32
)
target_timings = st.builds(r.TargetTimings, u64, u64, u64, u32, u32, u64, st.booleans())
draft_timings = st.builds(r.DraftTimings, u64, u64, u64, u64, u64, u64)
footprint = st.builds(r.Footprint, u64, u64, u64, u32, u64, u64)
target_info = st.builds(
    r.TargetInfo,
    model_id=text,
    fingerprint=text,
    vocab_size=u32,
    eos_token_ids=tokens,
    hidden_size=u32,
    num_layers=u32,
    page_size=u32,
    max_length=u32,
    tp_size=u32,
    max_sessions=u32,
    max_tree_nodes=u32,
    total_pages=u32,
    dtype=text,
    device=text,
    instance=instance,
    verify_cost=costs,
    channel_transport=text,
    channel_reason=text,
    deterministic=st.booleans(),
    dummy_weights=st.booleans(),
    simulated_acceptance=text,
    footprint=footprint,
)
draft_info = st.builds(
    r.DraftInfo,
    drafter_id=text,
    fingerprint=text,
    block_size=u32,
    mask_token_id=u32,
    target_layer_ids=tokens,
    max_nodes=u32,
    vocab_size=u32,
    instance=instance,
    target_fingerprint=text,
    draft_cost=costs,
    channel_transport=text,
    channel_reason=text,
    attached=st.booleans(),
    dummy_weights=st.booleans(),
    simulated_acceptance=text,
    footprint=footprint,
    on_arrival=st.booleans(),
)
target_request = st.builds(
    r.TargetRequest,
    batch_id=u64,
    opens=many(
        st.builds(
            r.TargetOpen, keys, tokens, u32, sampling, stop, u32, st.booleans(), st.binary(max_size=9), u32
        )
    ),
    verifies=many(verify),
    releases=many(keys),
)
draft_request = st.builds(
    r.DraftRequest,
    batch_id=u64,
    opens=many(draft_open),
    proposes=many(propose),
    releases=many(keys),
)
target_reply = st.builds(r.TargetReply, u64, many(target_result), st.none() | target_timings, st.none() | u32)
draft_reply = st.builds(r.DraftReply, u64, many(draft_result), st.none() | draft_timings)

BUILT = {
    r.SessionKey: keys,
    r.SamplingParams: sampling,
    r.StopParams: stop,
    r.TargetInfo: target_info,
    r.TargetOpen: target_open,
    r.Verify: verify,
    r.TargetRequest: target_request,
    r.TokenLogprobs: logprobs,
    r.TargetResult: target_result,
    r.TargetTimings: target_timings,
    r.TargetReply: target_reply,
    r.DraftInfo: draft_info,
    r.DraftOpen: draft_open,
    r.Propose: propose,
    r.DraftRequest: draft_request,
    r.DraftResult: draft_result,
    r.DraftTimings: draft_timings,
    r.DraftReply: draft_reply,
}
CASES = {
    "target_info": (target_info, target_pb2.TargetInfo),
    "target_request": (target_request, target_pb2.TargetRequest),
    "target_reply": (target_reply, target_pb2.TargetReply),
    "draft_info": (draft_info, draft_pb2.DraftInfo),
    "draft_request": (draft_request, draft_pb2.DraftRequest),
    "draft_reply": (draft_reply, draft_pb2.DraftReply),
}


def comparable(message: Any) -> Any:
    """Exceptions are equal only to themselves; compare their class and words."""
    if isinstance(message, BaseException):
        return type(message), str(message)
    if isinstance(message, tuple):
        return tuple(map(comparable, message))
    if hasattr(message, "__dataclass_fields__"):
        return type(message), tuple(
            comparable(getattr(message, name)) for name in message.__dataclass_fields__
        )
    return message


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60)
@given(data=st.data())
def test_round_trip(name: str, data: st.DataObject) -> None:
    strategy, kind = CASES[name]
    message = data.draw(strategy)
    raw = getattr(wire, f"{name}_to_pb")(message).SerializeToString()
    again = getattr(wire, f"{name}_from_pb")(kind.FromString(raw))
    assert comparable(again) == comparable(message)


@pytest.mark.parametrize("kind", BUILT, ids=lambda kind: kind.__name__)
def test_the_strategies_leave_no_field_out(kind: Any) -> None:
    """A field that wire.py forgets shows only if it varies here."""
    built = BUILT[kind].wrapped_strategy
    assert len(built.args) + len(built.kwargs) == len(kind.__dataclass_fields__)


def test_a_negative_seed_travels_mod_2_64() -> None:
    assert wire.sampling_from_pb(wire.sampling_to_pb(r.SamplingParams(seed=-1))).seed == 2**64 - 1


def test_unset_fields_mean_off() -> None:
    assert wire.sampling_from_pb(common_pb2.SamplingParams()) == r.SamplingParams()


def test_a_code_from_the_future_becomes_an_internal_error() -> None:
    pb = common_pb2.Error.FromString(common_pb2.Error(message="?").SerializeToString() + b"\x08\x63")
    assert pb.code == 99
    error = wire.error_from_pb(pb)
    assert type(error) is errors.InternalError and str(error) == "?"


@pytest.mark.parametrize("kind", [r.TargetResultKind, r.DraftResultKind, r.FinishReason])
def test_enums_have_the_wires_values(kind: Any) -> None:
    pb = {
        r.TargetResultKind: target_pb2.TargetResultKind,
        r.DraftResultKind: draft_pb2.DraftResultKind,
        r.FinishReason: common_pb2.FinishReason,
    }[kind]
    named = {name.split("_", 3 if kind is not r.FinishReason else 2)[-1]: value for name, value in pb.items()}
    for member in kind:
        name = "UNSPECIFIED" if member is r.FinishReason.RUNNING else member.name
        assert named[name] == member
    assert len(kind) == len(named) - (0 if kind is r.FinishReason else 1)


def test_a_newer_peers_result_kind_is_an_error_of_that_session_only() -> None:
    key = r.SessionKey(b"g" * 16, 1)
    target = target_pb2.TargetReply(batch_id=4)
    target.results.add(session=wire.key_fields(key), kind=99, base=7)  # type: ignore[arg-type]
    target.results.add(session=wire.key_fields(key), kind=3, base=8, tokens=[1])
    odd, good = wire.target_reply_from_pb(target).results
    assert odd.kind is r.TargetResultKind.ERROR and "99" in str(odd.error) and odd.session == key
    assert good.kind is r.TargetResultKind.VERIFIED and good.tokens == (1,)
    draft = draft_pb2.DraftReply()
    draft.results.add(session=wire.key_fields(key), kind=42)  # type: ignore[arg-type]
    assert wire.draft_reply_from_pb(draft).results[0].kind is r.DraftResultKind.ERROR
