"""The gateway's metrics: an observer of the scheduler, and what HTTP and gRPC add.

Names are `specbridge_gateway_<noun>_<unit>`; labels are bounded (routes, causes, reasons, positions below
the largest block). The speculative counters follow vLLM's: mean acceptance length = 1 + accepted / drafts.
Does not own the endpoint (rest, specbridge.metrics).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from gateway.generation import FALLBACK_CAUSES, REOPEN_CAUSES, DeliveredRecord, RequestRecord, RoundRecord
from specbridge.errors import SpecBridgeError
from specbridge.metrics import LATENCY_BUCKETS, ROUND_BUCKETS
from specbridge.rounds import FinishReason

PREFIX = "specbridge_gateway_"
MAX_POSITIONS = 64
_COUNT_BUCKETS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
_LENGTH_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0)
_RATE_BUCKETS = tuple(step / 20 for step in range(1, 21))
_SIZE_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0)
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS"})
_SKIPPED = frozenset({"budget", "draft_down", "draft_busy", "no_context", *FALLBACK_CAUSES})


class Histogram(Collector):
    """A histogram that takes many equal samples at once.

    A round delivers several tokens with one interval each; prometheus_client's would take them one by one.
    Used from the event loop only (a scrape on another thread may see a sample's count before its sum).
    """

    def __init__(
        self, name: str, text: str, buckets: Sequence[float], *, registry: CollectorRegistry
    ) -> None:
        self._name = PREFIX + name
        self._text = text
        self._edges = [float(edge) for edge in buckets]
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._edges, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[HistogramMetricFamily]:
        total = 0
        buckets: list[tuple[str, float]] = []
        for edge, count in zip([*map(str, self._edges), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((edge, float(total)))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets, self._sum)
        return [family]

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return [HistogramMetricFamily(self._name, self._text)]


class GatewayMetrics:
    """Implements gateway.generation.RoundObserver on a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.connected: dict[str, bool] = {"target": False, "draft": False}
        self.on_connection_changed: Callable[[], None] | None = None

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, buckets, registry=registry)

        # Speculation, over delivered tokens: adds up to the requests' own statistics.
        self._drafts = counter("spec_decode_drafts", "Rounds of a session with a draft tree.")
        self._draft_tokens = counter("spec_decode_draft_tokens", "Draft tokens (tree nodes) verified.")
        self._accepted = counter("spec_decode_accepted_tokens", "Draft tokens accepted.")
        per_position = counter(
            "spec_decode_accepted_tokens_per_position",
            "Draft tokens accepted at a depth, 0-based.",
            ("position",),
        )
        self._positions = [per_position.labels(str(position)) for position in range(MAX_POSITIONS)]
        self._acceptance = histogram(
            "acceptance_length_tokens",
            "Tokens of a session's round with a tree, bonus included.",
            _LENGTH_BUCKETS,
        )
        self._request_rate = histogram(
            "request_acceptance_rate_ratio", "Accepted / drafted tokens of a request.", _RATE_BUCKETS
        )
        self._request_length = histogram(
            "request_acceptance_length_tokens", "Mean acceptance length of a request.", _LENGTH_BUCKETS
        )
        # Tokens.
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._cached_tokens = counter(
            "cached_prompt_tokens", "Prompt tokens taken from the target's prefix cache."
        )
        self._tokens = counter("generation_tokens", "Output tokens delivered.")
        self._prompt_length = histogram(
            "request_prompt_tokens", "Prompt length of a request.", _COUNT_BUCKETS
        )
        self._output_length = histogram(
            "request_generation_tokens", "Output length of a request.", _COUNT_BUCKETS
        )
        self._chunk = histogram("delivery_tokens", "Tokens that reached a client together.", _SIZE_BUCKETS)
        # Latency.
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", LATENCY_BUCKETS)
        self._itl = histogram(
            "inter_token_latency_seconds",
            "Time per token after the first; one sample a token.",
            LATENCY_BUCKETS,
        )
        self._tpot = histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time per token after its first.",
            LATENCY_BUCKETS,
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end of a request.", LATENCY_BUCKETS)
        self._queue_time = histogram(
            "request_queue_time_seconds", "Arrival to opening the sessions.", LATENCY_BUCKETS
        )
        # Requests.
        requests = counter(
            "requests", "Requests that ended, by reason; error: failed inside.", ("finish_reason",)
        )
        self._requests = {name: requests.labels(name) for name in ("stop", "length", "abort", "error")}
        self._aborted_tokens = counter("aborted_tokens", "Output tokens of requests whose client went away.")
        self._rejected = counter("requests_rejected", "Requests never admitted.", ("error",))
        self._reopens = counter("session_reopens", "Sessions opened again.", ("service", "cause"))
        self._running = Gauge(
            PREFIX + "requests_running", "Requests decoding or in prefill.", registry=registry
        )
        self._waiting = Gauge(PREFIX + "requests_waiting", "Requests in the queue.", registry=registry)
        self._synthetic = Gauge(
            PREFIX + "synthetic",
            "1 while weights are random or acceptance is simulated: only times are real.",
            registry=registry,
        )
        self._up = Gauge(
            PREFIX + "service_connected", "1 while the stream is up.", ("service",), registry=registry
        )
        # Rounds.
        self._rounds = counter("rounds", "Rounds of a cohort, by kind.", ("kind",))
        self._skipped = counter("rounds_draft_skipped", "Rounds that did not ask the draft.", ("cause",))
        self._fallbacks = counter(
            "fallbacks", "Session rounds decoded without a tree that wanted one.", ("cause",)
        )
        self._round_tokens = counter(
            "round_tokens", "Tokens committed by rounds, before stop strings cut them."
        )
        self._round = histogram("round_seconds", "A whole round.", ROUND_BUCKETS)
        self._round_draft = histogram("round_draft_seconds", "Waiting for the draft's answer.", ROUND_BUCKETS)
        self._round_verify = histogram(
            "round_verify_seconds", "Waiting for the target's answer.", ROUND_BUCKETS
        )
        self._round_rpc = histogram(
            "round_rpc_seconds", "Part of the waits that the services do not account for.", ROUND_BUCKETS
        )
        self._round_own = histogram("round_gateway_seconds", "A round outside both waits.", ROUND_BUCKETS)
        self._round_outside = histogram(
            "round_outside_seconds", "A round outside the services' own work: gateway and RPC.", ROUND_BUCKETS
        )
        self._rows = histogram("round_rows", "Rows of a verify pass.", _SIZE_BUCKETS)
        self._nodes = histogram("round_nodes", "Tree nodes of a verify pass.", _SIZE_BUCKETS)
        self._sessions = histogram("round_sessions", "Sessions of a round.", _SIZE_BUCKETS)
        # Surfaces.
        self._http = counter("http_requests", "HTTP requests answered.", ("route", "method", "code"))
        self._grpc = counter("grpc_requests", "gRPC calls answered.", ("method", "code"))
        for cause in FALLBACK_CAUSES:
            self._fallbacks.labels(cause)
        for service in self.connected:
            self._up.labels(service).set(0)

    def watch(
        self,
        *,
        running: Callable[[], float],
        waiting: Callable[[], float],
        synthetic: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Read these at every scrape."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)
        self._synthetic.set_function(synthetic)

    # ---- RoundObserver ----------------------------------------------------------------------

    def on_round(self, record: RoundRecord) -> None:
        self._rounds.labels("speculative" if record.nodes else "plain").inc()
        if record.skipped:
            self._skipped.labels(record.skipped if record.skipped in _SKIPPED else "other").inc()
        self._round_tokens.inc(record.tokens)
        self._round.observe(record.total_s)
        if record.draft_wait_s:
            self._round_draft.observe(record.draft_wait_s)
        self._round_verify.observe(record.verify_wait_s)
        self._round_rpc.observe(record.rpc_s)
        self._round_own.observe(record.gateway_s)
        self._round_outside.observe(record.gateway_s + record.rpc_s)
        self._rows.observe(record.rows)
        self._nodes.observe(record.nodes)
        self._sessions.observe(record.sessions)

    def on_delivered(self, record: DeliveredRecord) -> None:
        tokens = record.tokens
        if tokens:
            self._tokens.inc(tokens)
            self._chunk.observe(tokens)
            if record.first:
                self._ttft.observe(record.interval_s)
            else:
                self._itl.observe(record.interval_s / tokens, tokens)
        for share in record.rounds:
            if not share.drafted:
                continue
            self._drafts.inc()
            self._draft_tokens.inc(share.drafted)
            self._accepted.inc(share.accepted)
            self._acceptance.observe(share.accepted + 1)
            for position in self._positions[: share.accepted]:
                position.inc()

    def on_request(self, record: RequestRecord) -> None:
        reason = "error" if record.error is not None else record.finish_reason.openai or "abort"
        self._requests[reason].inc()
        self._prompt_tokens.inc(record.prompt_tokens)
        self._cached_tokens.inc(record.cached_tokens)
        self._prompt_length.observe(record.prompt_tokens)
        self._output_length.observe(record.output_tokens)
        self._queue_time.observe(record.queue_s)
        self._e2e.observe(record.total_s)
        if record.first_token_s is not None and record.output_tokens > 1:
            self._tpot.observe((record.total_s - record.first_token_s) / (record.output_tokens - 1))
        if record.finish_reason is FinishReason.ABORT:
            self._aborted_tokens.inc(record.output_tokens)
        if record.stats.num_spec_steps:
            self._request_length.observe(record.stats.mean_acceptance_length)
            self._request_rate.observe(record.stats.draft_acceptance_rate)

    def on_rejected(self, error: BaseException) -> None:
        self._rejected.labels(type(error).__name__ if isinstance(error, SpecBridgeError) else "other").inc()

    def on_fallback(self, cause: str, count: int) -> None:
        self._fallbacks.labels(cause if cause in FALLBACK_CAUSES else "other").inc(count)

    def on_reopen(self, service: str, cause: str) -> None:
        self._reopens.labels(service, cause if cause in REOPEN_CAUSES else "other").inc()

    def on_connection(self, service: str, connected: bool, reason: str) -> None:
        self.connected[service] = connected
        self._up.labels(service).set(connected)
        if self.on_connection_changed is not None:
            self.on_connection_changed()

    # ---- surfaces ---------------------------------------------------------------------------

    def on_http(self, route: str, method: str, *, status: int) -> None:
        """An HTTP request was answered. route: the pattern, never the path a client made up."""
        self._http.labels(route, method if method in _METHODS else "other", str(status)).inc()

    def on_grpc(self, method: str, code: str) -> None:
        self._grpc.labels(method, code).inc()
