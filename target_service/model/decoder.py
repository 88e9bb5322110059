"""Decoder: the forward pass of one rank over a step's packed rows.

Owns the order of operations: embedding, layers, taps, final norm, head. It does not own which rows form a
step, which K/V are committed, or sampling. K/V of the step's rows go to staging, never to pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.activation import silu_mul
from kernels.heads import split_heads
from kernels.norm import add_rms_norm, rms_norm
from target_service.model.batch import StepInputs
from target_service.model.config import ModelConfig
from target_service.model.layers import ModelWeights
from target_service.model.projection import Projection
from target_service.parallel import Group


@dataclass(frozen=True, slots=True)
class Taps:
    """Layers whose output is captured, in the order of the columns. normed_last_layer: the last layer's
    output is taken after the final norm (the z-lab layout's convention) instead of before it. projection:
    what is made of them, for a draft that wants that."""

    layer_ids: tuple[int, ...] = ()
    normed_last_layer: bool = False
    projection: Projection | None = None

    def width(self, hidden_size: int) -> int:
        """Elements of a captured row."""
        return len(self.layer_ids) * hidden_size if self.projection is None else self.projection.width


class Decoder:
    """A rank's decoder. Memory is given per call: staging [2 * layers, max_rows, kv_heads, d] and pages, 2 *
    layers tensors [pages, page_size, kv_heads, d]; both hold K of a layer, then its V."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, group: Group, dtype: torch.dtype) -> None:
        self._config, self._weights, self._group = config, weights, group
        self._dtype = dtype
        self._scale = config.head_dim**-0.5

    def forward(
        self,
        inputs: StepInputs,
        staging: torch.Tensor,
        pages: Sequence[torch.Tensor],
        taps: Taps,
        *,
        want_logits: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns this rank's columns of the logits in the activation dtype, [k, its share of the vocabulary]
        (None if none are wanted), and taps [n, num_taps * hidden], or as projected (None without taps).
        Fills staging[:, :n].
        """
        config, weights = self._config, self._weights
        eps, n = config.rms_norm_eps, inputs.rows
        heads = weights.heads
        reduce = self._group.all_reduce if self._group.size > 1 else None
        captured = None
        columns: dict[int, list[int]] = {}
        if taps.layer_ids:
            captured = torch.empty(
                n, len(taps.layer_ids), config.hidden_size, dtype=self._dtype, device=inputs.tokens.device
            )
            for column, layer_id in enumerate(taps.layer_ids):
                columns.setdefault(layer_id, []).append(column)
        staged = staging.narrow(1, 0, n).unbind(0)
        residual = self._embed(inputs.tokens)
        delta = None
        for number, layer in enumerate(weights.layers):
            if delta is None:
                x = rms_norm(residual, layer.input_norm, eps)
            else:
                x = add_rms_norm(delta, residual, layer.input_norm, eps)
            if captured is not None:
                for column in columns.get(number - 1, ()):
                    captured[:, column].copy_(residual)
            k, v = staged[2 * number], staged[2 * number + 1]
            q = split_heads(
                layer.qkv(x),
                inputs.cos,
                inputs.sin,
                heads=heads.query,
                kv_heads=heads.key_value,
                k_out=k,
                v_out=v,
                qk_norm=layer.qk_norm,
                eps=eps,
            )
            attended = inputs.attention(
                q, k, v, pages[2 * number], pages[2 * number + 1], scale=self._scale, window=layer.window
            )
            delta = layer.output(attended)
            if reduce:
                reduce(delta)
            x = add_rms_norm(delta, residual, layer.post_norm, eps)
            delta = layer.down(silu_mul(layer.gate_up(x)))
            if reduce:
                reduce(delta)
        assert delta is not None
        residual.add_(delta)
        last = config.num_layers - 1
        if captured is not None and last in columns:
            output = rms_norm(residual, weights.final_norm, eps) if taps.normed_last_layer else residual
            for column in columns[last]:
                captured[:, column].copy_(output)
        flat = None if captured is None else captured.view(n, -1)
        if flat is not None and taps.projection is not None:
            flat = taps.projection(flat)
        if not want_logits:
            return None, flat
        chosen = residual if inputs.logit_rows is None else residual.index_select(0, inputs.logit_rows)
        return weights.head(rms_norm(chosen, weights.final_norm, eps)), flat

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        table = self._weights.embedding
        if self._group.size == 1:
            return F.embedding(tokens, table).to(self._dtype)
        local = tokens - self._weights.first_token
        own = (local >= 0) & (local < table.shape[0])
        rows = F.embedding(torch.where(own, local, 0), table).to(self._dtype).mul_(own.unsqueeze(1))
        self._group.all_reduce(rows)
        return rows
