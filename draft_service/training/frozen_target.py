"""The target as training sees it: whole responses at once, no cache, nothing to learn.

The services' own forward (target_service) is made for serving and is another process's; this is the same
arithmetic for packed rows of text, over the same kernels. Owns which checkpoints it reads: dense Llama-like
decoders (Llama, Mistral, Qwen2, Qwen3). "Output of layer i" is the residual stream after layer i, as the
hidden-state channel carries it; of the last layer it is the state after the final norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from draft_service.drafter_config import positive_integer
from kernels.activation import silu_mul
from kernels.heads import split_heads
from kernels.norm import add_rms_norm, rms_norm
from kernels.rotary import SUPPORTED, RotaryTables, rotary_tables, scaling_type
from specbridge.checkpoint import Checkpoint
from specbridge.errors import ConfigError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_IGNORED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Of config.json, what the forward and a drafter for it need."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position_embeddings: int

    @staticmethod
    def read(config: Mapping[str, Any], row_tokens: int) -> TargetShape:
        """Raises ConfigError for a family, or a feature, that would make our forward another model's."""
        named = config.get("architectures") or [config.get("model_type")]
        if not set(named) & {*ARCHITECTURES, *_TYPES}:
            raise ConfigError(
                f"architecture {named} can't be trained for; supported are {', '.join(ARCHITECTURES)}"
            )
        if config.get("quantization_config"):
            raise ConfigError(
                "the target's checkpoint is quantised: train from plain bfloat16 or float weights"
            )
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ConfigError(f"hidden_act {config['hidden_act']!r} is not supported; supported is silu")
        window = config.get("sliding_window")
        slides = config.get("use_sliding_window", "MistralForCausalLM" in named)
        if slides and window is not None and int(window) < row_tokens:
            raise ConfigError(
                f"the target's layers slide over {window} tokens, less than --row-tokens {row_tokens}: "
                f"give at most {window}"
            )
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = scaling_type(rope)
        if kind not in SUPPORTED or any(isinstance(v, Mapping) for v in rope.values()):
            raise ConfigError(f"rope type {kind!r} of the target is not supported; supported are {SUPPORTED}")
        where = "the target's config.json"
        hidden = positive_integer(config, "hidden_size", where)
        heads = positive_integer(config, "num_attention_heads", where)
        wide = 128 if "Qwen3ForCausalLM" in named else hidden // heads
        return TargetShape(
            hidden_size=hidden,
            num_layers=positive_integer(config, "num_hidden_layers", where),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or wide),
            intermediate_size=positive_integer(config, "intermediate_size", where),
            vocab_size=positive_integer(config, "vocab_size", where),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rope_scaling=None if kind == "default" else dict(rope),
            max_position_embeddings=positive_integer(config, "max_position_embeddings", where),
        )

    def tables(self, positions: int, dtype: torch.dtype, device: torch.device) -> RotaryTables:
        """Rotary tables for positions [0, positions)."""
        return rotary_tables(
            head_dim=self.head_dim,
            theta=self.rope_theta,
            max_position=positions,
            scaling=self.rope_scaling,
            trained_position=self.max_position_embeddings,
            dtype=dtype,
            device=device,
        )


@dataclass(frozen=True, slots=True)
class Documents:
    """Which tokens of rows [rows, length] belong together, in the form the device's attention wants.

    mask: bool [rows, 1, length, length], who sees whom. bounds: int32 [documents + 1], first token of each
    document counted over all rows, for flash attention. One of the two.
    """

    mask: torch.Tensor | None = None
    bounds: torch.Tensor | None = None

    @staticmethod
    def masked(numbers: torch.Tensor) -> Documents:
        """numbers [rows, length]: the document each token belongs to, in ascending order."""
        length = numbers.shape[1]
        same = numbers.unsqueeze(2) == numbers.unsqueeze(1)
        causal = torch.ones(length, length, dtype=torch.bool, device=numbers.device).tril_()
        return Documents(mask=(same & causal).unsqueeze(1))


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """features [rows, length, taps * hidden]; final [rows, length, hidden], normed: what the head reads; None
    unless asked for."""

    features: torch.Tensor
    final: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class FrozenTarget:
    """A target's weights on one device, in `dtype`.

    embedding, head: [vocab, hidden], one tensor if they are tied. row_tokens: longest row asked for.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, row_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape = TargetShape.read(checkpoint.config, row_tokens)
        self.dtype, self.device = dtype, device
        self._tables = shape.tables(row_tokens, dtype, device)
        left = {n for n in checkpoint.names() if not n.endswith(_IGNORED)}
        prefix = "model." if "model.embed_tokens.weight" in left else ""

        def optional(name: str) -> torch.Tensor | None:
            if name not in left:
                return None
            left.discard(name)
            return checkpoint.get(name).to(device, dtype)

        def take(name: str) -> torch.Tensor:
            tensor = optional(name)
            return checkpoint.get(name).to(device, dtype) if tensor is None else tensor

        def stacked(names: Sequence[str], ending: str) -> torch.Tensor | None:
            found = [t for t in (optional(n + ending) for n in names) if t is not None]
            return torch.cat(found) if found else None

        def layer(number: int) -> _Layer:
            at = f"{prefix}layers.{number}."
            qkv = [f"{at}self_attn.{p}_proj" for p in "qkv"]
            gate_up = [f"{at}mlp.{p}_proj" for p in ("gate", "up")]
            q_norm = optional(f"{at}self_attn.q_norm.weight")
            norms = None
            if q_norm is not None:
                k_norm = take(f"{at}self_attn.k_norm.weight")
                norms = torch.cat((q_norm.expand(shape.num_heads, -1), k_norm.expand(shape.num_kv_heads, -1)))
            return _Layer(
                input_norm=take(f"{at}input_layernorm.weight"),
                qkv=torch.cat([take(n + ".weight") for n in qkv]),
                qkv_bias=stacked(qkv, ".bias"),
                qk_norm=norms,
                o=take(f"{at}self_attn.o_proj.weight"),
                o_bias=optional(f"{at}self_attn.o_proj.bias"),
                post_norm=take(f"{at}post_attention_layernorm.weight"),
                gate_up=torch.cat([take(n + ".weight") for n in gate_up]),
                gate_up_bias=stacked(gate_up, ".bias"),
                down=take(f"{at}mlp.down_proj.weight"),
                down_bias=optional(f"{at}mlp.down_proj.bias"),
            )

        self.embedding = take(prefix + "embed_tokens.weight")
        head = optional("lm_head.weight")
        if head is None and not checkpoint.config.get("tie_word_embeddings", True):
            raise ConfigError(
                f"{checkpoint.folder} says tie_word_embeddings: false, but has no lm_head.weight"
            )
        tied = head is None or checkpoint.config.get("tie_word_embeddings", False)
        self.head = self.embedding if tied or head is None else head
        self._norm = take(prefix + "norm.weight")
        self._layers = tuple(layer(i) for i in range(shape.num_layers))
        if left:
            raise ConfigError(
                f"{checkpoint.folder} holds tensors this build does not use (of another family?): "
                f"{', '.join(sorted(left)[:5])}{' ...' if len(left) > 5 else ''}"
            )

    @torch.no_grad()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        documents: Documents,
        taps: Sequence[int],
        *,
        want_final: bool,
    ) -> TargetOutput:
        """tokens, positions int64 [rows, length]. Layers that nothing asks for are not run."""
        shape, eps = self.shape, self.shape.rms_norm_eps
        rows, length = tokens.shape
        last = shape.num_layers - 1
        cos, sin = self._tables.rows(positions.flatten())
        columns: dict[int, list[int]] = {}
        for column, tap in enumerate(taps):
            columns.setdefault(tap, []).append(column)
        features = torch.empty(
            tokens.numel(), len(taps), shape.hidden_size, dtype=self.dtype, device=self.device
        )
        residual = F.embedding(tokens.flatten(), self.embedding)
        normed = rms_norm(residual, self._layers[0].input_norm, eps)
        keys, values = (
            residual.new_empty(tokens.numel(), shape.num_kv_heads, shape.head_dim) for _ in range(2)
        )
        depth = shape.num_layers if want_final else 1 + max(taps)
        for number, layer in enumerate(self._layers[:depth]):
            q = split_heads(
                F.linear(normed, layer.qkv, layer.qkv_bias), cos, sin,
                heads=shape.num_heads, kv_heads=shape.num_kv_heads, k_out=keys, v_out=values,
                qk_norm=layer.qk_norm, eps=eps,
            )  # fmt: skip
            attended = self._attend(q, keys, values, documents, rows).reshape(tokens.numel(), -1)
            delta = F.linear(attended, layer.o, layer.o_bias)
            normed = add_rms_norm(delta, residual, layer.post_norm, eps)
            delta = F.linear(
                silu_mul(F.linear(normed, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias
            )
            following = self._norm if number == last else self._layers[number + 1].input_norm
            normed = add_rms_norm(delta, residual, following, eps)
            for column in columns.get(number, ()):
                features[:, column].copy_(normed if number == last else residual)
        final = normed.view(rows, length, -1) if want_final else None
        return TargetOutput(features.view(rows, length, -1), final)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, rows: int
    ) -> torch.Tensor:
        """q [n, heads, d], k, v [n, kv_heads, d] -> [n, heads, d], n tokens in `rows` rows."""
        if documents.bounds is not None:
            length = len(q) // rows
            out = torch.ops.aten._flash_attention_forward(
                q.contiguous(), k, v, documents.bounds, documents.bounds, length, length, 0.0, True, False,
                scale=self.shape.head_dim**-0.5,
            )  # fmt: skip
            return out[0]
        split_q, split_k, split_v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            split_q,
            split_k,
            split_v,
            attn_mask=documents.mask,
            scale=self.shape.head_dim**-0.5,
            enable_gqa=True,
        )
        return out.transpose(1, 2).flatten(0, 1)
