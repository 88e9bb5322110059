"""Domain dataclasses ↔ protobuf for the Rounds and GetInfo calls.

The only module besides the servers and clients that touches generated classes. `to_pb` functions
never fail on domain objects; `from_pb` functions check only what protobuf can't (sizes of ids), the
services validate meaning.

Every round passes here four times, so two things about protobuf's Python classes matter. A nested message
given to a constructor is serialised and parsed again, at every level; a mapping of its fields is not. And
slicing a repeated field is several times faster than iterating over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protos import common_pb2, draft_pb2, target_pb2
from specbridge import errors
from specbridge import rounds as r
from specbridge.tree import EMPTY_TREE, DraftTree

# Open enums: a newer peer may send numbers that this build has no name for.
_TARGET_KINDS = {int(kind): kind for kind in r.TargetResultKind}
_DRAFT_KINDS = {int(kind): kind for kind in r.DraftResultKind}
_FINISH_REASONS = {int(reason): reason for reason in r.FinishReason}

Fields = dict[str, Any]
"""A nested message on its way out, by field names."""

# ---- common ---------------------------------------------------------------------------------


def key_fields(key: r.SessionKey) -> Fields:
    return {"gateway": key.gateway, "number": key.number, "incarnation": key.incarnation}


def key_from_pb(pb: common_pb2.SessionKey) -> r.SessionKey:
    return r.SessionKey(pb.gateway, pb.number, pb.incarnation)


def sampling_to_pb(s: r.SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=s.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        min_p=s.min_p,
        seed=s.seed % 2**64,
        choice=s.choice,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=dict(s.logit_bias),
    )


def sampling_from_pb(pb: common_pb2.SamplingParams) -> r.SamplingParams:
    return r.SamplingParams(
        temperature=pb.temperature,
        top_k=pb.top_k,
        # proto3 has no default but zero: an unset top_p or repetition penalty means "off".
        top_p=pb.top_p or 1.0,
        min_p=pb.min_p,
        seed=pb.seed,
        choice=pb.choice,
        repetition_penalty=pb.repetition_penalty or 1.0,
        presence_penalty=pb.presence_penalty,
        frequency_penalty=pb.frequency_penalty,
        logit_bias=dict(pb.logit_bias),
    )


def stop_to_pb(s: r.StopParams) -> common_pb2.StopParams:
    return common_pb2.StopParams(
        stop_token_ids=s.stop_token_ids,
        max_tokens=s.max_tokens,
        min_tokens=s.min_tokens,
        ignore_eos=s.ignore_eos,
    )


def stop_from_pb(pb: common_pb2.StopParams) -> r.StopParams:
    return r.StopParams(pb.max_tokens, tuple(pb.stop_token_ids[:]), pb.min_tokens, pb.ignore_eos)


def _tree_fields(tree: DraftTree) -> Fields:
    return {"tokens": tree.tokens, "parents": tree.parents, "scores": tree.scores}


def _tree_from_pb(pb: common_pb2.DraftTree) -> DraftTree:
    tokens, parents, scores = tuple(pb.tokens[:]), tuple(pb.parents[:]), tuple(pb.scores[:])
    return DraftTree(tokens, parents, scores) if tokens or parents or scores else EMPTY_TREE


def error_to_pb(error: BaseException) -> common_pb2.Error:
    code = common_pb2.ErrorCode.Value(errors.mapping(error).code)
    return common_pb2.Error(code=code, message=errors.message_of(error))


def error_from_pb(pb: common_pb2.Error) -> errors.SpecBridgeError:
    # A newer peer may send a code this build does not know; proto3 keeps the number.
    known = common_pb2.ErrorCode.values()
    name = common_pb2.ErrorCode.Name(pb.code) if pb.code in known else "unknown"
    return errors.from_code(name, pb.message)


def _costs_fields(points: Sequence[r.CostPoint]) -> list[Fields]:
    return [{"rows": p.rows, "context": p.context, "time_ns": p.time_ns} for p in points]


def _costs_from_pb(points) -> tuple[r.CostPoint, ...]:  # type: ignore[no-untyped-def]
    return tuple(r.CostPoint(p.rows, p.context, p.time_ns) for p in points)


# ---- target ---------------------------------------------------------------------------------

_FOOTPRINT = tuple(r.Footprint.__slots__)
_TARGET_INFO_PLAIN = (
    "model_id", "fingerprint", "vocab_size", "hidden_size", "num_layers", "page_size", "max_length",
    "tp_size", "max_sessions", "max_tree_nodes", "total_pages", "dtype", "device", "instance",
    "channel_transport", "channel_reason", "deterministic", "dummy_weights", "simulated_acceptance",
)  # fmt: skip


def target_info_to_pb(info: r.TargetInfo) -> target_pb2.TargetInfo:
    return target_pb2.TargetInfo(
        eos_token_ids=info.eos_token_ids,
        verify_cost=_costs_fields(info.verify_cost),
        footprint={n: getattr(info.footprint, n) for n in _FOOTPRINT},
        **{name: getattr(info, name) for name in _TARGET_INFO_PLAIN},
    )


def target_info_from_pb(pb: target_pb2.TargetInfo) -> r.TargetInfo:
    return r.TargetInfo(
        eos_token_ids=tuple(pb.eos_token_ids),
        verify_cost=_costs_from_pb(pb.verify_cost),
        footprint=r.Footprint(*(getattr(pb.footprint, n) for n in _FOOTPRINT)),
        **{name: getattr(pb, name) for name in _TARGET_INFO_PLAIN},
    )


_TARGET_OPEN_PLAIN = (
    "prompt_length", "draft_prefix", "speculate", "cache_salt", "want_logprobs", "priority", "age_ms",
    "draft_absent",
)  # fmt: skip


def _target_open_to_pb(o: r.TargetOpen) -> target_pb2.TargetOpen:
    return target_pb2.TargetOpen(
        session=key_fields(o.session),
        tokens=o.tokens,
        sampling=sampling_to_pb(o.sampling),
        stop=stop_to_pb(o.stop),
        **{name: getattr(o, name) for name in _TARGET_OPEN_PLAIN},
    )


def _target_open_from_pb(pb: target_pb2.TargetOpen) -> r.TargetOpen:
    return r.TargetOpen(
        session=key_from_pb(pb.session),
        tokens=tuple(pb.tokens[:]),
        sampling=sampling_from_pb(pb.sampling),
        stop=stop_from_pb(pb.stop),
        **{name: getattr(pb, name) for name in _TARGET_OPEN_PLAIN},
    )


def target_request_to_pb(request: r.TargetRequest) -> target_pb2.TargetRequest:
    return target_pb2.TargetRequest(
        batch_id=request.batch_id,
        open=[_target_open_to_pb(o) for o in request.opens],
        verify=[
            {
                "session": key_fields(v.session),
                "base": v.base,
                "tree": _tree_fields(v.tree),
                "defer_rows": v.defer_rows,
            }
            for v in request.verifies
        ],
        release=[{"session": key_fields(key)} for key in request.releases],
    )


def target_request_from_pb(pb: target_pb2.TargetRequest) -> r.TargetRequest:
    return r.TargetRequest(
        batch_id=pb.batch_id,
        opens=tuple(_target_open_from_pb(o) for o in pb.open),
        verifies=tuple(
            r.Verify(key_from_pb(v.session), v.base, _tree_from_pb(v.tree), defer_rows=v.defer_rows)
            for v in pb.verify
        ),
        releases=tuple(key_from_pb(release.session) for release in pb.release),
    )


def _target_result_fields(result: r.TargetResult) -> Fields:
    fields: Fields = {
        "session": key_fields(result.session),
        "kind": int(result.kind),
        "base": result.base,
        "kv_length": result.kv_length,
        "tokens": result.tokens,
        "accepted": result.accepted,
        "finish_reason": int(result.finish_reason),
        "cached_tokens": result.cached_tokens,
        "draft_has_context": result.draft_has_context,
    }
    if result.error is not None:
        fields["error"] = error_to_pb(result.error)
    if result.logprobs:
        fields["logprobs"] = [
            {"chosen": lp.chosen, "top_ids": lp.top_ids, "top": lp.top} for lp in result.logprobs
        ]
    return fields


def _target_result_from_pb(pb: target_pb2.TargetResult) -> r.TargetResult:
    key = key_from_pb(pb.session)
    kind, finish_reason = _TARGET_KINDS.get(pb.kind), _FINISH_REASONS.get(pb.finish_reason)
    if kind is None or finish_reason is None:
        unknown = errors.InternalError(
            f"target result kind {pb.kind}, finish reason {pb.finish_reason} is unknown to this build; "
            "run one version"
        )
        return r.TargetResult(key, r.TargetResultKind.ERROR, base=pb.base, error=unknown)
    return r.TargetResult(
        key,
        kind,
        pb.base,
        pb.kv_length,
        tuple(pb.tokens[:]),
        tuple(pb.accepted[:]),
        finish_reason,
        pb.cached_tokens,
        pb.draft_has_context,
        error_from_pb(pb.error) if pb.HasField("error") else None,
        tuple(r.TokenLogprobs(lp.chosen, tuple(lp.top_ids[:]), tuple(lp.top[:])) for lp in pb.logprobs[:]),
    )


_TARGET_TIMINGS = ("queue_ns", "forward_ns", "commit_ns", "rows", "prefill_rows", "service_ns", "cold")


def target_reply_to_pb(reply: r.TargetReply) -> target_pb2.TargetReply:
    timings = reply.timings
    return target_pb2.TargetReply(
        batch_id=reply.batch_id,
        results=[_target_result_fields(result) for result in reply.results],
        timings={n: getattr(timings, n) for n in _TARGET_TIMINGS} if timings else None,
        available_pages=reply.available_pages,
    )


def target_reply_from_pb(pb: target_pb2.TargetReply) -> r.TargetReply:
    timings = (
        r.TargetTimings(*(getattr(pb.timings, n) for n in _TARGET_TIMINGS))
        if pb.HasField("timings")
        else None
    )
    return r.TargetReply(
        pb.batch_id,
        tuple(_target_result_from_pb(result) for result in pb.results),
        timings,
        pb.available_pages if pb.HasField("available_pages") else None,
    )


# ---- draft ----------------------------------------------------------------------------------

_DRAFT_INFO_PLAIN = (
    "drafter_id", "fingerprint", "target_fingerprint", "block_size", "mask_token_id", "max_nodes",
    "vocab_size", "instance", "channel_transport", "channel_reason", "attached", "dummy_weights",
    "simulated_acceptance", "on_arrival",
)  # fmt: skip


def draft_info_to_pb(info: r.DraftInfo) -> draft_pb2.DraftInfo:
    return draft_pb2.DraftInfo(
        target_layer_ids=info.target_layer_ids,
        draft_cost=_costs_fields(info.draft_cost),
        footprint={n: getattr(info.footprint, n) for n in _FOOTPRINT},
        **{name: getattr(info, name) for name in _DRAFT_INFO_PLAIN},
    )


def draft_info_from_pb(pb: draft_pb2.DraftInfo) -> r.DraftInfo:
    return r.DraftInfo(
        target_layer_ids=tuple(pb.target_layer_ids),
        draft_cost=_costs_from_pb(pb.draft_cost),
        footprint=r.Footprint(*(getattr(pb.footprint, n) for n in _FOOTPRINT)),
        **{name: getattr(pb, name) for name in _DRAFT_INFO_PLAIN},
    )


def draft_request_to_pb(request: r.DraftRequest) -> draft_pb2.DraftRequest:
    return draft_pb2.DraftRequest(
        batch_id=request.batch_id,
        open=[
            draft_pb2.DraftOpen(
                session=key_fields(o.session),
                tokens=o.tokens,
                prompt_length=o.prompt_length,
                sampling=sampling_to_pb(o.sampling),
                cache_salt=o.cache_salt,
                recapture=o.recapture,
                kv_length=o.kv_length,
            )
            for o in request.opens
        ],
        propose=[
            {
                "session": key_fields(p.session),
                "base": p.base,
                "anchor": p.anchor,
                "max_nodes": p.max_nodes,
                "max_depth": p.max_depth,
                "on_arrival": p.on_arrival,
            }
            for p in request.proposes
        ],
        release=[{"session": key_fields(key)} for key in request.releases],
    )


def draft_request_from_pb(pb: draft_pb2.DraftRequest) -> r.DraftRequest:
    return r.DraftRequest(
        batch_id=pb.batch_id,
        opens=tuple(
            r.DraftOpen(
                session=key_from_pb(o.session),
                tokens=tuple(o.tokens[:]),
                prompt_length=o.prompt_length,
                sampling=sampling_from_pb(o.sampling),
                cache_salt=o.cache_salt,
                recapture=o.recapture,
                kv_length=o.kv_length,
            )
            for o in pb.open
        ),
        proposes=tuple(
            r.Propose(key_from_pb(p.session), p.base, p.anchor, p.max_nodes, p.max_depth, p.on_arrival)
            for p in pb.propose
        ),
        releases=tuple(key_from_pb(release.session) for release in pb.release),
    )


def _draft_result_fields(result: r.DraftResult) -> Fields:
    fields: Fields = {
        "session": key_fields(result.session),
        "kind": int(result.kind),
        "base": result.base,
        "tree": _tree_fields(result.tree),
        "draft_prefix": result.draft_prefix,
        "anchor": result.anchor,
    }
    if result.error is not None:
        fields["error"] = error_to_pb(result.error)
    return fields


def _draft_result_from_pb(pb: draft_pb2.DraftResult) -> r.DraftResult:
    key, kind = key_from_pb(pb.session), _DRAFT_KINDS.get(pb.kind)
    if kind is None:
        unknown = errors.InternalError(
            f"draft result kind {pb.kind} is unknown to this build; run one version"
        )
        return r.DraftResult(key, r.DraftResultKind.ERROR, base=pb.base, error=unknown)
    return r.DraftResult(
        key,
        kind,
        pb.base,
        _tree_from_pb(pb.tree),
        pb.draft_prefix,
        error_from_pb(pb.error) if pb.HasField("error") else None,
        pb.anchor,
    )


_DRAFT_TIMINGS = ("queue_ns", "channel_wait_ns", "append_ns", "forward_ns", "tree_ns", "service_ns")


def draft_reply_to_pb(reply: r.DraftReply) -> draft_pb2.DraftReply:
    timings = reply.timings
    return draft_pb2.DraftReply(
        batch_id=reply.batch_id,
        results=[_draft_result_fields(result) for result in reply.results],
        timings={n: getattr(timings, n) for n in _DRAFT_TIMINGS} if timings else None,
    )


def draft_reply_from_pb(pb: draft_pb2.DraftReply) -> r.DraftReply:
    timings = (
        r.DraftTimings(*(getattr(pb.timings, n) for n in _DRAFT_TIMINGS)) if pb.HasField("timings") else None
    )
    return r.DraftReply(pb.batch_id, tuple(_draft_result_from_pb(result) for result in pb.results), timings)
