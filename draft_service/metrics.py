"""Metrics of the draft service: specbridge_draft_*.

Owns names, labels and buckets. Does not own when something is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specbridge.channel.base import ChannelSnapshot
from specbridge.channel.handles import HANDLES
from specbridge.metrics import ROUND_BUCKETS, BatchHistogram, LabelledGauge, new_registry
from specbridge.rounds import DraftTimings
from specbridge.rpc_metrics import RpcMetrics
from specbridge.tree import DraftTree

TREE_SIZE_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PROBABILITY_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
ACCEPTANCE_BUCKETS = (*range(1, 17), 24, 32)
STAGES = ("queue", "channel_wait", "append", "forward", "tree", "service")
RESULTS = ("proposed", "not_ready", "stale", "invalid", "capacity", "internal")
FATES = ("taken", "known", "gap", "stale", "unknown", "starved", "contradiction", "too_long")
TRIGGERS = ("propose", "eager", "prefill", "lazy", "close")
RECAPTURE_CAUSES = ("attach", "gap", "restart", "slots")
SELFCHECK_RESULTS = ("passed", "failed", "skipped", "interrupted", "error")


class DraftMetrics:
    """One object per process; `registry` is what /metrics serves."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else new_registry()

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"specbridge_draft_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"specbridge_draft_{name}", text, registry=self.registry)

        def histogram(
            name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()
        ) -> Histogram:
            return Histogram(
                f"specbridge_draft_{name}", text, labels, buckets=buckets, registry=self.registry
            )

        def probabilities(name: str, text: str) -> BatchHistogram:
            return BatchHistogram(
                f"specbridge_draft_{name}", text, PROBABILITY_BUCKETS, registry=self.registry
            )

        self.proposals = counter("proposals_total", "Proposals answered, by result.", ("result",))
        self.tree_nodes = histogram("tree_nodes", "Nodes of a proposed tree.", TREE_SIZE_BUCKETS)
        self.node_depth = counter("tree_node_depth_total", "Proposed nodes, by depth.", ("depth",))
        self.node_probability = probabilities(
            "tree_node_probability", "Path probability of proposed nodes under the draft."
        )
        self.accepted_probability = probabilities(
            "accepted_node_probability",
            "Path probability of proposed nodes that the target's text then went through.",
        )
        self.acceptance_length = histogram(
            "acceptance_length",
            "Tokens a proposed tree could have committed, bonus included, judged by the text that followed.",
            ACCEPTANCE_BUCKETS,
        )
        self.pass_sessions = histogram(
            "pass_sessions", "Sessions of one block pass.", (1, 2, 4, 8, 16, 32, 64, 128)
        )
        self.stage = histogram("stage_seconds", "Time of one reply by stage.", ROUND_BUCKETS, ("stage",))
        self.append_rows = counter("append_rows_total", "Context rows appended.")
        self.appends = counter("appends_total", "Append passes, by trigger.", ("trigger",))
        self.eager = counter(
            "eager_drafts_total", "Block passes begun before the gateway asked, by fate.", ("fate",)
        )
        self.chunks = counter("chunks_total", "Hidden-state chunks received, by fate.", ("fate",))
        self.recaptures = counter(
            "recaptures_total", "Re-captures asked of the target, by cause.", ("cause",)
        )
        self.prefix_query_tokens = counter(
            "prefix_query_tokens_total", "Tokens looked up in the prefix index."
        )
        self.prefix_hit_tokens = counter("prefix_hit_tokens_total", "Tokens found there.")
        self.evictions = counter("page_evictions_total", "Cached pages evicted.")
        self.pages_used = gauge("pages_used", "Context pages held by sessions.")
        self.pages_cached = gauge("pages_cached", "Context pages kept as reusable prefixes.")
        self.pages_total = gauge("pages_capacity", "Context pages in all.")
        self.sessions = gauge("sessions", "Open sessions.")
        self.pending_rows = gauge("pending_rows", "Hidden-state rows received and not yet appended.")
        self.attached = gauge("channel_attached", "1 while the hidden-state channel is up.")
        self.attaches = counter("channel_attaches_total", "Times the channel came up, by transport.",
                                ("transport",))  # fmt: skip
        self.transport = Info("specbridge_draft_channel", "Transport in use and why.", registry=self.registry)
        self.simulated = gauge("simulated_acceptance", "1 if proposals are drawn from an acceptance file.")
        self.dummy_weights = gauge("dummy_weights", "1 if the weights are random: times are real, no more.")
        self.acceptance_low = gauge(
            "acceptance_low", "1 while traffic's acceptance is so low that the drafter is probably misread."
        )
        self.recent_acceptance = gauge(
            "recent_acceptance_length", "Mean acceptance length of the traffic's latest greedy rounds."
        )
        self.selfchecks = counter("selfchecks_total", "Start-up self-checks, by how they ended.", ("result",))
        self.selfcheck_failed = gauge(
            "selfcheck_failed",
            "1 if the latest self-check found the drafter's acceptance below the threshold.",
        )
        self.selfcheck_acceptance = gauge(
            "selfcheck_acceptance", "Acceptance length of the latest self-check; NaN before the first."
        )
        self.selfcheck_acceptance.set(math.nan)
        self.target_changes = counter(
            "target_changes_total", "Times another target answered, which voids all cached context."
        )
        self.rows_spoilt = counter(
            "rows_spoilt_total", "Times rows appended turned out to be wrong, which voids all cached context."
        )
        self.lease_expiries = counter(
            "lease_expiries_total", "Gateways whose sessions were freed after a lost stream."
        )
        self.defects = counter("defects_total", "Unexpected errors in the engine.")
        self.rpc = RpcMetrics(self.registry, "specbridge_draft_")
        self.read_gpu_memory: Callable[[], Mapping[str, float]] = dict
        """Bytes of the GPU by kind; none on a CPU."""
        LabelledGauge(
            "specbridge_draft_gpu_memory_bytes",
            "Memory of the GPU, as it stands.",
            "kind",
            lambda: self.read_gpu_memory(),
            registry=self.registry,
        )
        # All from the start: a series that begins at its first event hides that event from rates.
        for metric, values in (
            (self.stage, STAGES),
            (self.proposals, RESULTS),
            (self.selfchecks, SELFCHECK_RESULTS),
            (self.chunks, FATES),
            (self.appends, TRIGGERS),
            (self.eager, ("used", "wasted")),
            (self.recaptures, RECAPTURE_CAUSES),
        ):
            for value in values:
                metric.labels(value)
        self._proposed = self.proposals.labels("proposed")
        self._stages = [(f"{stage}_ns", self.stage.labels(stage)) for stage in STAGES]
        self._depths: dict[int, Counter] = {}
        self.transport.info({"transport": "none", "reason": "not attached yet"})

    def proposed(self, tree: DraftTree) -> None:
        """Count one answered proposal."""
        self._proposed.inc()
        self.tree_nodes.observe(len(tree))
        if not tree.tokens:
            return
        counts: dict[int, int] = {}
        for depth in tree.depths():
            counts[depth] = counts.get(depth, 0) + 1
        for depth, count in counts.items():
            series = self._depths.get(depth)
            if series is None:  # looking one up by its label takes as long as several counts
                series = self._depths[depth] = self.node_depth.labels(str(depth))
            series.inc(count)
        self.node_probability.observe(map(math.exp, tree.scores))

    def accepted(self, tree: DraftTree, nodes: Sequence[int], length: int) -> None:
        """Count one proposal whose fate is known: the nodes the text went through, the acceptance length."""
        self.acceptance_length.observe(length)
        self.accepted_probability.observe(math.exp(tree.scores[node]) for node in nodes)

    def timings(self, timings: DraftTimings) -> None:
        for name, series in self._stages:
            series.observe(getattr(timings, name) / 1e9)


class ChannelCollector(Collector):
    """The channel's own counters at this end, read when somebody scrapes."""

    def __init__(self, snapshot: Callable[[], ChannelSnapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        counts = self._snapshot()
        prefix = "specbridge_draft_channel"
        moved = CounterMetricFamily(f"{prefix}_bytes", "Hidden-state bytes received", labels=["transport"])
        for transport, amount in counts.bytes_by_transport.items():
            moved.add_metric([transport], amount)
        detaches = CounterMetricFamily(f"{prefix}_detaches", "Times the channel broke", labels=["cause"])
        for cause, amount in counts.detaches.items():
            detaches.add_metric([cause], amount)
        handles = GaugeMetricFamily(
            f"{prefix}_open_handles",
            "Shared memory of the channel that this process has open.",
            labels=["kind"],
        )
        for kind, open_now in HANDLES.snapshot().items():
            handles.add_metric([kind], open_now)
        yield from (moved, detaches, handles)
        for name, text, value in (
            ("rows", "Hidden-state rows received", counts.rows),
            ("acks", "Chunks acknowledged", counts.acked),
            ("refused", "Attachments the target refused", counts.refused),
            ("overtaken", "Chunks overwritten while they were read", counts.overtaken),
        ):
            yield CounterMetricFamily(f"{prefix}_{name}", text, value=value)
