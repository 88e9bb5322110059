"""PackedLinear: every way to hold a weight computes x W^T + b, within that way's rounding."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

from kernels import linear
from kernels.linear import PackedLinear, activation_dtype

ATOL = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-5, torch.float16: 2e-5}


@pytest.fixture(params=[False, True], ids=["no-native-bf16", "native-bf16"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(linear, "has_native_bfloat16", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("dtype", ATOL, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 5), (64, 64), (130, 33)], ids=str)
@pytest.mark.parametrize("rows", [(1,), (9,), (2, 17)], ids=str)
def test_equals_a_plain_product_of_the_rounded_weight(
    native: bool, dtype: torch.dtype, bias: bool, shape: tuple[int, int], rows: tuple[int, ...]
) -> None:
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=g, dtype=torch.float64) / shape[1] ** 0.5
    b = torch.randn(shape[0], generator=g, dtype=torch.float64) if bias else None
    act = activation_dtype(dtype, "cpu")
    x = torch.randn(*rows, shape[1], generator=g, dtype=torch.float64).to(act)
    got = PackedLinear(weight, b, dtype=dtype, device="cpu")(x)
    assert got.dtype == act and got.shape == (*rows, shape[0])
    expected = F.linear(x.double(), weight.to(dtype).double(), None if b is None else b.to(dtype).double())
    atol = ATOL[dtype] if act != torch.bfloat16 else 0.05
    torch.testing.assert_close(got.double(), expected, atol=atol, rtol=atol)


@pytest.mark.parametrize(
    "dtype,native_bf16,expected",
    [
        (torch.bfloat16, False, torch.float32),
        (torch.bfloat16, True, torch.bfloat16),
        (torch.float16, True, torch.float32),
        (torch.float32, False, torch.float32),
        (torch.float64, False, torch.float64),
    ],
)
def test_activation_dtype(
    dtype: torch.dtype, native_bf16: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "has_native_bfloat16", lambda: native_bf16)
    assert activation_dtype(dtype, "cpu") == expected
    assert activation_dtype(dtype, "cuda") == dtype


@pytest.mark.skipif(not linear.has_fbgemm_float16(), reason="torch here lacks FBGEMM's half-precision linear")
def test_bfloat16_weights_beyond_float16_are_kept_in_float32(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linear, "has_native_bfloat16", lambda: False)
    weight = torch.ones(4, 4)
    assert PackedLinear(weight, dtype=torch.bfloat16, device="cpu").kind == "fbgemm_float16"
    weight[1, 2] = 1e6
    with caplog.at_level(logging.WARNING):
        packed = PackedLinear(weight, dtype=torch.bfloat16, device="cpu")
    assert packed.kind != "fbgemm_float16" and "float16" in caplog.text
    torch.testing.assert_close(packed(torch.eye(4)), weight.bfloat16().float().T)


def test_small_bfloat16_weights_lose_at_most_float16s_step() -> None:
    weight = torch.tensor([[1e-5, 3e-6, -2e-7, 1e-9]])
    got = PackedLinear(weight, dtype=torch.bfloat16, device="cpu")(
        torch.eye(4, dtype=activation_dtype(torch.bfloat16, "cpu"))
    )
    assert (got[:, 0].float() - weight[0].bfloat16().float()).abs().max() <= 3.1e-8
