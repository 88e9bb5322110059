"""Words and number formats that the text and the page share."""

from __future__ import annotations

PARTS = ("bytes", "candidates", "parts", "round", "ranks")
"""The report's questions, in the order in which they are shown."""
QUESTIONS = {
    "bytes": "What does a round read?",
    "candidates": "What do candidates cost, and what does each further node buy?",
    "parts": "What does each part give?",
    "round": "Where does a round's time go?",
    "ranks": "Would more tensor-parallel ranks help?",
}


def stage_name(stage: str) -> str:
    return "RPC" if stage == "rpc" else stage.replace("_", " ")


def millis(seconds: float) -> str:
    """Milliseconds with as many digits as tell something."""
    value = seconds * 1e3
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def ratio(value: float) -> str:
    return f"{value:.2f}x"


def size(count: float) -> str:
    """Bytes in decimal units."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:,.2f} {unit}"
    return f"{count:.0f} B"


def operations(count: float) -> str:
    """Floating-point operations with a unit."""
    for limit, unit in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= limit:
            return f"{count / limit:,.3g} {unit}"
    return f"{count:.0f}"
