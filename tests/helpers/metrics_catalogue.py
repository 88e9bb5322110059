"""Which metrics there are: by the registries, by docs/metrics.md, and by what dashboards and rules read.

Expressions are read word by word rather than parsed (promtool does that): every word that is no function,
keyword or label of PromQL has to be the name of a series.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from draft_service.metrics import ChannelCollector as DraftChannel
from draft_service.metrics import DraftMetrics
from gateway.metrics import GatewayMetrics
from specbridge.channel.base import ChannelStats
from target_service.metrics import ChannelCollector as TargetChannel
from target_service.metrics import TargetMetrics

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
RULES = sorted((ROOT / "deploy/prometheus/rules").glob("*.yml"))

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "info": ("_info",)}
FOREIGN = {
    "up": (), "ALERTS": ("alertname", "alertstate", "severity"),
    "process_cpu_seconds_total": (), "process_resident_memory_bytes": (), "process_open_fds": (),
    "process_max_fds": (), "process_start_time_seconds": (),
}  # fmt: skip
"""Series that Prometheus or prometheus_client makes, and their labels."""
SCRAPED = {"job", "instance"}
"""Labels that each series gets from its scrape."""
_FUNCTIONS = ("rate", "increase", "delta", "changes", "histogram_quantile", "vector")
_WORDS = {"sum", "min", "max", "count", "and", "or", "unless", *_FUNCTIONS}


@dataclass(frozen=True)
class Shape:
    """Of one metric."""

    kind: str
    labels: tuple[str, ...] = ()


class _Ring:
    ring_slots = 8
    ring_used = 0


@functools.cache
def registered() -> dict[str, Shape]:
    """All metrics of the three services, as /metrics names them (a histogram without its suffixes)."""
    registries = [CollectorRegistry() for _ in range(3)]
    GatewayMetrics(registries[0])
    TargetMetrics(registries[1])
    registries[1].register(TargetChannel(_Ring(), ChannelStats().snapshot))
    DraftMetrics(registries[2])
    registries[2].register(DraftChannel(ChannelStats().snapshot))
    return {name: shape for registry in registries for name, shape in _shapes(registry)}


def _shapes(registry: CollectorRegistry) -> Iterator[tuple[str, Shape]]:
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            of = collector if isinstance(collector, MetricWrapperBase) else family
            name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
            yield name, Shape(family.type, tuple(getattr(of, "_labelnames", ())))


def documented() -> dict[str, Shape]:
    """The tables of docs/metrics.md. An info's labels are left out: prometheus_client has them per value."""
    rows = re.findall(
        r"^\| `(specbridge_\w+)` \| (\w+) \| ([^|]*) \|", (ROOT / "docs/metrics.md").read_text(), re.M
    )
    names = [name for name, *_ in rows]
    assert len(set(names)) == len(names), "a metric is documented twice"
    return {
        name: Shape(kind, () if labels == "–" or kind == "info" else tuple(labels.split(", ")))
        for name, kind, labels in rows
    }


@functools.cache
def series() -> dict[str, tuple[str, ...]]:
    """Every name that an expression may read, with its labels."""
    found: dict[str, tuple[str, ...]] = dict(FOREIGN)
    for name, shape in registered().items():
        if shape.kind == "histogram":
            found |= {name + suffix: (*shape.labels, "le") for suffix in SUFFIXES["histogram"]}
        else:
            found[name] = shape.labels
    return found | dict.fromkeys(recording_rules(), ("stage",))


def rules() -> list[dict[str, Any]]:
    """Recording and alert rules, in the order of the files."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def recording_rules() -> list[str]:
    return [rule["record"] for rule in rules() if "record" in rule]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def dashboards() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in DASHBOARDS}


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that show something."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def concrete(expr: str, *, interval: str = "30s") -> str:
    """A panel's expression as Grafana sends it with every variable at All."""
    expr = expr.replace("$__rate_interval", interval).replace("$__range", interval)
    return re.sub(r'"\$(gateway|target|draft)"', '".*"', expr)


@dataclass(frozen=True)
class Reads:
    """What an expression reads: series, and for each the labels it selects by."""

    names: frozenset[str]
    selectors: tuple[tuple[str, str], ...]
    unknown: frozenset[str]


def reads(expr: str) -> Reads:
    """unknown: words that are neither known series nor PromQL."""
    known = series()
    selectors = []
    for name, inside in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", expr):
        selectors += [(name, label) for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside)]
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\"[^\"]*\"", " ", expr)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    words = set(re.findall(r"(?<![\w.])[a-zA-Z_:][\w:]*", bare)) - _WORDS
    return Reads(frozenset(words & set(known)), tuple(selectors), frozenset(words - set(known)))


def grouped_labels(expr: str) -> set[str]:
    """Labels that an expression groups or matches by."""
    lists = re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", expr)
    return {label.strip() for names in lists for label in names.split(",") if label.strip()}
