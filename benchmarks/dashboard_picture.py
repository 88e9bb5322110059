"""A picture of dashboard panels, from real data and without Grafana: docs/dashboard.svg.

Asks a Prometheus for what the panels of a dashboard ask for, over the last minutes, and draws stat, time
series, bar chart and heatmap panels with their titles, units, mappings and thresholds. What Grafana itself
would add (hovering, zooming, its fonts) is not there. Needs the extra `bench`.

    python -m benchmarks.dashboard_picture --prometheus http://127.0.0.1:9090 --minutes 10
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.dashboard_data import COLUMNS, PanelData, Prometheus, Window, collect

ROOT = Path(__file__).parents[1]
OVERVIEW = ROOT / "deploy/grafana/dashboards/overview.json"
SHOWN = (
    "Output tokens a second", "Acceptance length", "TTFT p95", "Time per token p95", "Running / waiting",
    "Services",
    "Acceptance length over time", "Acceptance length, distribution", "Acceptance by position",
    "Round time by stage", "Budget decisions", "Accepted tokens by tree size",
    "Token throughput", "Time to first token", "Inter-token latency",
)  # fmt: skip
"""What a README has room for."""
_INK, _MUTED, _GRID, _BACK = "#24292f", "#6e7781", "#d8dee4", "#ffffff"
_LINES = (
    "#3274d9", "#e0752d", "#299c46", "#a352cc", "#c4162a", "#0a8f8f", "#8f6b00", "#d44a97", "#5c6b7a",
    "#7eb26d",
)  # fmt: skip
_STEPS = {
    "green": "#2b8a3e",
    "yellow": "#b08800",
    "orange": "#d9730d",
    "red": "#c4162a",
    "transparent": _GRID,
}


def shown(value: float, unit: str, decimals: int | None = None) -> str:
    """A value as a panel writes it."""
    if unit == "s":
        if abs(value) < 1:
            return f"{value * 1e3:.3g} ms"
        return f"{value:.3g} s"
    if unit == "percentunit":
        return f"{100 * value:.{decimals or 0}f} %"
    if unit in ("bytes", "Bps"):
        for factor, word in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
            if abs(value) >= factor:
                return f"{value / factor:.3g} {word}{'/s' if unit == 'Bps' else ''}"
    if decimals is not None:
        return f"{value:.{decimals}f}"
    return f"{value:.3g}" if abs(value) < 1e4 else f"{value / 1e3:.3g} k"


def threshold_color(value: float, defaults: dict[str, Any]) -> str:
    """Of the last step that the value has reached."""
    steps = defaults["thresholds"]["steps"]
    reached = [step for step in steps if step["value"] is None or value >= step["value"]]
    return _STEPS.get(reached[-1]["color"], _INK)


def mapped(value: float, defaults: dict[str, Any]) -> str | None:
    """The word that stands for a value, if one does."""
    for mapping in defaults.get("mappings", ()):
        option = mapping["options"].get(str(int(value)))
        if option:
            return str(option["text"])
    return None


def draw(data: Sequence[PanelData], window: Window, caption: str) -> Any:
    """The picture, a matplotlib Figure."""
    from matplotlib.figure import Figure

    rows = _rows(data)
    heights = [max(p.height for p in row) for row in rows]
    figure = Figure(figsize=(13.2, 0.33 * sum(heights) + 0.4), facecolor=_BACK)
    top = sum(heights) + 1.2
    y = 0.9
    for row, height in zip(rows, heights, strict=True):
        x = 0
        for item in row:
            width = item.width
            _frame(figure, item, x, y, width, height, top, window)
            x += width
        y += height
    figure.text(0.012, 1 - 0.45 / top, caption, fontsize=9, color=_MUTED, va="center")
    return figure


def _rows(data: Sequence[PanelData]) -> list[list[PanelData]]:
    rows: list[list[PanelData]] = []
    for item in data:
        used = sum(p.width for p in rows[-1]) if rows else COLUMNS
        if used + item.width > COLUMNS:
            rows.append([])
        rows[-1].append(item)
    return rows


def _frame(
    figure: Any, item: PanelData, x: float, y: float, width: float, height: float, top: float, window: Window
) -> None:
    from matplotlib.patches import FancyBboxPatch

    left, right = (x + 0.12) / COLUMNS, (x + width - 0.12) / COLUMNS
    upper, lower = 1 - (y + 0.12) / top, 1 - (y + height - 0.12) / top
    box = FancyBboxPatch(
        (left, lower), right - left, upper - lower, boxstyle="round,pad=0,rounding_size=0.003", linewidth=0.8,
        edgecolor=_GRID, facecolor=_BACK, transform=figure.transFigure, zorder=-1,
    )  # fmt: skip
    figure.add_artist(box)
    unit = 1 / top
    figure.text(
        left + 0.006, upper - 0.55 * unit, item.title, fontsize=8.5, color=_INK, weight="bold", va="center"
    )
    if not item.series:
        figure.text((left + right) / 2, (upper + lower) / 2, "no data", fontsize=9, color=_MUTED, ha="center")
    elif item.panel["type"] == "stat":
        _stat(figure, item, (left + right) / 2, (upper + lower) / 2 - 0.3 * unit, unit)
    else:
        legend = (
            0.2 + 0.45 * -(-len(item.lines) // _columns(item)) if item.panel["type"] == "timeseries" else 0.0
        )
        place = (
            left + 0.031,
            lower + (0.95 + legend) * unit,
            right - left - 0.04,
            upper - lower - (2.1 + legend) * unit,
        )
        axes = figure.add_axes(place)
        _style(axes)
        {"timeseries": _lines, "barchart": _bars, "heatmap": _heat}[item.panel["type"]](axes, item, window)


def _style(axes: Any) -> None:
    axes.set_facecolor(_BACK)
    axes.tick_params(labelsize=7, colors=_MUTED, length=0)
    axes.grid(axis="y", color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _stat(figure: Any, item: PanelData, x: float, y: float, unit: float) -> None:
    single = len(item.series) == 1
    lines = []
    for series in item.series:
        value = series.points[-1][1]
        word = mapped(value, item.defaults) or shown(
            value, item.defaults["unit"], item.defaults.get("decimals")
        )
        lines.append((series.name, word, threshold_color(value, item.defaults)))
    for i, (name, word, color) in enumerate(lines):
        at = y + (0.5 * (len(lines) - 1) - i) * 0.95 * unit
        if single:
            figure.text(x, at, word, fontsize=17, color=color, weight="bold", ha="center", va="center")
        else:
            figure.text(x - 0.004, at, name, fontsize=9, color=_MUTED, ha="right", va="center")
            figure.text(x + 0.004, at, word, fontsize=11, color=color, weight="bold", ha="left", va="center")


def _times(axes: Any, window: Window) -> None:
    axes.set_xlim(window.start, window.end)
    ticks = [window.start + share * (window.end - window.start) for share in (0.0, 0.25, 0.5, 0.75)]
    minutes = [(window.end - tick) / 60 for tick in ticks]
    axes.set_xticks([*ticks, window.end], [*(f"-{m:.3g} min" for m in minutes), "now"])
    for label, side in zip(axes.get_xticklabels(), ("left", *["center"] * 3, "right"), strict=True):
        label.set_horizontalalignment(side)


def _value_axis(axes: Any, item: PanelData) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    unit = item.defaults["unit"]
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, unit)))


def _lines(axes: Any, item: PanelData, window: Window) -> None:
    custom = item.defaults.get("custom", {})
    series = item.lines
    if custom.get("stacking", {}).get("mode") == "normal":
        times = sorted({at for s in series for at, _ in s.points})
        stacks = [[dict(s.points).get(at, 0.0) for at in times] for s in series]
        axes.stackplot(times, stacks, colors=_LINES, alpha=0.85, linewidth=0, labels=[s.name for s in series])
    else:
        for i, s in enumerate(series):
            axes.plot(
                *zip(*s.points, strict=True), color=_LINES[i % len(_LINES)], linewidth=1.3, label=s.name
            )
    if custom.get("thresholdsStyle"):
        for step in item.defaults["thresholds"]["steps"][1:]:
            if axes.get_ylim()[1] > step["value"]:
                axes.axhline(
                    step["value"], color=_STEPS.get(step["color"], _MUTED), linewidth=0.8, linestyle=":"
                )
    axes.set_ylim(bottom=0)
    _times(axes, window)
    _value_axis(axes, item)
    axes.legend(
        loc="upper left", bbox_to_anchor=(-0.08, -0.16), ncols=_columns(item), fontsize=6.8, frameon=False,
        labelcolor=_MUTED, handlelength=1.0, columnspacing=1.1, handletextpad=0.4, borderaxespad=0.0,
    )  # fmt: skip


def _columns(item: PanelData) -> int:
    """Of a legend, so that its longest name fits."""
    longest = max(len(series.name) for series in item.lines)
    return max(1, min(len(item.lines), 72 // (longest + 5)))


def _bars(axes: Any, item: PanelData, window: Window) -> None:
    label = item.panel["options"]["xField"]
    bars = sorted(
        ((s.labels[label], s.points[-1][1]) for s in item.series),
        key=lambda bar: (not bar[0].isdecimal(), int(bar[0]) if bar[0].isdecimal() else 0),
    )
    places = range(len(bars))
    axes.bar(places, [value for _, value in bars], color=_LINES[0], width=0.7)
    for place, (_, value) in zip(places, bars, strict=True):
        text = shown(value, item.defaults["unit"], item.defaults.get("decimals"))
        axes.text(place, value, text, fontsize=6.5, color=_MUTED, ha="center", va="bottom")
    axes.set_xticks(list(places), [name for name, _ in bars])
    axes.margins(y=0.18)
    axes.set_xlabel(label, fontsize=7, color=_MUTED, labelpad=1)
    _value_axis(axes, item)


def _heat(axes: Any, item: PanelData, window: Window) -> None:
    """Buckets are cumulative; a cell is what came in between two of them."""
    edges = sorted(item.series, key=lambda s: float(s.labels["le"]))
    times = sorted({at for s in edges for at, _ in s.points})
    totals = [[dict(s.points).get(at, 0.0) for at in times] for s in edges]
    cells = [
        [max(0.0, b - a) for a, b in zip(low, high, strict=True)]
        for low, high in zip([[0.0] * len(times), *totals], totals, strict=False)
    ]
    used = [i for i, row in enumerate(cells) if any(row)]
    cells = cells[used[0] : used[-1] + 1] if used else cells
    names = [s.labels["le"].removesuffix(".0") for s in edges][used[0] : used[-1] + 1] if used else []
    axes.grid(visible=False)
    axes.imshow(
        cells, aspect="auto", origin="lower", cmap="Oranges", interpolation="nearest",
        extent=(times[0], times[-1], 0, len(cells)),
    )  # fmt: skip
    axes.set_yticks([i + 0.5 for i in range(len(names))], names)
    _times(axes, window)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--dashboard", type=Path, default=OVERVIEW)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--until", type=float, default=time.time(), help="unix seconds; default: now")
    parser.add_argument("--all", action="store_true", help="every panel, not the README's selection")
    parser.add_argument(
        "--caption", default="", help="a line above the panels; default: the dashboard's title"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "docs/dashboard.svg")
    args = parser.parse_args(argv)
    import matplotlib

    # Texts stay texts: a tenth of the size of outlines, and they can be searched.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "specbridge", "font.family": "sans-serif"}
    dashboard = json.loads(args.dashboard.read_text())
    window = Window(args.until - 60 * args.minutes, args.until)
    data = collect(Prometheus(args.prometheus), dashboard, window, () if args.all else SHOWN)
    caption = args.caption or f"{dashboard['title']}, the last {args.minutes:g} minutes"
    draw(data, window, caption).savefig(args.output, metadata={"Date": None})
    for item in data:
        print(f"{item.title:<34} {len(item.series):>3} series")
    print(f"{args.output}: {args.output.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
