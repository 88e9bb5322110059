"""The acceptance a drafter would have, estimated on held-out responses without serving it.

A response of the target is what it would have said after any of its own prefixes. So for an anchor in it, the
drafter's best token per depth either is the response's or not, and a chain's acceptance length is one more
than the run of hits: exactly what a greedy round commits, and at T > 0 what a round commits that has the same
noise. Owns this estimate, for chains. Trees, prompts and real rounds are the evaluation's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft_service.training.batches import Batch, Batches
from draft_service.training.shards import Shards
from draft_service.training.trainer import Inputs, Trainer
from kernels.choice import GREEDY_BELOW, choose_rows

MAX_BATCHES = 8
MOST_NOISY = 256
"""Blocks drafted with noise on a CPU."""
CHUNK_ROWS = 2048


@dataclass(frozen=True, slots=True)
class Chain:
    """blocks: anchors looked at. length: mean tokens committed a round, the bonus included. depths: share of
    blocks whose first k tokens were all right, k = 1..horizon."""

    blocks: int
    length: float
    depths: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """greedy: of greedy responses. sampled: of the others, drafted without noise; shared_noise: with the
    noise that the response was drawn with, where the data knows its seed. None: no such responses."""

    greedy: Chain | None
    sampled: Chain | None
    shared_noise: Chain | None

    @property
    def best(self) -> float:
        """One number to watch: the greedy length, or what there is in its place."""
        found = self.greedy or self.shared_noise or self.sampled
        return found.length if found else 0.0

    def as_dict(self) -> dict[str, float]:
        """Flat, for logs: "greedy" and "greedy/3" (share right up to depth 3)."""
        flat: dict[str, float] = {}
        for name in ("greedy", "sampled", "shared_noise"):
            chain: Chain | None = getattr(self, name)
            if chain:
                flat[name] = round(chain.length, 4)
                flat |= {f"{name}/{k}": round(rate, 4) for k, rate in enumerate(chain.depths, 1)}
        return flat


def held_out_batches(batches: Batches) -> list[Batch]:
    """Those that every estimate of a run looks at."""
    return [batches.get(i) for i in range(min(MAX_BATCHES, batches.per_epoch))]


@torch.no_grad()
def estimate(trainer: Trainer, shards: Shards, batches: Sequence[Batch]) -> Estimate:
    """Over the blocks of `batches` whose responses go on for the whole horizon."""
    hits: dict[str, list[torch.Tensor]] = {"greedy": [], "sampled": [], "shared_noise": []}
    for batch in batches:
        inputs = Inputs(batch, trainer.network.device)
        inputs.load(batch)
        found = trainer.predict(inputs, want_final=False)
        whole = found.counts.all(-1)
        owners = torch.from_numpy(batch.responses)[whole.cpu()]
        temperatures = torch.from_numpy(shards.temperatures)[owners]
        seeds = torch.from_numpy(shards.seeds)[owners]
        places = inputs.blocks.positions.gather(1, found.index.flatten(1)).view_as(found.index)
        hidden, labels = found.hidden[whole], found.labels[whole]
        greedy = temperatures < GREEDY_BELOW
        best = _choices(hidden, trainer.target.head, torch.zeros_like(temperatures), seeds, places[whole])
        right = best == labels
        hits["greedy"].append(right[greedy])
        hits["sampled"].append(right[~greedy])
        # A CPU draws noise for a row of a large vocabulary about as slowly as it multiplies for it.
        some = torch.nonzero(~greedy).flatten()[: None if hidden.is_cuda else MOST_NOISY // len(batches)]
        noisy = _choices(
            hidden[some], trainer.target.head, temperatures[some], seeds[some], places[whole][some]
        )
        hits["shared_noise"].append(noisy == labels[some])
    return Estimate(**{name: _chain(torch.cat(parts)) if parts else None for name, parts in hits.items()})


def _choices(
    hidden: torch.Tensor,
    head: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    places: torch.Tensor,
) -> torch.Tensor:
    """Tokens [blocks, horizon] that the drafter would propose: its best ones, or at a temperature [blocks]
    the best ones under the noise of the seed [blocks] and the places [blocks, horizon]."""
    blocks, horizon, _ = hidden.shape
    rows = hidden.flatten(0, 1)
    heat = temperatures.to(hidden.device, torch.float32).repeat_interleave(horizon)
    seed = seeds.to(hidden.device).repeat_interleave(horizon)
    position = places.flatten().to(torch.int32)
    found = torch.empty_like(position)
    for at in range(0, len(rows), CHUNK_ROWS):
        part = slice(at, at + CHUNK_ROWS)
        choice = torch.zeros_like(position[part])
        found[part] = choose_rows(rows[part] @ head.T, heat[part], seed[part], position[part], choice).ids
    return found.view(blocks, horizon).long()


def _chain(hits: torch.Tensor) -> Chain | None:
    if not len(hits):
        return None
    runs = hits.cumprod(-1).double().mean(0)
    return Chain(len(hits), 1 + float(runs.sum()), tuple(runs.tolist()))
