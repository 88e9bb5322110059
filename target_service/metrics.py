"""Prometheus metrics of the target service: names, help, labels. Owns no logic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specbridge.channel.base import ChannelSnapshot
from specbridge.channel.handles import HANDLES
from specbridge.errors import TABLE
from specbridge.metrics import ROUND_BUCKETS, LabelledGauge
from specbridge.rpc_metrics import RpcMetrics

RECAPTURE_CAUSES = ("attach", "gap", "restart", "slots", "other")
_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class TargetMetrics:
    """All metrics of one target process, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"specbridge_target_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"specbridge_target_{name}", text, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(
                f"specbridge_target_{name}_seconds", text, buckets=ROUND_BUCKETS, registry=registry
            )

        self.registry = registry
        self.sessions = gauge("sessions", "Open sessions")
        self.running = gauge("sessions_running", "Open sessions whose text has not ended")
        self.memory = Gauge(
            "specbridge_target_memory_bytes",
            "Planned use of a GPU's memory, of the rank with the least room",
            ("kind",),
            registry=registry,
        )
        self.pages_used = gauge("kv_pages_used", "KV pages held by sessions")
        self.pages_cached = gauge("kv_pages_cached", "KV pages kept as reusable prefixes")
        self.pages_total = gauge("kv_pages_capacity", "KV pages in all")
        self.prefix_queries = counter("prefix_query_tokens_total", "Tokens that were prefilled or found")
        self.prefix_hits = counter("prefix_hit_tokens_total", "Tokens taken from cached pages")
        self.prefill_rows = counter("prefill_rows_total", "Prompt rows run")
        self.prefill_chunks = counter("prefill_chunks_total", "Prompt chunks run")
        self.verify_rows = counter("verify_rows_total", "Verify rows run, anchors included")
        self.context_rows = counter(
            "context_rows_total", "Committed rows that verify passes attended to, a session's once a pass"
        )
        self.context_rows_read = counter(
            "context_rows_read_total", "Context rows that attention loaded for them, by its plan"
        )
        self.context_rows_copied = counter(
            "context_rows_copied_total", "Of these, rows of pages apart, put together first"
        )
        self.padding_rows = counter("padding_rows_total", "Scratch rows run in deterministic mode")
        self.tokens = counter("tokens_total", "Tokens committed")
        self.accepted = counter("accepted_tokens_total", "Draft tokens accepted")
        self.step_rows = Histogram(
            "specbridge_target_step_rows", "Rows of a forward pass", buckets=_ROW_BUCKETS, registry=registry
        )
        self.queue_time = seconds("queue", "Verify batch received until its forward started")
        self.forward_time = seconds("forward", "Forward pass and sampling of one step")
        self.commit_time = seconds("commit", "Walk, page commit, capture of one step")
        self.service_time = seconds("service", "Verify batch received until its reply was built")
        self.channel_attached = gauge("channel_attached", "1 while a draft is attached")
        self.captured_rows = counter("captured_rows_total", "Hidden-state rows published")
        self.suspended = counter("captures_suspended_total", "Captures suspended for want of slots")
        self.recaptures = counter("recaptures_total", "Re-captures completed", ("cause",))
        self.recapture_rows = counter("recapture_rows_total", "Rows run again for the draft")
        self.recaptures_skipped = counter("recaptures_skipped_total", "Re-captures not worth their cost")
        self.preemptions = counter("preemptions_total", "Sessions whose pages were taken away", ("cause",))
        for cause in ("round", "prompt"):
            self.preemptions.labels(cause)
        self.idle_timeouts = counter("idle_timeouts_total", "Sessions freed because no verify came")
        self.errors = counter("errors_total", "Sessions ended by an error", ("code",))
        self.bad_logits = counter(
            "bad_logits_total", "Sessions ended because the model's logits were no numbers"
        )
        self.simulated = gauge("simulated_acceptance", "1 if the text is made up: acceptance is simulated")
        self.dummy_weights = gauge(
            "dummy_weights", "1 if the weights are random: times are real, text is not"
        )
        self.defects = counter("defects_total", "Unexpected errors in the engine")
        self.lease_timeouts = counter("lease_timeouts_total", "Sessions freed after their stream broke")
        self.page_evictions = counter("kv_page_evictions_total", "Cached pages given up for others")
        self.rpc = RpcMetrics(registry, "specbridge_target_")
        self.read_gpu_memory: Callable[[], Mapping[str, float]] = dict
        """Bytes of the first rank's GPU by kind; none on a CPU."""
        LabelledGauge(
            "specbridge_target_gpu_memory_bytes",
            "Memory of the GPU that the first rank runs on, as it stands",
            "kind",
            lambda: self.read_gpu_memory(),
            registry=registry,
        )
        # From the start: a series that begins at its first event hides that event from rates.
        for code in dict.fromkeys(row.code for _, row in TABLE):
            self.errors.labels(code.removeprefix("ERROR_CODE_").lower())
        for cause in RECAPTURE_CAUSES:
            self.recaptures.labels(cause)
        self._collectives = CollectiveCollector()
        registry.register(self._collectives)

    def watch_collectives(self, clock: Clock) -> None:
        """Show what the ranks' collectives take, from here on."""
        self._collectives.clock = clock


class Clock(Protocol):
    """target_service.collective_clock, as a scrape sees it."""

    @property
    def seconds(self) -> float: ...

    @property
    def steps(self) -> int: ...


class CollectiveCollector(Collector):
    """Time of forward passes in collectives; no series while there is one rank only."""

    def __init__(self) -> None:
        self.clock: Clock | None = None

    def collect(self) -> Iterable[Metric]:
        clock = self.clock
        seconds = CounterMetricFamily(
            "specbridge_target_collective_seconds",
            "Time of the first rank in collectives, of the passes that were measured",
            value=None if clock is None else clock.seconds,
        )
        steps = CounterMetricFamily(
            "specbridge_target_collective_steps",
            "Passes whose collectives were measured",
            value=None if clock is None else clock.steps,
        )
        return [seconds, steps]


class ChannelSource(Protocol):
    """Where the hidden-state channel keeps its counters (specbridge.channel.producer)."""

    @property
    def ring_slots(self) -> int: ...

    @property
    def ring_used(self) -> int: ...


class ChannelCollector(Collector):
    """The channel's own counters, read when somebody scrapes."""

    def __init__(self, source: ChannelSource, snapshot: Callable[[], ChannelSnapshot]) -> None:
        self._source = source
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        counts = self._snapshot()
        prefix = "specbridge_target_channel"
        moved = CounterMetricFamily(f"{prefix}_bytes", "Hidden-state bytes published", labels=["transport"])
        for transport, amount in counts.bytes_by_transport.items():
            moved.add_metric([transport], amount)
        attaches = CounterMetricFamily(f"{prefix}_attaches", "Draft attachments", labels=["transport"])
        by_transport: dict[str, int] = {}
        for (transport, _reason), amount in counts.attaches.items():
            by_transport[transport] = by_transport.get(transport, 0) + amount
        for transport, amount in by_transport.items():
            attaches.add_metric([transport], amount)
        detaches = CounterMetricFamily(f"{prefix}_detaches", "Draft detachments", labels=["cause"])
        for cause, amount in counts.detaches.items():
            detaches.add_metric([cause], amount)
        yield from (moved, attaches, detaches)
        for name, text, amount in (
            ("chunks", "Chunks published", counts.chunks),
            ("acks", "Chunks acknowledged", counts.acked),
            ("unknown_acks", "Acknowledgements of no chunk in use: late or repeated", counts.unknown_acks),
            ("stale_publishes", "Chunks whose draft was gone when they were ready", counts.stale_publishes),
            ("reservation_failures", "Reservations refused by a full ring", counts.reservation_failures),
            (
                "lease_timeouts",
                "Attachments ended because the draft gave no sign of life",
                counts.lease_timeouts,
            ),
            ("refused", "Attachments refused", counts.refused),
        ):
            yield CounterMetricFamily(f"{prefix}_{name}", text, value=amount)
        handles = GaugeMetricFamily(
            f"{prefix}_open_handles",
            "Shared memory of the channel that this process has open",
            labels=["kind"],
        )
        for kind, amount in HANDLES.snapshot().items():
            handles.add_metric([kind], amount)
        yield handles
        yield GaugeMetricFamily(
            f"{prefix}_ring_slots", "Slots of the ring in use", value=self._source.ring_slots
        )
        yield GaugeMetricFamily(
            f"{prefix}_ring_used", "Slots reserved or not yet acknowledged", value=self._source.ring_used
        )
