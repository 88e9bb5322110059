"""The report's charts: what is drawn of it. Shapes are svg's; words and numbers beside them are the page's.

Each chart returns its shapes and its height, drawn WIDTH wide: for a phone's column at full size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbridge.explain.svg import Scale, dot, drawing, line, picture, rect, shifted, text, ticks
from specbridge.explain.words import millis, size, stage_name

WIDTH = 340.0
STAGE_KINDS = {"draft": "fb", "channel_wait": "fd", "verify": "fa", "rpc": "fe", "gateway": "fc"}


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    height: float
    shapes: Sequence[str]

    def svg(self) -> str:
        return drawing(WIDTH, self.height, self.shapes, title=self.title)


def reads(report: Mapping[str, Any]) -> Chart | None:
    """Bytes of a round, a bar for each thing that is read."""
    rows = [read for read in report["bytes"]["reads"] if read["bytes"] > 0]
    if not rows:
        return None
    most = max(read["bytes"] for read in rows)
    scale = Scale(0, most, 0, WIDTH)
    shapes, y = [], 0.0
    kinds = {"weights": "fa", "context_kv": "fb", "hidden_states": "fd", "copies": "fe"}
    for read in rows:
        label = f"{read['service']}: {read['what'].split(', rows')[0]}"
        shapes += [
            text(0, y + 12, label),
            text(WIDTH, y + 12, size(read["bytes"]), anchor="end", kind="strong"),
            rect(0, y + 17, max(1.0, scale(read["bytes"])), 8, kind=kinds[read["kind"]]),
        ]
        y += 36
    return Chart("Bytes that a round reads", y, shapes)


def stages(report: Mapping[str, Any]) -> Chart | None:
    """The round's time in a bar of stages, its floor below, and a plain round for comparison."""
    part = report["round"]
    if not part["stages"]:
        return None
    floors = [(s["stage"], s["floor_s"]) for s in part["stages"] if s["floor_s"]]
    plain = part.get("plain_seconds")
    longest = max(part["seconds"], plain or 0.0)
    scale = Scale(0, longest, 0, WIDTH)
    shapes: list[str] = []

    def bar(y: float, label: str, seconds: float, pieces: Sequence[tuple[str, float]], height: float) -> None:
        shapes.append(text(0, y + 12, label))
        shapes.append(text(WIDTH, y + 12, f"{millis(seconds)} ms", anchor="end", kind="strong"))
        x = 0.0
        for stage, value in pieces:
            width = scale(value)
            told = f"{stage_name(stage)}: {millis(value)} ms"
            shapes.append(rect(x, y + 18, width, height, kind=STAGE_KINDS.get(stage, "fe"), title=told))
            x += width

    bar(0, "a round", part["seconds"], [(s["stage"], s["seconds"]) for s in part["stages"]], 22)
    y = 52.0
    if floors:
        bar(y, "its floor: bytes / copy rate", sum(value for _, value in floors), floors, 10)
        y += 40
    if plain:
        bar(y, "a plain round", plain, [("verify", plain)], 10)
        y += 40
    x = 0.0
    for stage in part["stages"]:
        name = stage_name(stage["stage"])
        width = 18 + 6.6 * len(name)
        if x + width > WIDTH:
            x, y = 0.0, y + 18
        shapes.append(rect(x, y + 2, 10, 10, kind=STAGE_KINDS.get(stage["stage"], "fe")))
        shapes.append(text(x + 14, y + 11, name, kind="small"))
        x += width + 8
    return Chart("Where a round's time goes", y + 18, shapes)


def parts(report: Mapping[str, Any]) -> Chart | None:
    """Rate with each part over rate without: the median of the pairs, and their range."""
    rows = [one for one in report["parts"]["comparisons"] if one["ratio"] is not None]
    if not rows:
        return None
    low = min(0.8, *(one["low"] for one in rows)) * 0.97
    high = max(1.25, *(one["high"] for one in rows)) * 1.03
    scale = Scale(max(low, 0.05), high, 4, WIDTH - 4, log=True)
    bottom = 38.0 * len(rows)
    shapes = []
    for tick in ticks(low, high, 5):
        shapes.append(line([(scale(tick), 0), (scale(tick), bottom)], kind="axis"))
        shapes.append(text(scale(tick), bottom + 14, f"{tick:g}x", anchor="middle", kind="dim small"))
    shapes.append(line([(scale(1), 0), (scale(1), bottom)], kind="axis mark"))
    y = 0.0
    for one in rows:
        color = {"gives": "c", "costs": "bad"}.get(one["verdict"], "e")
        shapes += [
            text(0, y + 13, one["title"]),
            text(WIDTH, y + 13, f"{one['ratio']:.2f}x", anchor="end", kind="strong"),
            line([(scale(one["low"]), y + 25), (scale(one["high"]), y + 25)], kind=f"line l{color}"),
            dot(scale(one["ratio"]), y + 25, kind=f"f{color}", radius=5),
        ]
        y += 38
    return Chart("Tokens per second with each part over without", bottom + 20, shapes)


def rate_curve(report: Mapping[str, Any]) -> Chart | None:
    """Tokens a second over nodes: measured, what the budget expects, and where it stands."""
    expected = [(row[0], row[3]) for row in report["candidates"]["expected"] if len(row) > 3 and row[3]]
    return _curve(
        report, "Tokens per second, over nodes", lambda p: p["tokens_per_s"], "{:.0f}", expected=expected
    )


def tokens_curve(report: Mapping[str, Any]) -> Chart | None:
    expected = [(row[0], row[1]) for row in report["candidates"]["expected"] if len(row) > 1]
    return _curve(report, "Tokens a round, over nodes", lambda p: p["tokens"], "{:.2g}", expected=expected)


def time_curve(report: Mapping[str, Any]) -> Chart | None:
    expected = [(row[0], row[2]) for row in report["candidates"]["expected"] if len(row) > 2 and row[2]]
    return _curve(report, "ms a round, over nodes", lambda p: p["round_s"] * 1e3, "{:.0f}", expected=expected)


def _curve(
    report: Mapping[str, Any],
    title: str,
    value: Callable[[Mapping[str, Any]], float],
    form: str,
    *,
    expected: Sequence[tuple[float, float]],
) -> Chart | None:
    points = [(float(p["nodes"]), float(value(p))) for p in report["candidates"]["points"]]
    if len(points) < 2:
        return None
    chosen = report["candidates"]["chosen"]
    widest = max(x for x, _ in points)
    expected = [(x, y) for x, y in expected if x <= widest]
    top = max(y for _, y in (*points, *expected)) * 1.08
    height = 150.0
    across = Scale(0, widest, 34, WIDTH - 8)
    up = Scale(0, top, height - 22, 8)
    shapes = []
    for tick in ticks(0, top, 4):
        shapes.append(line([(34, up(tick)), (WIDTH - 8, up(tick))], kind="axis"))
        shapes.append(text(30, up(tick) + 4, form.format(tick), anchor="end", kind="dim small"))
    for tick in ticks(0, widest, 6):
        if tick == int(tick):
            shapes.append(text(across(tick), height - 6, f"{tick:.0f}", anchor="middle", kind="dim small"))
    if len(expected) > 1:
        shapes.append(line([(across(x), up(y)) for x, y in expected], kind="line lb dashed"))
    shapes.append(line([(across(x), up(y)) for x, y in points], kind="line la"))
    shapes += [dot(across(x), up(y), kind="fa", title=f"{x:.1f} nodes: {y:.2f}") for x, y in points]
    if chosen:
        x = across(chosen["nodes"])
        shapes.append(dot(x, up(value(chosen)), kind="fc", radius=5, title=f"chosen: {value(chosen):.2f}"))
        late = x > WIDTH * 0.7
        shapes.append(line([(x, 8), (x, height - 22)], kind="axis mark"))
        shapes.append(
            text(
                x + (-5 if late else 5),
                height - 28,
                "chosen",
                anchor="end" if late else "start",
                kind="small",
            )
        )
    return Chart(title, height, shapes)


def excerpt(report: Mapping[str, Any]) -> str:
    """The rate over nodes, the stages and the parts side by side, as a picture of its own."""
    gap, shapes, x, tallest = 36.0, [], 24.0, 0.0
    for chart in (stages(report), rate_curve(report), parts(report)):
        if chart is not None:
            shapes.append(shifted(x, 26, [text(0, 0, chart.title, kind="strong")]))
            shapes.append(shifted(x, 42, chart.shapes))
            x += WIDTH + gap
            tallest = max(tallest, chart.height)
    stack = report["stack"]
    told = f"{stack['model']}, {stack.get('dtype', '?')}, {stack['machine']}, {report['time'][:10]}"
    shapes.append(text(24, tallest + 66, told, kind="dim small"))
    return picture(max(x - gap + 24, 200.0), tallest + 80, shapes, title=f"specbridge explain: {told}")
