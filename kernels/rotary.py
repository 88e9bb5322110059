"""Rotary position embedding in the half-split layout: tables per position, and their application.

A table row holds, for each of the d channels of a head, the cosine and the *signed* sine, so that

    apply_rotary(x) = x * cos + swap_halves(x) * sin,      sin = [-sin(angle) | +sin(angle)]

Built once for all positions (`rotary_tables`), indexed once per pass (`RotaryTables.rows`), applied in every
layer. Scaling rules: default, linear, llama3, yarn, as in the transformers library, whose config fields they
read. A rule outside `SUPPORTED` is a ValueError; whether a checkpoint is refused is the caller's matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

SUPPORTED = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """cos, sin [max_position, d]; see the module's docstring for the sign convention."""

    cos: torch.Tensor
    sin: torch.Tensor

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [n] -> cos, sin [n, 1, d], ready for apply_rotary on [n, heads, d]."""
        return self.cos.index_select(0, positions).unsqueeze(1), self.sin.index_select(
            0, positions
        ).unsqueeze(1)


def scaling_type(scaling: Mapping[str, Any] | None) -> str:
    """The rule's name: key rope_type, or type in older configs; "default" without one."""
    if not scaling:
        return "default"
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def rotary_tables(
    *,
    head_dim: int,
    theta: float,
    max_position: int,
    scaling: Mapping[str, Any] | None = None,
    trained_position: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> RotaryTables:
    """Tables for positions [0, max_position).

    scaling: the config's rope_scaling / rope_parameters. trained_position: the config's
    max_position_embeddings, which yarn falls back on. Angles are computed in float32 (float64 for dtype
    float64). Raises ValueError for an unknown rule, naming it, and KeyError for a missing parameter of a
    known one.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inverse, factor = _inverse_frequencies(head_dim, theta, scaling or {}, trained_position or max_position)
    angles = torch.outer(torch.arange(max_position, dtype=wide), inverse.to(wide))
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return RotaryTables(
        torch.cat((cos, cos), -1).to(device=device, dtype=dtype),
        torch.cat((-sin, sin), -1).to(device=device, dtype=dtype),
    )


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., heads, d] with cos, sin broadcastable to it ([rows, 1, d]); returns a new tensor like x."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _inverse_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any], trained_position: int
) -> tuple[torch.Tensor, float]:
    """Float32 [head_dim / 2] inverse frequencies, and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (theta**exponents)
    rule = scaling_type(scaling)
    if rule == "default":
        return inverse, 1.0
    if rule == "linear":
        return inverse / float(scaling["factor"]), 1.0
    if rule == "llama3":
        return _llama3(inverse, scaling), 1.0
    if rule == "yarn":
        return _yarn(inverse, head_dim, theta, scaling, trained_position)
    raise ValueError(f"rope scaling {rule!r} is not supported; known are {', '.join(SUPPORTED)}")


def _llama3(inverse: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    trained = float(scaling["original_max_position_embeddings"])
    turns = trained * inverse / (2 * math.pi)  # full turns over the trained length
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inverse / factor + blend * inverse


def _yarn(
    inverse: torch.Tensor, head_dim: int, theta: float, scaling: Mapping[str, Any], trained_position: int
) -> tuple[torch.Tensor, float]:
    """Peng et al. 2023: interpolate slow channels, keep fast ones, ramp between; sharpen attention by the
    factor."""
    trained = float(scaling.get("original_max_position_embeddings") or trained_position)
    factor = float(scaling["factor"])

    def sharpness(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        weight, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = (
            sharpness(factor, float(weight)) / sharpness(factor, float(all_dim))
            if weight and all_dim
            else sharpness(factor)
        )

    def channel(
        turns: float,
    ) -> float:  # the channel pair that makes `turns` full turns over the trained length
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = (
        channel(float(scaling.get("beta_fast") or 32)),
        channel(float(scaling.get("beta_slow") or 1)),
    )
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return inverse / factor * ramp + inverse * (1 - ramp), float(attention)
