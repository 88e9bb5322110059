"""The picture of the dashboard: what panels ask for, how values are written, and that it can be drawn."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import dashboard_picture as picture
from benchmarks.dashboard_data import POINTS, Window, collect

WINDOW = Window(1000.0, 1600.0)
DASHBOARD = json.loads(picture.OVERVIEW.read_text())


class FakeApi:
    """Answers every query with a few series, whose values grow with their number."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def instant(self, expr: str, at: float) -> list[dict[str, Any]]:
        self.asked.append(expr)
        return [{"metric": self._labels(expr, i), "value": [at, str(0.1 * i)]} for i in (0, 2, 10)]

    def range(self, expr: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        self.asked.append(expr)
        times = [start + step * i for i in range(POINTS + 1)]
        return [
            {
                "metric": self._labels(expr, i),
                "values": [[at, str(i + at / 1000)] for at in times] + [[end, "NaN"]],
            }
            for i in (1, 2)
        ]

    def _labels(self, expr: str, number: int) -> dict[str, str]:
        labels = re.findall(r"by \(([\w, ]+)\)", expr)
        return dict.fromkeys(labels[0].split(", "), str(number)) if labels else {}


def test_every_chosen_panel_is_in_the_dashboard_and_no_variable_is_left() -> None:
    api = FakeApi()
    data = collect(api, DASHBOARD, WINDOW, picture.SHOWN)
    assert [item.title for item in data] == list(picture.SHOWN)
    assert all(item.series for item in data)
    assert api.asked and not any("$" in expr for expr in api.asked)
    assert any("[600s]" in expr for expr in api.asked) and any("[30s]" in expr for expr in api.asked)
    points = [point for item in data for series in item.series for point in series.points]
    assert all(math.isfinite(value) for _, value in points)


def test_legends_are_filled_in() -> None:
    [item] = collect(FakeApi(), DASHBOARD, WINDOW, ["Round time by stage"])
    assert [series.name for series in item.series] == ["1", "2"]


@pytest.mark.parametrize(
    ("value", "unit", "decimals", "text"),
    [
        (0.0123, "s", None, "12.3 ms"),
        (2.5, "s", 2, "2.5 s"),
        (0.256, "percentunit", 1, "25.6 %"),
        (3 << 20, "bytes", None, "3 MiB"),
        (2048, "Bps", None, "2 KiB/s"),
        (2.4321, "none", 2, "2.43"),
        (33.61, "short", None, "33.6"),
        (12345, "short", None, "12.3 k"),
    ],
)
def test_values_are_written_in_their_unit(value: float, unit: str, decimals: int | None, text: str) -> None:
    assert picture.shown(value, unit, decimals) == text


def test_thresholds_and_mappings_are_the_panels_own() -> None:
    [down] = collect(FakeApi(), DASHBOARD, WINDOW, ["Services"])
    assert picture.mapped(0.0, down.defaults) == "down" and picture.mapped(1.0, down.defaults) == "up"
    [ttft] = collect(FakeApi(), DASHBOARD, WINDOW, ["TTFT p95"])
    colors = [picture.threshold_color(value, ttft.defaults) for value in (1.0, 2.0, 7.0)]
    assert len(set(colors)) == 3


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs the extra bench (matplotlib)"
)
def test_it_can_be_drawn_and_stays_small(tmp_path: Path) -> None:
    import matplotlib

    matplotlib.rcParams["svg.fonttype"] = "none"
    data = collect(FakeApi(), DASHBOARD, WINDOW, picture.SHOWN)
    picture.draw(data, WINDOW, "a caption").savefig(tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    assert len(text) < 400_000
    for title in picture.SHOWN:
        assert f">{title}<" in text.replace("&gt;", ">"), title


def test_the_committed_picture_is_small_enough_for_a_readme() -> None:
    path = picture.ROOT / "docs/dashboard.svg"
    assert path.stat().st_size <= 300_000
    text = path.read_text()
    assert all(title in text for title in picture.SHOWN) and "no data" not in text
