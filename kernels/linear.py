"""PackedLinear: y = x W^T + b with the weight in the layout that is fastest for few rows on this device.

Owns the choice of arithmetic on a CPU. It does not own sharding (target_service.parallel) or loading.

    device  model dtype         weight held as                activations  multiply
    cuda    any                 model dtype                   model dtype  torch.nn.functional.linear
    cpu     float64             float64                       float64      torch.nn.functional.linear
    cpu     float32             float32, oneDNN blocked       float32      oneDNN
    cpu     bfloat16, native    bfloat16, oneDNN blocked      bfloat16     oneDNN (avx512_bf16, AMX)
    cpu     bfloat16, float16   float16, FBGEMM packed        float32      FBGEMM (weights widened on the fly)

A CPU without bfloat16 instructions multiplies bfloat16 matrices row by row: nine rows cost nine times one
row. FBGEMM's half-precision kernel reads the same two bytes a weight and costs nearly the same for one row as
for six. Float16 holds every bfloat16 of magnitude 2^-17 .. 65504 exactly, smaller ones within 3e-8; a matrix
with a larger value is held as float32 instead (`kind` says so, a log line names it).
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.nn.functional as F

log = logging.getLogger(__name__)

FLOAT16_MAX = 65504.0


@cache
def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (avx512_bf16 or AMX)."""
    checks = (
        getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    return any(check is not None and bool(check()) for check in checks)


@cache
def has_fbgemm_float16() -> bool:
    """Whether torch was built with FBGEMM's packed half-precision weights and this CPU can run them."""
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(torch.eye(8), None)
        return bool(
            torch.equal(torch.ops.quantized.linear_dynamic_fp16(torch.ones(1, 8), packed), torch.ones(1, 8))
        )
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


@cache
def has_onednn() -> bool:
    """Whether oneDNN's blocked weights are there."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def activation_dtype(dtype: torch.dtype, device: torch.device | str) -> torch.dtype:
    """The dtype of activations, KV cache and hidden states of a model whose weights are `dtype`.

    Equal to `dtype`, except on a CPU where half precision has no fast arithmetic: there float32.
    """
    if torch.device(device).type != "cpu" or dtype in (torch.float32, torch.float64):
        return dtype
    return dtype if dtype == torch.bfloat16 and has_native_bfloat16() else torch.float32


class PackedLinear:
    """weight [out_features, in_features], bias [out_features] or None; rounded to `dtype`, then packed.

    `kind` is "torch", "onednn" or "fbgemm_float16". The weight passed in is not kept where a packed copy
    replaces it.
    """

    __slots__ = ("in_features", "out_features", "kind", "_weight", "_bias", "_call")

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        act = activation_dtype(dtype, device)
        on_cpu = torch.device(device).type == "cpu"
        weight = weight.detach().to(device=device, dtype=dtype)
        self._bias = None if bias is None else bias.detach().to(device=device, dtype=dtype).to(act)
        if (
            on_cpu
            and dtype in (torch.bfloat16, torch.float16)
            and act == torch.float32
            and has_fbgemm_float16()
        ):
            largest = float(weight.abs().max()) if weight.numel() else 0.0
            if largest <= FLOAT16_MAX:
                self.kind = "fbgemm_float16"
                self._weight = torch.ops.quantized.linear_prepack_fp16(
                    weight.float().contiguous(), self._bias
                )
                self._call = self._fbgemm
                return
            log.warning(
                "a [%d, %d] matrix holds %.3g, beyond float16: it is kept in float32 and runs slower",
                self.out_features,
                self.in_features,
                largest,
            )
        weight = weight.to(act).contiguous()
        if on_cpu and act in (torch.float32, torch.bfloat16) and has_onednn() and weight.numel():
            try:
                self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
                self.kind = "onednn"
                self._call = self._onednn
                return
            except RuntimeError as error:  # this CPU has no oneDNN kernel of that dtype
                log.warning("oneDNN can't pack a %s matrix here (%s); plain torch is used", act, error)
        self.kind = "torch"
        self._weight = weight
        self._call = self._plain

    @property
    def nbytes(self) -> int:
        """Of the weight as it is held: what a product reads, however few rows it has."""
        return self.products * (2 if self.kind == "fbgemm_float16" else self._weight.element_size())

    @property
    def products(self) -> int:
        """Multiply-adds of one row."""
        return self.in_features * self.out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] in the activation dtype -> [..., out_features], likewise."""
        return self._call(x)

    def _fbgemm(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self._weight)

    def _onednn(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)
