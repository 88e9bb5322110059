"""What `specbridge serve` takes for the fixed budget's rows where the target runs on a GPU and nobody said.

There rows are cheap: up to some hundred, a verify pass is bound by the weights' bytes, as on an H200 with
Qwen3-8B's shape, where 128 rows take 1.27 times a plain step (docs/performance.md). The services' own
defaults are those of two CPU cores. Owns these two numbers and the question whether there is a GPU that torch
can use; asks torch's version and the driver, since torch takes seconds to import.
"""

from __future__ import annotations

import ctypes
from importlib import metadata

from specbridge.settings import Settings

TREE_BUDGET = 16
MAX_VERIFY_ROWS = 264
"""Whole trees for 15 sessions, 4 nodes each for 52; with more the draft is skipped, so that a drafter that is
seldom right costs nothing under load. A good one pays with more rows: see the README."""


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
    """The gateway's options to add to those given."""
    ours, theirs = gateway.model_dump(), target.model_dump()
    if ours["budget"] != "fixed" or not runs_on_gpu(theirs["device"]):
        return {}
    rows = {"tree_budget": min(TREE_BUDGET, theirs["max_tree_nodes"]), "max_verify_rows": MAX_VERIFY_ROWS}
    return {name: value for name, value in rows.items() if name not in gateway.model_fields_set}
