"""Command-line flags generated from settings classes: one field, one flag, one help text.

`tree_budget: int` becomes `--tree-budget`; a bool becomes `--flag` / `--no-flag`; help is the field's
docstring with its default and environment variable. Values are passed on as text: the settings class parses
them, so a wrong value has the same message whether it came by flag or by environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from specbridge.settings import ENV_PREFIX, Settings

METAVARS = {int: "N", float: "X", str: "TEXT"}


def flag(name: str) -> str:
    """The flag of a field: tree_budget -> --tree-budget."""
    return "--" + name.replace("_", "-")


def add_flags(
    parser: argparse.ArgumentParser, kind: type[Settings], *, leave_out: Iterable[str] = (), env: bool = True
) -> None:
    """Add a flag per field of `kind`. Only flags that were given appear in the parsed namespace."""
    for name, field in kind.model_fields.items():
        if name not in leave_out:
            add_flag(parser, name, field, env=env)


def add_flag(parser: argparse.ArgumentParser, name: str, field: FieldInfo, *, env: bool = True) -> None:
    notes = []
    if isinstance(field.default, bool):
        notes.append(f"default: {'on' if field.default else 'off'}")
    elif field.default not in (None, ""):
        notes.append(f"default: {field.default}")
    if env:
        notes.append(ENV_PREFIX + name.upper())
    text = " ".join((field.description or "").split())
    shown = (f"{text} ({'; '.join(notes)})" if notes else text).replace("%", "%%")
    if is_switch(field):
        # "--no-no-draft" helps nobody: a field that is itself a "no" has only the one form.
        action: Any = "store_true" if name.startswith("no_") else argparse.BooleanOptionalAction
        parser.add_argument(flag(name), dest=name, action=action, default=argparse.SUPPRESS, help=shown)
    else:
        extra = field.json_schema_extra
        kind = (
            str(extra["metavar"])
            if isinstance(extra, dict) and "metavar" in extra
            else metavar(field.annotation)
        )
        parser.add_argument(flag(name), dest=name, metavar=kind, default=argparse.SUPPRESS, help=shown)


def is_switch(field: FieldInfo) -> bool:
    """Whether the field is a bool (or a bool that may be left open)."""
    return field.annotation is bool or set(get_args(field.annotation)) == {bool, type(None)}


def arguments(values: Mapping[str, Any]) -> list[str]:
    """The inverse: flags that give these fields these values."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            if name.startswith("no_"):
                words += [flag(name)] if value else []
            else:
                words.append(flag(name) if value else "--no-" + name.replace("_", "-"))
        else:
            words.append(f"{flag(name)}={value}")
    return words


def metavar(annotation: Any) -> str:
    """What a help text shows for a value of this type."""
    if get_origin(annotation) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(annotation)) + "}"
    return METAVARS.get(annotation, "VALUE")
