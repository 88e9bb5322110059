"""The picture of a run: throughput, p95 inter-token latency and p95 time a token over the load.

Owns drawing. Needs the extra `bench` (matplotlib). Does not own figures (figures.py).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.load.figures import Figures
from specbridge.errors import ConfigError

FORMATS = (".svg", ".png")
_INK, _MUTED, _GRID = "#24292f", "#6e7781", "#d8dee4"
_LINES = ("#5c6b7a", "#3274d9", "#299c46", "#e0752d", "#a352cc", "#c4162a", "#0a8f8f", "#8f6b00")
_MARKERS = "osD^vP*X"


def check(path: Path) -> None:
    """Raises ConfigError, before anything is measured, if `path` could not be drawn in the end."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"--plot {str(path)!r}: the name must end in {' or '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'specbridge[bench]', or drop --plot")


def draw(found: Sequence[Figures], caption: str) -> Any:
    """The picture, a matplotlib Figure: three panels side by side, and `caption` below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.6, 4.2), facecolor="white", layout="constrained")
    rates, gaps, tokens = figure.subplots(1, 3)
    engine: Any = figure.get_layout_engine()
    engine.set(wspace=0.06)
    loads = sorted({f.load.value for f in found})
    open_loop = any(f.load.rate for f in found)
    arms = list(dict.fromkeys(f.arm for f in found))
    for i, arm in enumerate(arms):
        mine = sorted((f for f in found if f.arm == arm), key=lambda f: f.load.value)
        style = {"color": _LINES[i % len(_LINES)], "marker": _MARKERS[i % len(_MARKERS)], "linewidth": 1.8}
        style |= {"markersize": 5, "label": arm}
        x = [f.load.value for f in mine]
        rates.plot(x, [f.tokens_per_second for f in mine], **style)
        gaps.plot(x, [1000 * f.times["itl", 95] for f in mine], **style)
        tokens.plot(x, [1000 * f.times["tpot", 95] for f in mine], **style)
    _panel(rates, "Throughput", "output tokens a second", loads, open_loop)
    _panel(gaps, "Inter-token latency, p95", "ms between chunks of text", loads, open_loop)
    _panel(tokens, "Time per output token, p95", "ms a token", loads, open_loop)
    handles, labels = rates.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=min(6, len(arms)), frameon=False, labelcolor=_INK
    )
    figure.supxlabel(caption, fontsize=8, color=_MUTED, x=0.01, ha="left")
    return figure


def _panel(axes: Any, title: str, unit: str, loads: Sequence[float], open_loop: bool) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK, fontweight="bold")
    axes.set_ylabel(unit, fontsize=9, color=_MUTED)
    axes.set_xlabel("requests a second" if open_loop else "streams at a time", fontsize=9, color=_MUTED)
    if len(loads) > 1 and loads[-1] / loads[0] >= 4:
        axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.minorticks_off()
    top = axes.get_ylim()[1]
    axes.set_ylim(0, 1.03 * top if math.isfinite(top) and top > 0 else 1)
    axes.grid(True, color=_GRID, linewidth=0.7)
    axes.tick_params(colors=_MUTED, labelsize=8.5, length=0)
    for name in ("top", "right", "left"):
        axes.spines[name].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)


def save(found: Sequence[Figures], caption: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(found, caption).savefig(path, dpi=150)
