"""RMSNorm, rotary embedding, gated activation and page writes against plain statements of what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels.activation import silu_mul
from kernels.norm import add_rms_norm, rms_norm, rms_norm_reference
from kernels.paged import append_rows, gather_context
from kernels.rotary import apply_rotary, rotary_tables, scaling_type


@pytest.mark.parametrize("dtype,atol", [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 0.0)])
@pytest.mark.parametrize("shape", [(1, 16), (9, 48), (5, 3, 8)], ids=str)
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 300.0])
def test_rms_norm(dtype: torch.dtype, atol: float, shape: tuple[int, ...], magnitude: float) -> None:
    x = (torch.randn(shape, dtype=torch.float64) * magnitude).to(dtype)
    weight = torch.randn(shape[-1], dtype=torch.float64).to(dtype)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), atol=atol, rtol=atol
    )


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5), torch.zeros(2, 8))


def test_rms_norm_takes_a_weight_per_head() -> None:
    x, weight = torch.randn(5, 3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    expected = torch.stack([rms_norm_reference(x[:, h], weight[h], 1e-6) for h in range(3)], 1)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected)


def test_add_rms_norm_updates_the_residual() -> None:
    x, residual, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    total = x + residual
    torch.testing.assert_close(
        add_rms_norm(x, residual, weight, 1e-5), rms_norm_reference(total, weight, 1e-5)
    )
    assert torch.equal(residual, total)


def test_silu_mul() -> None:
    gate_up = torch.randn(3, 5, 14, dtype=torch.float64)
    torch.testing.assert_close(silu_mul(gate_up), F.silu(gate_up[..., :7]) * gate_up[..., 7:])


RULES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "beta_fast": 16,
        "truncate": False,
    },
}


@pytest.mark.parametrize("rule", RULES)
def test_tables_equal_transformers(rule: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = RULES[rule]
    parameters = {"rope_theta": 5000.0, "rope_type": scaling_type(scaling)}
    parameters.update({k: v for k, v in (scaling or {}).items() if k != "type"})
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=256, rope_parameters=parameters
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, 1, dtype=torch.float32), torch.arange(200)[None])
    tables = rotary_tables(head_dim=32, theta=5000.0, max_position=200, scaling=scaling, trained_position=256)
    torch.testing.assert_close(tables.cos, cos[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(tables.sin[:, 16:], sin[0, :, 16:], atol=2e-5, rtol=0)
    torch.testing.assert_close(tables.sin[:, :16], -sin[0, :, :16], atol=2e-5, rtol=0)


def test_rotary_is_a_rotation_of_each_channel_pair() -> None:
    tables = rotary_tables(head_dim=8, theta=100.0, max_position=50, dtype=torch.float64)
    x = torch.randn(6, 2, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 5, 5, 20, 49])
    got = apply_rotary(x, *tables.rows(positions))
    inverse = 1.0 / 100.0 ** (torch.arange(0, 8, 2).double() / 8)
    turn = torch.polar(torch.ones(6, 1, 4, dtype=torch.float64), positions[:, None, None] * inverse)
    expected = torch.complex(x[..., :4], x[..., 4:]) * turn
    torch.testing.assert_close(got, torch.cat((expected.real, expected.imag), -1), atol=1e-6, rtol=1e-6)


def test_scores_depend_on_distance_only() -> None:
    tables = rotary_tables(head_dim=16, theta=1000.0, max_position=100, dtype=torch.float64)
    q, k = torch.randn(1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 16, dtype=torch.float64)

    def score(i: int, j: int) -> torch.Tensor:
        rows = [apply_rotary(x, *tables.rows(torch.tensor([p]))) for x, p in ((q, i), (k, j))]
        return (rows[0] * rows[1]).sum()

    torch.testing.assert_close(score(90, 83), score(7, 0), atol=1e-5, rtol=1e-5)


def test_unknown_scaling_is_named() -> None:
    with pytest.raises(ValueError, match="longrope"):
        rotary_tables(head_dim=8, theta=1e4, max_position=4, scaling={"rope_type": "longrope"})


def test_append_then_gather_gives_the_rows_back() -> None:
    k_pages, v_pages = torch.zeros(6, 4, 2, 3), torch.zeros(6, 4, 2, 3)
    pages = torch.tensor([4, 1, 3])
    k, v = torch.randn(9, 2, 3), torch.randn(9, 2, 3)
    slots = torch.tensor([16, 17, 18, 19, 4, 5, 6, 7, 12])
    append_rows(k_pages, v_pages, slots[:5], k[:5], v[:5])
    append_rows(k_pages, v_pages, slots[5:], k[5:], v[5:])
    assert torch.equal(gather_context(k_pages, pages)[:9], k)
    assert torch.equal(gather_context(v_pages, pages[None])[0, :9], v)
    untouched = [0, 2, 5]
    assert not k_pages[untouched].any() and not v_pages[untouched].any()
