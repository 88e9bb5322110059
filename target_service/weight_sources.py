"""Where a rank's weights come from: a checkpoint's files, or a random generator of the same shapes.

Owns reading (or making) one tensor's part, the checks of what a file holds, and the fingerprint. Does not own
names and splits (target_service.weights).
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

import torch

from kernels.random_weights import random_tensor
from specbridge.checkpoint import Checkpoint, config_files, fingerprint_of_config
from specbridge.errors import ConfigError
from target_service.parallel import Span

log = logging.getLogger(__name__)

LoadFormat = Literal["auto", "dummy"]

_FLOATS = {"F64", "F32", "F16", "BF16"}
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$")
_RESIDUAL = re.compile(r"\.(o_proj|down_proj)\.weight$")


class WeightSource(Protocol):
    """A rank's tensors. `shape` is always the whole tensor's; `part`: the rows or columns wanted, None
    all."""

    def rows(self, name: str, part: Span | None, shape: tuple[int, ...]) -> torch.Tensor: ...

    def columns(self, name: str, part: Span, shape: tuple[int, ...]) -> torch.Tensor: ...

    def finish(self, architecture: str, unused: frozenset[str]) -> None:
        """All tensors have been taken, `unused` are known and not needed."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_weights(
    model_dir: Path, load_format: LoadFormat, *, dtype: torch.dtype, device: torch.device
) -> WeightSource:
    """The source that `load_format` means. Raises ConfigError for a folder that can't be read."""
    return RandomSource(dtype, device) if load_format == "dummy" else CheckpointSource(model_dir)


def weights_fingerprint(model_dir: Path, load_format: LoadFormat) -> str:
    """Differs between different weights; of a dummy model, between different configurations."""
    if load_format == "dummy":
        return fingerprint_of_config(config_files(model_dir).model)
    with Checkpoint(model_dir) as checkpoint:
        return checkpoint.fingerprint()


class CheckpointSource:
    """Parts of a safetensors folder, each tensor checked against what config.json calls for."""

    def __init__(self, model_dir: Path) -> None:
        self._file = Checkpoint(model_dir)
        self._used: set[str] = set()

    def rows(self, name: str, part: Span | None, shape: tuple[int, ...]) -> torch.Tensor:
        """Raises ConfigError for a tensor that is missing, misshapen or quantised."""
        self._check(name, shape)
        return self._file.get(name) if part is None else self._file.get_slice(name, 0, part.start, part.stop)

    def columns(self, name: str, part: Span, shape: tuple[int, ...]) -> torch.Tensor:
        """Raises ConfigError like `rows`."""
        self._check(name, shape)
        return self._file.get_slice(name, 1, part.start, part.stop)

    def finish(self, architecture: str, unused: frozenset[str]) -> None:
        """A tensor of a layer that the forward would ignore means that the model is not what config.json
        says."""
        ignored = [n for n in self._file.names() if n not in self._used and not _HARMLESS.search(n)]
        in_layers = [n for n in ignored if n.startswith("model.layers.")]
        if in_layers:
            shown = ", ".join(in_layers[:3])
            raise ConfigError(
                f"the checkpoint holds {len(in_layers)} layer tensors that "
                f"{architecture} does not use ({shown}); "
                "check num_hidden_layers and the bias keys in config.json"
            )
        other = [n for n in ignored if n not in unused]
        if other:
            log.warning("tensors of the checkpoint that are not used: %s", ", ".join(other[:8]))

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        entry = self._file.entry(name)
        self._used.add(name)
        if entry.shape != shape:
            raise ConfigError(
                f"tensor {name!r} has shape {list(entry.shape)}; config.json calls for {list(shape)}"
            )
        if entry.dtype not in _FLOATS:
            raise ConfigError(
                f"tensor {name!r} is stored as {entry.dtype}; "
                f"supported are {', '.join(sorted(_FLOATS))} (not quantised)"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class RandomSource:
    """Random parts, made where they stay; only a rank's own share is ever made.

    Matrices keep the size of what they multiply (std 1 / sqrt(inputs)), those that add to the residual stream
    are a quarter of that, norms are 1 and biases 0: activations stay of the size of a trained model's.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device

    def rows(self, name: str, part: Span | None, shape: tuple[int, ...]) -> torch.Tensor:
        return self._make(name, part, shape, dim=0)

    def columns(self, name: str, part: Span, shape: tuple[int, ...]) -> torch.Tensor:
        return self._make(name, part, shape, dim=1)

    def finish(self, architecture: str, unused: frozenset[str]) -> None:
        return None

    def _make(self, name: str, part: Span | None, shape: tuple[int, ...], *, dim: int) -> torch.Tensor:
        own = list(shape)
        if part is not None:
            own[dim] = len(part)
            name = f"{name}[{dim}:{part.start}]"
        if len(shape) == 1:
            fill = torch.zeros if ".bias" in name else torch.ones
            return fill(own, dtype=self._dtype, device=self._device)
        scale = 0.25 if _RESIDUAL.search(name.split("[")[0]) else 1.0
        return random_tensor(name, own, std=scale * shape[1] ** -0.5, dtype=self._dtype, device=self._device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None
