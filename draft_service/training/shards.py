"""Training data on disk: a folder of responses, each the target's own, as tokens.

    manifest.json               format, version, and who answered what (`Manifest`)
    shard-00000.safetensors     flat arrays of some thousand responses

A shard's arrays: `tokens` uint16 (int32 where the vocabulary is larger); `starts` int64 [n + 1]: response i,
its prompt before it, is tokens[starts[i]:starts[i + 1]]; `prompt_lengths` int32 [n]; `temperatures` fp32 [n];
`seeds` int64 [n] (of the keyed noise, 0 where greedy); `keys` int64 [n]: what the writer's caller calls the
response, so that an interrupted run knows what it has.

Owns the format, its reader and its writer. A shard appears whole or not at all, so a folder whose writer was
killed is read like any other and continued. Does not own where responses come from, nor which are trained on.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from specbridge.checkpoint import read_json, replacing, writable_folder
from specbridge.errors import ConfigError

FORMAT = "specbridge-train-data"
VERSION = 1
MANIFEST = "manifest.json"
SHARD_RESPONSES = 2048
"""Responses of a shard: what is lost at most when a writer is killed."""

_SHARD = re.compile(r"shard-(\d{5,})\.safetensors")
_ARRAYS = {
    "starts": np.int64, "prompt_lengths": np.int32, "temperatures": np.float32,
    "seeds": np.int64, "keys": np.int64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Manifest:
    """Who answered what.

    target: the model's name. fingerprint: of its weights (Checkpoint.fingerprint), "" if it was reached by an
    address only. temperatures: those asked for. sources: name of a prompt file -> prompts taken from it.
    notes: anything else worth keeping. responses, tokens: counted by the writer; prompts count as tokens.
    """

    target: str
    fingerprint: str
    vocab_size: int
    temperatures: tuple[float, ...] = ()
    sources: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    responses: int = 0
    tokens: int = 0

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Raises ConfigError for a folder that holds no training data of this version."""
        if not (folder / MANIFEST).is_file():
            raise ConfigError(
                f"{str(folder)!r} holds no training data (there is no {MANIFEST}): name a folder that "
                "`specbridge train data` has made"
            )
        raw = read_json(folder / MANIFEST)
        if raw.pop("format", None) != FORMAT or raw.pop("version", None) != VERSION:
            raise ConfigError(f"{folder / MANIFEST} is not {FORMAT} of version {VERSION}: make the data anew")
        try:
            return Manifest(**{**raw, "temperatures": tuple(raw.get("temperatures", ()))})
        except TypeError as error:
            raise ConfigError(f"{folder / MANIFEST} does not fit {FORMAT} {VERSION}: {error}") from None

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest in one step."""
        text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)
        _replace(folder / MANIFEST, text.encode() + b"\n")


@dataclass(frozen=True, slots=True)
class Response:
    """tokens int64 [length], the prompt first; temperature, seed: of its sampling. key: the writer's name."""

    tokens: np.ndarray
    prompt_length: int
    temperature: float
    seed: int
    key: int


class ShardWriter:
    """Adds responses to `folder`, which may hold some already.

    Raises ConfigError if it holds those of another target or vocabulary. Not for two writers at a time:
    several processes write a folder each, and `Shards` reads them together.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, shard_responses: int = SHARD_RESPONSES) -> None:
        self.folder = folder
        writable_folder(folder, "--out")
        if (folder / MANIFEST).exists():
            _same_target(Manifest.read(folder), manifest, folder)
        for leftover in folder.glob("*.partial"):
            leftover.unlink()
        self._size = shard_responses
        self._pending: list[Response] = []
        self._keys: set[int] = set()
        self._next = 0
        self._responses = self._tokens = 0
        for path in _shard_paths(folder):
            arrays = _load(path)
            self._keys.update(arrays["keys"].tolist())
            self._count(arrays)
            self._next = int(_SHARD.fullmatch(path.name)[1]) + 1  # type: ignore[index]
        self._manifest = replace(manifest, responses=self._responses, tokens=self._tokens)
        self._manifest.write(folder)

    @property
    def done(self) -> frozenset[int]:
        """Keys of the responses in finished shards: what a new run need not ask for again."""
        return frozenset(self._keys)

    @property
    def count(self) -> int:
        """Responses added, those not yet on disk included."""
        return self._responses + len(self._pending)

    def add(self, tokens: Sequence[int], prompt_length: int, temperature: float, seed: int, key: int) -> None:
        """One response, its prompt before it. Raises ValueError for what no trainer could use."""
        flat = np.asarray(tokens, np.int64)
        if not 0 < prompt_length < len(flat):
            raise ValueError(f"prompt_length {prompt_length} of {len(flat)} tokens: no prompt or no answer")
        if flat.min() < 0 or flat.max() >= self._manifest.vocab_size:
            raise ValueError(
                f"token ids {flat.min()}..{flat.max()} leave the vocabulary of {self._manifest.vocab_size}"
            )
        self._pending.append(Response(flat, prompt_length, temperature, seed, key))
        if len(self._pending) >= self._size:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as a shard of its own, then the manifest with the new counts."""
        if not self._pending:
            return
        from safetensors.numpy import save

        rows, self._pending = self._pending, []
        kind = np.uint16 if self._manifest.vocab_size <= 1 << 16 else np.int32
        arrays = {
            "tokens": np.concatenate([r.tokens for r in rows]).astype(kind),
            "starts": np.cumsum([0, *(len(r.tokens) for r in rows)]),
            "prompt_lengths": np.array([r.prompt_length for r in rows]),
            "temperatures": np.array([r.temperature for r in rows]),
            "seeds": np.array([r.seed for r in rows], np.uint64).astype(np.int64),
            "keys": np.array([r.key for r in rows]),
        }
        arrays |= {name: arrays[name].astype(kind) for name, kind in _ARRAYS.items()}
        _replace(self.folder / f"shard-{self._next:05d}.safetensors", save(arrays))
        self._next += 1
        self._keys.update(r.key for r in rows)
        self._count(arrays)
        self._manifest = replace(self._manifest, responses=self._responses, tokens=self._tokens)
        self._manifest.write(self.folder)

    def close(self) -> None:
        self.flush()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._responses += len(arrays["prompt_lengths"])
        self._tokens += len(arrays["tokens"])


class Shards:
    """All responses of one or more folders of the same target, in memory (two or four bytes a token).

    lengths, prompt_lengths int64 [n]; temperatures fp32 [n]; seeds, keys int64 [n]. Raises ConfigError if a
    folder holds no data or the folders do not belong together.
    """

    def __init__(self, folders: Path | Sequence[Path]) -> None:
        self.folders = (folders,) if isinstance(folders, Path) else tuple(folders)
        manifests = [Manifest.read(folder) for folder in self.folders]
        if not manifests:
            raise ConfigError("no folder of training data was given")
        for folder, other in zip(self.folders, manifests, strict=True):
            _same_target(manifests[0], other, folder)
        parts = [_load(path) for folder in self.folders for path in _shard_paths(folder)]
        if not parts:
            raise ConfigError(
                f"{', '.join(map(str, self.folders))}: there is no finished shard yet; let "
                "`specbridge train data` run to its end, or stop it by Ctrl-C, which keeps its answers"
            )
        self.manifest = replace(
            manifests[0],
            responses=sum(len(p["keys"]) for p in parts),
            tokens=sum(len(p["tokens"]) for p in parts),
        )
        self.tokens = np.concatenate([p["tokens"] for p in parts])
        offsets = np.cumsum([0, *(len(p["tokens"]) for p in parts)])
        self.starts = np.concatenate([p["starts"][:-1] + o for p, o in zip(parts, offsets, strict=False)])
        self.lengths = np.concatenate([np.diff(p["starts"]) for p in parts])
        self.prompt_lengths = np.concatenate([p["prompt_lengths"] for p in parts]).astype(np.int64)
        self.temperatures = np.concatenate([p["temperatures"] for p in parts])
        self.seeds = np.concatenate([p["seeds"] for p in parts])
        self.keys = np.concatenate([p["keys"] for p in parts])

    def __len__(self) -> int:
        return len(self.lengths)

    def owners(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every token: whose it is, int64, and whether it is an answer's and not a prompt's, bool."""
        owner = np.repeat(np.arange(len(self)), self.lengths)
        return owner, np.arange(len(self.tokens)) - self.starts[owner] >= self.prompt_lengths[owner]

    def get(self, index: int) -> Response:
        start = self.starts[index]
        return Response(
            self.tokens[start : start + self.lengths[index]].astype(np.int64),
            int(self.prompt_lengths[index]),
            float(self.temperatures[index]),
            int(self.seeds[index]),
            int(self.keys[index]),
        )


def _same_target(known: Manifest, new: Manifest, folder: Path) -> None:
    for name in ("fingerprint", "vocab_size"):
        old, wanted = getattr(known, name), getattr(new, name)
        if old != wanted:
            raise ConfigError(
                f"{folder}: data of another target: its {name} is {old!r}, not {wanted!r}; "
                f"use another folder for each target"
            )


def _shard_paths(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if _SHARD.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(_SHARD.fullmatch(path.name)[1]))  # type: ignore[index]


def _load(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        arrays: dict[str, np.ndarray] = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{path} is no whole shard ({error}): delete it and resume") from error
    missing = sorted({"tokens", *_ARRAYS} - set(arrays))
    if missing:
        raise ConfigError(f"{path} is no shard of {FORMAT}: {', '.join(missing)} missing")
    starts, count = arrays["starts"], len(arrays["keys"])
    if len(starts) != count + 1 or starts[0] != 0 or starts[-1] != len(arrays["tokens"]):
        raise ConfigError(
            f"{path} contradicts itself: its starts do not span its tokens; delete it and resume"
        )
    return arrays


def _replace(path: Path, content: bytes) -> None:
    """The file appears whole, or what was there stays, whenever the process or the machine stops."""
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
