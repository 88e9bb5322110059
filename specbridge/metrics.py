"""One /metrics per process: a registry, standard buckets and the HTTP endpoint.

Names are `specbridge_<service>_<noun>_<unit>`; each service declares its own metrics in its metrics module
against a registry from `new_registry`. No multiprocess mode: Prometheus does the adding up.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

log = logging.getLogger(__name__)

# Edges in seconds. Rounds take 1 ms (GPU, tiny model) to seconds (long prefill on a CPU); what a round costs
# outside the services is a few ms, and to be told apart there.
ROUND_BUCKETS = (
    0.0002, 0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015,
    0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip


def new_registry() -> CollectorRegistry:
    """A registry with the process, platform and garbage-collector metrics every process shows."""
    # A second series beside each counter, with the time it was made: nobody asks, every scrape would pay.
    disable_created_metrics()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class LabelledGauge(Collector):
    """A gauge of one label whose values are read when somebody scrapes.

    read: value by label; no values, no series.
    """

    def __init__(
        self,
        name: str,
        text: str,
        label: str,
        read: Callable[[], Mapping[str, float]],
        *,
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._label, self._read = name, text, label, read
        registry.register(self)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._text, labels=[self._label])
        for value, amount in self._read().items():
            family.add_metric([value], amount)
        return [family]

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return [GaugeMetricFamily(self._name, self._text, labels=[self._label])]


class BatchHistogram(Collector):
    """A histogram that takes many samples at once, all from one thread.

    prometheus_client's takes 2 us a sample: of a tree's nodes that was a tenth of a millisecond before each
    answer. A scrape, on another thread, may see some samples of a batch and not yet the others.
    """

    def __init__(
        self, name: str, text: str, buckets: Sequence[float], *, registry: CollectorRegistry
    ) -> None:
        self._name, self._text = name, text
        self._edges = [float(edge) for edge in buckets]
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, values: Iterable[float]) -> None:
        counts, edges, total = self._counts, self._edges, self._sum
        for value in values:
            counts[bisect_left(edges, value)] += 1
            total += value
        self._sum = total

    def collect(self) -> Iterable[HistogramMetricFamily]:
        total, buckets = 0, []
        for edge, count in zip([*self._edges, math.inf], self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(edge), float(total)))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets, self._sum)
        return [family]

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return [HistogramMetricFamily(self._name, self._text)]


def serve_metrics(registry: CollectorRegistry, port: int, host: str = "127.0.0.1") -> tuple[WSGIServer, int]:
    """Serve /metrics on a daemon thread; port 0 picks one. Returns the server and the port bound."""
    server, _thread = start_http_server(port, addr=host, registry=registry)
    bound = int(server.server_address[1])
    log.info("metrics on http://%s:%d/metrics", host, bound)
    return server, bound
