"""Metrics of our own making beside prometheus_client's: a scrape must not tell them apart."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from specbridge.metrics import BatchHistogram, new_registry

EDGES = (0.001, 0.25, 0.5, 1.0)


def shown(registry: CollectorRegistry) -> list[str]:
    return generate_latest(registry).decode().splitlines()


@given(st.lists(st.lists(st.sampled_from([0.0, 0.001, 0.0015, 0.25, 0.5, 0.75, 1.0, 2.5, math.inf]))))
def test_a_batch_counts_as_its_samples_do(batches: list[list[float]]) -> None:
    new_registry()  # turns off the second series that a histogram would have
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    batched = BatchHistogram("x_seconds", "Text.", EDGES, registry=ours)
    single = Histogram("x_seconds", "Text.", buckets=EDGES, registry=theirs)
    for batch in batches:
        batched.observe(batch)
        for value in batch:
            single.observe(value)
    assert shown(ours) == shown(theirs)
