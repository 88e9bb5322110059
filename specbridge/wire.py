"""Domain dataclasses ↔ protobuf for the Rounds and GetInfo calls.

The only module besides the servers and clients that touches generated classes. `to_pb` functions
never fail on domain objects; `from_pb` functions check only what protobuf can't (sizes of ids), the
services validate meaning.
"""

from __future__ import annotations

from protos import common_pb2, draft_pb2, target_pb2
from specbridge import errors
from specbridge import rounds as r
from specbridge.tree import EMPTY_TREE, DraftTree

# Open enums: a newer peer may send numbers that this build has no name for.
_TARGET_KINDS = frozenset(int(kind) for kind in r.TargetResultKind)
_DRAFT_KINDS = frozenset(int(kind) for kind in r.DraftResultKind)
_FINISH_REASONS = frozenset(int(reason) for reason in r.FinishReason)

# ---- common ---------------------------------------------------------------------------------


def key_to_pb(key: r.SessionKey) -> common_pb2.SessionKey:
    return common_pb2.SessionKey(gateway=key.gateway, number=key.number, incarnation=key.incarnation)


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
    return r.StopParams(pb.max_tokens, tuple(pb.stop_token_ids), pb.min_tokens, pb.ignore_eos)


def tree_to_pb(tree: DraftTree) -> common_pb2.DraftTree:
    return common_pb2.DraftTree(tokens=tree.tokens, parents=tree.parents, scores=tree.scores)


def tree_from_pb(pb: common_pb2.DraftTree) -> DraftTree:
    if not pb.tokens and not pb.parents and not pb.scores:
        return EMPTY_TREE
    return DraftTree(tuple(pb.tokens), tuple(pb.parents), tuple(pb.scores))


def error_to_pb(error: BaseException) -> common_pb2.Error:
    code = common_pb2.ErrorCode.Value(errors.mapping(error).code)
    return common_pb2.Error(code=code, message=str(error))


def error_from_pb(pb: common_pb2.Error) -> errors.SpecBridgeError:
    # A newer peer may send a code this build does not know; proto3 keeps the number.
    known = common_pb2.ErrorCode.values()
    name = common_pb2.ErrorCode.Name(pb.code) if pb.code in known else "unknown"
    return errors.from_code(name, pb.message)


def _costs_to_pb(points: tuple[r.CostPoint, ...]) -> list[common_pb2.CostPoint]:
    return [common_pb2.CostPoint(rows=p.rows, context=p.context, time_ns=p.time_ns) for p in points]


def _costs_from_pb(points) -> tuple[r.CostPoint, ...]:  # type: ignore[no-untyped-def]
    return tuple(r.CostPoint(p.rows, p.context, p.time_ns) for p in points)


# ---- target ---------------------------------------------------------------------------------

_TARGET_INFO_PLAIN = (
    "model_id",
    "fingerprint",
    "vocab_size",
    "hidden_size",
    "num_layers",
    "page_size",
    "max_length",
    "tp_size",
    "max_sessions",
    "max_tree_nodes",
    "total_pages",
    "dtype",
    "device",
    "instance",
    "channel_transport",
    "channel_reason",
    "deterministic",
)


def target_info_to_pb(info: r.TargetInfo) -> target_pb2.TargetInfo:
    return target_pb2.TargetInfo(
        eos_token_ids=info.eos_token_ids,
        verify_cost=_costs_to_pb(info.verify_cost),
        **{name: getattr(info, name) for name in _TARGET_INFO_PLAIN},
    )


def target_info_from_pb(pb: target_pb2.TargetInfo) -> r.TargetInfo:
    return r.TargetInfo(
        eos_token_ids=tuple(pb.eos_token_ids),
        verify_cost=_costs_from_pb(pb.verify_cost),
        **{name: getattr(pb, name) for name in _TARGET_INFO_PLAIN},
    )


def target_open_to_pb(o: r.TargetOpen) -> target_pb2.TargetOpen:
    return target_pb2.TargetOpen(
        session=key_to_pb(o.session),
        tokens=o.tokens,
        prompt_length=o.prompt_length,
        sampling=sampling_to_pb(o.sampling),
        stop=stop_to_pb(o.stop),
        draft_prefix=o.draft_prefix,
        speculate=o.speculate,
        cache_salt=o.cache_salt,
        want_logprobs=o.want_logprobs,
    )


def target_open_from_pb(pb: target_pb2.TargetOpen) -> r.TargetOpen:
    return r.TargetOpen(
        session=key_from_pb(pb.session),
        tokens=tuple(pb.tokens),
        prompt_length=pb.prompt_length,
        sampling=sampling_from_pb(pb.sampling),
        stop=stop_from_pb(pb.stop),
        draft_prefix=pb.draft_prefix,
        speculate=pb.speculate,
        cache_salt=pb.cache_salt,
        want_logprobs=pb.want_logprobs,
    )


def target_request_to_pb(request: r.TargetRequest) -> target_pb2.TargetRequest:
    return target_pb2.TargetRequest(
        batch_id=request.batch_id,
        open=[target_open_to_pb(o) for o in request.opens],
        verify=[
            target_pb2.Verify(
                session=key_to_pb(v.session), base=v.base, tree=tree_to_pb(v.tree), defer_rows=v.defer_rows
            )
            for v in request.verifies
        ],
        release=[target_pb2.Release(session=key_to_pb(key)) for key in request.releases],
    )


def target_request_from_pb(pb: target_pb2.TargetRequest) -> r.TargetRequest:
    return r.TargetRequest(
        batch_id=pb.batch_id,
        opens=tuple(target_open_from_pb(o) for o in pb.open),
        verifies=tuple(
            r.Verify(key_from_pb(v.session), v.base, tree_from_pb(v.tree), defer_rows=v.defer_rows)
            for v in pb.verify
        ),
        releases=tuple(key_from_pb(release.session) for release in pb.release),
    )


def target_result_to_pb(result: r.TargetResult) -> target_pb2.TargetResult:
    return target_pb2.TargetResult(
        session=key_to_pb(result.session),
        kind=int(result.kind),  # type: ignore[arg-type]  # open enums take any number
        base=result.base,
        kv_length=result.kv_length,
        tokens=result.tokens,
        accepted=result.accepted,
        finish_reason=int(result.finish_reason),  # type: ignore[arg-type]
        cached_tokens=result.cached_tokens,
        draft_has_context=result.draft_has_context,
        error=error_to_pb(result.error) if result.error else None,
        logprobs=[
            target_pb2.TokenLogprobs(chosen=lp.chosen, top_ids=lp.top_ids, top=lp.top)
            for lp in result.logprobs
        ],
    )


def target_result_from_pb(pb: target_pb2.TargetResult) -> r.TargetResult:
    if pb.kind not in _TARGET_KINDS or pb.finish_reason not in _FINISH_REASONS:
        unknown = errors.InternalError(
            f"target result kind {pb.kind}, finish reason {pb.finish_reason} is unknown to this build; "
            "run one version"
        )
        return r.TargetResult(key_from_pb(pb.session), r.TargetResultKind.ERROR, base=pb.base, error=unknown)
    return r.TargetResult(
        session=key_from_pb(pb.session),
        kind=r.TargetResultKind(pb.kind),
        base=pb.base,
        kv_length=pb.kv_length,
        tokens=tuple(pb.tokens),
        accepted=tuple(pb.accepted),
        finish_reason=r.FinishReason(pb.finish_reason),
        cached_tokens=pb.cached_tokens,
        draft_has_context=pb.draft_has_context,
        error=error_from_pb(pb.error) if pb.HasField("error") else None,
        logprobs=tuple(r.TokenLogprobs(lp.chosen, tuple(lp.top_ids), tuple(lp.top)) for lp in pb.logprobs),
    )


_TARGET_TIMINGS = ("queue_ns", "forward_ns", "commit_ns", "rows", "prefill_rows", "service_ns")


def target_reply_to_pb(reply: r.TargetReply) -> target_pb2.TargetReply:
    timings = reply.timings
    return target_pb2.TargetReply(
        batch_id=reply.batch_id,
        results=[target_result_to_pb(result) for result in reply.results],
        timings=target_pb2.TargetTimings(**{n: getattr(timings, n) for n in _TARGET_TIMINGS})
        if timings
        else None,
    )


def target_reply_from_pb(pb: target_pb2.TargetReply) -> r.TargetReply:
    timings = (
        r.TargetTimings(*(getattr(pb.timings, n) for n in _TARGET_TIMINGS))
        if pb.HasField("timings")
        else None
    )
    return r.TargetReply(pb.batch_id, tuple(target_result_from_pb(result) for result in pb.results), timings)


# ---- draft ----------------------------------------------------------------------------------

_DRAFT_INFO_PLAIN = (
    "drafter_id",
    "fingerprint",
    "target_fingerprint",
    "block_size",
    "mask_token_id",
    "max_nodes",
    "vocab_size",
    "instance",
    "channel_transport",
    "channel_reason",
    "attached",
)


def draft_info_to_pb(info: r.DraftInfo) -> draft_pb2.DraftInfo:
    return draft_pb2.DraftInfo(
        target_layer_ids=info.target_layer_ids,
        draft_cost=_costs_to_pb(info.draft_cost),
        **{name: getattr(info, name) for name in _DRAFT_INFO_PLAIN},
    )


def draft_info_from_pb(pb: draft_pb2.DraftInfo) -> r.DraftInfo:
    return r.DraftInfo(
        target_layer_ids=tuple(pb.target_layer_ids),
        draft_cost=_costs_from_pb(pb.draft_cost),
        **{name: getattr(pb, name) for name in _DRAFT_INFO_PLAIN},
    )


def draft_request_to_pb(request: r.DraftRequest) -> draft_pb2.DraftRequest:
    return draft_pb2.DraftRequest(
        batch_id=request.batch_id,
        open=[
            draft_pb2.DraftOpen(
                session=key_to_pb(o.session),
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
            draft_pb2.Propose(
                session=key_to_pb(p.session),
                base=p.base,
                anchor=p.anchor,
                max_nodes=p.max_nodes,
                max_depth=p.max_depth,
            )
            for p in request.proposes
        ],
        release=[draft_pb2.DraftRelease(session=key_to_pb(key)) for key in request.releases],
    )


def draft_request_from_pb(pb: draft_pb2.DraftRequest) -> r.DraftRequest:
    return r.DraftRequest(
        batch_id=pb.batch_id,
        opens=tuple(
            r.DraftOpen(
                session=key_from_pb(o.session),
                tokens=tuple(o.tokens),
                prompt_length=o.prompt_length,
                sampling=sampling_from_pb(o.sampling),
                cache_salt=o.cache_salt,
                recapture=o.recapture,
                kv_length=o.kv_length,
            )
            for o in pb.open
        ),
        proposes=tuple(
            r.Propose(key_from_pb(p.session), p.base, p.anchor, p.max_nodes, p.max_depth) for p in pb.propose
        ),
        releases=tuple(key_from_pb(release.session) for release in pb.release),
    )


def draft_result_to_pb(result: r.DraftResult) -> draft_pb2.DraftResult:
    return draft_pb2.DraftResult(
        session=key_to_pb(result.session),
        kind=int(result.kind),  # type: ignore[arg-type]  # open enums take any number
        base=result.base,
        tree=tree_to_pb(result.tree),
        draft_prefix=result.draft_prefix,
        error=error_to_pb(result.error) if result.error else None,
    )


def draft_result_from_pb(pb: draft_pb2.DraftResult) -> r.DraftResult:
    if pb.kind not in _DRAFT_KINDS:
        unknown = errors.InternalError(
            f"draft result kind {pb.kind} is unknown to this build; run one version"
        )
        return r.DraftResult(key_from_pb(pb.session), r.DraftResultKind.ERROR, base=pb.base, error=unknown)
    return r.DraftResult(
        session=key_from_pb(pb.session),
        kind=r.DraftResultKind(pb.kind),
        base=pb.base,
        tree=tree_from_pb(pb.tree),
        draft_prefix=pb.draft_prefix,
        error=error_from_pb(pb.error) if pb.HasField("error") else None,
    )


_DRAFT_TIMINGS = ("queue_ns", "channel_wait_ns", "append_ns", "forward_ns", "tree_ns", "service_ns")


def draft_reply_to_pb(reply: r.DraftReply) -> draft_pb2.DraftReply:
    timings = reply.timings
    return draft_pb2.DraftReply(
        batch_id=reply.batch_id,
        results=[draft_result_to_pb(result) for result in reply.results],
        timings=draft_pb2.DraftTimings(**{n: getattr(timings, n) for n in _DRAFT_TIMINGS})
        if timings
        else None,
    )


def draft_reply_from_pb(pb: draft_pb2.DraftReply) -> r.DraftReply:
    timings = (
        r.DraftTimings(*(getattr(pb.timings, n) for n in _DRAFT_TIMINGS)) if pb.HasField("timings") else None
    )
    return r.DraftReply(pb.batch_id, tuple(draft_result_from_pb(result) for result in pb.results), timings)
