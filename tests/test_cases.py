"""tests/cases.md names tests that exist, and every row says what shows it or what it waits for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "tests" / "cases.md").read_text(encoding="utf-8")
NUMBERS = [1, 2, 4, 7, 9, 11, 12, 14, 15, 16, 18, 20, 22, 23, 24, 26, 28, 29, 31, 32, 34, 35, 36, 39, 40]
NUMBERS += [41, 43, 45, 47, 48]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("path", sorted({path for path, _ in NAMED}))
def test_named_tests_exist(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert {name for where, name in NAMED if where == path} <= defined


def test_every_row_is_there_and_is_shown_or_waits() -> None:
    assert [int(row[0]) for row in rows()] == NUMBERS
    for number, report, fault, shown, waits in rows():
        assert report and fault
        assert "::" in shown or waits, f"row {number} says neither what shows it nor what it waits for"
        # Anything in backquotes with a path must have been recognised as a test.
        assert len(re.findall(r"`tests/", shown + waits)) == len(
            re.findall(r"`tests/[\w/]+\.py::\w+`", shown + waits)
        )
