"""Stepper: runs one planned pass and books its outcome.

The pass itself chooses, walks, and writes accepted rows to pages and ring (target_service.model.shard). Owns
what follows from its choices: the walk with stops and limits, sessions' lengths, announcements, index,
results. Does not own what is run (target_service.planner), sessions and replies (target_service.sessions) or
the thread (target_service.engine).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from specbridge.errors import InternalError, SpecBridgeError, Unavailable
from specbridge.rounds import FinishReason, TargetResult, TargetResultKind, TokenLogprobs
from target_service.batching import Buckets, ChainItem, StepPlan, VerifyItem, build_step
from target_service.planner import Planner
from target_service.sampling import NO_CHOICE, token_logprobs
from target_service.session import Phase, Session
from target_service.sessions import SessionBook
from target_service.step import Step, StepOutput
from target_service.verify import walk

log = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What the stepper needs of target_service.runner."""

    def run(self, step: Step) -> StepOutput: ...


class Stepper:
    """Runs steps over the sessions of `book` on `runner`."""

    def __init__(self, runner: StepRunner, book: SessionBook, *, vocab_size: int, max_position: int) -> None:
        self._runner = runner
        self._book = book
        self._limits = book.limits
        self._cache = book.cache
        self._capture = book.capture
        self._metrics = book.metrics
        self.planner = Planner(book, vocab_size=vocab_size)
        self._max_position = max_position
        self._buckets = Buckets()
        if self._limits.deterministic:
            rows = self._limits.max_tree_nodes + 1
            self._buckets = Buckets(verify=-(-rows // 8) * 8, prefill=self._limits.prefill_chunk)

    def step(self) -> bool:
        """Run one step. False if nothing could be run. Raises Unavailable when the model is gone for good."""
        plan = self.planner.plan()
        if not plan:
            return False
        try:
            with torch.inference_mode():
                self._run(plan)
        except Unavailable as error:
            self._abandon(plan, error)
            raise
        except Exception as error:  # the sessions of this step are in doubt, the others are not
            log.exception("a step of %d sessions failed", len(plan.sessions()))
            self._abandon(plan, InternalError(f"the step failed: {type(error).__name__}: {error}"))
        return True

    # ---- running --------------------------------------------------------------------------------

    def _run(self, plan: StepPlan) -> None:
        built = build_step(
            plan,
            buckets=self._buckets,
            max_position=self._max_position,
            page_size=self._limits.page_size,
        )
        begin = time.perf_counter_ns()
        batches = {id(item.batch): item.batch for item in plan.verifies}.values()
        for batch in batches:
            batch.start(begin)
        output = self._runner.run(built.step)
        if plan.captures:
            self._capture.written(over=output.read_back)
        forwarded = time.perf_counter_ns()
        results = self._settle(plan, output)
        done = time.perf_counter_ns()
        prefill_rows = sum(chunk.count for chunk in plan.prefills)
        rows = len(built.step.tokens)
        for batch in batches:
            batch.forward_ns += forwarded - begin
            batch.commit_ns += done - forwarded
            batch.rows += rows
            batch.prefill_rows += prefill_rows
            batch.cold = batch.cold or output.cold
        self.planner.ran(plan, (forwarded - begin) / 1e9, cold=output.cold)
        self._metrics.forward_time.observe((forwarded - begin) / 1e9)
        self._metrics.commit_time.observe((done - forwarded) / 1e9)
        self._metrics.step_rows.observe(rows)
        self._metrics.prefill_rows.inc(prefill_rows)
        self._metrics.prefill_chunks.inc(len(plan.prefills))
        self._metrics.padding_rows.inc(built.padding)
        self._metrics.context_rows.inc(output.context_rows)
        self._metrics.context_rows_read.inc(output.context_rows_read)
        self._metrics.context_rows_copied.inc(output.context_rows_copied)
        self._metrics.verify_rows.inc(plan.verify_rows)
        for item, result in zip(plan.verifies, results, strict=True):
            if result is not None:
                self._book.finish_item(item, result)

    def _settle(self, plan: StepPlan, output: StepOutput) -> list[TargetResult | None]:
        """Walk, announce, index. Returns the verifies' results, None for those answered already; first tokens
        are notified.
        """
        now = time.monotonic()
        for chunk in plan.recaptures:
            session = chunk.session
            self._publish_chain(chunk, anchor=session.anchor if self._closes(chunk) else None)
            self._capture.recaptured(session.capture, kv_length=session.kv_length, rows=chunk.count, now=now)
        results = [self._settle_round(item, output) for item in plan.verifies]
        firsts = [self._settle_chunk(chunk, output.choices) for chunk in plan.prefills]
        for session in dict.fromkeys(plan.sessions()):
            if session.table.closed:
                continue
            self._cache.commit(session.table, session.tokens, session.kv_length)
            if session.phase is Phase.FINISHED:
                self._cache.release(session.table)
        for chunk, reason in zip(plan.prefills, firsts, strict=True):
            if reason is not None:
                self._notify_first(chunk, reason, output.logits)
        return results

    def _settle_round(self, item: VerifyItem, output: StepOutput) -> TargetResult | None:
        session, tree, base = item.session, item.verify.tree, item.verify.base
        assert session is not None
        own = output.choices[item.logit_row : item.logit_row + len(tree) + 1]
        if NO_CHOICE in own:
            self._capture.cancel(item.reserved)
            item.reserved = None
            self._book.fail_item(item, self._bad_logits(session))
            return None
        outcome = walk(tree, own, stop_ids=session.stop_ids, remaining=session.remaining, room=session.room)
        path = [0, *(node + 1 for node in outcome.accepted)]
        committed = [session.anchor, *(tree.tokens[node] for node in outcome.accepted)]
        session.tokens += outcome.tokens
        session.kv_length = base + len(path)
        if outcome.finish_reason:
            session.phase = Phase.FINISHED
        self._capture.publish(
            session.capture,
            item.reserved,
            key=session.key,
            first=base,
            tokens=committed,
            anchor=None if outcome.finish_reason else session.anchor,
            defer=item.verify.defer_rows and not outcome.finish_reason,
        )
        item.reserved = None
        self._metrics.tokens.inc(len(outcome.tokens))
        self._metrics.accepted.inc(len(outcome.accepted))
        logprobs: tuple[TokenLogprobs, ...] = ()
        if session.want_logprobs:
            at = torch.tensor([item.logit_row + row for row in path[: len(outcome.tokens)]])
            rows = output.logits.index_select(0, at.to(output.logits.device))
            logprobs = token_logprobs(rows, outcome.tokens, session.want_logprobs)
        return TargetResult(
            session.key,
            TargetResultKind.VERIFIED,
            base=base,
            kv_length=session.kv_length,
            tokens=outcome.tokens,
            accepted=outcome.accepted,
            finish_reason=outcome.finish_reason,
            cached_tokens=session.cached_tokens,
            draft_has_context=session.capture.following,
            logprobs=logprobs,
        )

    def _settle_chunk(self, chunk: ChainItem, choices: Sequence[int]) -> FinishReason | None:
        """Returns how the text stands after the first token; None while the prefill goes on."""
        session = chunk.session
        if chunk.final and choices[chunk.logit_row] == NO_CHOICE:
            self._capture.cancel(chunk.reserved)
            chunk.reserved = None
            self._book.fail(session, self._bad_logits(session))
            return None
        session.kv_length = chunk.first + chunk.count
        reason: FinishReason | None = None
        anchor: int | None = None
        if chunk.final:
            token = choices[chunk.logit_row]
            reason = FinishReason.RUNNING
            if token in session.stop_ids:
                reason = FinishReason.STOP
            elif min(session.remaining, session.room) <= 1:
                reason = FinishReason.LENGTH
            if not reason:
                anchor = token
        self._publish_chain(chunk, anchor=anchor)
        if reason is not None:
            session.tokens.append(choices[chunk.logit_row])
            session.phase = Phase.FINISHED if reason else Phase.READY
            self._metrics.tokens.inc()
        return reason

    def _publish_chain(self, chunk: ChainItem, *, anchor: int | None) -> None:
        session = chunk.session
        self._capture.publish(
            session.capture,
            chunk.reserved,
            key=session.key,
            first=chunk.first,
            tokens=session.tokens[chunk.first : chunk.first + chunk.count],
            anchor=anchor,
        )
        chunk.reserved = None

    def _closes(self, chunk: ChainItem) -> bool:
        return chunk.first + chunk.count == chunk.session.kv_length

    def _notify_first(self, chunk: ChainItem, reason: FinishReason, logits: torch.Tensor) -> None:
        session = chunk.session
        token = session.anchor
        logprobs: tuple[TokenLogprobs, ...] = ()
        if session.want_logprobs:
            row = logits[chunk.logit_row : chunk.logit_row + 1]
            logprobs = token_logprobs(row, [token], session.want_logprobs)
        # Together, so that their ratio is one; the first token is not of the prompt.
        self._metrics.prefix_queries.inc(session.num_tokens - 1)
        self._metrics.prefix_hits.inc(session.cached_tokens)
        self._book.notify(
            session.reply,
            TargetResult(
                session.key,
                TargetResultKind.FIRST,
                kv_length=session.kv_length,
                tokens=(token,),
                finish_reason=reason,
                cached_tokens=session.cached_tokens,
                draft_has_context=session.capture.following,
                logprobs=logprobs,
            ),
        )

    def _bad_logits(self, session: Session) -> InternalError:
        """Take a session out whose logits are no numbers: a token chosen from them would be anything."""
        self._metrics.bad_logits.inc()
        log.error("session %s: the logits at position %d are no numbers", session.key, session.kv_length)
        # Its rows may be why, so no other session shall find them.
        self._book.remove(session, keep_pages=False)
        return InternalError(
            f"the model's logits at position {session.kv_length} are NaN or infinite: check the checkpoint, "
            "or run it in a wider dtype"
        )

    def _abandon(self, plan: StepPlan, error: SpecBridgeError) -> None:
        """A step failed half-way: its sessions end, its reservations go back."""
        for item in plan.verifies:
            self._capture.cancel(item.reserved)
            if item.batch.results[item.index] is None:
                self._book.fail_item(item, error)
        for chunk in (*plan.prefills, *plan.recaptures):
            self._capture.cancel(chunk.reserved)
            if self._book.find(chunk.session.key) is chunk.session:
                self._book.fail(chunk.session, error)
