"""DFlash: the block-diffusion drafter's two operations over paged context.

    append   context features (the target's tapped hidden states of committed tokens) -> K and V of every
             layer, written into pages. Once per committed token, never undone.
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

from draft_service.block_attention import (
    AttentionSetup,
    BlockAttention,
    BlockBatch,
    ContextPages,
    SplitBlocks,
)
from draft_service.drafter_config import DrafterConfig
from draft_service.drafter_weights import DrafterWeights, LayerWeights
from draft_service.ragged_blocks import BlockRoom, RaggedBlocks, upload
from draft_service.staging import Staging
from kernels import cuda
from kernels.activation import silu_mul
from kernels.append import append_context
from kernels.linear import PackedLinear, activation_dtype
from kernels.norm import add_rms_norm, rms_norm
from kernels.rotary import SUPPORTED, rotary_tables, scaling_type
from specbridge.channel.base import Projection
from specbridge.errors import ConfigError
from specbridge.rounds import Footprint

__all__ = ["APPEND_VARIANTS", "BlockBatch", "ContextPages", "Drafter", "Reading"]

APPEND_VARIANTS = ("fused", "sequential")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a checkpoint's configuration says about the block's rows, and may say wrongly."""

    first_row: int
    mask_token_id: int


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear


class Drafter:
    """One drafter on one device.

    window: attend to the last `window` context rows only (None: all); positions stay absolute.
    append: "fused" (one stacked K/V product for all layers) or "sequential" (layer by layer); equal results.
    max_position: positions a session can reach, the block's own rows included. projected: features come as
    hidden_norm(fc(taps)) already, and `projection` is what somebody else has to apply for that.
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
        projected: bool = False,
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
        # With its number, as torch.cuda.set_device wants it.
        self.device = torch.device("cuda:0" if str(device) == "cuda" else device)
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

        self.projection: Projection | None = None
        if projected:
            matrix, norm = (w.to("cpu", dtype) for w in (weights.fc, weights.hidden_norm))
            self.projection = Projection(matrix, norm, config.rms_norm_eps)
        else:
            self._fc = pack(weights.fc)
            self._hidden_norm = place(weights.hidden_norm)
        self._norm = place(weights.norm)
        # Looked up a few rows at a time: kept in the model's dtype, widened row by row.
        self._embedding = weights.embedding.to(self.device, dtype)
        # Of the target's own head there is one copy, where packing leaves it as it is.
        head, self.head_ids = weights.head, weights.target_ids
        if self.head_ids is not None:
            # In the order of their ids, which decides between equal marginals.
            order = self.head_ids.argsort()
            head, self.head_ids = head[order], self.head_ids[order].to(self.device)
        self._head = pack(self._embedding if head is weights.embedding else head)
        self._layers = tuple(
            _Layer(
                input_norm=place(layer.input_norm),
                post_norm=place(layer.post_norm),
                qkv=pack(layer.qkv, layer.qkv_bias),
                o=pack(layer.o, layer.o_bias),
                gate_up=pack(layer.gate_up),
                down=pack(layer.down),
            )
            for layer in weights.layers
        )
        self._k_norms = torch.stack([place(layer.k_norm) for layer in weights.layers])
        q_norms = [place(layer.q_norm).expand(config.num_heads, -1) for layer in weights.layers]
        self.attention = AttentionSetup(
            config=config,
            qk_norms=tuple(
                torch.cat((q, k.expand(config.num_kv_heads, -1)))
                for q, k in zip(q_norms, self._k_norms, strict=True)
            ),
            rotary=self._rotary,
            window=window,
            dtype=self.dtype,
            device=self.device,
        )
        parts = [_kv_part(layer, config.num_heads * config.head_dim) for layer in weights.layers]
        if append == "fused":
            biases = [bias for _, bias in parts if bias is not None]
            parts = [(torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None)]
        # One product for all layers, or one a layer.
        self._context_kv = tuple(pack(weight, bias) for weight, bias in parts)
        inner = [p for layer in self._layers for p in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        self.pass_bytes = _bytes([*inner, self._head], dtype)
        """Of the matrices that a block pass reads, as the model's dtype stores them."""
        first = () if projected else (self._fc,)
        self.weight_bytes = self.pass_bytes + _bytes([*first, *self._context_kv], dtype)
        """Of all matrices, likewise."""
        if weights.head is not weights.embedding:
            self.weight_bytes += self._embedding.nbytes
        self.footprint = Footprint(
            weight_bytes=sum(p.nbytes for p in (*inner, self._head)),
            products_per_row=sum(p.products for p in (*inner, self._head)),
            kv_bytes_per_token=self.bytes_per_token,
            num_kv_heads=config.num_kv_heads,
            append_weight_bytes=sum(p.nbytes for p in (*first, *self._context_kv)),
        )
        """What a block pass reads, as it is held."""
        self._staging = Staging(self.device)

    def reread(self, reading: Reading) -> Drafter:
        """The same weights under another reading of the block; shares everything, context pages included."""
        other = copy.copy(self)
        other.config = replace(self.config, first_row=reading.first_row, mask_token_id=reading.mask_token_id)
        return other

    def trimmed(self, rows: int) -> Drafter:
        """The same weights over the first `rows` rows of a block; shares everything, context pages included.

        Other rows than of a whole block come out: rows look at each other both ways.
        """
        other = copy.copy(self)
        other.config = replace(self.config, block_size=rows)
        other.attention = replace(self.attention, config=other.config)
        return other

    @property
    def capturable(self) -> bool:
        """Whether all it launches are kernels, so that CUDA graphs can hold it: the torch references of
        some read back what they work on.
        """
        return self.device.type == "cuda" and cuda.available() and self.dtype in cuda.DTYPES

    @property
    def feature_width(self) -> int:
        """Elements of a context feature as `append` takes it."""
        return self.config.feature_size if self.projection is None else self.config.hidden_size

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

        features [n, feature_width] of any float dtype, on any device; positions, slots int64 [n] on the CPU,
        slots distinct. On a GPU this only tells the current stream what to do: with features that are there
        already, the host waits for nothing.
        """
        places = self._staging.send(torch.stack((positions, slots)))
        self.append_at(pages, features.to(self.device, self.dtype), places)

    @torch.inference_mode()
    def append_at(self, pages: ContextPages, features: torch.Tensor, places: torch.Tensor) -> None:
        """`append` of features in the drafter's dtype, with everything on its device.

        places int32 [2, n]: positions, and slots (-1: the row is padding).
        """
        c = self.config
        context = features
        if self.projection is None:
            context = rms_norm(self._fc(features), self._hidden_norm, c.rms_norm_eps)
        each = c.num_layers // len(self._context_kv)
        for number, context_kv in enumerate(self._context_kv):
            layers = slice(number * each, (number + 1) * each)
            append_context(
                context_kv(context),
                positions=places[0],
                slots=places[1],
                k_norms=self._k_norms[layers],
                rotary=self._rotary,
                k_pages=pages.k[layers],
                v_pages=pages.v[layers],
                eps=c.rms_norm_eps,
                value_scale=c.value_scale,
            )

    # ---- block pass --------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(
        self, pages: ContextPages, batch: BlockBatch, depth: int | None = None, *, own_ids: bool = False
    ) -> torch.Tensor:
        """Logits of the `depth` (default: horizon) positions after each anchor: fp32 [sessions, depth,
        vocab].

        Ids that a reduced head can't name get -inf; own_ids: they have no column, and column i is the token
        head_ids[i]. Row d - 1 is the marginal of depth d, position base + d.
        """
        c = self.config
        depth = c.horizon if depth is None else min(depth, c.horizon)
        tokens = torch.full((len(batch), c.block_size), c.mask_token_id)
        tokens[:, 0] = torch.tensor(batch.anchors, dtype=torch.int64)
        attention: BlockAttention
        if self.device.type == "cpu":
            attention = SplitBlocks(self.attention, pages, batch)
        else:
            who = upload(batch, block_size=c.block_size, page_size=pages.page_size, device=self.device)
            room = BlockRoom(self.attention, len(batch), pages.page_size)
            attention = RaggedBlocks(self.attention, pages, who, room)
        found = self.forward(tokens.view(-1).to(self.device), attention, depth, own_ids=own_ids)
        return found.float()

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, attention: BlockAttention, depth: int, *, own_ids: bool = False
    ) -> torch.Tensor:
        """The pass over `attention.sessions` blocks: logits [sessions, depth, vocab] in the model's dtype, or
        wider where they are scaled. own_ids: as in `propose`.

        tokens: integers [sessions * block_size] on the device, of each session its anchor and then mask ids.
        """
        c = self.config
        sessions, rows = attention.sessions, c.block_size
        residual = self._embed(tokens)
        normed = rms_norm(residual, self._layers[0].input_norm, c.rms_norm_eps)
        following = [*(layer.input_norm for layer in self._layers[1:]), self._norm]
        for i, (layer, norm_after) in enumerate(zip(self._layers, following, strict=True)):
            out = layer.o(attention(i, layer.qkv(normed)))
            normed = add_rms_norm(out, residual, layer.post_norm, c.rms_norm_eps)
            hidden = layer.down(silu_mul(layer.gate_up(normed)))
            normed = add_rms_norm(hidden, residual, norm_after, c.rms_norm_eps)
        # The head, as wide as the vocabulary, runs on the predicted rows only.
        wanted = normed.view(sessions, rows, -1)[:, c.first_row : c.first_row + depth]
        logits = self._logits(wanted.reshape(sessions * depth, -1))
        if self.head_ids is not None and not own_ids:
            full = logits.new_full((len(logits), c.vocab_size), float("-inf"))
            logits = full.index_copy_(1, self.head_ids, logits)
        return logits.view(sessions, depth, -1)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._embedding.index_select(0, ids).to(self.dtype)
        return rows if self.config.embedding_scale == 1.0 else rows * self.config.embedding_scale

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        c = self.config
        logits = self._head(hidden)
        if c.output_multiplier != 1.0 or c.logit_softcap is not None:
            logits = logits if logits.dtype == torch.float64 else logits.float()
        if c.output_multiplier != 1.0:
            logits = logits * c.output_multiplier
        if c.logit_softcap is not None:
            logits = torch.tanh(logits / c.logit_softcap) * c.logit_softcap
        return logits


def _bytes(products: Sequence[PackedLinear], dtype: torch.dtype) -> int:
    return sum(p.products for p in products) * dtype.itemsize


def _kv_part(layer: LayerWeights, q_size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The K and V rows of a layer's stacked projection, and of its bias."""
    return layer.qkv[q_size:], None if layer.qkv_bias is None else layer.qkv_bias[q_size:]
