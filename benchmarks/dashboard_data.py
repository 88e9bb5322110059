"""What the panels of a Grafana dashboard show, asked of a Prometheus: for pictures of them without Grafana.

Owns how a panel's targets become queries, and their answers series. Does not own the drawing
(dashboard_picture).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

POINTS = 120
COLUMNS = 24
"""Of Grafana's grid."""


class Api(Protocol):
    """What is asked of Prometheus."""

    def instant(self, expr: str, at: float) -> list[dict[str, Any]]: ...

    def range(self, expr: str, start: float, end: float, step: float) -> list[dict[str, Any]]: ...


class Prometheus:
    """Its HTTP API. Raises RuntimeError with its message for an expression that it does not take."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=30)

    def instant(self, expr: str, at: float) -> list[dict[str, Any]]:
        return self._get("/api/v1/query", query=expr, time=at)

    def range(self, expr: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        return self._get("/api/v1/query_range", query=expr, start=start, end=end, step=step)

    def _get(self, path: str, **params: Any) -> list[dict[str, Any]]:
        reply = self._client.get(path, params=params).json()
        if reply["status"] != "success":
            raise RuntimeError(f"{params['query']}: {reply.get('error')}")
        return list(reply["data"]["result"])


@dataclass(frozen=True, slots=True)
class Series:
    """points: (unix seconds, value), finite ones only."""

    name: str
    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class PanelData:
    """A panel as the dashboard describes it, and what it shows."""

    panel: dict[str, Any]
    series: tuple[Series, ...]

    @property
    def title(self) -> str:
        return str(self.panel["title"])

    @property
    def width(self) -> int:
        """Of Grafana's columns; three charts a row here."""
        return min(int(self.panel["gridPos"]["w"]), COLUMNS // 3)

    @property
    def height(self) -> int:
        return 4 if self.panel["type"] == "stat" else 7

    @property
    def lines(self) -> list[Series]:
        """Those to draw: a line that never leaves 0 tells by being absent."""
        return [s for s in self.series if any(value for _, value in s.points)] or list(self.series[:1])

    @property
    def defaults(self) -> dict[str, Any]:
        return dict(self.panel["fieldConfig"]["defaults"])


@dataclass(frozen=True, slots=True)
class Window:
    """Unix seconds."""

    start: float
    end: float

    @property
    def step(self) -> float:
        return (self.end - self.start) / POINTS


def collect(
    api: Api, dashboard: dict[str, Any], window: Window, titles: Sequence[str] = ()
) -> list[PanelData]:
    """Ask for the panels of these titles, in their order; without titles for all, in the dashboard's."""
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    if titles:
        by_title = {panel["title"]: panel for panel in panels}
        panels = [by_title[title] for title in titles]
    return [_asked(api, panel, window) for panel in panels]


def _asked(api: Api, panel: dict[str, Any], window: Window) -> PanelData:
    found: list[Series] = []
    for target in panel["targets"]:
        expr = target["expr"].replace("$__rate_interval", "30s")
        expr = expr.replace("$__range", f"{int(window.end - window.start)}s")
        expr = re.sub(r'"\$\w+"', '".*"', expr)
        legend = target.get("legendFormat", "")
        if target.get("instant"):
            found += [
                _series(item["metric"], legend, [item["value"]], panel)
                for item in api.instant(expr, window.end)
            ]
        else:
            found += [
                _series(item["metric"], legend, item["values"], panel)
                for item in api.range(expr, window.start, window.end, window.step)
            ]
    return PanelData(panel, tuple(series for series in found if series.points))


def _series(labels: dict[str, str], legend: str, values: list[Any], panel: dict[str, Any]) -> Series:
    name = re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend) or str(panel["title"])
    points = [(float(at), float(value)) for at, value in values]
    return Series(name, dict(labels), tuple(p for p in points if math.isfinite(p[1])))
