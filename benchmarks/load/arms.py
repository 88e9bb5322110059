"""What is compared: arms, the order of their turns, and what an arm runs on.

Owns the presets' flags. An arm is a stack of its own (`specbridge serve` with flags) or the address of any
OpenAI-compatible server. Does not own the load (loops.py).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from benchmarks import common
from specbridge.errors import ConfigError

PRESETS = {
    "plain": ("--no-draft",),
    "chain": ("--budget=fixed", "--top-k=1"),
    "tree": ("--budget=fixed",),
    "adaptive": ("--budget=cost",),
}
_SIZED = ("chain", "tree")
_NAME = re.compile(r"[\w.+-]+")
USUAL_RUNNING = 64
"""`--max-running` of a gateway that is not told otherwise."""


@dataclass(frozen=True, slots=True)
class Arm:
    """flags: of its own stack. url: of a server that runs already, up to and with /v1; empty: a stack."""

    name: str
    flags: tuple[str, ...] = ()
    url: str = ""
    model: str = ""
    api_key: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def describe(self) -> dict[str, Any]:
        """For the report; without the key."""
        if self.url:
            return {"name": self.name, "url": self.url, "model": self.model}
        return {"name": self.name, "flags": list(self.flags)}


@dataclass(frozen=True, slots=True)
class Server:
    """An arm that answers. url: with /v1. synthetic: as common.synthetic."""

    arm: Arm
    url: str
    model: str
    synthetic: dict[str, Any]


def parse_arm(
    word: str,
    *,
    flags: Sequence[str] = (),
    spec_flags: Sequence[str] = (),
    most_streams: int = 1,
) -> Arm:
    """A preset (`plain`, `chain`, `tree`, `adaptive`), a sized one (`tree:16`), NAME=FLAGS or NAME=URL.

    flags: for every stack; spec_flags: for every stack with a draft; both come before the arm's own. A sized
    preset gives each of `most_streams` streams trees of so many nodes. Raises ConfigError.
    """
    name, given, rest = word.partition("=")
    if not given:
        own = _preset(word, most_streams)
    elif not _NAME.fullmatch(name):
        raise ConfigError(f"--arm {word!r}: the name {name!r} must be letters, digits, and any of _ . + -")
    elif re.match(r"https?://", rest):
        url = rest.rstrip("/")
        return Arm(name, url=url if url.endswith("/v1") else f"{url}/v1")
    else:
        try:
            own = tuple(shlex.split(rest))
        except ValueError as error:
            raise ConfigError(f"--arm {word!r}: the flags do not parse: {error}") from None
        if own and not own[0].startswith("--"):
            raise ConfigError(f"--arm {word!r}: after NAME= comes http://… or flags as of `specbridge serve`")
    every = [*flags, *(() if "--no-draft" in (*flags, *own) else spec_flags), *own]
    given_names = {flag.partition("=")[0] for flag in every}
    if most_streams > USUAL_RUNNING and "--max-running" not in given_names:
        every.append(f"--max-running={most_streams}")
    return Arm(name, tuple(every))


def _preset(word: str, most_streams: int) -> tuple[str, ...]:
    name, sized, size = word.partition(":")
    if name not in PRESETS or (sized and name not in _SIZED):
        raise ConfigError(
            f"--arm {word!r} is no preset; take one of {', '.join(PRESETS)}, "
            f"{' or '.join(f'{n}:NODES' for n in _SIZED)}, or give NAME=FLAGS or NAME=http://host:port"
        )
    if not sized:
        return PRESETS[name]
    if not size.isdecimal() or int(size) < 1:
        raise ConfigError(f"--arm {word!r}: the nodes of a tree must be a number from 1 on, not {size!r}")
    nodes = int(size)
    rows = (nodes + 1) * most_streams
    more = (f"--tree-budget={nodes}", f"--max-verify-rows={rows}", f"--min-tree={min(nodes, 4)}")
    return (*PRESETS[name], *more, *((f"--max-tree-nodes={nodes}",) if nodes > 64 else ()))


def assign(arms: Sequence[Arm], words: Sequence[str], flag: str) -> dict[str, str]:
    """`VALUE` (for every server by URL) or `ARM=VALUE` words → value by arm's name. Raises ConfigError."""
    servers = [arm.name for arm in arms if arm.url]
    if words and not servers:
        raise ConfigError(f"{flag} is for servers given by URL, and there is none; drop it")
    found: dict[str, str] = {}
    for word in sorted(words, key=lambda word: word.partition("=")[0] in servers):
        name, _, value = word.partition("=")
        found |= {name: value} if name in servers else dict.fromkeys(servers, word)
    return found


def parse_extra(words: Sequence[str], arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`JSON` (for every arm) or `ARM=JSON` words -> fields by arm's name, an arm's own winning.

    words: of --extra-body. Raises ConfigError.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in arms}
    for word in sorted(words, key=lambda word: word.partition("=")[0] in found):
        name, _, rest = word.partition("=")
        text = rest if name in found else word
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"--extra-body {word!r} is no JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"--extra-body {word!r} must be a JSON object")
        for arm in [name] if name in found else arms:
            found[arm] |= fields
    return found


def order(arms: Sequence[Arm], repeat: int) -> list[Arm]:
    """The arms' turns in a repeat: A B C, then C B A, and so on, so that a drift hits all alike."""
    return list(arms) if repeat % 2 == 0 else list(reversed(arms))


@contextmanager
def opened(arm: Arm) -> Iterator[Server]:
    """The arm's stack, started and ended, or its server. Raises ConfigError if a server can't be used."""
    if arm.url:
        yield _look(arm)
        return
    with common.serve(*arm.flags) as stack:
        yield replace(_look(Arm(arm.name, url=f"{stack.url}/v1")), arm=arm)


def _look(arm: Arm) -> Server:
    """A server by URL, with the model that was named, or its first; of ours also what is not real in it."""
    try:
        reply = httpx.get(f"{arm.url}/models", headers=arm.headers, timeout=30.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"arm {arm.name}: nothing answers at {arm.url}: {error}; check --arm {arm.name}=…"
        ) from None
    if reply.status_code in (401, 403):
        raise ConfigError(f"arm {arm.name}: {arm.url} wants a key; give --api-key {arm.name}=KEY")
    try:
        first = reply.json()["data"][0]
        unreal = {name: first[name] for name in common.UNREAL if first.get(name)}
        return Server(arm, arm.url, arm.model or str(first["id"]), unreal)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        if arm.model:
            return Server(arm, arm.url, arm.model, {})
        raise ConfigError(
            f"arm {arm.name}: {arm.url}/models answered {reply.status_code} and names no model; "
            f"give --model {arm.name}=NAME"
        ) from None
