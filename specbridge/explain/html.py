"""The report as one HTML page that needs nothing else: styles and charts are in it, nothing is fetched.

Owns what the template is given. The template is templates/report.html.j2, the charts are charts'.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from specbridge.explain import charts
from specbridge.explain.svg import SHAPES, STYLE
from specbridge.explain.words import PARTS, QUESTIONS, millis, ratio, size, stage_name

CHARTS = {
    "bytes": (charts.reads,),
    "candidates": (charts.rate_curve, charts.tokens_curve, charts.time_curve),
    "parts": (charts.parts,),
    "round": (charts.stages,),
    "ranks": (),
}


def page(report: Mapping[str, Any]) -> str:
    """The page; what the report quotes of others (model names, notes) is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(millis=millis, ratio=ratio, size=size, stage_name=stage_name)
    drawn = {
        part: [
            {"title": chart.title, "svg": Markup(chart.svg())}
            for draw in CHARTS[part]
            if (chart := draw(report)) is not None
        ]
        for part in PARTS
    }
    return environment.get_template("report.html.j2").render(
        report=report, parts=PARTS, questions=QUESTIONS, charts=drawn, style=Markup(STYLE + SHAPES)
    )
