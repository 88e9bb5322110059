"""DFlash: the block-diffusion drafter's two operations over paged context.

    append   context features (the target's tapped hidden states of committed tokens) -> K and V of every
    layer,
             written into pages. Once per committed token, never undone.
    propose  one bidirectional pass over [anchor, MASK, MASK, ...] that reads the pages -> logits of the next
             `horizon` positions, all at once. Writes nothing.

Owns the forward. Does not own which page is whose (context_cache), what a checkpoint means (drafter_config),
the tensors (drafter_weights), nor trees.

Source of the formulas: the published reference of the z-lab checkpoints (dflash 0.1.0), restated:
context features c = hidden_norm(fc(taps)), the same for all layers and without the layer's input norm;
K = rotary(k_norm(Wk [c ; x])), V = Wv [c ; x] with the block's own rows x; positions are absolute.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from draft_service.drafter_config import DrafterConfig, LayerRule
from draft_service.drafter_weights import DrafterWeights, LayerWeights
from kernels.activation import silu_mul
from kernels.attention import AttentionPlan, PagedContext, plan_attention, split_attention
from kernels.linear import PackedLinear, activation_dtype
from kernels.norm import add_rms_norm, rms_norm
from kernels.paged import append_rows
from kernels.rotary import SUPPORTED, apply_rotary, rotary_tables, scaling_type
from specbridge.errors import ConfigError

APPEND_VARIANTS = ("fused", "sequential")


@dataclass(frozen=True, slots=True)
class ContextPages:
    """K and V of committed tokens for every layer: each [layers, pages, page_size, kv_heads, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def page_size(self) -> int:
        return int(self.k.shape[2])


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """The sessions of one propose pass.

    anchors: token at position base. bases: context rows each session holds. pages: its page ids, in order,
    enough to cover base.
    """

    anchors: Sequence[int]
    bases: Sequence[int]
    pages: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.bases)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a checkpoint's configuration says about the block's rows, and may say wrongly."""

    first_row: int
    mask_token_id: int


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qk_norm: torch.Tensor  # [heads + kv_heads, head_dim]
    k_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    context_kv: PackedLinear | None
    rule: LayerRule


class Drafter:
    """One drafter on one device.

    window: attend to the last `window` context rows only (None: all); positions stay absolute.
    append: "fused" (one stacked K/V product for all layers) or "sequential" (layer by layer); equal results.
    max_position: positions a session can reach, the block's own rows included.
    """

    def __init__(
        self,
        config: DrafterConfig,
        weights: DrafterWeights,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_position: int,
        window: int | None = None,
        append: str = "fused",
    ) -> None:
        if append not in APPEND_VARIANTS:
            raise ConfigError(f"append is {append!r}; it must be one of {', '.join(APPEND_VARIANTS)}")
        if window is not None and window < 1:
            raise ConfigError(f"window is {window}; it must be a positive number of context rows")
        if scaling_type(config.rope_scaling) not in SUPPORTED:
            raise ConfigError(
                f"rope scaling {scaling_type(config.rope_scaling)!r} of the drafter is not supported; "
                f"known are {', '.join(SUPPORTED)}"
            )
        self.config = config
        self.device = torch.device(device)
        self.dtype = activation_dtype(dtype, self.device)
        self.window = window
        self.append_variant = append
        self.max_position = max_position
        self._rotary = rotary_tables(
            head_dim=config.head_dim,
            theta=config.rope_theta,
            max_position=max_position + config.block_size,
            scaling=config.rope_scaling,
            trained_position=config.max_position_embeddings,
            dtype=self.dtype,
            device=self.device,
        )

        def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
            return PackedLinear(weight, bias, dtype=dtype, device=self.device)

        def place(tensor: torch.Tensor) -> torch.Tensor:
            # Rounded to the model's dtype first, then widened to what activations have.
            return tensor.to(self.device, dtype).to(self.dtype)

        self._q_size = config.num_heads * config.head_dim
        self._kv_size = config.num_kv_heads * config.head_dim
        self._scale = config.head_dim**-0.5
        self._fc = pack(weights.fc)
        self._hidden_norm = place(weights.hidden_norm)
        self._norm = place(weights.norm)
        # Looked up a few rows at a time: kept in the model's dtype, widened row by row.
        self._embedding = weights.embedding.to(self.device, dtype)
        self._mask_row = self._embed(torch.tensor([config.mask_token_id], device=self.device))[0]
        self._head = pack(weights.head)
        self._target_ids = None if weights.target_ids is None else weights.target_ids.to(self.device)
        self._layers = tuple(
            _Layer(
                input_norm=place(layer.input_norm),
                qk_norm=torch.cat(
                    (
                        place(layer.q_norm).expand(config.num_heads, -1),
                        place(layer.k_norm).expand(config.num_kv_heads, -1),
                    )
                ),
                k_norm=place(layer.k_norm),
                post_norm=place(layer.post_norm),
                qkv=pack(layer.qkv, layer.qkv_bias),
                o=pack(layer.o, layer.o_bias),
                gate_up=pack(layer.gate_up),
                down=pack(layer.down),
                context_kv=pack(*_kv_part(layer, self._q_size)) if append == "sequential" else None,
                rule=config.layers[i],
            )
            for i, layer in enumerate(weights.layers)
        )
        self._context_kv: PackedLinear | None = None
        if append == "fused":
            parts = [_kv_part(layer, self._q_size) for layer in weights.layers]
            biases = [bias for _, bias in parts if bias is not None]
            self._context_kv = pack(
                torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None
            )
        self._k_norms = torch.stack([layer.k_norm for layer in self._layers]).unsqueeze(1)
        self._ones = torch.ones(config.head_dim, dtype=self.dtype, device=self.device)
        self._block_masks = {rule: _block_mask(config, rule) for rule in config.layers}

    def reread(self, reading: Reading) -> Drafter:
        """The same weights under another reading of the block; shares everything, context pages included."""
        other = copy.copy(self)
        other.config = replace(self.config, first_row=reading.first_row, mask_token_id=reading.mask_token_id)
        other._mask_row = other._embed(torch.tensor([reading.mask_token_id], device=self.device))[0]
        return other

    # ---- context -----------------------------------------------------------------------------

    def new_pages(self, num_pages: int, page_size: int) -> ContextPages:
        """Zeroed pages for `num_pages * page_size` context rows."""
        c = self.config
        shape = (c.num_layers, num_pages, page_size, c.num_kv_heads, c.head_dim)
        k = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return ContextPages(k, torch.zeros_like(k))

    @property
    def bytes_per_token(self) -> int:
        """Context K and V of one token, all layers."""
        c = self.config
        return 2 * c.num_layers * c.num_kv_heads * c.head_dim * self.dtype.itemsize

    @torch.inference_mode()
    def append(
        self, pages: ContextPages, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write the context K/V of n committed tokens (of any sessions).

        features [n, taps * hidden] of any float dtype; positions int64 [n]; slots int64 [n], distinct.
        """
        c = self.config
        features = features.to(self.device, self.dtype)
        context = rms_norm(self._fc(features), self._hidden_norm, c.rms_norm_eps)
        cos, sin = self._rotary.rows(positions.to(self.device))
        slots = slots.to(self.device)
        n = len(features)
        if self._context_kv is not None:
            kv = (
                self._context_kv(context).view(n, c.num_layers, 2, c.num_kv_heads, c.head_dim).transpose(0, 1)
            )
            # Normed without a weight, then weighted layer by layer: the same rounding as rms_norm's own.
            normed = rms_norm(kv[:, :, 0], self._ones, c.rms_norm_eps)
            keys = apply_rotary(normed * self._k_norms.unsqueeze(1), cos, sin)
            values = self._scaled(kv[:, :, 1])
            for i in range(c.num_layers):
                append_rows(pages.k[i], pages.v[i], slots, keys[i], values[i])
            return
        for i, layer in enumerate(self._layers):
            assert layer.context_kv is not None
            kv = layer.context_kv(context).view(n, 2, c.num_kv_heads, c.head_dim)
            key = apply_rotary(rms_norm(kv[:, 0], layer.k_norm, c.rms_norm_eps), cos, sin)
            append_rows(pages.k[i], pages.v[i], slots, key, self._scaled(kv[:, 1]))

    # ---- block pass --------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, pages: ContextPages, batch: BlockBatch, depth: int | None = None) -> torch.Tensor:
        """Logits of the `depth` (default: horizon) positions after each anchor: fp32 [sessions, depth,
        vocab].

        Ids that a reduced head can't name get -inf. Row d - 1 is the marginal of depth d, position base + d.
        """
        c = self.config
        depth = c.horizon if depth is None else min(depth, c.horizon)
        sessions, rows = len(batch), c.block_size
        base = torch.tensor(batch.bases, dtype=torch.int64)
        anchors = torch.tensor(batch.anchors, dtype=torch.int64).to(self.device)
        residual = self._mask_row.repeat(sessions, rows, 1)
        residual[:, 0] = self._embed(anchors)
        residual = residual.view(sessions * rows, c.hidden_size)
        positions = base.unsqueeze(1) + torch.arange(rows)
        cos, sin = self._rotary.rows(positions.flatten().to(self.device))
        view = self._context_view(batch, base, pages.page_size)
        plans = {rule: self._plan(rule, base, positions, view, pages.page_size) for rule in self._block_masks}
        normed = rms_norm(residual, self._layers[0].input_norm, c.rms_norm_eps)
        for i, layer in enumerate(self._layers):
            qk, v = layer.qkv(normed).split((self._q_size + self._kv_size, self._kv_size), dim=-1)
            qk = rms_norm(qk.unflatten(-1, (-1, c.head_dim)), layer.qk_norm, c.rms_norm_eps)
            q, k = apply_rotary(qk, cos, sin).split((c.num_heads, c.num_kv_heads), dim=-2)
            out = split_attention(
                q.unflatten(0, (sessions, rows)),
                k.unflatten(0, (sessions, rows)),
                self._scaled(v.unflatten(-1, (-1, c.head_dim))).unflatten(0, (sessions, rows)),
                PagedContext(pages.k[i], pages.v[i], view.page_table, view.lengths),
                None,
                scale=self._scale,
                plan=plans[layer.rule],
            )
            normed = add_rms_norm(
                layer.o(out.reshape(sessions * rows, self._q_size)), residual, layer.post_norm, c.rms_norm_eps
            )
            hidden = layer.down(silu_mul(layer.gate_up(normed)))
            if i + 1 < c.num_layers:
                normed = add_rms_norm(hidden, residual, self._layers[i + 1].input_norm, c.rms_norm_eps)
        # The final norm and the head run on the predicted rows only.
        first = c.first_row
        wanted = (residual + hidden).view(sessions, rows, -1)[:, first : first + depth]
        normed = rms_norm(wanted.reshape(sessions * depth, -1), self._norm, c.rms_norm_eps)
        return self._logits(normed).view(sessions, depth, -1)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        c = self.config
        logits = self._head(hidden).float() if self.dtype != torch.float64 else self._head(hidden)
        if c.output_multiplier != 1.0:
            logits = logits * c.output_multiplier
        if c.logit_softcap is not None:
            logits = torch.tanh(logits / c.logit_softcap) * c.logit_softcap
        logits = logits.float()
        if self._target_ids is None:
            return logits
        full = torch.full((len(logits), c.vocab_size), float("-inf"), device=self.device)
        return full.index_copy_(1, self._target_ids, logits)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._embedding.index_select(0, ids).to(self.dtype)
        return rows if self.config.embedding_scale == 1.0 else rows * self.config.embedding_scale

    def _scaled(self, v: torch.Tensor) -> torch.Tensor:
        return v if self.config.value_scale == 1.0 else v * self.config.value_scale

    def _context_view(self, batch: BlockBatch, base: torch.Tensor, page_size: int) -> _ContextView:
        """Page table over what some layer can see: with a window in every layer, old pages are left out."""
        reach = [self._reach(rule.window) for rule in self.config.layers]
        skip = [0] * len(batch)
        if all(r is not None for r in reach):
            widest = max(r for r in reach if r is not None)
            skip = [max(0, b - widest) // page_size for b in batch.bases]
        needed = [-(-b // page_size) for b in batch.bases]
        width = max((n - s for n, s in zip(needed, skip, strict=True)), default=0)
        table = torch.zeros((len(batch), width), dtype=torch.int64)
        for row, (pages, first, last) in enumerate(zip(batch.pages, skip, needed, strict=True)):
            table[row, : last - first] = torch.tensor(pages[first:last], dtype=torch.int64)
        offset = torch.tensor(skip, dtype=torch.int64) * page_size
        return _ContextView(table, base - offset, offset)

    def _plan(
        self, rule: LayerRule, base: torch.Tensor, positions: torch.Tensor, view: _ContextView, page_size: int
    ) -> AttentionPlan:
        sessions, rows = positions.shape
        return plan_attention(
            view.page_table,
            view.lengths,
            self._block_masks[rule].expand(sessions, rows, rows),
            rows=rows,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
            window_start=self._window_start(rule.window, base, positions, view),
        )

    def _reach(self, window: int | None) -> int | None:
        """Context rows before the anchor that a layer with `window` can see at most; None: all."""
        sizes = [w for w in (window, self.window) if w is not None]
        return min(sizes) if sizes else None

    def _window_start(
        self, window: int | None, base: torch.Tensor, positions: torch.Tensor, view: _ContextView
    ) -> torch.Tensor | None:
        """First visible context position of each block row, int64 [sessions, rows], counted in the view."""
        bounds = []
        if window is not None:
            from_anchor = (base - window).unsqueeze(1).expand_as(positions)
            bounds.append(from_anchor if self.config.window_from_anchor else positions - window + 1)
        if self.window is not None:
            bounds.append((base - self.window).unsqueeze(1).expand_as(positions))
        if not bounds:
            return None
        start = bounds[0] if len(bounds) == 1 else torch.maximum(*bounds)
        return (start - view.offset.unsqueeze(1)).clamp_min(0)


def _kv_part(layer: LayerWeights, q_size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The K and V rows of a layer's stacked projection, and of its bias."""
    return layer.qkv[q_size:], None if layer.qkv_bias is None else layer.qkv_bias[q_size:]


def _block_mask(config: DrafterConfig, rule: LayerRule) -> torch.Tensor:
    """bool [block, block]: which rows of the block each row sees in a layer of this rule."""
    row = torch.arange(config.block_size)
    ahead = row.unsqueeze(0) - row.unsqueeze(1)  # key row - query row
    mask = torch.ones(config.block_size, config.block_size, dtype=torch.bool)
    if rule.causal:
        mask &= ahead <= 0
    if rule.window is not None and not config.window_from_anchor:
        mask &= ahead.abs() < rule.window
    return mask


@dataclass(frozen=True, slots=True)
class _ContextView:
    """page_table int64 [sessions, P]; lengths int64 [sessions] in it; offset: positions cut off its front. On
    the CPU.
    """

    page_table: torch.Tensor
    lengths: torch.Tensor
    offset: torch.Tensor
