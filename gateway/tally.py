"""Counters and histograms for one thread: plain numbers, which become metrics when somebody scrapes.

prometheus_client's take a lock and several calls for each increment, some 1 to 5 µs, and a round of 32
sessions makes hundreds of them on the event loop. Owns how numbers are held and shown, not which there are
(metrics). A scrape on another thread may see one number of a record and not yet the next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

PREFIX = "specbridge_gateway_"


class Cell:
    """One number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


class Counter(Collector):
    """A counter without labels."""

    def __init__(self, name: str, text: str, *, registry: CollectorRegistry) -> None:
        self._name, self._text = PREFIX + name, text
        self._cell = Cell()
        self.inc = self._cell.inc
        registry.register(self)

    def collect(self) -> Iterable[CounterMetricFamily]:
        return [CounterMetricFamily(self._name, self._text, value=self._cell.value)]

    def describe(self) -> Iterable[CounterMetricFamily]:
        return self.collect()


class Counters(Collector):
    """A counter of one label with the values it may have: a cell for each, and "other" if asked for.

    All are shown from the start: a series that begins at its first event hides that event from rates.
    """

    def __init__(
        self,
        name: str,
        text: str,
        label: str,
        values: Iterable[str],
        *,
        registry: CollectorRegistry,
        other: bool = False,
    ) -> None:
        self._name, self._text, self._label = PREFIX + name, text, label
        self.cells = {value: Cell() for value in values}
        if other:
            self.cells["other"] = Cell()
        registry.register(self)

    def cell(self, value: str) -> Cell:
        """The cell of a value; of one that is not expected, the one for others. Raises KeyError without."""
        found = self.cells.get(value)
        return self.cells["other"] if found is None else found

    def collect(self) -> Iterable[CounterMetricFamily]:
        [family] = self.describe()
        for value, cell in self.cells.items():
            family.add_metric([value], cell.value)
        return [family]

    def describe(self) -> Iterable[CounterMetricFamily]:
        return [CounterMetricFamily(self._name, self._text, labels=[self._label])]


class Histogram(Collector):
    """A histogram that takes many equal samples at once: a round delivers several tokens with one interval
    each.
    """

    def __init__(
        self, name: str, text: str, buckets: Sequence[float], *, registry: CollectorRegistry
    ) -> None:
        self._name, self._text = PREFIX + name, text
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
