"""Triton's interpreter made to compute as the device does, where tests compare results strictly."""

from __future__ import annotations

from typing import Any

import torch


def as_the_device() -> None:
    """Once or often; triton must be importable."""
    _round_as_the_device()
    _let_scalars_bound_loops()


def _round_as_the_device() -> None:
    from triton.runtime import interpreter

    theirs = interpreter._convert_float
    if getattr(theirs, "rounds", False):
        return

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        """numpy in, numpy out; bfloat16 is held as uint16."""
        names = (str(source), str(target))
        if names == ("fp32", "bf16") and rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            narrow = torch.tensor(data).bfloat16().view(torch.uint16)  # a copy: data may be read-only
            return narrow.numpy().reshape(data.shape)
        return theirs(data, source, target, rounding)

    convert.rounds = True  # type: ignore[attr-defined]
    interpreter._convert_float = convert


def _let_scalars_bound_loops() -> None:
    """The interpreter's scalars are arrays of one element, which numpy since 2.4 takes for no index."""
    from triton.runtime import interpreter

    theirs = interpreter._patch_lang_tensor
    if getattr(theirs, "indexes", False):
        return

    def patch(tensor: Any, scope: Any) -> None:
        theirs(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch.indexes = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch
