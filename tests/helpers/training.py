"""Tiny targets' own responses, as training data."""

from __future__ import annotations

from pathlib import Path

import torch

from draft_service.training.frozen_target import Documents, FrozenTarget
from draft_service.training.shards import Manifest, ShardWriter
from kernels.choice import choose_rows
from specbridge.checkpoint import Checkpoint

PROMPT = 5


def make_data(
    folder: Path,
    target: Path,
    *,
    prompts: int = 24,
    length: int = 40,
    temperatures: tuple[float, ...] = (0.0, 1.0),
    seed: int = 0,
) -> Path:
    """`prompts` random prompts, answered once at every temperature, `length` tokens in all; written to
    `folder` by the keyed noise of seed + the response's number."""
    checkpoint = Checkpoint(target)
    model = FrozenTarget(checkpoint, row_tokens=length, dtype=torch.float32, device=torch.device("cpu"))
    vocab, count = model.shape.vocab_size, prompts * len(temperatures)
    generator = torch.Generator().manual_seed(seed)
    asked = torch.randint(0, min(vocab, 256), (prompts, PROMPT), generator=generator)
    tokens = torch.zeros(count, length, dtype=torch.int64)
    tokens[:, :PROMPT] = asked.repeat(len(temperatures), 1)
    heat = torch.tensor(temperatures).repeat_interleave(prompts)
    seeds = torch.arange(count) + seed
    positions = torch.arange(length).expand(count, length)
    for at in range(PROMPT, length):
        part = tokens[:, :at]
        out = model.forward(
            part, positions[:, :at], Documents.masked(torch.zeros_like(part)), (0,), want_final=True
        )
        assert out.final is not None
        place = torch.full((count,), at, dtype=torch.int32)
        chosen = choose_rows(out.final[:, -1] @ model.head.T, heat, seeds, place, torch.zeros_like(place))
        tokens[:, at] = chosen.ids
    manifest = Manifest("tiny", checkpoint.fingerprint(), vocab, temperatures=temperatures)
    with ShardWriter(folder, manifest, shard_responses=20) as writer:
        for i in range(count):
            writer.add(tokens[i].tolist(), PROMPT, float(heat[i]), int(seeds[i]), key=i)
    return folder
