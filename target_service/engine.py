"""Engine: the one thread that owns the model, and the door through which everybody else talks to it.

Owns the thread, its inbox, warm-up, leases' clock, the channel's callbacks and what happens when the model
dies. Everything that reaches the model goes through `_post`; everything that leaves goes through a reply
callable, called on this thread. Does not own sessions (target_service.sessions) or steps (planner, stepper).
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kernels.linear import activation_dtype
from specbridge.channel.base import Projection
from specbridge.errors import InternalError, InvalidRequest, SpecBridgeError, Unavailable
from specbridge.rounds import Footprint, SessionKey, TargetInfo, TargetRequest
from target_service.capture import Capture, CaptureState, HiddenStateSink
from target_service.config import Limits
from target_service.kv_cache import PageCache
from target_service.metrics import TargetMetrics
from target_service.ports import ModelConfig, Runner
from target_service.session import Phase, Reply
from target_service.sessions import SessionBook
from target_service.stepper import Stepper
from target_service.warmup import (
    decode_steps,
    measure_prefill_cost,
    measure_verify_cost,
    mixed_steps,
    prefill_steps,
    tree_steps,
)

log = logging.getLogger(__name__)

_CHECK_S = 1.0  # how often an idle engine asks whether all ranks are alive
_BLOCKED_S = 0.005  # pause when there is work that waits for pages or slots


@dataclass(frozen=True, slots=True)
class Identity:
    """What the engine reports about itself without using it."""

    model_id: str
    dtype: str
    device: str
    tp_size: int = 1
    instance: bytes = b""
    dummy_weights: bool = False
    footprint: Footprint = Footprint()


@dataclass(frozen=True, slots=True)
class TapLayout:
    """Shape of one hidden-state row. dtype: "float32", "bfloat16", ..."""

    row_width: int
    dtype: str


class Engine:
    """The target's engine. `start` blocks until warm; `submit` is thread-safe and never blocks.

    on_failure is called once, on the engine's thread, when the model is gone for good; from then on every
    request is answered UNAVAILABLE.
    """

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        metrics: TargetMetrics,
        *,
        identity: Identity,
        on_failure: Callable[[SpecBridgeError], None] | None = None,
    ) -> None:
        self._runner = runner
        self._limits = limits
        self._metrics = metrics
        self._on_failure = on_failure
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._closing = False
        self._checked = time.monotonic()
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        self.failure: SpecBridgeError | None = None
        config = runner.config
        self._config: ModelConfig = config
        self._cache = PageCache(
            limits.num_pages, limits.page_size, fingerprint=runner.fingerprint, reuse=limits.keep_prefixes
        )
        self._capture = Capture(
            metrics, slots=limits.channel_slots, recapture_interval=limits.recapture_interval
        )
        self._book = SessionBook(
            limits,
            self._cache,
            self._capture,
            metrics,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
        )
        self._stepper = Stepper(
            runner, self._book, vocab_size=config.vocab_size, max_position=config.max_position_embeddings - 1
        )
        self._info = TargetInfo(
            model_id=identity.model_id,
            fingerprint=runner.fingerprint,
            vocab_size=config.vocab_size,
            eos_token_ids=tuple(config.eos_token_ids),
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            page_size=limits.page_size,
            max_length=limits.max_length,
            tp_size=identity.tp_size,
            max_sessions=limits.max_sessions,
            max_tree_nodes=limits.max_tree_nodes,
            total_pages=limits.num_pages,
            dtype=identity.dtype,
            device=identity.device,
            instance=identity.instance or secrets.token_bytes(16),
            deterministic=limits.deterministic,
            dummy_weights=identity.dummy_weights,
            simulated_acceptance=limits.simulated_acceptance,
            footprint=identity.footprint,
        )

    # ---- for everybody, any thread --------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and wait until the model is warm. Raises what the warm-up raised."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, name="target-engine", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Answer what is queued with UNAVAILABLE, end the thread, close the model. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def info(self) -> TargetInfo:
        return self._info

    @property
    def num_sessions(self) -> int:
        """Open sessions; read from any thread."""
        return len(self._book)

    def submit(self, request: TargetRequest, reply: Reply, *, received: int | None = None) -> None:
        """Queue a request. `reply` also names the stream: sessions answer through the last one that spoke of
        them. received: perf_counter_ns of its arrival, if that was earlier than now.
        """
        arrival = time.perf_counter_ns() if received is None else received
        self._post(lambda: self._submit(request, reply, arrival))

    def drop_stream(self, reply: Reply) -> None:
        """The stream behind `reply` is gone: its sessions live on for `session_lease` seconds."""
        self._post(lambda: self._book.drop_stream(reply, now=time.monotonic()))

    # ---- the hidden-state channel's callbacks, any thread ----------------------------------------

    def connect_channel(self, sink: HiddenStateSink) -> None:
        """Give the engine its end of the channel; before `start`."""
        assert self._thread is None
        self._capture.connect(sink)

    def prepare_taps(
        self, layer_ids: Sequence[int], normed_last_layer: bool, projection: Projection | None = None
    ) -> TapLayout:
        """A draft wants these taps, or what its projection makes of them. Checks them, queues the change and
        returns the row layout.

        Raises InvalidRequest, Unavailable after a failure.
        """
        if self.failure is not None:
            raise Unavailable(f"the target has failed: {self.failure}")
        ids = tuple(layer_ids)
        layers = self._config.num_layers
        if not ids or len(set(ids)) != len(ids):
            raise InvalidRequest(
                f"target_layer_ids {ids[:layers]} must be distinct and not empty", param="target_layer_ids"
            )
        wrong = [i for i in ids if not 0 <= i < layers]
        if wrong:
            raise InvalidRequest(
                f"target_layer_ids {wrong[:layers]} are outside [0, {layers}), the model's layers; check "
                "that the drafter was made for this model",
                param="target_layer_ids",
            )
        if projection is not None:
            self._post(lambda: self._set_taps(ids, normed_last_layer, projection=projection))
            dtype = activation_dtype(projection.matrix.dtype, self._info.device)
            return TapLayout(projection.matrix.shape[0], str(dtype).removeprefix("torch."))
        self._post(lambda: self._set_taps(ids, normed_last_layer))
        dtype = self._runner.activation_dtype
        return TapLayout(len(ids) * self._config.hidden_size, str(dtype).removeprefix("torch."))

    def channel_attached(self, transport: str, reason: str) -> None:
        self._info = replace(self._info, channel_transport=transport, channel_reason=reason)
        self._metrics.channel_attached.set(1)
        self._post(lambda: self._runner.set_ring(self._capture.attached([s.capture for s in self._book])))

    def channel_detached(self, reason: str) -> None:
        log.warning("draft detached: %s", reason)
        self._info = replace(self._info, channel_transport="none", channel_reason=reason)
        self._metrics.channel_attached.set(0)
        self._post(self._detached)

    def request_recapture(self, session: SessionKey, first: int, cause: str) -> None:
        """The draft lacks this session's rows from `first` on."""
        self._post(lambda: self._recapture(session, first, cause))

    # ---- the engine's thread --------------------------------------------------------------------

    def _post(self, work: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(work)
            self._wake.notify()

    def _run(self) -> None:
        try:
            self._warm_up()
        except Exception as error:  # start() raises it in the caller
            self.failure = (
                error if isinstance(error, SpecBridgeError) else InternalError(f"warm-up failed: {error}")
            )
            self._ready.set()
            self._runner.close()
            return
        self._ready.set()
        busy = True
        while not self._closing:
            try:
                busy = self._turn(busy=busy)
            except Exception as error:  # nobody else could go on for this thread: the process has to end
                busy = self.failure is None  # answer at once; but never spin on what breaks each turn
                self._defect("the engine's loop failed", error)
                self._fail(InternalError(f"the engine's loop failed: {type(error).__name__}: {error}"))
        try:
            for work in self._next_work(wait=False):
                self._guard(work)
            self._book.fail_all(self.failure or Unavailable("the target service is shutting down"))
            self._answer()
        except Exception as error:
            self._defect("the last answers failed", error)
        finally:
            self._runner.close()

    def _turn(self, *, busy: bool) -> bool:
        """Messages, one step, answers. Returns whether there may be more to run without a further message.

        Saying so at once matters where it is not so: until this thread sleeps it holds the interpreter, which
        the event loop needs to send the answer.
        """
        for work in self._next_work(wait=not busy):
            self._guard(work)
        failure = self.failure
        if failure is not None:
            # Answers only: whatever else there is may be what broke.
            self._book.fail_all(failure)
            self._book.flush()
            return False
        now = time.monotonic()
        self._book.expire(now=now)
        self._answer()
        ran = not self._closing and self._step()
        if self.failure is not None:
            self._book.fail_all(self.failure)
        elif now - self._checked > _CHECK_S:
            self._checked = now
            self._check()
        self._book.update_gauges()
        self._answer()
        return ran and (bool(self._book.pending) or self._blocked())

    def _answer(self) -> None:
        """Send what has piled up: answers first, which somebody waits for."""
        self._book.flush()
        self._capture.flush()

    def _next_work(self, *, wait: bool) -> list[Callable[[], None]]:
        with self._wake:
            if wait and not self._inbox and not self._closing:
                self._wake.wait(self._idle_time())
            work = list(self._inbox)
            self._inbox.clear()
            return work

    def _idle_time(self) -> float:
        """Seconds to sleep when the last step found nothing to run."""
        if self.failure is not None:
            return _CHECK_S
        if self._blocked():
            return _BLOCKED_S
        return min(max(self._book.next_expiry() - time.monotonic(), 0.0), _CHECK_S)

    def _blocked(self) -> bool:
        """Whether sessions have rows to run that nobody has to ask for: of prompts, or for the draft."""
        return any(s.phase is Phase.PREFILL for s in self._book) or (
            self._capture.live and any(s.capture.state is CaptureState.SUSPENDED for s in self._book)
        )

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Unavailable as error:
            self._fail(error)
        except Exception as error:  # one bad message must not end the engine
            self._defect("a message to the engine failed", error)

    def _submit(self, request: TargetRequest, reply: Reply, received: int) -> None:
        try:
            self._book.submit(request, reply, received=received)
        except Exception as error:
            self._defect("a request could not be taken in", error)
            wrapped = InternalError(f"the request could not be taken in: {type(error).__name__}: {error}")
            self._book.refuse(request, reply, wrapped, received=received)

    def _defect(self, what: str, error: Exception) -> None:
        log.error("%s", what, exc_info=error)
        self._metrics.defects.inc()

    def _step(self) -> bool:
        try:
            return self._stepper.step()
        except Unavailable as error:
            self._fail(error)
        except Exception as error:  # planning failed: no telling whose fault it is
            self._defect("planning a step failed", error)
            self._book.fail_all(InternalError(f"planning failed: {type(error).__name__}: {error}"))
        return False

    def _check(self) -> None:
        try:
            self._runner.check()
        except Unavailable as error:
            self._fail(error)

    def _fail(self, error: SpecBridgeError) -> None:
        if self.failure is not None:
            return
        log.error("the target can't go on: %s", error)
        self.failure = error
        if self._on_failure is not None:
            try:
                self._on_failure(error)
            except Exception as second:  # whoever was to be told is gone; the answers still have to go out
                self._defect("the failure could not be reported", second)

    def _warm_up(self) -> None:
        begin = time.monotonic()
        points = measure_verify_cost(self._runner.run, self._limits, repeats=self._limits.warmup_repeats)
        if points:
            self._runner.warm_up(prefill_steps(self._limits))
            prefill = measure_prefill_cost(self._runner.run, self._limits)
            self._stepper.planner.set_times(points, prefill)
        for steps in (decode_steps, tree_steps, mixed_steps):
            self._runner.warm_up(steps(self._limits))
        self._info = replace(self._info, verify_cost=points)
        log.info("warm after %.1f s, %d points of verify cost", time.monotonic() - begin, len(points))

    def _set_taps(self, layer_ids: tuple[int, ...], normed_last_layer: bool, **more: Projection) -> None:
        self._detached()
        self._runner.set_taps(layer_ids, normed_last_layer=normed_last_layer, **more)

    def _detached(self) -> None:
        self._capture.detached([s.capture for s in self._book])
        self._runner.set_ring(None)

    def _recapture(self, key: SessionKey, first: int, cause: str) -> None:
        session = self._book.find(key)
        if session is None:
            log.debug("re-capture of unknown session %s", key)
            return
        self._capture.request(
            session.capture,
            first=first,
            kv_length=session.kv_length,
            limit=session.num_tokens if session.phase is Phase.PREFILL else session.kv_length,
            cause=cause,
        )
