"""Reading a model folder: config.json and the safetensors index over one or many shards.

Owns: finding tensors by name, whole or a slice of one dimension (so that a tensor-parallel rank reads only
its part), a fingerprint of the weights, putting a file of such a folder in place whole, and whether a folder
can be written to. Does not own: what the names mean, dtype conversion, or getting the folder onto this
machine (specbridge.models). torch is imported only when a tensor is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbridge.errors import ConfigError

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
BIGRAMS_FILE = "draft_bigrams.safetensors"
VOCABULARY_FILE = "draft_vocabulary.safetensors"
_BESIDE = frozenset({BIGRAMS_FILE, VOCABULARY_FILE})
"""Tables that `specbridge train` puts beside a drafter's tensors: no part of the checkpoint, so that whoever
uses none of them does not need them whole."""
SAMPLE_BYTES = 1024
# Keys of config.json that say where a file came from, not what the model is.
_PROVENANCE_KEYS = ("_name_or_path", "transformers_version")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: dtype as safetensors writes it ("BF16", "F32"), offsets in bytes of the file."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Checkpoint:
    """The tensors of a model folder. Cheap to open: only headers are read until a tensor is asked for.

    Raises ConfigError if the folder, its config.json or its safetensors files are missing or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ConfigError(f"model folder {str(self.folder)!r} does not exist")
        self.config: dict[str, Any] = read_json(self.folder / "config.json")
        self._headers: dict[Path, bytes] = {}
        self._entries: dict[str, TensorEntry] = {}
        self._handles: dict[Path, Any] = {}
        for shard in self._shards():
            self._read_header(shard)
        self._check_index()

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def entry(self, name: str) -> TensorEntry:
        """Shape, dtype and place of a tensor. Raises ConfigError if there is none of that name."""
        try:
            return self._entries[name]
        except KeyError:
            near = [n for n in self.names() if n.rsplit(".", 2)[-2:] == name.rsplit(".", 2)[-2:]][:3]
            hint = f" (similar: {', '.join(near)})" if near else ""
            raise ConfigError(f"{self.folder} has no tensor {name!r}{hint}") from None

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entry(name).shape

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor in the file's dtype, on the CPU."""
        tensor: torch.Tensor = self._open(self.entry(name).shard).get_tensor(name)
        return tensor

    def get_slice(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of dimension `dim`, read without the rest; a contiguous CPU tensor.

        Raises ConfigError if the range does not lie in that dimension.
        """
        shape = self.shape(name)
        if not -len(shape) <= dim < len(shape) or not 0 <= start <= stop <= shape[dim]:
            raise ConfigError(
                f"tensor {name!r} of shape {list(shape)} has no range [{start}, {stop}) in dimension {dim}"
            )
        index = tuple(slice(start, stop) if i == dim % len(shape) else slice(None) for i in range(len(shape)))
        part: torch.Tensor = self._open(self.entry(name).shard).get_slice(name)[index]
        return part.contiguous()

    def fingerprint(self) -> str:
        """32 hex digits that differ between different weights, for prefix indexes and hand-shakes.

        blake2b over config.json (keys of provenance left out), every shard's header and length, and the first
        and middle KiB of every tensor: a sample, not a checksum, since hashing 100 GB would delay each start.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(_config_bytes(self.config))
        for shard in sorted(self._headers):
            digest.update(self._headers[shard])
            digest.update(shard.stat().st_size.to_bytes(8, "little"))
            with shard.open("rb") as file:
                own = (entry for entry in self._entries.values() if entry.shard == shard)
                for entry in sorted(own, key=lambda e: e.start):
                    for offset in (entry.start, entry.start + (entry.end - entry.start) // 2):
                        file.seek(offset)
                        digest.update(file.read(min(SAMPLE_BYTES, entry.end - offset)))
        return digest.hexdigest()

    def close(self) -> None:
        """Drop the open files; tensors already read stay valid."""
        self._handles.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _shards(self) -> list[Path]:
        index = self.folder / INDEX_NAME
        if index.exists():
            names = sorted(set(self._weight_map().values()))
            missing = [name for name in names if not (self.folder / name).exists()]
            if missing:
                raise ConfigError(
                    f"{index} names shards that are missing: {', '.join(missing)}; fetch the model again"
                )
            return [self.folder / name for name in names]
        shards = sorted(path for path in self.folder.glob("*.safetensors") if path.name not in _BESIDE)
        if not shards:
            other = sorted(
                p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf")
            )
            found = f"; it has {', '.join(other)}, which is not read: convert to safetensors" if other else ""
            raise ConfigError(f"{self.folder} has no *.safetensors file{found}")
        return shards

    def _weight_map(self) -> dict[str, str]:
        index = self.folder / INDEX_NAME
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index} has no weight_map; fetch the model again")
        for name in weight_map.values():
            if not isinstance(name, str) or Path(name).name != name:
                raise ConfigError(f"{index} names a shard outside its folder: {name!r}")
        return weight_map

    def _check_index(self) -> None:
        if not (self.folder / INDEX_NAME).exists():
            return
        for name, shard in self._weight_map().items():
            if name not in self._entries or self._entries[name].shard.name != shard:
                raise ConfigError(
                    f"{self.folder / INDEX_NAME} puts {name!r} into {shard}, which does not hold it"
                )

    def _read_header(self, shard: Path) -> None:
        damaged = f"{shard} is not a whole safetensors file"
        size = shard.stat().st_size
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ConfigError(f"{damaged} ({size} bytes); fetch it again")
            header = file.read(length)
        try:
            entries = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
            for name, item in entries.items():
                start, end = (8 + length + int(offset) for offset in item["data_offsets"])
                if not 8 + length <= start <= end <= size:
                    raise ConfigError(
                        f"{damaged}: tensor {name!r} ends at byte {end} of {size}; fetch it again"
                    )
                if name in self._entries:
                    raise ConfigError(
                        f"{self.folder} holds {name!r} twice, in {self._entries[name].shard} and {shard}"
                    )
                shape = tuple(int(n) for n in item["shape"])
                self._entries[name] = TensorEntry(shard, str(item["dtype"]), shape, start, end)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{damaged}: its header does not parse ({error}); fetch it again") from error
        self._headers[shard] = header

    def _open(self, shard: Path) -> Any:
        if shard not in self._handles:
            from safetensors import safe_open

            self._handles[shard] = safe_open(str(shard), framework="pt")
        return self._handles[shard]

    def __repr__(self) -> str:
        weights = sum(math.prod(entry.shape) for entry in self._entries.values())
        return (
            f"Checkpoint({str(self.folder)!r}, {len(self._entries)} tensors, {weights / 1e6:.1f} M weights)"
        )


@dataclass(frozen=True, slots=True)
class ConfigFiles:
    """A model's config.json and, where there is one beside it, its generation_config.json."""

    model: dict[str, Any]
    generation: dict[str, Any]


def config_files(place: Path) -> ConfigFiles:
    """Read the configuration in folder `place`, or the file `place` itself. Raises ConfigError."""
    path = place if place.is_file() else place / "config.json"
    beside = path.with_name("generation_config.json")
    return ConfigFiles(read_json(path), read_json(beside) if beside.is_file() else {})


def fingerprint_of_config(config: dict[str, Any]) -> str:
    """32 hex digits for a model that has a configuration and no weights; never those of a checkpoint."""
    return hashlib.blake2b(b"dummy weights/" + _config_bytes(config), digest_size=16).hexdigest()


def _config_bytes(config: dict[str, Any]) -> bytes:
    kept = {key: value for key, value in config.items() if key not in _PROVENANCE_KEYS}
    return json.dumps(kept, sort_keys=True).encode()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError if it is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} does not parse as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def writable_folder(folder: Path, flag: str) -> None:
    """Make `folder` if need be, and try whether files can be made in it. Raises ConfigError naming `flag`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag}: nothing can be written to the folder {str(folder)!r} ({error.strerror}); name another"
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what then stands at `path`: whole, or, if the block does not end well, not at all."""
    partial = path.with_name(path.name + ".partial")
    yield partial
    partial.replace(path)
