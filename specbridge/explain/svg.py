"""A few shapes of SVG as text, and scales with round ticks. Knows nothing of reports.

Colours are CSS classes, so that a page (or a picture's own style) can be light or dark. Numbers have to be
finite: ValueError otherwise, never a NaN in a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root{--ink:#1c2733;--dim:#5d6b7a;--line:#d5dce3;--paper:#fff;--a:#2f6fde;--b:#d97f12;--c:#2f9e63;
--d:#a04fc4;--e:#7d8b99;--bad:#c8403a}
@media (prefers-color-scheme:dark){:root{--ink:#e6ebf0;--dim:#9aa8b6;--line:#364350;--paper:#131a21;
--a:#6ea3ff;--b:#f0ad55;--c:#5fcf93;--d:#cf8cf0;--e:#93a2b1;--bad:#ff7b74}}
"""
"""The colours of pages and pictures."""
SHAPES = """
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--ink)}
svg .dim{fill:var(--dim)}svg .small{font-size:11px}svg .strong{font-weight:600}svg .paper{fill:var(--paper)}
svg .axis{stroke:var(--line);stroke-width:1;fill:none}svg .mark{stroke:var(--ink);stroke-dasharray:3 3}
svg .fa{fill:var(--a)}svg .fb{fill:var(--b)}svg .fc{fill:var(--c)}svg .fd{fill:var(--d)}svg .fe{fill:var(--e)}
svg .fbad{fill:var(--bad)}svg .la{stroke:var(--a)}svg .lb{stroke:var(--b)}svg .lc{stroke:var(--c)}
svg .ld{stroke:var(--d)}svg .le{stroke:var(--e)}svg .lbad{stroke:var(--bad)}
svg .line{fill:none;stroke-width:2;stroke-linejoin:round}svg .dashed{stroke-dasharray:5 4}
"""
"""How shapes use them; every rule begins with svg, so that a page's text is left alone."""


def number(value: float) -> str:
    """A coordinate with one decimal. Raises ValueError for what is no number."""
    if not math.isfinite(value):
        raise ValueError(f"{value} can't be drawn")
    text = f"{value:.1f}"
    return text.removesuffix(".0")


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> str:
    place = f'x="{number(x)}" y="{number(y)}"'
    ends = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f"<text {place}{ends}{_kind(kind)}>{escape(words)}</text>"


def rect(x: float, y: float, width: float, height: float, *, kind: str, title: str = "") -> str:
    box = f'x="{number(x)}" y="{number(y)}" width="{number(max(0.0, width))}" height="{number(height)}"'
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect {box} rx="2"{_kind(kind)}>{inside}</rect>'


def line(points: Sequence[tuple[float, float]], *, kind: str) -> str:
    at = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return f'<polyline points="{at}"{_kind(kind)}/>'


def dot(x: float, y: float, *, kind: str, radius: float = 3.5, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    place = f'cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"'
    return f"<circle {place}{_kind(kind)}>{inside}</circle>"


def _kind(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def drawing(width: float, height: float, shapes: Sequence[str], *, title: str) -> str:
    """An <svg> for a page: as wide as its place, at most a third wider than drawn."""
    box = f'viewBox="0 0 {number(width)} {number(height)}"'
    look = f'style="width:100%;max-width:{number(width * 4 / 3)}px;height:auto;display:block"'
    inside = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} {look} role="img">'
        f"<title>{escape(title)}</title>\n{inside}\n</svg>"
    )


def picture(width: float, height: float, shapes: Sequence[str], *, title: str) -> str:
    """An SVG file of its own, with its colours, light or dark as the reader's."""
    box = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
    ground = rect(0, 0, width, height, kind="paper")
    inside = "\n".join([ground, *shapes])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img"><title>{escape(title)}</title>\n'
        f"<style>{STYLE}{SHAPES}</style>\n{inside}\n</svg>\n"
    )


def shifted(x: float, y: float, shapes: Sequence[str]) -> str:
    return f'<g transform="translate({number(x)} {number(y)})">' + "\n".join(shapes) + "</g>"


@dataclass(frozen=True, slots=True)
class Scale:
    """Values [low, high] to coordinates [start, end]; log: by their logarithm, low above 0 then."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, 1e-9))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + (self.end - self.start) * min(1.0, max(0.0, share))


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round values within [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]
