"""The offline generator: many texts by plain decoding, as fast as the model's passes allow, without services.

    requests -> slots -> tokens -> finished texts, in the order in which they end

For making training data and held-out texts: the text of a request is the one that the served engine gives for
the same prompt, seed and temperature (up to near-ties where batches round differently). Owns who is in which
slot, refilling, and when a text ends. Does not own the passes (offline_passes, offline_device) nor where
prompts come from (draft_service.training).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

import kernels.device
from kernels.linear import activation_dtype
from specbridge.errors import ConfigError, InternalError
from specbridge.models import resolve_target
from target_service.model.config import ModelConfig
from target_service.model.decoder import Taps
from target_service.model.device_pass import uses_kernels
from target_service.offline_device import DeviceSlots
from target_service.offline_passes import PAGE, HostSlots, SlotPasses, Start
from target_service.runner import load_runner

log = logging.getLogger(__name__)

SLOTS = {"cpu": 32, "cuda": 511}
"""Texts side by side, at most. One below a power of two: attention's planner counts the padding in."""
MEMORY_SHARE = 0.8
"""Of a GPU's free memory, for K/V of the slots."""


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """key: the caller's name for it. tokens: the prompt. The text has at most max_tokens more."""

    key: int
    tokens: Sequence[int]
    temperature: float
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class OfflineText:
    """tokens: of the response, the end-of-text id included if it came (`ended`)."""

    key: int
    tokens: tuple[int, ...]
    ended: bool


class Generator:
    """Over `passes`, whose texts may have `length` tokens. eos: ids that end a text. For one thread."""

    def __init__(self, passes: SlotPasses, *, length: int, eos: Sequence[int]) -> None:
        self._passes = passes
        self.length = length
        self._eos = np.array(sorted(set(eos)), dtype=np.int64)

    @property
    def config(self) -> ModelConfig:
        return self._passes.config

    @property
    def slots(self) -> int:
        return self._passes.slots

    def taps(
        self, texts: Sequence[Sequence[int]], layer_ids: tuple[int, ...], *, normed_last_layer: bool
    ) -> Iterator[torch.Tensor]:
        """Hidden states of each text's tokens as a draft gets them: [len(text), layers * hidden], columns in
        the order of layer_ids, on the model's device; valid until the next one is taken.
        """
        return self._passes.taps(texts, Taps(layer_ids, normed_last_layer))

    def generate(self, requests: Iterable[OfflineRequest]) -> Iterator[OfflineText]:
        """Texts as they end. Reads on in `requests` when slots are free: no more than `slots` are open.

        Raises ConfigError for a request that is longer than `length`, InternalError if logits are no numbers.
        """
        passes, queue = self._passes, iter(requests)
        slots = passes.slots
        owner: list[OfflineRequest | None] = [None] * slots
        limit, count = np.zeros(slots, dtype=np.int64), np.zeros(slots, dtype=np.int64)
        text = np.zeros((slots, self.length + passes.span + 1), dtype=np.int64)
        free = list(range(slots))
        while True:
            starts = []
            while free and (request := next(queue, None)) is not None:
                if not request.tokens or len(request.tokens) + request.max_tokens > self.length:
                    raise ConfigError(
                        f"request {request.key} has {len(request.tokens)} tokens and asks for "
                        f"{request.max_tokens}: texts here have 1 to {self.length}"
                    )
                slot = free.pop()
                owner[slot], limit[slot], count[slot] = request, request.max_tokens, 0
                starts.append(Start(slot, request.tokens, request.temperature, request.seed))
            passes.fill(starts)
            live = np.array([s for s, request in enumerate(owner) if request is not None], dtype=np.int64)
            if not live.size:
                return
            first, chosen = passes.decode(passes.span)
            text[live, 0] = np.where(count[live] == 0, first[live], text[live, 0])
            count[live] = np.maximum(count[live], 1)
            steps = len(chosen)
            columns = count[live, None] + np.arange(steps)
            text[live[:, None], columns] = chosen[:, live].T
            # The text so far ends before `count`, or at its first token when that has just come.
            seen = np.maximum(columns[:, :1] - 1, 0)
            look = np.concatenate((seen, columns), axis=1)
            tokens = text[live[:, None], look]
            hit = np.isin(tokens, self._eos) | (tokens < 0)
            at = np.where(hit.any(1), look[np.arange(len(live)), hit.argmax(1)] + 1, self.length + 1)
            count[live] += steps
            ends = np.minimum(at, limit[live])
            done = []
            for row in np.flatnonzero(ends <= count[live]):
                slot, end = int(live[row]), int(ends[row])
                request = owner[slot]
                assert request is not None
                found = text[slot, :end]
                if end and found.min() < 0:
                    raise InternalError(f"the logits of request {request.key} are no numbers")
                owner[slot] = None
                done.append(slot)
                yield OfflineText(request.key, tuple(found.tolist()), bool(at[row] <= limit[slot]))
            passes.free(done)
            free += reversed(done)


def load_generator(
    target: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    length: int,
    slots: int = 0,
    cuda_graphs: bool = True,
    eos: Sequence[int] = (),
) -> Generator:
    """The generator of a model folder, id or built-in name. slots 0: as many as the device is good for.

    cuda_graphs: on a GPU, capture a decode step. eos: instead of the model's own end-of-text ids. Raises
    ConfigError for what can't be loaded.
    """
    folder = resolve_target(target)
    config = ModelConfig.from_folder(folder)
    try:
        found = kernels.device.resolve_device(device)
        # With its number, as torch.cuda.set_device wants it.
        where = torch.device("cuda:0" if found == "cuda" else found)
        kind = config.dtype if dtype == "auto" else kernels.device.parse_dtype(dtype)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if kind == torch.float16 and where.type == "cpu":
        kind = torch.float32
    if length > config.max_position_embeddings:
        raise ConfigError(
            f"texts of {length} tokens are longer than the model's {config.max_position_embeddings}; "
            "lower --max-tokens, or leave long prompts out"
        )
    passes: SlotPasses
    ends = tuple(eos) or config.eos_token_ids
    if uses_kernels(where, activation_dtype(kind, where)):
        span = 16
        count = slots or _fitting(config, kind, where, length + span)
        passes = DeviceSlots(
            folder,
            config,
            device=where,
            dtype=kind,
            slots=count,
            length=length,
            span=span,
            graphs=cuda_graphs,
        )
    else:
        count = slots or SLOTS["cpu"]
        runner = load_runner(
            folder,
            device=str(where),
            dtype=str(kind).removeprefix("torch."),
            num_pages=count * -(-length // PAGE),
            page_size=PAGE,
            max_rows=max(length, count),
        )
        passes = HostSlots(runner, slots=count, length=length)
    return Generator(passes, length=length, eos=ends)


def _fitting(config: ModelConfig, dtype: torch.dtype, device: torch.device, length: int) -> int:
    """Slots whose K/V fit what is free on the GPU after the weights, by a generous estimate of those."""
    layer = config.hidden_size * (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer += 3 * config.hidden_size * config.intermediate_size
    weights = (config.num_layers * layer + 2 * config.vocab_size * config.hidden_size) * dtype.itemsize
    free, _ = torch.cuda.mem_get_info(device)
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    room = int(MEMORY_SHARE * (free - weights)) // (token * length)
    if room < 1:
        raise ConfigError(
            f"one text of {length} tokens does not fit the {free / 2**30:.1f} GiB that are free on {device}"
        )
    return min(SLOTS["cuda"], room)
