"""One rank's share of a model's weights, packed.

Owns tensor names and how each is split; sizes of the shares are parallel's matter, where tensors come from is
weight_sources'. Only the rows or columns a rank needs are read (or made).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.linear import PackedLinear, activation_dtype
from target_service.model.config import ModelConfig
from target_service.model.layers import Heads, LayerWeights, ModelWeights
from target_service.parallel import Span, check_split, kv_share, padded_share, share
from target_service.weight_sources import WeightSource

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a rank's weights are held."""

    rank: int
    size: int
    dtype: torch.dtype
    device: torch.device


def load_weights(
    source: WeightSource,
    config: ModelConfig,
    placement: Placement,
    progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Take, split and pack. progress(layers done, layers) is called after each layer.

    Raises ConfigError for a tensor that is missing, of the wrong shape, quantised or unknown to the decoder,
    and if the heads can't be split over the ranks.
    """
    return _Reader(source, config, placement).read(progress or (lambda done, total: None))


class _Reader:
    def __init__(self, source: WeightSource, config: ModelConfig, placement: Placement) -> None:
        self._source, self._config, self._place = source, config, placement
        self._act = activation_dtype(placement.dtype, placement.device)
        check_split(config.num_heads, config.num_kv_heads, config.vocab_size, placement.size)
        rank, size = placement.rank, placement.size
        self._query = share(config.num_heads, rank, size)
        self._kv = kv_share(config.num_kv_heads, rank, size)
        self._mlp = share(config.intermediate_size, rank, size)
        self._vocab = padded_share(config.vocab_size, rank, size)

    def read(self, progress: Callable[[int, int], None]) -> ModelWeights:
        config = self._config
        layers = []
        for i in range(config.num_layers):
            layers.append(self._layer(i))
            progress(i + 1, config.num_layers)
        embedding = self._rows(EMBEDDING, self._vocab, (config.vocab_size, config.hidden_size))
        # Moved first: a tied head then shares its memory on a GPU.
        embedding = embedding.to(device=self._place.device, dtype=self._place.dtype)
        head_rows = embedding
        if not config.tie_word_embeddings:
            head_rows = self._rows(HEAD, self._vocab, (config.vocab_size, config.hidden_size))
        width = -(-config.vocab_size // self._place.size)
        if len(self._vocab) < width:  # the last ranks' shares are padded, so that all gather the same width
            head_rows = torch.nn.functional.pad(head_rows, (0, 0, 0, width - len(self._vocab)))
        weights = ModelWeights(
            embedding=embedding,
            first_token=self._vocab.start,
            layers=tuple(layers),
            final_norm=self._norm(FINAL_NORM, config.hidden_size),
            head=self._pack(head_rows, None),
            heads=Heads(len(self._query), len(self._kv), config.head_dim),
        )
        unused = frozenset({HEAD}) if config.tie_word_embeddings else frozenset[str]()
        self._source.finish(config.architecture, unused)
        return weights

    def _layer(self, i: int) -> LayerWeights:
        config, d = self._config, self._config.head_dim
        at = f"model.layers.{i}."
        query = Span(self._query.start * d, self._query.stop * d)
        kv = Span(self._kv.start * d, self._kv.stop * d)
        sizes = {
            "q": (config.num_heads * d, query),
            "k": (config.num_kv_heads * d, kv),
            "v": (config.num_kv_heads * d, kv),
        }
        qkv = [
            self._rows(f"{at}self_attn.{n}_proj.weight", part, (total, config.hidden_size))
            for n, (total, part) in sizes.items()
        ]
        qkv_bias = [
            self._rows(f"{at}self_attn.{n}_proj.bias", part, (total,))
            for n, (total, part) in sizes.items()
            if config.qkv_bias
        ]
        mlp_shape = (config.intermediate_size, config.hidden_size)
        gate_up = [self._rows(f"{at}mlp.{n}_proj.weight", self._mlp, mlp_shape) for n in ("gate", "up")]
        gate_up_bias = [
            self._rows(f"{at}mlp.{n}_proj.bias", self._mlp, mlp_shape[:1])
            for n in ("gate", "up")
            if config.mlp_bias
        ]
        return LayerWeights(
            input_norm=self._norm(f"{at}input_layernorm.weight", config.hidden_size),
            qkv=self._pack(torch.cat(qkv), torch.cat(qkv_bias) if qkv_bias else None),
            qk_norm=self._qk_norm(at) if config.qk_norm else None,
            output=self._row_parallel(
                f"{at}self_attn.o_proj", query, config.num_heads * d, bias=config.output_bias
            ),
            post_norm=self._norm(f"{at}post_attention_layernorm.weight", config.hidden_size),
            gate_up=self._pack(torch.cat(gate_up), torch.cat(gate_up_bias) if gate_up_bias else None),
            down=self._row_parallel(
                f"{at}mlp.down_proj", self._mlp, config.intermediate_size, bias=config.mlp_bias
            ),
            window=config.windows[i],
        )

    def _qk_norm(self, at: str) -> torch.Tensor:
        d = self._config.head_dim
        q, k = (self._norm(f"{at}self_attn.{n}_norm.weight", d) for n in ("q", "k"))
        return torch.cat((q.expand(len(self._query), d), k.expand(len(self._kv), d))).contiguous()

    def _row_parallel(self, name: str, part: Span, total: int, *, bias: bool) -> PackedLinear:
        """A matrix split along its inputs; the ranks' products are summed, so one rank alone adds the
        bias."""
        weight = self._columns(f"{name}.weight", part, (self._config.hidden_size, total))
        added = self._rows(f"{name}.bias", None, (self._config.hidden_size,)) if bias else None
        return self._pack(weight, added if self._place.rank == 0 else None)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return PackedLinear(weight, bias, dtype=self._place.dtype, device=self._place.device)

    def _norm(self, name: str, size: int) -> torch.Tensor:
        weight = self._rows(name, None, (size,))
        # Through the model dtype, so that a float32 norm in a bfloat16 model rounds as it does elsewhere.
        return weight.to(self._place.dtype).to(device=self._place.device, dtype=self._act)

    def _rows(self, name: str, part: Span | None, shape: tuple[int, ...]) -> torch.Tensor:
        return self._source.rows(name, part, shape)

    def _columns(self, name: str, part: Span, shape: tuple[int, ...]) -> torch.Tensor:
        return self._source.columns(name, part, shape)
