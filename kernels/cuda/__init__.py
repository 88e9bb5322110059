"""The Triton versions of the ops, one file an op, and the question which tensors go to them.

Owns how an op chooses (`takes`) and the switch that sends CPU tensors here in tests (`cpu_tensors_too`). Does
not own the ops: kernels/<op>.py has the public function, its shapes and its torch reference.

How an op is laid out:

    kernels/<op>.py            def op(x, ...):
                                   if cuda.takes(x):
                                       from kernels.cuda import <op> as triton_op
                                       return triton_op.op(x, ...)
                                   return op_reference(x, ...)
    kernels/cuda/<op>.py       imports triton at its top; plain functions with the same signature, and the
                               @triton.jit kernels that they launch

Triton is an optional dependency: nothing imports it before a tensor that needs it is there, and importing
this package does not. Float64 always goes to the torch reference: it is the arithmetic of the tests' oracles.

A launch goes to the current device of the calling thread. Whoever owns a device makes it the current one,
once per thread (torch.cuda.set_device); the ops don't, since that costs more than many of their launches.
A first launch compiles: whoever captures a CUDA graph runs the same sizes once before.

On the CPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1 before triton is first imported; the
tests set it where no GPU is): slow, exact about indexing and masks. See tests/kernels/conftest.py.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

log = logging.getLogger(__name__)

DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""What the kernels compute in or convert from and to."""

_cpu_too = False


@cache
def available() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton kernels of this process run in the interpreter. Imports triton, if it is there.

    Triton reads TRITON_INTERPRET when a kernel is defined; those of its own library are defined when it is
    imported, so what counts is how they were: setting the variable later changes nothing here.
    """
    if not available():
        return False
    import triton
    import triton.language as tl

    return not isinstance(tl.cdiv, triton.JITFunction)


def takes(x: torch.Tensor) -> bool:
    """Whether an op on x runs its Triton version rather than its torch reference.

    True for CUDA tensors of DTYPES where triton is there (its absence is logged once), and for CPU tensors
    inside of `cpu_tensors_too`.
    """
    if x.is_cuda:
        return x.dtype in DTYPES and (available() or _missing())
    return _cpu_too and x.dtype in DTYPES and x.device.type == "cpu"


@contextmanager
def cpu_tensors_too() -> Iterator[None]:
    """Inside, ops on CPU tensors run their Triton versions in the interpreter; for tests, in all threads.

    Raises RuntimeError if kernels are compiled in this process, or triton is not installed.
    """
    global _cpu_too
    if not interpreting():
        raise RuntimeError(
            "Triton kernels are not interpreted in this process; set TRITON_INTERPRET=1 before it starts"
        )
    before, _cpu_too = _cpu_too, True
    try:
        yield
    finally:
        _cpu_too = before


@cache
def _missing() -> bool:
    log.warning("triton is not installed: GPU ops run as plain torch, which is slower (extra `gpu` has it)")
    return False
