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
from kernels.attention import PagedContext, split_attention
from kernels.norm import add_rms_norm, rms_norm
from kernels.rotary import apply_rotary
from target_service.model.batch import StepInputs
from target_service.model.config import ModelConfig
from target_service.model.layers import ModelWeights
from target_service.parallel import Group


@dataclass(frozen=True, slots=True)
class Taps:
    """Layers whose output is captured, in the order of the columns. normed_last_layer: the last layer's
    output is taken after the final norm (the z-lab layout's convention) instead of before it."""

    layer_ids: tuple[int, ...] = ()
    normed_last_layer: bool = False


class Decoder:
    """A rank's decoder. Memory is given per call: staging [2 * layers, max_rows, kv_heads, d] and pages, 2 *
    layers tensors [pages, page_size, kv_heads, d]; both hold K of a layer, then its V."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, group: Group, dtype: torch.dtype) -> None:
        self._config, self._weights, self._group = config, weights, group
        self._dtype = dtype
        self._scale = config.head_dim**-0.5
        self._nothing = torch.empty(0)

    def forward(
        self,
        inputs: StepInputs,
        staging: torch.Tensor,
        pages: Sequence[torch.Tensor],
        taps: Taps,
        *,
        want_logits: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns logits fp32 [k, vocab] (on rank 0, if any are wanted; else None) and taps [n, num_taps *
        hidden] in the activation dtype (None without taps). Fills staging[:, :n]."""
        config, weights = self._config, self._weights
        eps, n = config.rms_norm_eps, inputs.rows
        heads = weights.heads
        qk_heads, kv_heads, d = heads.query + heads.key_value, heads.key_value, heads.dim
        reduce = self._group.all_reduce if self._group.size > 1 else None
        captured = None
        columns: dict[int, list[int]] = {}
        if taps.layer_ids:
            captured = torch.empty(
                n, len(taps.layer_ids), config.hidden_size, dtype=self._dtype, device=inputs.tokens.device
            )
            for column, layer_id in enumerate(taps.layer_ids):
                columns.setdefault(layer_id, []).append(column)
        staged, nothing = staging.narrow(1, 0, n).unbind(0), self._nothing
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
            qkv = layer.qkv(x).view(n, qk_heads + kv_heads, d)
            qk = qkv.narrow(1, 0, qk_heads)
            if layer.qk_norm is not None:
                qk = rms_norm(qk, layer.qk_norm, eps)
            qk = apply_rotary(qk, inputs.cos, inputs.sin)
            k, v = staged[2 * number], staged[2 * number + 1]
            k.copy_(qk.narrow(1, heads.query, kv_heads))
            v.copy_(qkv.narrow(1, qk_heads, kv_heads))
            context = PagedContext(pages[2 * number], pages[2 * number + 1], nothing, nothing)
            attended = self._attend(qk.narrow(1, 0, heads.query), k, v, context, inputs, layer.window)
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
        if not want_logits:
            return None, flat
        chosen = residual if inputs.logit_rows is None else residual.index_select(0, inputs.logit_rows)
        logits = self._group.gather_columns(weights.head(rms_norm(chosen, weights.final_norm, eps)).float())
        return (None if logits is None else logits.narrow(1, 0, config.vocab_size)), flat

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        table = self._weights.embedding
        if self._group.size == 1:
            return F.embedding(tokens, table).to(self._dtype)
        local = tokens - self._weights.first_token
        own = (local >= 0) & (local < table.shape[0])
        rows = F.embedding(torch.where(own, local, 0), table).to(self._dtype).mul_(own.unsqueeze(1))
        self._group.all_reduce(rows)
        return rows

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        context: PagedContext,
        inputs: StepInputs,
        window: int | None,
    ) -> torch.Tensor:
        """q [n, heads, d], k, v [n, kv_heads, d] -> [n, heads * d]."""
        n, width = q.shape[0], q.shape[1] * q.shape[2]
        whole = len(inputs.groups) == 1
        out = self._nothing if whole else q.new_empty(n, width)
        for group in inputs.groups:
            count = group.sessions * group.rows
            if group.gather is None:
                parts = [x.narrow(0, group.first_row, count) for x in (q, k, v)]
            else:
                parts = [x.index_select(0, group.gather) for x in (q, k, v)]
            gq, gk, gv = (x.view(group.sessions, group.rows, x.shape[1], x.shape[2]) for x in parts)
            result = split_attention(gq, gk, gv, context, None, scale=self._scale, plan=group.plans[window])
            result = result.reshape(count, width)
            if group.kept is not None:
                result = result.index_select(0, group.kept)
            if whole and group.gather is None:
                return result
            if whole:
                out = q.new_empty(n, width)
            if group.scatter is None:
                out.narrow(0, group.first_row, count).copy_(result)
            else:
                out.index_copy_(0, group.scatter, result)
        return out
