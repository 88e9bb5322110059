"""The memory plan: arithmetic on made-up GPUs, and what the messages say about what does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tm
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbridge.errors import ConfigError
from specbridge.settings import load
from target_service.config import MemoryRules, TargetSettings, memory_rules, resolve_limits
from target_service.memory_plan import GIB, Gpu, Needs, needs_of, plan_memory
from target_service.model import shard as shard_module
from target_service.model.config import ModelConfig
from target_service.parallel import SingleRank

NEEDS = Needs(
    weights=16 * GIB, staging=GIB // 4, rotary=GIB // 64, ring=GIB // 4, passes=2 * GIB, token=1 << 17
)
RULES = MemoryRules(
    fraction=0.9,
    reserve=0,
    kv_tokens=0,
    max_length=40960,
    fixed_length=False,
    max_sessions=256,
    ring_slots=4096,
    verify_rows=520,
    graphs=True,
)
H200 = Gpu(total=140 * GIB, free=139 * GIB)
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}


def test_what_is_left_is_for_pages() -> None:
    plan = plan_memory(NEEDS, [H200], RULES, page_size=16)
    assert sum(plan.parts().values()) == H200.total
    used = sum(size for kind, size in plan.parts().items() if kind != "free")
    assert used <= 0.9 * H200.total < used + 16 * NEEDS.token
    assert "GiB: weights 16.00, kv pages" in str(plan) and f"({plan.tokens} tokens of 128.0 KiB)" in str(plan)


def test_no_more_pages_than_sessions_can_use() -> None:
    plan = plan_memory(NEEDS, [H200], replace(RULES, max_sessions=2, max_length=1000), page_size=16)
    assert plan.tokens == 2000
    assert plan.spare > 100 * GIB


@pytest.mark.parametrize("loaded", [0, 2 * GIB, 6 * GIB], ids=["before", "half-loaded", "loaded"])
def test_a_promised_reserve_counts_the_same_whenever_it_is_taken(loaded: int) -> None:
    rules = replace(RULES, reserve=6 * GIB)
    plan = plan_memory(NEEDS, [Gpu(H200.total, H200.total - loaded)], rules, page_size=16)
    assert plan == plan_memory(NEEDS, [Gpu(H200.total, H200.total)], rules, page_size=16)
    assert plan.others == 6 * GIB


def test_the_fullest_gpu_decides_for_all() -> None:
    crowded = Gpu(H200.total, 80 * GIB)
    plan = plan_memory(NEEDS, [H200, crowded, H200], RULES, page_size=16)
    assert plan.others == 60 * GIB
    assert plan.num_pages == plan_memory(NEEDS, [crowded], RULES, page_size=16).num_pages


@pytest.mark.parametrize(
    ("changes", "gpu", "said"),
    [
        (
            {},
            Gpu(16 * GIB, 16 * GIB),
            r"does not fit: weights 16\.00.* 4\.12 more than.*rank 0.*--tp above 1",
        ),
        ({"fraction": 0.5}, H200, None),
        ({"fraction": 0.1}, H200, r"--gpu-memory-fraction 0\.1 of the 140\.00 GiB"),
        ({"kv_tokens": 10**6}, H200, r"--kv-tokens 1000000 takes 122\.07 GiB, .* lower it to \d+ or less"),
        ({"max_length": 40960, "fixed_length": True}, Gpu(24 * GIB, 24 * GIB), r"lower --max-length to \d+"),
        ({}, Gpu(int(20.6 * GIB), int(20.6 * GIB)), r"1024 tokens of K/V take 0\.12 GiB"),
        ({"reserve": 130 * GIB}, H200, r"less 130\.00 GiB of other processes"),
    ],
)
def test_what_does_not_fit_is_named_with_the_remedy(
    changes: dict[str, Any], gpu: Gpu, said: str | None
) -> None:
    rules = replace(RULES, **changes)
    if said is None:
        plan_memory(NEEDS, [gpu], rules, page_size=16)
        return
    with pytest.raises(ConfigError, match=said):
        plan_memory(NEEDS, [gpu], rules, page_size=16)


def test_the_remedy_is_the_part_to_blame() -> None:
    small = Gpu(20 * GIB, 20 * GIB)
    with pytest.raises(ConfigError, match="lower --channel-slots"):
        plan_memory(replace(NEEDS, weights=GIB, ring=30 * GIB), [small], RULES, page_size=16)
    with pytest.raises(ConfigError, match="lower --max-verify-rows"):
        plan_memory(replace(NEEDS, weights=GIB, passes=30 * GIB), [small], RULES, page_size=16)


@given(
    total=st.integers(1, 200),
    free=st.integers(0, 200),
    reserve=st.integers(0, 20),
    wanted=st.integers(0, 10**6),
)
def test_a_plan_keeps_its_word(total: int, free: int, reserve: int, wanted: int) -> None:
    """What the message of a plan that fails recommends, works; what a plan promises, fits."""
    gpu = Gpu(total * GIB, min(free, total) * GIB)
    rules = replace(RULES, reserve=reserve * GIB, kv_tokens=wanted)
    try:
        plan = plan_memory(NEEDS, [gpu], rules, page_size=16)
    except ConfigError as error:
        advice = str(error).partition("lower it to ")[2].split(" ")[0]
        if advice and int(advice):
            plan_memory(NEEDS, [gpu], replace(rules, kv_tokens=int(advice)), page_size=16)
        return
    assert plan.tokens >= wanted and plan.num_pages > 0
    assert sum(plan.parts().values()) == gpu.total
    assert plan.needs.fixed + plan.tokens * NEEDS.token <= rules.fraction * gpu.total - plan.others


def test_a_known_model_s_needs() -> None:
    config = ModelConfig.from_dict(QWEN3_8B)
    needs = needs_of(config, RULES, ranks=1, dtype=torch.bfloat16, max_rows=2568)
    assert needs.weights == pytest.approx(8.19e9 * 2, rel=0.01)  # 8.2 billion parameters
    assert needs.token == 147456
    halves = needs_of(config, RULES, ranks=2, dtype=torch.bfloat16, max_rows=2568)
    assert halves.weights == pytest.approx(needs.weights / 2, rel=0.001)
    assert halves.token == needs.token // 2
    # More ranks than key/value heads: a head each, not less.
    many = needs_of(config, RULES, ranks=16, dtype=torch.bfloat16, max_rows=2568)
    assert many.token == needs.token // 8


@pytest.mark.parametrize("name", ["llama-tied", "llama-biases", "qwen3-bias", "qwen2"])
def test_the_weights_are_counted_to_the_last_bias(name: str, tmp_path: Path) -> None:
    theirs = tm.build(name, tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    needs = needs_of(config, RULES, ranks=1, dtype=torch.float32, max_rows=8)
    # Norms of queries and keys are repeated per head.
    extra = 0
    if config.qk_norm:
        extra = config.num_layers * config.head_dim * (config.num_heads + config.num_kv_heads - 2)
    assert needs.weights == 4 * (sum(p.numel() for p in theirs.parameters()) + extra)


# ---- in the service -------------------------------------------------------------------------------------


def test_settings_leave_pages_open_on_a_gpu_only() -> None:
    settings = load(TargetSettings, gpu_reserve=1.5, kv_tokens=0)
    limits = resolve_limits(settings, model_length=8192, device="cuda:0")
    assert (limits.num_pages, limits.max_length) == (0, 8192)
    assert limits.with_pages(100).max_length == 1600
    rules = memory_rules(settings, limits)
    assert rules.reserve == 3 * GIB // 2 and not rules.fixed_length and rules.fraction == 0.9
    assert resolve_limits(settings, model_length=8192, device="cpu").num_pages == 2048


def test_a_shard_plans_before_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU that is too small the weights are never opened."""
    tm.build("llama", tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    spec = shard_module.ShardSpec(tmp_path, "cuda:0", torch.float32, 0, 16, 64, rules=RULES)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB // 2, GIB))
    monkeypatch.setattr(shard_module, "open_weights", lambda *a, **k: pytest.fail("opened"))
    with pytest.raises(ConfigError, match="does not fit"):
        shard_module.ModelShard(spec, config, SingleRank())


@pytest.mark.gpu
def test_a_gpu_s_plan_is_kept(tmp_path: Path) -> None:
    from target_service.runner import load_runner

    tm.build("llama", tmp_path)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    rules = replace(RULES, max_length=256, max_sessions=100_000)
    with load_runner(tmp_path, device="cuda", num_pages=0, max_rows=64, rules=rules) as runner:
        plan = runner.plan_of_memory
        assert plan is not None and runner.num_pages == plan.num_pages > 1000
        taken = free - torch.cuda.mem_get_info()[0]
        assert taken >= plan.parts()["kv_pages"]
        assert taken <= plan.needs.fixed + plan.parts()["kv_pages"]
