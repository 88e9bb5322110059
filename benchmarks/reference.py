"""The published algorithms once more, on Hugging Face transformers, as the yardstick for acceptance.

DFlash's drafter as published (plain concatenated keys and values, no pages, no fused append) and DDTree's
best-first heap. Greedy decoding is deterministic, so acceptance is replayed: transformers' own `generate`
gives the text once, one forward over it gives every hidden state and every greedy choice, and each round is
then walked as the reference loop would walk it. Single sequence, slow, readable; shares no code with the
services.
"""

from __future__ import annotations

import heapq
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class ReferenceDrafter:
    """DFlash in the z-lab layout, full attention layers. `marginals` runs one block pass from scratch."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        inner = self.config.get("dflash_config", {})
        self.block_size: int = inner.get("block_size") or self.config["block_size"]
        self.taps: list[int] = inner["target_layer_ids"]
        self.mask_id: int = inner["mask_token_id"]
        self.weights: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(str(path), "pt") as shard:
                for name in shard.keys():  # noqa: SIM118  (a safe_open is no dict)
                    self.weights[name] = shard.get_tensor(name).to(dtype)

    def project(self, target_hidden: torch.Tensor) -> torch.Tensor:
        """target_hidden [rows, taps * H] → context features [rows, H]."""
        w = self.weights
        return _norm(target_hidden @ w["fc.weight"].T, w["hidden_norm.weight"], self.config["rms_norm_eps"])

    def marginals(self, context: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """context [C, H] (projected), block [B, H] (embedded anchor and masks) → hidden states [B-1, H]."""
        w, c = self.weights, self.config
        eps, d = c["rms_norm_eps"], c["head_dim"]
        heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
        rows, size = context.shape[0], block.shape[0]
        steps = torch.arange(0, d, 2, dtype=torch.float64) / d
        angles = torch.arange(rows + size, dtype=torch.float64)[:, None] * (c["rope_theta"] ** -steps)[None]
        cos = torch.cat((angles, angles), -1).cos().to(block.dtype)
        sin = torch.cat((angles, angles), -1).sin().to(block.dtype)
        h = block
        for i in range(c["num_hidden_layers"]):
            p = f"layers.{i}."
            x = _norm(h, w[p + "input_layernorm.weight"], eps)
            both = torch.cat(
                (context, x)
            )  # the context takes the same K and V projections, without the input norm
            q = (x @ w[p + "self_attn.q_proj.weight"].T).view(size, heads, d)
            k = (both @ w[p + "self_attn.k_proj.weight"].T).view(rows + size, kv, d)
            v = (both @ w[p + "self_attn.v_proj.weight"].T).view(rows + size, kv, d)
            q = _rotate(
                _norm(q, w[p + "self_attn.q_norm.weight"], eps).transpose(0, 1), cos[rows:], sin[rows:]
            )
            k = _rotate(_norm(k, w[p + "self_attn.k_norm.weight"], eps).transpose(0, 1), cos, sin)
            k, v = (t.repeat_interleave(heads // kv, 0) for t in (k, v.transpose(0, 1)))
            weights = (q @ k.transpose(1, 2) / math.sqrt(d)).softmax(-1)
            h = (
                h
                + (weights @ v).transpose(0, 1).reshape(size, heads * d) @ w[p + "self_attn.o_proj.weight"].T
            )
            x = _norm(h, w[p + "post_attention_layernorm.weight"], eps)
            gate, up = x @ w[p + "mlp.gate_proj.weight"].T, x @ w[p + "mlp.up_proj.weight"].T
            h = h + (F.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
        return _norm(h, w["norm.weight"], eps)[1:]


def heap_tree(log_probs: torch.Tensor, budget: int) -> list[tuple[int, int, int]]:
    """DDTree: the `budget` most probable prefixes of log_probs [L, V] as (parent, depth, token), best
    first."""
    k = min(budget, log_probs.shape[1])
    top, ids = log_probs.topk(k, dim=-1)
    scores, tokens = top.tolist(), ids.tolist()
    heap = [(-scores[0][0], (0,), -1)]
    nodes: list[tuple[int, int, int]] = []
    while heap and len(nodes) < budget:
        cost, ranks, parent = heapq.heappop(heap)
        depth, rank = len(ranks), ranks[-1]
        index = len(nodes)
        nodes.append((parent, depth, tokens[depth - 1][rank]))
        if rank + 1 < k:
            sibling = cost + scores[depth - 1][rank] - scores[depth - 1][rank + 1]
            heapq.heappush(heap, (sibling, (*ranks[:-1], rank + 1), parent))
        if depth < len(scores):
            heapq.heappush(heap, (cost - scores[depth][0], (*ranks, 0), index))
    return nodes


@dataclass(frozen=True, slots=True)
class Replay:
    """Rounds of one greedy text: tokens committed in each, bonus included."""

    tokens: tuple[int, ...]
    acceptance_lengths: tuple[int, ...]


class Reference:
    """Target (transformers) and drafter at one dtype."""

    def __init__(self, target: Path, drafter: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model: nn.Module = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self.drafter = ReferenceDrafter(drafter, dtype)

    @torch.inference_mode()
    def greedy(self, prompt_ids: list[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt_ids])
        out = self.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
        )
        return [int(token) for token in out[0, len(prompt_ids) :]]

    @torch.inference_mode()
    def replay(self, prompt_ids: list[int], output: list[int], *, budget: int | None) -> Replay:
        """Acceptance lengths over `output` (greedy). budget None: the chain of B-1 greedy drafts, else
        a tree."""
        tokens = prompt_ids + output
        states = self.model(torch.tensor([tokens]), output_hidden_states=True)
        hidden = torch.cat([states.hidden_states[i + 1][0] for i in self.drafter.taps], -1)
        context = self.drafter.project(hidden)
        embed = self.model.get_input_embeddings()  # type: ignore[operator]
        size = self.drafter.block_size
        start, lengths = len(prompt_ids), []
        # tokens[start] is the anchor; the text ends when the last token of `output` is the anchor.
        while start < len(tokens) - 1:
            block = embed(torch.tensor([tokens[start], *[self.drafter.mask_id] * (size - 1)]))
            logits = self.model.lm_head(self.drafter.marginals(context[:start], block)).float()  # type: ignore[operator]
            log_probs = logits.log_softmax(-1)
            if budget is None:
                nodes = [(d - 1, d + 1, int(token)) for d, token in enumerate(log_probs.argmax(-1))]
            else:
                nodes = heap_tree(log_probs, budget)
            children = {(parent, token): i for i, (parent, _, token) in enumerate(nodes)}
            node, accepted = -1, 0
            while start + accepted + 1 < len(tokens):
                found = children.get((node, tokens[start + accepted + 1]))
                if found is None:
                    break
                node, accepted = found, accepted + 1
            committed = min(accepted + 1, len(tokens) - 1 - start)
            lengths.append(committed)
            start += committed
        return Replay(tuple(output), tuple(lengths))
