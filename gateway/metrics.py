"""The gateway's metrics: an observer of the scheduler, and what HTTP and gRPC add.

Names are `specbridge_gateway_<noun>_<unit>`; labels are bounded (routes, causes, reasons, positions below
the largest block). The speculative counters follow vLLM's: mean acceptance length = 1 + accepted / drafts.
Does not own the endpoint (rest, specbridge.metrics), how numbers are held (tally), nor vLLM's names for them
(vllm_aliases).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, Info
from prometheus_client.registry import Collector

from gateway.generation import FALLBACK_CAUSES, REOPEN_CAUSES, DeliveredRecord, RequestRecord, RoundRecord
from gateway.tally import PREFIX, Counter, Counters, Histogram
from gateway.vllm_aliases import VllmAliases
from specbridge.errors import TABLE, SpecBridgeError
from specbridge.metrics import LATENCY_BUCKETS, ROUND_BUCKETS
from specbridge.rounds import FinishReason
from specbridge.rpc_metrics import RpcMetrics

MAX_POSITIONS = 64
STAGES = ("draft", "channel_wait", "verify", "rpc", "gateway")
"""What a round's time is split into; they add up to it."""
FINISH_REASONS = ("stop", "length", "abort", "error")
TREE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper ends of the classes of tree sizes, in nodes."""
_COUNT_BUCKETS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
_LENGTH_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0)
_RATE_BUCKETS = tuple(step / 20 for step in range(1, 21))
_SIZE_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0)
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS"})
_SKIPPED = ("budget", *FALLBACK_CAUSES)


class GatewayMetrics:
    """Implements gateway.generation.RoundObserver on a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.connected: dict[str, bool] = {"target": False, "draft": False}
        self.on_connection_changed: Callable[[], None] | None = None

        self._by_name: dict[str, Collector] = {}

        def counter(name: str, text: str) -> Counter:
            self._by_name[name] = made = Counter(name, text, registry=registry)
            return made

        def counters(
            name: str, text: str, label: str, values: Iterable[str], *, other: bool = False
        ) -> Counters:
            self._by_name[name] = made = Counters(name, text, label, values, registry=registry, other=other)
            return made

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            self._by_name[name] = made = Histogram(name, text, buckets, registry=registry)
            return made

        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
            self._by_name[name] = made = Gauge(PREFIX + name, text, labels, registry=registry)
            return made

        def rare(name: str, text: str, labels: Sequence[str]) -> prometheus_client.Counter:
            return prometheus_client.Counter(PREFIX + name, text, labels, registry=registry)

        # Speculation, over delivered tokens: adds up to the requests' own statistics.
        self._drafts = counter("spec_decode_drafts", "Rounds of a session with a draft tree.")
        self._draft_tokens = counter("spec_decode_draft_tokens", "Draft tokens (tree nodes) verified.")
        self._accepted = counter("spec_decode_accepted_tokens", "Draft tokens accepted.")
        per_position = counters(
            "spec_decode_accepted_tokens_per_position",
            "Draft tokens accepted at a depth, 0-based.",
            "position",
            map(str, range(MAX_POSITIONS)),
        )
        self._positions = list(per_position.cells.values())
        sizes = (*map(str, TREE_SIZES), "more")
        drafts_by_size = counters(
            "spec_decode_drafts_by_size",
            "Rounds of a session with a tree of up to so many nodes.",
            "nodes",
            sizes,
        )
        accepted_by_size = counters(
            "spec_decode_accepted_tokens_by_size",
            "Draft tokens accepted from trees of up to so many nodes.",
            "nodes",
            sizes,
        )
        self._drafts_by_size = list(drafts_by_size.cells.values())
        self._accepted_by_size = list(accepted_by_size.cells.values())
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
        self._prefill_time = histogram(
            "request_prefill_time_seconds", "Opening the sessions to the first token.", LATENCY_BUCKETS
        )
        self._decode_time = histogram(
            "request_decode_time_seconds", "First token to the end of a request.", LATENCY_BUCKETS
        )
        # Requests.
        self._requests = counters(
            "requests",
            "Requests that ended, by reason; error: failed inside.",
            "finish_reason",
            FINISH_REASONS,
        ).cells
        self._aborted_tokens = counter(
            "aborted_tokens", "Output tokens of requests whose client went away or that failed."
        )
        self._request_rounds = histogram("request_rounds", "Rounds of a request.", _COUNT_BUCKETS)
        self._rejected = rare("requests_rejected", "Requests never admitted.", ("error",))
        self._reopens = rare("session_reopens", "Sessions opened again.", ("service", "cause"))
        self._preemptions = counter(
            "preemptions", "Sessions whose target pages were taken away; they were opened again."
        )
        self._running = gauge("requests_running", "Requests decoding or in prefill.")
        self._waiting = gauge("requests_waiting", "Requests in the queue.")
        self._stall = gauge(
            "longest_stall_seconds",
            "Time since the last token, or the admission, of the running request that waits longest.",
        )
        self._kv_usage = gauge(
            "target_kv_usage_ratio", "Share of the target's KV pages that sessions hold, as it last said."
        )
        self._synthetic = gauge(
            "synthetic", "1 while weights are random or acceptance is simulated: only times are real."
        )
        self._up = gauge("service_connected", "1 while the stream is up.", ("service",))
        self._info = Info(PREFIX + "model", "What is served.", registry=registry)
        # Rounds.
        kinds = counters("rounds", "Rounds of a cohort, by kind.", "kind", ("speculative", "plain"))
        self._speculative, self._plain = kinds.cell("speculative"), kinds.cell("plain")
        self._skipped = counters(
            "rounds_draft_skipped", "Rounds that did not ask the draft.", "cause", _SKIPPED, other=True
        )
        self._fallbacks = counters(
            "fallbacks",
            "Session rounds decoded without a tree that wanted one.",
            "cause",
            FALLBACK_CAUSES,
            other=True,
        )
        stages = counters(
            "round_stage_seconds",
            "Time of rounds by where it went; the stages add up to round_seconds.",
            "stage",
            STAGES,
        )
        self._stages = list(stages.cells.values())
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
        # The budget.
        self._asked = counter("budget_asked_nodes", "Tree nodes that the draft was asked for.")
        self._expected = counter(
            "budget_expected_tokens", "Tokens that the budget expected of the rounds it expected any of."
        )
        self._observed = counter("budget_observed_tokens", "Tokens that the same rounds brought.")
        self._expected_s = counter("budget_expected_seconds", "Time that the budget expected of them.")
        self._observed_s = counter("budget_observed_seconds", "Time that they took.")
        self._probes = counters(
            "budget_probes", "Rounds run to learn.", "probe", ("plain", "draft", "explore"), other=True
        )
        self._cohorts = gauge("cohorts_in_use", "Cohorts of sessions whose rounds alternate.")
        # Surfaces.
        self._http = rare("http_requests", "HTTP requests answered.", ("route", "method", "code"))
        self.rpc = RpcMetrics(registry, PREFIX)
        # From the start: a series that begins at its first event hides that event from rates.
        for kind, _ in TABLE:
            self._rejected.labels(kind.__name__)
        for service in self.connected:
            for cause in REOPEN_CAUSES:
                self._reopens.labels(service, cause)
            self._up.labels(service).set(0)

    def watch(
        self,
        *,
        running: Callable[[], float],
        waiting: Callable[[], float],
        synthetic: Callable[[], float] = lambda: 0.0,
        stall: Callable[[], float] = lambda: 0.0,
        kv_usage: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Read these at every scrape. stall: seconds, see longest_stall_seconds."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)
        self._synthetic.set_function(synthetic)
        self._stall.set_function(stall)
        self._kv_usage.set_function(kv_usage)

    def tell(self, *, model_name: str, version: str, drafts: bool, vllm_aliases: bool) -> None:
        """What is served, once. drafts: there is a draft service; vllm_aliases: vLLM's names as well."""
        self._info.info({"model_name": model_name, "version": version})
        if not drafts:  # one that is not there is not down
            self._up.remove("draft")
        if vllm_aliases:
            VllmAliases(self._by_name, model_name, registry=self.registry)

    # ---- RoundObserver ----------------------------------------------------------------------

    def on_round(self, record: RoundRecord) -> None:
        (self._speculative if record.nodes else self._plain).inc()
        if record.skipped:
            self._skipped.cell(record.skipped).inc()
        for cell, seconds in zip(self._stages, round_stages(record), strict=True):
            cell.value += seconds
        self._round_tokens.inc(record.tokens)
        self._round.observe(record.total_s)
        if record.draft_wait_s:
            self._round_draft.observe(record.draft_wait_s)
        self._round_verify.observe(record.verify_wait_s)
        self._round_rpc.observe(record.rpc_s)
        self._round_own.observe(record.gateway_s)
        self._round_outside.observe(record.gateway_s + record.rpc_s)
        self._asked.inc(record.asked)
        if record.expected_tokens is not None and record.expected_s is not None:
            self._expected.inc(record.expected_tokens)
            self._observed.inc(record.tokens)
            self._expected_s.inc(record.expected_s)
            self._observed_s.inc(record.total_s)
        if record.probe:
            self._probes.cell(record.probe).inc()
        self._cohorts.set(record.cohorts)
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
            size = bisect_left(TREE_SIZES, share.drafted)
            self._drafts_by_size[size].value += 1
            if share.accepted:
                self._accepted_by_size[size].value += share.accepted
                for position in self._positions[: share.accepted]:
                    position.value += 1

    def on_request(self, record: RequestRecord) -> None:
        reason = "error" if record.error is not None else record.finish_reason.openai or "abort"
        self._requests[reason].inc()
        self._prompt_tokens.inc(record.prompt_tokens)
        self._cached_tokens.inc(record.cached_tokens)
        self._prompt_length.observe(record.prompt_tokens)
        self._output_length.observe(record.output_tokens)
        self._queue_time.observe(record.queue_s)
        self._e2e.observe(record.total_s)
        self._request_rounds.observe(record.stats.num_rounds)
        if record.first_token_s is not None:
            self._prefill_time.observe(max(0.0, record.first_token_s - record.queue_s))
            self._decode_time.observe(record.total_s - record.first_token_s)
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
        self._fallbacks.cell(cause).inc(count)

    def on_reopen(self, service: str, cause: str) -> None:
        self._reopens.labels(service, cause if cause in REOPEN_CAUSES else "other").inc()
        if (service, cause) == ("target", "preempted"):
            self._preemptions.inc()

    def on_connection(self, service: str, connected: bool, reason: str) -> None:
        self.connected[service] = connected
        self._up.labels(service).set(connected)
        if self.on_connection_changed is not None:
            self.on_connection_changed()

    # ---- surfaces ---------------------------------------------------------------------------

    def on_http(self, route: str, method: str, *, status: int) -> None:
        """An HTTP request was answered. route: the pattern, never the path a client made up."""
        self._http.labels(route, method if method in _METHODS else "other", str(status)).inc()


def round_stages(record: RoundRecord) -> tuple[float, ...]:
    """Seconds of a round by STAGES: the services' own work, as they report it, within the waits for them.

    A service that reports nothing gets the whole wait; one that reports more than the wait (clocks differ)
    gets no more than that.
    """
    draft = min(record.draft_service_s or record.draft_wait_s, record.draft_wait_s)
    verify = min(record.verify_service_s or record.verify_wait_s, record.verify_wait_s)
    timings = record.draft_timings
    channel = min(draft, timings.channel_wait_ns / 1e9) if timings is not None else 0.0
    waits = record.draft_wait_s + record.verify_wait_s
    return draft - channel, channel, verify, waits - draft - verify, max(0.0, record.total_s - waits)
