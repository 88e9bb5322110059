"""Triton's interpreter made to compute as the device does, where tests compare results strictly."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


def as_the_device() -> None:
    """Once or often; triton must be importable."""
    _round_as_the_device()
    _let_scalars_bound_loops()
    _look_through_the_language_once()
    _compute_no_unread_checks()
    _remember_dtypes()


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


def _look_through_the_language_once() -> None:
    """A launch replaces the language's functions until it ends; every call of a helper in it would search all
    of them once more, though none is left to replace: a fourth of these tests' time.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    theirs = interpreter._patch_lang
    if getattr(theirs, "once", False):
        return

    def patch(fn: Any) -> Any:
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        samples = [member for lang in languages for member in (lang.load, lang.tensor.__add__)]
        if samples and not any(map(tl.core.is_builtin, samples)):
            return interpreter._LangPatchScope()
        return theirs(fn)

    patch.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch


def _compute_no_unread_checks() -> None:
    """Integers would be computed again in 64 bits for a device_assert, which only debug runs execute."""
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    if not options.debug and options.sanitize_overflow:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _remember_dtypes() -> None:
    """A table of all types is built for each look into it."""
    from triton.runtime import interpreter

    theirs = interpreter._get_np_dtype
    if getattr(theirs, "known", None) is not None:
        return

    def look_up(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.is_ptr():
            return theirs(scalar)
        if scalar.name not in known:
            known[scalar.name] = theirs(scalar)
        return known[scalar.name]

    look_up.known = known = {}  # type: ignore[attr-defined]
    interpreter._get_np_dtype = look_up
