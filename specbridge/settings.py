"""Settings: one frozen class per service, read from flags and SPECBRIDGE_* environment variables.

The only module that looks at the environment. Every field of a service's settings is a command-line
flag (`tree_budget` → `--tree-budget`) and an environment variable (`SPECBRIDGE_TREE_BUDGET`); flags win.
A value that does not parse is an error that names it, never ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from specbridge.errors import ConfigError

ENV_PREFIX = "SPECBRIDGE_"


class Settings(BaseSettings):
    """Base of all settings classes: immutable, strict about unknown names, documented per field."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        env_ignore_empty=True,
    )


S = TypeVar("S", bound=Settings)


def load(kind: type[S], **values: Any) -> S:
    """Build settings from explicit `values` (flags) over the environment over the defaults.

    Raises ConfigError naming each wrong field, its value and what is legal.
    """
    try:
        return kind(**values)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            name = ".".join(str(part) for part in item["loc"]) or "settings"
            flag = "--" + name.replace("_", "-")
            given = "" if item["type"] == "missing" else f" (given {item['input']!r})"
            lines.append(f"{flag} / {ENV_PREFIX}{name.upper()}: {item['msg']}{given}")
        raise ConfigError("; ".join(lines)) from None


def child_environment(**values: str) -> Mapping[str, str]:
    """The environment for a process this one starts, with `values` on top."""
    return {**os.environ, **values}


def default_environment(**values: str) -> None:
    """Set variables of this process that libraries read at import (thread counts, wait policies).

    What the user has exported stays.
    """
    for name, value in values.items():
        os.environ.setdefault(name, value)
