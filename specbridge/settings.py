"""Settings: one frozen class per service, read from flags and SPECBRIDGE_* environment variables.

The only module that looks at the environment. Every field of a service's settings is a command-line
flag (`tree_budget` → `--tree-budget`) and an environment variable (`SPECBRIDGE_TREE_BUDGET`); flags win.
A value that does not parse is an error that names it, never ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from specbridge.errors import ConfigError

ENV_PREFIX = "SPECBRIDGE_"
LONGEST_S = 1e8
"""Largest of all settings that are times: about three years."""
LARGEST = 2**31 - 1
"""Largest of all settings that are counts."""


class Settings(BaseSettings):
    """Base of all settings classes: immutable, strict about unknown names, documented per field."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        env_ignore_empty=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="after")
    @classmethod
    def _fits(cls, value: Any) -> Any:
        """What clocks, counters and tensors can't hold would fail there, without a flag's name."""
        most = LONGEST_S if isinstance(value, float) else LARGEST
        if isinstance(value, int | float) and value > most:
            raise ValueError(f"must be at most {most:g}")
        return value


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
            text = item["msg"].removeprefix("Value error, ")
            if not item["loc"]:  # a combination: its message names the fields
                lines.append(text)
                continue
            name = ".".join(str(part) for part in item["loc"])
            flag = "--" + name.replace("_", "-")
            given = "" if item["type"] == "missing" else f" (given {item['input']!r})"
            lines.append(f"{flag} / {ENV_PREFIX}{name.upper()}: {text}{given}")
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


@dataclass(frozen=True, slots=True)
class Launched:
    """What torchrun says about this process: which rank of how many, which of its host's, and where the ranks
    meet. attempt: how often the ranks were started before. agent_store: torchrun serves the meeting point
    itself; otherwise rank 0 has to.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    attempt: int
    agent_store: bool


def launched_by_torchrun(*, required: bool) -> Launched | None:
    """From torchrun's environment variables; None if it did not start this process.

    Raises ConfigError for a variable that is missing or no number. required: so is their absence.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ and not required:
        return None

    def number(name: str, default: str | None = None) -> int:
        text = os.environ.get(name, default)
        try:
            return int(text or "")
        except ValueError:
            raise ConfigError(
                f"{name} is {text!r} where torchrun sets a number; start the ranks with torchrun, or give "
                "--launcher none"
            ) from None

    return Launched(
        rank=number("RANK"),
        size=number("WORLD_SIZE"),
        local_rank=number("LOCAL_RANK"),
        local_size=number("LOCAL_WORLD_SIZE", "1"),
        host=os.environ.get("MASTER_ADDR", ""),
        port=number("MASTER_PORT"),
        attempt=number("TORCHELASTIC_RESTART_COUNT", "0"),
        agent_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true",
    )
