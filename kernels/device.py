"""Devices and dtypes by name, as flags give them: checked, with messages that name what is there.

Raises ValueError; the services turn it into their own error.
"""

from __future__ import annotations

import torch

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The dtypes that models are run in, by name."""


def resolve_device(device: str, *, count: int = 1) -> str:
    """The device to use: "auto" is the first GPU if there are `count`, else the CPU; others are checked.

    count: GPUs in a row that are needed, from the one named on.
    """
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda" if there >= count else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ValueError(f"--device {device} is not known; use auto, cpu, cuda or cuda:N")
    last = int(index or 0) + count - 1
    if kind == "cuda" and last >= there:
        needed = f" for {count} ranks" if count > 1 else ""
        seen = f"torch sees {there} GPUs" if there else f"{_why_no_gpu()}; use --device cpu (or auto)"
        raise ValueError(f"--device {device} needs GPU {last}{needed}, and {seen}")
    return device


def memory_in_use(device: str) -> dict[str, int]:
    """Bytes of a GPU by kind; of a CPU nothing. allocated: tensors of this process; reserved: what torch
    holds, those included; capacity: of the GPU.

    From torch's own books: a question to the driver would fail a capture of CUDA graphs on another thread.
    """
    if torch.device(device).type != "cuda":
        return {}
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "capacity": torch.cuda.get_device_properties(device).total_memory,
    }


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    return "torch sees none (is the driver there, and CUDA_VISIBLE_DEVICES not empty?)"


def parse_dtype(name: str) -> torch.dtype:
    """The dtype of a name in DTYPES, with or without "torch." before it."""
    dtype = DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"dtype {name!r} is not supported; use one of {', '.join(DTYPES)} or auto")
    return dtype
