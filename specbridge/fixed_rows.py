"""The fixed budget's rows where nobody said: by the device that the target runs on.

On a GPU rows are cheap: up to some hundred, a verify pass is bound by the weights' bytes, as on an H200 with
Qwen3-8B's shape, where 128 rows take 1.27 times a plain step (docs/performance.md). On two CPU cores, where
the others were measured, a dozen take twice a plain step (docs/architecture.md). Owns these numbers, and the
question whether there is a GPU that torch can use: it asks torch's version and the driver, since torch takes
seconds to import. A gateway asks with what its target says of itself; `specbridge serve` beforehand, with the
target's options, so that combinations that can't work are known before anything starts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container
from dataclasses import asdict, dataclass, replace
from importlib import metadata

from specbridge.settings import Settings


@dataclass(frozen=True, slots=True)
class FixedRows:
    """Most nodes of one tree, and most rows of one verify pass; the gateway's options of these names."""

    tree_budget: int
    max_verify_rows: int

    def missing(self, given: Container[str]) -> dict[str, int]:
        """Those of the two that are not among the `given` options."""
        return {name: value for name, value in asdict(self).items() if name not in given}


ON_CPU = FixedRows(tree_budget=5, max_verify_rows=12)
ON_GPU = FixedRows(tree_budget=16, max_verify_rows=264)
"""Whole trees for 15 sessions, 4 nodes each for 52; with more the draft is skipped, so that a drafter that is
seldom right costs nothing under load. A good one pays with more rows: see the README."""


def rows_on(device: str, max_tree_nodes: int) -> FixedRows:
    """For a target that runs on `device` (cpu, cuda:0, ..) and takes trees of up to max_tree_nodes."""
    rows = ON_GPU if device.startswith("cuda") else ON_CPU
    return replace(rows, tree_budget=min(rows.tree_budget, max_tree_nodes))


def runs_on_gpu(device: str) -> bool:
    """Whether a service with this --device (auto, cpu, cuda, cuda:N) runs on a GPU."""
    if device != "auto":
        return device.startswith("cuda")
    if _built_for_cpu():
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _built_for_cpu() -> bool:
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False  # whoever starts a service without torch is told so there


def defaults(target: Settings, gateway: Settings) -> dict[str, int]:
    """The gateway's options to add to those given, for a target with these settings."""
    ours, theirs = gateway.model_dump(), target.model_dump()
    if ours["budget"] != "fixed" or not runs_on_gpu(theirs["device"]):
        return {}  # its own are those of a CPU
    return rows_on("cuda", theirs["max_tree_nodes"]).missing(gateway.model_fields_set)
