"""The report as text for a terminal: each question's answer, then its numbers in a table.

Owns what is printed. Reads the report's JSON only, so that a saved one looks the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specbridge.explain.words import PARTS, QUESTIONS, millis, ratio, size, stage_name


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the report."""
    stack = report["stack"]
    console.print(f"[bold]{escape(stack['model'])}[/bold], drafter {escape(stack['drafter'] or 'none')}")
    console.print(f"[dim]{escape(_facts(report))}[/dim]")
    for note in report["notes"]:
        console.print(f"[yellow]note[/yellow] {escape(note)}")
    for part in PARTS:
        console.print(f"\n[bold]{QUESTIONS[part]}[/bold]")
        console.print(escape(report[part].get("answer", "")))
        table = _TABLES[part](report[part])
        if table is not None and table.row_count:
            console.print(table)


def _facts(report: Mapping[str, Any]) -> str:
    stack, load = report["stack"], report["load"]
    words = [stack["machine"], f"{stack.get('dtype', '?')} on {stack.get('device', '?')}"]
    words.append(f"{load['rounds']} rounds, prompts: {load['prompts']} x {load['repeats']}")
    return " · ".join([*words, report["time"]])


def _table(*columns: str) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, title in enumerate(columns):
        made.add_column(title, justify="left" if number == 0 else "right", no_wrap=number > 0)
    return made


def _bytes(part: Mapping[str, Any]) -> Table:
    table = _table("read by", "times", "bytes a round")
    for read in part["reads"]:
        table.add_row(f"{read['service']}: {read['what']}", f"{read['times']:.2f}", size(read["bytes"]))
    slope = (part.get("context") or {}).get("slope")
    if slope:
        low, high = slope["contexts"]
        table.add_row(
            f"[dim]a context row more ({low} to {high}), passes of 1 and of {slope['rows']} rows[/dim]",
            "",
            f"[dim]{slope['alone_s'] * 1e6:.2f} and {slope['together_s'] * 1e6:.2f} µs[/dim]",
        )
    return table


def _candidates(part: Mapping[str, Any]) -> Table:
    table = _table("nodes", "tokens a round", "ms a round", "verify ms", "tokens/s", "each further node")
    steps = {round(step["last"], 3): step for step in part["steps"]}
    rows = [(point, steps.get(round(point["nodes"], 3)), "") for point in part["points"]]
    if part["chosen"]:
        rows.append((part["chosen"], None, " [green]<- chosen[/green]"))
    for point, step, mark in rows:
        more = f"{step['tokens']:+.3f} tokens, {step['seconds'] * 1e3:+.2f} ms" if step else ""
        table.add_row(
            f"{point['nodes']:.1f}{mark}",
            f"{point['tokens']:.2f}",
            millis(point["round_s"]),
            millis(point["verify_s"]),
            f"{point['tokens_per_s']:.1f}",
            more,
        )
    return table


def _parts(part: Mapping[str, Any]) -> Table:
    table = _table("with it / without", "ratio", "lowest..highest", "pairs", "tok/s", "without", "same text")
    for one in part["comparisons"]:
        if one["ratio"] is None:
            table.add_row(f"{one['title']} [dim]({escape(one['missing'])})[/dim]")
            continue
        color = {"gives": "green", "costs": "red"}.get(one["verdict"], "default")
        table.add_row(
            f"{one['title']} [dim]/ {one['without']}[/dim]",
            f"[{color}]{ratio(one['ratio'])}[/{color}]",
            f"{one['low']:.2f}..{one['high']:.2f}",
            str(one["pairs"]),
            f"{one['on']['tokens_per_s']:.1f}",
            f"{one['off']['tokens_per_s']:.1f}",
            "yes" if one["same_text"] else "no",
        )
    return table


def _round(part: Mapping[str, Any]) -> Table:
    table = _table("stage", "ms", "share", "floor ms")
    for stage in part["stages"]:
        table.add_row(
            stage_name(stage["stage"]),
            millis(stage["seconds"]),
            f"{stage['seconds'] / part['seconds']:.1%}",
            millis(stage["floor_s"]) if stage["floor_s"] is not None else "",
        )
    for check in part["checks"]:
        table.add_row(
            f"[dim]{escape(check['what'])}[/dim]",
            f"[dim]{millis(check['found_s'])}[/dim]",
            f"[dim]{check['ratio']:.1%}[/dim]" if check["agrees"] else f"[red]{check['ratio']:.1%}[/red]",
        )
    return table


def _ranks(part: Mapping[str, Any]) -> Table:
    table = _table("ranks", "weights of one", "floor ms", "saves ms", "each collective", "round, at best")
    for estimate in part["estimates"]:
        table.add_row(
            str(estimate["ranks"]),
            size(estimate["weight_bytes"]),
            millis(estimate["floor_s"]),
            millis(estimate["saved_s"]),
            f"{estimate['break_even_s'] * 1e6:.0f} µs",
            ratio(estimate["best_ratio"]),
        )
    if part["estimates"]:
        table.caption = "Assumes: " + "; ".join(part["assumptions"]) + "."
        table.caption_justify = "left"
    return table


_TABLES = {
    "bytes": _bytes,
    "candidates": _candidates,
    "parts": _parts,
    "round": _round,
    "ranks": _ranks,
}
