"""A torch tensor over memory that is not torch's, through DLPack.

The device is stated, not guessed from the pointer: a mapping of another GPU's memory belongs to the GPU that
maps it. `owner` lives as long as any tensor that views the memory. Owns nothing else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from specbridge.channel.base import ITEM_SIZES, ChannelLayout

if TYPE_CHECKING:
    import torch

_CPU, _CUDA = 1, 2
_FLOAT, _BFLOAT = 2, 4


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_lent: dict[int, tuple[Any, ...]] = {}
"""What each tensor handed out needs, by the address of its `_Managed`."""


def _give_back(address: int, forget: Callable[..., Any] = _lent.pop) -> None:
    forget(address, None)


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_give_back)
# A tensor may outlive this module when the interpreter ends; the function it calls then must still be there.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_DELETER))

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def view(pointer: int, slots: int, layout: ChannelLayout, *, device: str, owner: object) -> torch.Tensor:
    """[slots, row_width] of `layout`'s dtype at `pointer`, memory of torch device `device`."""
    from torch.utils.dlpack import from_dlpack

    kind, _, ordinal = device.partition(":")
    shape = (ctypes.c_int64 * 2)(slots, layout.row_width)
    managed = _Managed()
    managed.tensor.data = pointer
    managed.tensor.device = _Device(_CPU if kind == "cpu" else _CUDA, int(ordinal or 0))
    managed.tensor.dimensions = 2
    code = _BFLOAT if layout.dtype == "bfloat16" else _FLOAT
    managed.tensor.dtype = _Type(code, 8 * ITEM_SIZES[layout.dtype], 1)
    managed.tensor.shape = shape
    managed.deleter = ctypes.cast(_DELETER, ctypes.c_void_p)
    address = ctypes.addressof(managed)
    _lent[address] = (managed, shape, owner)
    try:
        rows: torch.Tensor = from_dlpack(_new_capsule(address, b"dltensor", None))
    except BaseException:
        _lent.pop(address, None)
        raise
    return rows
