"""How many tokens a drafter's rounds commit on given texts: chains and trees of any size, without serving.

Verification is lossless, so a text is the same whatever was drafted: it is made once, and rounds are replayed
over it. At base b the drafter proposes from the context rows [0, b) of the true text; its tree is accepted as
far as the text goes along it, d tokens deep; the next round begins at b + d + 1. The drafter's marginals of
all positions of a text are computed in a few large passes, of which each setting then walks its own. The
passes, noise, tree rules and depth limits are those of serving, so the counts are, too.

Owns the replay and its counts. Does not own the texts or the target's hidden states (whoever calls brings
them), scoring rules (scoring), nor tables (evaluation_report).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from draft_service.bigrams import FILE as BIGRAMS_FILE
from draft_service.bigrams import Bigrams, read_bigrams
from draft_service.block_attention import BlockBatch
from draft_service.conditional_tree import WIDTH, Conditioner, Conditioning, grow_levels
from draft_service.config import DraftSettings
from draft_service.drafter import Drafter
from draft_service.drafter_config import TargetFacts
from draft_service.drafter_files import Places, open_files
from draft_service.drafter_layouts import parse_config
from draft_service.loading import resolve_device, resolve_dtype
from draft_service.training.scoring import ScoringRule
from kernels.conditional_tree import Steps
from kernels.marginals import Candidates
from kernels.philox import gumbel_noise, signed_seed
from kernels.topk import top_entries
from kernels.tree import deepest_tree, pack_trees
from specbridge.errors import ConfigError
from specbridge.rounds import GREEDY_BELOW

PAGE = 16
PASS_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Logits of one pass, as fp32."""
CHAIN = 0
"""Stands for the chain where a number of nodes does: the best token of each depth."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A text of the target: prompt and response as ids, how it was chosen, and what it may be compared by.

    group: the prompt file's name. max_tokens: what the request asked for, as it limits the last trees.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    temperature: float
    seed: int
    max_tokens: int
    group: str = ""

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.response)


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of one text under one setting and size. accepted: of each round; committed: tokens in all."""

    accepted: tuple[int, ...]
    committed: int


class Replay:
    """A drafter on one device, with room for the context of one text of up to `length` tokens."""

    def __init__(self, drafter: Drafter, *, length: int, bigrams: Bigrams | None = None) -> None:
        self.drafter = drafter
        self._bigrams = bigrams
        self._pages = drafter.new_pages(-(-(length + PAGE) // PAGE), PAGE)

    @staticmethod
    def load(
        draft: Path, target: Path, *, device: str, dtype: str, length: int, vocabulary: int = -1
    ) -> Replay:
        """A drafter's folder with its target's. vocabulary: as DraftSettings.draft_vocabulary.

        Raises ConfigError for what does not fit.
        """
        told = {"draft": str(draft), "target": str(target), "device": device, "dtype": dtype}
        settings = DraftSettings.model_validate({**told, "draft_vocabulary": vocabulary})
        where = resolve_device(device)
        files = open_files(settings, Places(draft, target))
        facts = TargetFacts.read(files.target_config, target)
        config = parse_config(files.draft_config, facts, fc_columns=files.fc_columns)
        kind = resolve_dtype(dtype, files, where)
        weights = files.weights(config, dtype=kind, device=where)
        drafter = Drafter(config, weights, dtype=kind, device=where, max_position=length + config.block_size)
        files.close()
        bigrams = read_bigrams(draft, vocab_size=config.vocab_size, device=drafter.device)
        return Replay(drafter, length=length, bigrams=bigrams)

    @torch.inference_mode()
    def rounds(
        self, text: HeldOut, features: torch.Tensor, rules: Sequence[ScoringRule], nodes: Sequence[int]
    ) -> dict[tuple[str, int], Rounds]:
        """Replay `text` for each rule and each of `nodes` (CHAIN: the chain), by (rule's name, nodes).

        features [>= len(tokens) - 1, taps * hidden]: the target's hidden states of the text's tokens.
        """
        depths = self.depths(text, features, rules, nodes)
        count = len(text.response)
        found = {}
        for (name, size), accepted in depths.items():
            at, taken, committed = 0, [], 0
            while at < count - 1:
                depth = min(int(accepted[at]), count - 1 - at)
                tokens = min(depth + 1, count - 1 - at)
                taken.append(depth)
                committed += tokens
                at += tokens
            found[name, size] = Rounds(tuple(taken), committed)
        return found

    @torch.inference_mode()
    def depths(
        self, text: HeldOut, features: torch.Tensor, rules: Sequence[ScoringRule], nodes: Sequence[int]
    ) -> dict[tuple[str, int], np.ndarray]:
        """How deep a round that began at each token of the response would get: int [len(response) - 1]."""
        tokens, prompt = text.tokens, len(text.prompt)
        anchors = list(range(prompt, len(tokens) - 1))
        parts: dict[tuple[str, int], list[np.ndarray]] = {
            (rule.name, size): [] for rule in rules for size in nodes
        }
        if anchors:
            self._append(features[: len(tokens) - 1])
        noise = self._noise(text, anchors) if any(rule.noisy for rule in rules) else None
        config = self.drafter.config
        budget = PASS_BYTES[self.drafter.device.type]
        most = max(1, budget // (4 * config.horizon * config.vocab_size))
        for start in range(0, len(anchors), most):
            some = anchors[start : start + most]
            logits = self._logits(tokens, some)
            limits = torch.tensor(
                [max(0, min(config.horizon, text.max_tokens - (b - prompt) - 2)) for b in some],
                dtype=torch.int32,
            ).to(logits.device)
            truth = self._truth(tokens, some)
            for rule in rules:
                own = None
                if rule.noisy and noise is not None:
                    first = some[0] - anchors[0]
                    own = noise[first : first + len(some) + config.horizon - 1].unfold(0, config.horizon, 1)
                    own = own.transpose(1, 2)
                scores = rule.scores(logits, text.temperature, own)
                if rule.conditioning is None:
                    found = accepted_depths(scores, truth, limits, nodes)
                else:
                    heat = text.temperature if text.temperature >= GREEDY_BELOW else 1.0
                    steps = self._steps(scores, logits / heat, rule.conditioning)
                    found = conditional_depths(steps, truth, limits, nodes)
                for size, depth in found.items():
                    parts[rule.name, size].append(depth)
                del scores
        return {
            key: np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
            for key, found in parts.items()
        }

    def _steps(self, scores: torch.Tensor, beliefs: torch.Tensor, rule: Conditioning) -> Steps:
        if self._bigrams is None:
            raise ConfigError(f"the drafter has no {BIGRAMS_FILE}, make it with `specbridge train bigrams`")
        log_probs, ids = top_entries(scores, min(WIDTH, scores.shape[-1]), nonpositive=True)
        made = Conditioner(self._bigrams, self.drafter.config.horizon, rule)
        return made.steps(log_probs, beliefs.gather(-1, ids), ids)

    def _append(self, features: torch.Tensor) -> None:
        places = torch.arange(len(features))
        self.drafter.append(self._pages, features, places, places)

    def _logits(self, tokens: Sequence[int], anchors: Sequence[int]) -> torch.Tensor:
        pages = range(self._pages.k.shape[1])
        batch = BlockBatch([tokens[b] for b in anchors], list(anchors), [pages] * len(anchors))
        return self.drafter.propose(self._pages, batch)

    def _noise(self, text: HeldOut, anchors: Sequence[int]) -> torch.Tensor | None:
        """fp32 [anchors + horizon - 1, vocab]: the noise of the positions after each anchor, in order."""
        if text.temperature < GREEDY_BELOW or not anchors:
            return None
        config = self.drafter.config
        positions = list(range(anchors[0] + 1, anchors[-1] + config.horizon + 1))
        seeds, choices = [signed_seed(text.seed)] * len(positions), [0] * len(positions)
        return gumbel_noise(seeds, positions, choices, config.vocab_size, device=self.drafter.device)

    def _truth(self, tokens: Sequence[int], anchors: Sequence[int]) -> torch.Tensor:
        """int64 [anchors, horizon]: the tokens that follow each, -1 past the end."""
        horizon = self.drafter.config.horizon
        padded = torch.tensor([*tokens, *[-1] * horizon])
        at = torch.tensor(list(anchors)).unsqueeze(1) + torch.arange(1, horizon + 1)
        return padded[at].to(self.drafter.device)


def accepted_depths(
    scores: torch.Tensor, truth: torch.Tensor, limits: torch.Tensor, nodes: Sequence[int]
) -> dict[int, np.ndarray]:
    """How far `truth` goes along the chain and along trees of each size.

    scores: fp32 [anchors, depths, vocab], log-probabilities; truth int [anchors, depths], -1: the text has
    ended; limits int32 [anchors]: deepest level. Returns int64 [anchors] by size.
    """
    depths, vocab = scores.shape[1:]
    most = max(nodes)
    width = max(1, min(most, vocab))
    log_probs, ids = top_entries(scores, width, nonpositive=True)
    level = torch.arange(depths, device=scores.device)
    beyond = level >= limits.unsqueeze(1)
    best = (ids[..., 0] == truth) & ~beyond & (log_probs[..., 0] > -math.inf)
    found = {}
    if CHAIN in nodes:
        found[CHAIN] = best.long().cumprod(1).sum(1).cpu().numpy()
    sizes = [size for size in nodes if size != CHAIN]
    if not sizes:
        return found
    used = min(depths, deepest_tree(most))
    candidates = Candidates(
        log_probs[:, :used].masked_fill(beyond[:, :used].unsqueeze(2), -math.inf).contiguous(),
        ids[:, :used].to(torch.int32).contiguous(),
    )
    budgets = torch.full_like(limits, most)
    packed = pack_trees(candidates, budgets, limits, nodes=most)
    return found | _walked(packed, truth[:, :used], sizes)


def conditional_depths(
    steps: Steps, truth: torch.Tensor, limits: torch.Tensor, nodes: Sequence[int]
) -> dict[int, np.ndarray]:
    """`accepted_depths` where nodes know the token before theirs. The chain takes each time's best child."""
    found = {}
    if CHAIN in nodes:
        place = torch.zeros_like(steps.ids[:, 0, :1])
        right = torch.ones_like(place[:, 0], dtype=torch.bool)
        count = torch.zeros_like(place[:, 0])
        for d in range(truth.shape[1]):
            row = steps.scores[:, d].gather(1, place.unsqueeze(-1).expand(-1, -1, steps.ids.shape[2]))
            place = row[:, 0].argmax(-1, keepdim=True)
            right = right & (steps.ids[:, d].gather(1, place)[:, 0] == truth[:, d]) & (limits > d)
            count += right
        found[CHAIN] = count.cpu().numpy()
    sizes = [size for size in nodes if size != CHAIN]
    return found | (_walked(grow_levels(steps, limits, max(sizes)), truth, sizes) if sizes else {})


def _walked(packed: torch.Tensor, truth: torch.Tensor, sizes: Sequence[int]) -> dict[int, np.ndarray]:
    """How far `truth` [anchors, depths] goes along packed trees [anchors, 3, nodes] cut to each size."""
    most, used = packed.shape[2], truth.shape[1]
    tokens, parents = packed[:, 0], packed[:, 1]
    at = torch.full_like(tokens[:, 0], -1)
    places = []
    for d in range(used):
        match = (parents == at.unsqueeze(1)) & (tokens == truth[:, d : d + 1]) & (tokens >= 0)
        place = torch.where(match.any(1), match.int().argmax(1), most)
        at = torch.where(place < most, place, -2).to(torch.int32)
        places.append(place)
    # The best n of a larger tree's nodes are the tree of n; a node comes after its parent.
    path = torch.stack(places, dim=1)
    path = torch.where(path < most, path, 1 << 30)
    return {size: (path < size).sum(1).cpu().numpy() for size in sizes}
