"""What a device has in use, as /metrics shows it."""

from __future__ import annotations

import pytest
import torch

from kernels.device import memory_in_use


def test_a_cpu_has_no_gpu_memory() -> None:
    assert memory_in_use("cpu") == {}


@pytest.mark.gpu
def test_gpu_memory_follows_what_is_allocated() -> None:
    before = memory_in_use("cuda:0")
    block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0")
    during = memory_in_use("cuda:0")
    assert during["allocated"] - before["allocated"] == block.numel()
    assert during["allocated"] <= during["reserved"] <= during["capacity"] == before["capacity"]
