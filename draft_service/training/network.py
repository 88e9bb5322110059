"""The drafter while it is trained: flat float32 weights, the block pass with gradients, and its checkpoint.

All matrices lie in one tensor and all norms in another, so that the optimiser, the gradient's sum over ranks
and the cast to the arithmetic's dtype are each one operation. Owns the pass (draft_service.drafter's, which
tests hold it against), the first weights, and the z-lab layout written out. Does not own the loss.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from draft_service.drafter_config import TargetFacts
from draft_service.drafter_layouts import parse_config
from draft_service.drafter_weights import load_weights
from draft_service.training.attention import Visibility, block_attention
from draft_service.training.frozen_target import FrozenTarget, TargetShape
from kernels.rotary import apply_rotary
from specbridge.checkpoint import Checkpoint, replacing
from specbridge.errors import ConfigError

INITIAL_STD = 0.02


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """A drafter for a target of this shape; heads and positions are the target's. rms_norm_eps: 0 for the
    target's."""

    target: TargetShape
    layers: int
    block_size: int
    taps: tuple[int, ...]
    intermediate_size: int
    mask_token_id: int
    rms_norm_eps: float = 0.0

    @property
    def eps(self) -> float:
        return self.rms_norm_eps or self.target.rms_norm_eps

    @property
    def horizon(self) -> int:
        return self.block_size - 1

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Name -> [out, in], of one stacked product each."""
        t = self.target
        hidden, inner = t.hidden_size, t.num_heads * t.head_dim
        wide = (t.num_heads + 2 * t.num_kv_heads) * t.head_dim
        shapes = {"fc": (hidden, len(self.taps) * hidden)}
        for i in range(self.layers):
            shapes |= {
                f"{i}.qkv": (wide, hidden),
                f"{i}.o": (hidden, inner),
                f"{i}.gate_up": (2 * self.intermediate_size, hidden),
                f"{i}.down": (hidden, self.intermediate_size),
            }
        return shapes

    def norms(self) -> dict[str, int]:
        """Name -> width."""
        t = self.target
        sizes = {"hidden_norm": t.hidden_size, "norm": t.hidden_size}
        for i in range(self.layers):
            sizes |= {f"{i}.input_norm": t.hidden_size, f"{i}.post_norm": t.hidden_size}
            sizes |= {f"{i}.q_norm": t.head_dim, f"{i}.k_norm": t.head_dim}
        return sizes

    def config(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """config.json of the z-lab layout."""
        t = self.target
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": t.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": t.num_heads,
            "num_key_value_heads": t.num_kv_heads,
            "head_dim": t.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": t.vocab_size,
            "rms_norm_eps": self.eps,
            "rope_theta": t.rope_theta,
            **({"rope_scaling": dict(t.rope_scaling)} if t.rope_scaling else {}),
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": True,
            "max_position_embeddings": t.max_position_embeddings,
            "torch_dtype": dtype,
            "num_target_layers": t.num_layers,
            "block_size": self.block_size,
            "dflash_config": {
                "target_layer_ids": list(self.taps),
                "mask_token_id": self.mask_token_id,
                "block_size": self.block_size,
            },
        }

    @staticmethod
    def of(checkpoint: Checkpoint, target: Checkpoint, shape: TargetShape) -> DrafterShape:
        """Of a drafter that training can go on with. Raises ConfigError naming what it can't do."""
        facts = TargetFacts.read(target.config, target.folder)
        config = parse_config(checkpoint.config, facts)
        ours = DrafterShape(
            shape, config.num_layers, config.block_size, config.target_layer_ids, config.intermediate_size,
            config.mask_token_id, config.rms_norm_eps if config.rms_norm_eps != shape.rms_norm_eps else 0.0,
        )  # fmt: skip
        again = parse_config(ours.config(), facts)
        for name in again.__dataclass_fields__:
            if name not in ("layout", "max_position_embeddings") and getattr(again, name) != getattr(
                config, name
            ):
                raise ConfigError(
                    f"--init {checkpoint.folder}: its {name} is {getattr(config, name)!r}; training makes "
                    f"drafters with {getattr(again, name)!r} for this target"
                )
        return ours


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """A batch's blocks on the device. anchors, starts, ends int64 [rows, blocks], as in batches.Batch;
    positions [rows, length]: of the tokens in their responses."""

    tokens: torch.Tensor
    positions: torch.Tensor
    anchors: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor


class Network:
    """A drafter's weights and pass.

    matrices, norms: fp32 (fp64 for fp64 arithmetic), flat, in the order of DrafterShape's names; what is
    trained. dtype: of the arithmetic. attention: "dense" or "split". max_position: positions a row reaches.
    """

    def __init__(
        self,
        shape: DrafterShape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_position: int,
        attention: str,
    ) -> None:
        self.shape, self.dtype, self.device, self.attention = shape, dtype, device, attention
        master = torch.float64 if dtype == torch.float64 else torch.float32
        self._matrices, self._norms = shape.matrices(), shape.norms()
        self.matrices = torch.zeros(sum(map(math.prod, self._matrices.values())), dtype=master, device=device)
        self.norms = torch.ones(sum(self._norms.values()), dtype=master, device=device)
        for tensor in self.parameters:
            tensor.requires_grad_()
        self._tables = shape.target.tables(max_position + shape.block_size, dtype, device)

    @property
    def parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.matrices, self.norms

    @property
    def count(self) -> int:
        """Weights in all."""
        return self.matrices.numel() + self.norms.numel()

    def views(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Every weight by name, in `dtype` (default: the arithmetic's); gradients reach the flat tensors."""
        wanted = dtype or self.dtype
        flat = self.matrices.to(wanted).split([math.prod(s) for s in self._matrices.values()])
        weights = {n: part.view(s) for (n, s), part in zip(self._matrices.items(), flat, strict=True)}
        norms = self.norms.to(wanted).split(list(self._norms.values()))
        return weights | dict(zip(self._norms, norms, strict=True))

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Normal with std 0.02; what adds to the residual stream, less with more layers; norms are one."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.views(self.matrices.dtype).items():
            if weight.dim() == 2:
                std = INITIAL_STD
                if name.endswith((".o", ".down")):
                    std /= math.sqrt(2 * self.shape.layers)
                weight.copy_(torch.empty(weight.shape).normal_(0.0, std, generator=generator))

    @torch.no_grad()
    def load(self, draft: Checkpoint, target: Checkpoint) -> None:
        """The weights of a checkpoint of this shape (DrafterShape.of)."""
        facts = TargetFacts.read(target.config, target.folder)
        loaded = load_weights(draft, target, parse_config(draft.config, facts), dtype=self.matrices.dtype)
        own = self.views(self.matrices.dtype)
        for name in ("fc", "hidden_norm", "norm"):
            own[name].copy_(getattr(loaded, name))
        for i, layer in enumerate(loaded.layers):
            for name in ("qkv", "o", "gate_up", "down", "input_norm", "post_norm", "q_norm", "k_norm"):
                own[f"{i}.{name}"].copy_(getattr(layer, name))

    def forward(self, target: FrozenTarget, features: torch.Tensor, blocks: BlockInputs) -> torch.Tensor:
        """features [rows, length, taps * hidden] of the target -> hidden states of the predicted rows,
        normed, [rows, blocks, horizon, hidden]: what the target's head reads.
        """
        shape, t = self.shape, self.shape.target
        eps, group = shape.eps, t.num_heads // t.num_kv_heads
        weights = self.views()
        (rows, length), count, size = blocks.tokens.shape, blocks.anchors.shape[1], shape.block_size

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            # The weight apart, as served: rounded before it; and its gradient is a plain sum over rows, where
            # the fused op's backward has few of a GPU's units at work on a head's 64 or 128 columns.
            return F.rms_norm(x, (x.shape[-1],), None, eps) * weights[name]

        context = norm(F.linear(features, weights["fc"]), "hidden_norm")
        context_turn = self._turn(blocks.positions)
        first = blocks.positions.gather(1, blocks.anchors)
        own_turn = self._turn(first.unsqueeze(-1) + torch.arange(size, device=self.device))
        visible = Visibility.make(
            self.attention, blocks.starts, blocks.anchors, length, group * size, self.dtype
        )
        ids = torch.full((rows, count, size), shape.mask_token_id, device=self.device)
        ids[:, :, 0] = blocks.tokens.gather(1, blocks.anchors)
        residual = F.embedding(ids, target.embedding)
        widths = (t.num_heads * t.head_dim, t.num_kv_heads * t.head_dim, t.num_kv_heads * t.head_dim)
        for i in range(shape.layers):
            q_norm, k_norm = f"{i}.q_norm", f"{i}.k_norm"
            matrix = weights[f"{i}.qkv"]
            q, k, v = F.linear(norm(residual, f"{i}.input_norm"), matrix).split(widths, -1)
            past_k, past_v = F.linear(context, matrix[widths[0] :]).split(widths[1:], -1)
            q, k, past_k = (
                apply_rotary(norm(x.unflatten(-1, (-1, t.head_dim)), name), *turn)
                for x, name, turn in (
                    (q, q_norm, own_turn),
                    (k, k_norm, own_turn),
                    (past_k, k_norm, context_turn),
                )
            )
            # [rows, blocks, size, kv_heads, group, d] -> [rows, kv_heads, blocks, group * size, d]
            q = q.unflatten(3, (t.num_kv_heads, group)).permute(0, 3, 1, 4, 2, 5).flatten(3, 4)
            attended = block_attention(
                q,
                past_k.transpose(1, 2),
                past_v.unflatten(-1, (-1, t.head_dim)).transpose(1, 2),
                k.permute(0, 3, 1, 2, 4),
                v.unflatten(-1, (-1, t.head_dim)).permute(0, 3, 1, 2, 4),
                visible,
            )
            attended = attended.unflatten(3, (group, size)).permute(0, 2, 4, 1, 3, 5).flatten(3)
            residual = residual + F.linear(attended, weights[f"{i}.o"])
            gate, up = F.linear(norm(residual, f"{i}.post_norm"), weights[f"{i}.gate_up"]).chunk(2, -1)
            residual = residual + F.linear(F.silu(gate) * up, weights[f"{i}.down"])
        return norm(residual[:, :, 1:], "norm")

    def _turn(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [..., 1, head_dim] of positions [...]."""
        cos, sin = self._tables.rows(positions.flatten())
        return cos.view(*positions.shape, 1, -1), sin.view(*positions.shape, 1, -1)

    @torch.no_grad()
    def tensors(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
        """The z-lab layout's tensors, on the CPU."""
        t, own = self.shape.target, self.views(dtype)
        heads = (t.num_heads * t.head_dim, t.num_kv_heads * t.head_dim, t.num_kv_heads * t.head_dim)
        found = {f"{n}.weight": own[n] for n in ("fc", "hidden_norm", "norm")}
        for i in range(self.shape.layers):
            at, attention, mlp = f"layers.{i}.", f"layers.{i}.self_attn.", f"layers.{i}.mlp."
            found[at + "input_layernorm.weight"] = own[f"{i}.input_norm"]
            found[at + "post_attention_layernorm.weight"] = own[f"{i}.post_norm"]
            for name, part in zip("qkv", own[f"{i}.qkv"].split(heads), strict=True):
                found[f"{attention}{name}_proj.weight"] = part
            found[attention + "o_proj.weight"] = own[f"{i}.o"]
            found[attention + "q_norm.weight"], found[attention + "k_norm.weight"] = (
                own[f"{i}.q_norm"],
                own[f"{i}.k_norm"],
            )
            found[mlp + "gate_proj.weight"], found[mlp + "up_proj.weight"] = own[f"{i}.gate_up"].chunk(2)
            found[mlp + "down_proj.weight"] = own[f"{i}.down"]
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in found.items()}

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """config.json and model.safetensors of the z-lab layout; the weights appear whole or not at all."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "model.safetensors") as partial:
            save_file(self.tensors(dtype), partial, metadata={"format": "pt"})
        text = json.dumps(self.shape.config(str(dtype).removeprefix("torch.")), indent=1)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
