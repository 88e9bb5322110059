"""Settings: flags over environment over defaults, errors that name the field; flags generated from fields."""

from __future__ import annotations

import argparse
from typing import Literal

import pytest
from pydantic import Field, ValidationError

from specbridge.errors import ConfigError
from specbridge.flags import add_flags, arguments
from specbridge.settings import Settings, child_environment, default_environment, load


class Example(Settings):
    """An example."""

    tree_budget: int = Field(default=16, ge=0)
    """Most nodes, 100% of them."""
    dtype: Literal["auto", "float32"] = "auto"
    """The dtype."""
    fast: bool = True
    """Be fast."""
    no_draft: bool = False
    """Without."""
    name: str = ""
    """A name."""
    maybe: bool | None = None
    """Left open."""
    wait: float = Field(default=1.0, gt=0)
    """Seconds."""


def parse(*words: str) -> Example:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_flags(parser, Example)
    return load(Example, **vars(parser.parse_args(list(words))))


def test_flags_win_over_environment_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse() == Example(tree_budget=16)
    monkeypatch.setenv("SPECBRIDGE_TREE_BUDGET", "7")
    monkeypatch.setenv("SPECBRIDGE_FAST", "0")
    assert (parse().tree_budget, parse().fast) == (7, False)
    assert (parse("--tree-budget", "9", "--fast").tree_budget, parse("--fast").fast) == (9, True)
    monkeypatch.setenv("SPECBRIDGE_TREE_BUDGET", "")
    assert parse().tree_budget == 16, "an empty variable is an unset one"


def test_every_form_of_flag_reaches_its_field() -> None:
    got = parse("--no-fast", "--no-draft", "--dtype=float32", "--name", "x", "--no-maybe")
    assert got.model_dump() == {
        "tree_budget": 16, "dtype": "float32", "fast": False, "no_draft": True, "name": "x", "maybe": False,
        "wait": 1.0,
    }  # fmt: skip
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        parse("--no-no-draft")


def test_arguments_are_the_inverse_of_parsing() -> None:
    for values in (
        {
            "tree_budget": 0,
            "dtype": "float32",
            "fast": False,
            "no_draft": True,
            "name": "a b=c",
            "maybe": True,
        },
        {"tree_budget": 5, "fast": True, "no_draft": False, "name": "", "maybe": False},
        {"name": "--dtype"},
        {},
    ):
        assert parse(*arguments(values)) == Example(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tree_budget": "x"}, r"--tree-budget / SPECBRIDGE_TREE_BUDGET: .*given 'x'"),
        ({"tree_budget": -1}, r"--tree-budget .*greater than or equal to 0.*given -1"),
        ({"dtype": "int8"}, r"--dtype .*'auto' or 'float32'.*given 'int8'"),
        ({"nope": 1}, r"--nope .*given 1"),
        ({"wait": "inf"}, r"--wait .*finite number.*given 'inf'"),
        ({"wait": "nan"}, r"--wait .*finite number.*given 'nan'"),
        ({"wait": 1e300}, r"--wait / SPECBRIDGE_WAIT: must be at most 1e\+08 \(given 1e\+300\)"),
        ({"tree_budget": 2**40}, r"--tree-budget .*must be at most .*given 1099511627776"),
    ],
)
def test_wrong_values_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(Example, **values)


def test_wrong_environment_values_are_errors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRIDGE_TREE_BUDGET", "many")
    with pytest.raises(ConfigError, match="SPECBRIDGE_TREE_BUDGET.*many"):
        load(Example)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        load(Example).tree_budget = 3  # type: ignore[misc]


def test_help_shows_docstring_default_and_variable() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Example)
    text = " ".join(parser.format_help().split())
    assert "--tree-budget N Most nodes, 100% of them. (default: 16; SPECBRIDGE_TREE_BUDGET)" in text
    assert "--dtype {auto,float32}" in text and "--fast, --no-fast" in text


def test_environment_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRIDGE_X", "1")
    monkeypatch.setenv("SPECBRIDGE_Z", "")
    monkeypatch.delenv("SPECBRIDGE_Z")
    default_environment(SPECBRIDGE_X="4", SPECBRIDGE_Z="5")
    env = child_environment(SPECBRIDGE_Z="6")
    assert [env[f"SPECBRIDGE_{name}"] for name in "XZ"] == ["1", "6"]
    assert child_environment()["SPECBRIDGE_Z"] == "5"
