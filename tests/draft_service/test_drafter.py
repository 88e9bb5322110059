"""The drafter against a plain re-statement of the published forward: growing caches, no pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_drafters import changed, layout

from draft_service.drafter import BlockBatch, ContextPages, Drafter
from kernels.rotary import RotaryTables
from specbridge.errors import ConfigError

PAGE = 4
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXACT = {"rtol": 1e-9, "atol": 1e-9}


class Published:
    """One session of the published reference, in float64 and the most literal way: per layer one growing K
    and V, context rows and block rows concatenated, a full mask; the block's rows are cut off again
    afterwards.
    """

    def __init__(self, config: dict[str, Any], built: Any, *, window: int | None = None) -> None:
        self.inner = config.get("transformer_layer_config", config)
        self.own = config.get("dflash_config", {})
        self.config, self.built, self.window = config, built, window
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []

    def value(self, key: str, default: Any) -> Any:
        return self.own.get(key, self.config.get(key, default))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.built.tensors[name + ".weight"]
        return weight * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.inner["rms_norm_eps"])

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.built.tensors[name + ".weight"], self.built.tensors.get(name + ".bias"))

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [heads, n, d]"""
        d = self.inner["head_dim"]
        rate = self.inner["rope_theta"] ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
        angle = positions.double()[:, None] * rate
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1, self.inner["head_dim"]).transpose(0, 1)

    def mask(self, layer: int, start: int, block: int) -> torch.Tensor:
        kinds = self.inner.get("layer_types") or ["full_attention"] * self.inner["num_hidden_layers"]
        slides = kinds[layer] == "sliding_attention"
        total = start + block
        query = torch.arange(start, total)[:, None]
        key = torch.arange(total)[None, :]
        visible = torch.ones(block, total, dtype=torch.bool)
        if "transformer_layer_config" in self.config:
            causal = slides and not self.config.get("sliding_window_non_causal", False)
            if slides:
                visible &= (key >= start) | (key >= start - self.inner["sliding_window"])
        else:
            causal = self.value("is_causal", None)
            causal = slides if causal is None else causal
            if slides:
                visible &= (query - key).abs() < self.inner["sliding_window"]
        if causal:
            visible &= key <= query
        if self.window is not None:
            visible &= key >= start - self.window
        return visible

    def round(self, taps: torch.Tensor, anchor: int) -> torch.Tensor:
        """One round: new context features [C, F], then the block; logits of the rows that predict."""
        block = self.value("block_size", 16)
        start = (self.k[0].shape[1] if self.k else 0) + len(taps)
        positions = torch.arange(start - len(taps), start + block)
        ids = torch.tensor([anchor] + [self.value("mask_token_id", -1)] * (block - 1))
        hidden = self.built.embedding[ids] * self.value("input_embedding_scale", 1.0)
        context = self.norm(self.linear(taps, "fc"), "hidden_norm")
        group = self.inner["num_attention_heads"] // self.inner["num_key_value_heads"]
        for i in range(self.inner["num_hidden_layers"]):
            name = f"layers.{i}."
            attention = name + "self_attn."
            x = self.norm(hidden, name + "input_layernorm")
            q = self.norm(self.heads(self.linear(x, attention + "q_proj")), attention + "q_norm")
            k = self.heads(
                torch.cat((self.linear(context, attention + "k_proj"), self.linear(x, attention + "k_proj")))
            )
            v = self.heads(
                torch.cat((self.linear(context, attention + "v_proj"), self.linear(x, attention + "v_proj")))
            )
            v = v * self.value("attention_value_scale", 1.0)
            k = self.rotate(self.norm(k, attention + "k_norm"), positions)
            q = self.rotate(q, positions[-block:])
            if len(self.k) == i:
                self.k.append(k)
                self.v.append(v)
            else:
                self.k[i] = torch.cat((self.k[i], k), 1)
                self.v[i] = torch.cat((self.v[i], v), 1)
            keys = self.k[i].repeat_interleave(group, 0)
            scores = q @ keys.transpose(1, 2) / math.sqrt(self.inner["head_dim"])
            scores = scores.masked_fill(~self.mask(i, start, block), float("-inf"))
            out = scores.softmax(-1) @ self.v[i].repeat_interleave(group, 0)
            hidden = hidden + self.linear(out.transpose(0, 1).reshape(block, -1), attention + "o_proj")
            x = self.norm(hidden, name + "post_attention_layernorm")
            gated = F.silu(self.linear(x, name + "mlp.gate_proj")) * self.linear(x, name + "mlp.up_proj")
            hidden = hidden + self.linear(gated, name + "mlp.down_proj")
            self.k[i], self.v[i] = self.k[i][:, :start], self.v[i][:, :start]
        hidden = self.norm(hidden, "norm")
        first = 0 if self.value("sample_from_anchor", False) else 1
        tensors = self.built.tensors
        if "d2t" in tensors:
            reduced = hidden[first:] @ tensors["lm_head.weight"].T
            logits = torch.full((len(reduced), len(self.built.embedding)), float("-inf"), dtype=torch.float64)
            logits[:, torch.arange(len(tensors["d2t"])) + tensors["d2t"]] = reduced
            return logits
        logits = hidden[first:] @ self.built.head.T * self.value("output_multiplier", 1.0)
        cap = self.value("final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap


class Ours:
    """One session of ours over pages handed out in a scattered order."""

    def __init__(
        self, drafter: Drafter, *, pages: ContextPages | None = None, order: list[int] | None = None
    ) -> None:
        self.drafter = drafter
        self.store = pages if pages is not None else drafter.new_pages(64, PAGE)
        self.pages = (
            order
            if order is not None
            else torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
        )
        self.length = 0

    def append(self, taps: torch.Tensor) -> None:
        positions = torch.arange(self.length, self.length + len(taps))
        slots = torch.tensor(
            [self.pages[p // PAGE] * PAGE + p % PAGE for p in positions.tolist()], dtype=torch.int64
        )
        self.drafter.append(self.store, taps, positions, slots)
        self.length += len(taps)

    def round(self, taps: torch.Tensor, anchor: int) -> torch.Tensor:
        self.append(taps)
        batch = BlockBatch([anchor], [self.length], [self.pages[: -(-self.length // PAGE)]])
        return self.drafter.propose(self.store, batch)[0]


CASES = {
    "z-lab full": changed("z-lab"),
    "z-lab taps at top level, old block key": {
        **{k: v for k, v in layout("z-lab").items() if k != "dflash_config"},
        "target_layer_ids": [1, 4, 6],
        "mask_token_id": 5,
    },
    "z-lab block in dflash_config, default taps": changed(
        "z-lab", block_size=16, dflash_config={"mask_token_id": 5, "block_size": 4}
    ),
    "z-lab sliding and full": changed(
        "z-lab", inner={"layer_types": MIXED, "sliding_window": 7}
    ),
    "z-lab window smaller than the block": changed(
        "z-lab", inner={"layer_types": ["sliding_attention"] * 3, "sliding_window": 3}
    ),
    "z-lab sliding, is_causal false": changed(
        "z-lab", is_causal=False, inner={"layer_types": ["sliding_attention"] * 3, "sliding_window": 4}
    ),
    "z-lab causal everywhere": changed("z-lab", is_causal=True),
    "z-lab softcap, multiplier, scales": changed(
        "z-lab",
        own={
            "final_logit_softcapping": 3.0,
            "output_multiplier": 0.5,
            "input_embedding_scale": 1.7,
            "attention_value_scale": 0.6,
        },
    ),
    "z-lab biases": changed("z-lab", inner={"attention_bias": True}),
    "z-lab anchor row predicts": changed("z-lab", own={"sample_from_anchor": True}),
    "speculators full": changed("speculators"),
    "speculators reduced vocabulary": changed("speculators", draft_vocab_size=41),
    "speculators anchor row predicts": changed("speculators", sample_from_anchor=True),
    "speculators sliding": changed(
        "speculators", inner={"layer_types": MIXED, "sliding_window": 5}
    ),
    "speculators sliding, non-causal": changed(
        "speculators",
        sliding_window_non_causal=True,
        inner={"layer_types": ["sliding_attention"] * 3, "sliding_window": 5},
    ),
}  # fmt: skip


def features(built: Any, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, built.config.feature_size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("append", ["fused", "sequential"])
def test_rounds_equal_the_published_forward(case: str, append: str, build: Callable[..., Any]) -> None:
    config = CASES[case]
    built = build(config, append=append, tied=case == "z-lab full")
    ours, published = Ours(built.drafter), Published(config, built)
    for seed, count in enumerate((3, 1, 6, 2, 9)):
        taps = features(built, count, seed)
        expected = published.round(taps, anchor=11 + seed)
        got = ours.round(taps, anchor=11 + seed)
        assert got.dtype == torch.float32 and got.shape == expected.shape
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_first_block_may_have_no_context(build: Callable[..., Any]) -> None:
    built = build(layout("z-lab"))
    expected = Published(layout("z-lab"), built).round(features(built, 0, 0), anchor=3)
    torch.testing.assert_close(
        Ours(built.drafter).round(features(built, 0, 0), 3).double(), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fused_append_equals_sequential(dtype: torch.dtype, build: Callable[..., Any]) -> None:
    config = changed("z-lab", own={"attention_value_scale": 0.6}, inner={"attention_bias": True})
    fused, sequential = (Ours(build(config, dtype=dtype, append=a).drafter) for a in ("fused", "sequential"))
    taps = torch.randn(13, fused.drafter.config.feature_size, generator=torch.Generator().manual_seed(3))
    for ours in (fused, sequential):
        ours.append(taps)
    tolerance = EXACT if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(fused.store.k, sequential.store.k, **tolerance)
    torch.testing.assert_close(fused.store.v, sequential.store.v, **tolerance)
    assert fused.store.k.abs().sum() > 0


def test_incremental_appends_equal_one_append(build: Callable[..., Any]) -> None:
    built = build(layout("z-lab"))
    at_once, in_steps = Ours(built.drafter), Ours(built.drafter)
    taps = features(built, 14, 4)
    at_once.append(taps)
    for part in taps.split((1, 4, 2, 7)):
        in_steps.append(part)
    torch.testing.assert_close(at_once.store.k, in_steps.store.k, **EXACT)
    torch.testing.assert_close(at_once.store.v, in_steps.store.v, **EXACT)


@pytest.mark.parametrize(
    "case", ["z-lab full", "z-lab sliding and full", "z-lab window smaller than the block"]
)
@pytest.mark.parametrize("window", [1, 5, 8, 1000])
def test_a_draft_window_hides_older_rows_and_nothing_else(
    case: str, window: int, build: Callable[..., Any]
) -> None:
    config = CASES[case]
    built = build(config, window=window)
    ours, published = Ours(built.drafter), Published(config, built, window=window)
    for seed, count in enumerate((4, 9, 3)):
        taps = features(built, count, seed)
        expected = published.round(taps, anchor=seed)
        torch.testing.assert_close(ours.round(taps, seed).double(), expected, rtol=1e-5, atol=1e-5)


def test_windowed_equals_full_while_the_context_fits(build: Callable[..., Any]) -> None:
    full, windowed = build(layout("z-lab")), build(layout("z-lab"), window=8)
    one, other = Ours(full.drafter), Ours(windowed.drafter)
    taps = features(full, 8, 0)
    torch.testing.assert_close(one.round(taps, 1), other.round(taps, 1), rtol=0, atol=1e-12)
    more = features(full, 1, 1)
    assert not torch.allclose(one.round(more, 1), other.round(more, 1), atol=1e-4)


@pytest.mark.parametrize(
    "case", ["z-lab full", "z-lab sliding and full", "z-lab window smaller than the block"]
)
def test_a_batch_equals_its_sessions_alone(case: str, build: Callable[..., Any]) -> None:
    built = build(CASES[case])
    store = built.drafter.new_pages(64, PAGE)
    sessions = [
        Ours(built.drafter, pages=store, order=list(range(s * 12 + 11, s * 12 - 1, -1))) for s in range(5)
    ]
    for s, session in enumerate(sessions):
        session.append(features(built, (0, 3, 17, 40, 8)[s], s))
    batch = BlockBatch(
        [s + 1 for s in range(5)],
        [session.length for session in sessions],
        [session.pages[: -(-session.length // PAGE)] for session in sessions],
    )
    together = built.drafter.propose(store, batch)
    for s, session in enumerate(sessions):
        alone = session.round(features(built, 0, 0), s + 1)
        torch.testing.assert_close(together[s], alone, rtol=1e-6, atol=1e-6)


def test_fewer_depths_are_the_first_rows(build: Callable[..., Any]) -> None:
    built = build(layout("z-lab"))
    ours = Ours(built.drafter)
    ours.append(features(built, 7, 0))
    batch = BlockBatch([2], [7], [ours.pages[:2]])
    full = built.drafter.propose(ours.store, batch)
    assert full.shape == (1, 5, 67)
    torch.testing.assert_close(
        built.drafter.propose(ours.store, batch, depth=2), full[:, :2], rtol=1e-6, atol=1e-6
    )


def test_block_rows_leave_no_trace_in_the_pages(build: Callable[..., Any]) -> None:
    built = build(layout("z-lab"))
    ours = Ours(built.drafter)
    ours.append(features(built, 6, 0))
    before = ours.store.k.clone(), ours.store.v.clone()
    ours.round(features(built, 0, 0), 9)
    assert torch.equal(ours.store.k, before[0]) and torch.equal(ours.store.v, before[1])


def test_bfloat16_stays_near_float64(build: Callable[..., Any]) -> None:
    exact, rounded = build(layout("z-lab")), build(layout("z-lab"), dtype=torch.bfloat16)
    taps = features(exact, 12, 0)
    one = Ours(exact.drafter).round(taps, 3)
    other = Ours(rounded.drafter).round(taps, 3)
    assert (one - other).abs().max() < 0.05 * one.std()


def test_rope_scaling_of_the_drafter_is_used(build: Callable[..., Any]) -> None:
    plain = build(layout("z-lab"))
    scaled = build(changed("z-lab", inner={"rope_scaling": {"rope_type": "linear", "factor": 2.0}}))
    rotary: RotaryTables = scaled.drafter._rotary
    torch.testing.assert_close(rotary.cos[10], plain.drafter._rotary.cos[5], rtol=1e-6, atol=1e-6)


def test_unknown_options_are_refused(build: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="append is 'magic'"):
        build(layout("z-lab"), append="magic")
    with pytest.raises(ConfigError, match="window is 0"):
        build(layout("z-lab"), window=0)
    with pytest.raises(ConfigError, match="dynamic"):
        build(changed("z-lab", inner={"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}))
