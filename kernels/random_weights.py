"""Random tensors for models without weights, made on the device that will hold them.

Owns that a tensor depends on its name and shape only: ranks that hold the same part hold the same numbers,
and two runs on one kind of device are equal. Does not own names or scales (the services' dummy loaders).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch


def random_tensor(
    name: str, shape: Sequence[int], *, std: float, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Normal numbers of mean 0 and the given standard deviation, drawn on `device` in `dtype`."""
    key = f"{name}/{'x'.join(map(str, shape))}".encode()
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=dtype, device=device).mul_(std)
