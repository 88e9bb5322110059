"""One step of training: forward and backward of a batch, and the weights' update, on one rank.

On a GPU both are CUDA graphs: a step of a small model is thousands of short kernels, which one launch each
would make wait for the host. For that, inputs lie in one buffer of fixed size, and nothing reads back. Owns
the step. Does not own which batch comes next (fit, batches) nor the sum over ranks (parallel).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from draft_service.training.batches import Batch
from draft_service.training.fit_settings import Recipe
from draft_service.training.frozen_target import Documents, FrozenTarget
from draft_service.training.losses import Objective, Rows, decay, head_loss
from draft_service.training.network import BlockInputs, Network
from draft_service.training.optimizer import AdamW
from draft_service.training.parallel import Ranks
from kernels.token_loss import LossTerms

_WARM_UPS = 3
_INPUTS = ("tokens", "positions", "documents", "anchors", "starts", "ends", "bounds", "seed")


@dataclass(frozen=True, slots=True)
class Progress:
    """Means over the rows since the last one: loss (of all terms, weighted over depths), losses per depth
    (not weighted), norm of the last gradient. Of this rank's rows unless they were summed."""

    loss: float
    depths: tuple[float, ...]
    norm: float


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """A batch's rows after the drafter's pass: hidden [rows, blocks, horizon, hidden]; labels int64, counts
    bool [rows, blocks, horizon]: a row's token, and whether its response goes that far. final [rows, length,
    hidden] of the target, if asked for. index int64, like labels: place of the label in its row of tokens."""

    hidden: torch.Tensor
    labels: torch.Tensor
    counts: torch.Tensor
    index: torch.Tensor
    final: torch.Tensor | None


class Inputs:
    """A batch on the device, in one buffer that batches are copied into, one after the other."""

    def __init__(self, like: Batch, device: torch.device) -> None:
        flat = _flat(like)
        self._buffer = torch.zeros(flat.shape, dtype=torch.int64, device=device)
        sizes = [getattr(like, name).size for name in _INPUTS]
        parts = self._buffer.split(sizes)
        views = {n: p.view(getattr(like, n).shape) for n, p in zip(_INPUTS, parts, strict=True)}
        self.blocks = BlockInputs(*(views[n] for n in ("tokens", "positions", "anchors", "starts", "ends")))
        self._numbers, self._bounds = views["documents"], views["bounds"]
        self.seed = views["seed"]

    def load(self, batch: Batch) -> None:
        """Copy a batch of the same shape in; on a GPU the host does not wait for it."""
        flat = torch.from_numpy(_flat(batch))
        if self._buffer.is_cuda:
            flat = flat.pin_memory()
        self._buffer.copy_(flat, non_blocking=True)

    def documents(self, *, flash: bool) -> Documents:
        """What the target's attention needs."""
        if flash:
            return Documents(bounds=self._bounds.to(torch.int32))
        return Documents.masked(self._numbers)


def _flat(batch: Batch) -> np.ndarray:
    return np.concatenate([getattr(batch, name).ravel().astype(np.int64, copy=False) for name in _INPUTS])


class Trainer:
    """A target, a drafter in training and its optimiser. example: a batch of the shape of all."""

    def __init__(
        self,
        target: FrozenTarget,
        network: Network,
        recipe: Recipe,
        example: Batch,
        *,
        ranks: Ranks,
        cuda_graphs: bool,
    ) -> None:
        self.target, self.network, self.recipe = target, network, recipe
        self.inputs = Inputs(example, network.device)
        terms = LossTerms(**{"ce": 0.0, **recipe.losses}, temperature=recipe.distill_temperature)
        self.objective = Objective(terms, network.shape.horizon, recipe.reach)
        self.optimizer = AdamW(
            network.parameters, (recipe.weight_decay, 0.0), betas=recipe.betas, clip=recipe.clip
        )
        self._ranks = ranks
        self._on_gpu = network.device.type == "cuda"
        # Flash attention is there in half precision only.
        self._flash = self._on_gpu and network.dtype in (torch.bfloat16, torch.float16)
        kind, horizon = network.matrices.dtype, network.shape.horizon
        self._decay = decay(horizon, recipe.gamma, dtype=kind, device=network.device)
        self._gradients = [torch.zeros_like(p, requires_grad=False) for p in network.parameters]
        self._weight = torch.zeros((), dtype=kind, device=network.device)
        # Sums of weighted losses and weights; then, per depth, of losses and of rows.
        self._sums = torch.zeros(2, 1 + horizon, dtype=kind, device=network.device)
        self._batch: Callable[[], None] = self._run_batch
        self._update: Callable[[], None] = self._run_update
        if self._on_gpu and cuda_graphs:
            self._capture(example)

    def step(self, batches: list[Batch], rate: float) -> None:
        """One optimiser step over this rank's `batches`, at learning rate `rate`; returns while a GPU is
        still at it.
        """
        for batch in batches:
            self.inputs.load(batch)
            self._batch()
        self._ranks.add((*self._gradients, self._weight))
        self.optimizer.rate.fill_(rate)
        self._update()

    def progress(self) -> Progress:
        """Of all steps since the last call, over all ranks. Waits for the device; every rank has to call."""
        sums = self._sums.clone()
        self._sums.zero_()
        self._ranks.add((sums,))
        losses, counts = sums.tolist()
        means = [value / count if count else 0.0 for value, count in zip(losses, counts, strict=True)]
        return Progress(means[0], tuple(means[1:]), float(self.optimizer.norm))

    def predict(self, inputs: Inputs, *, want_final: bool) -> Predictions:
        """The target's and the drafter's pass over a batch."""
        blocks = inputs.blocks
        seen = self.target.forward(
            blocks.tokens, blocks.positions, inputs.documents(flash=self._flash), self.network.shape.taps,
            want_final=want_final,
        )  # fmt: skip
        hidden = self.network.forward(self.target, seen.features, blocks)
        ahead = torch.arange(1, self.network.shape.block_size, device=hidden.device)
        index = blocks.anchors.unsqueeze(-1) + ahead
        counts = index < blocks.ends.unsqueeze(-1)
        index = index.clamp_max(blocks.tokens.shape[1] - 1)
        labels = blocks.tokens.gather(1, index.flatten(1)).view_as(index)
        return Predictions(hidden, labels, counts, index, seen.final)

    def flops(self) -> float:
        """Floating-point operations of a batch, matrix products only."""
        shape, t, recipe = self.network.shape, self.target.shape, self.recipe
        inner, kv = t.num_heads * t.head_dim, 2 * t.num_kv_heads * t.head_dim
        hidden, tokens, blocks = t.hidden_size, recipe.tokens_per_batch, recipe.blocks_per_batch
        depth = t.num_layers if self.objective.terms.distils else 1 + max(shape.taps)
        target = depth * hidden * (2 * inner + kv + 3 * t.intermediate_size)
        layer = hidden * (2 * inner + kv + 3 * shape.intermediate_size)
        context = 2 * len(shape.taps) * hidden * hidden + 3 * shape.layers * kv * hidden
        head = blocks * shape.horizon * t.vocab_size * hidden * (3 if self.objective.terms.distils else 2)
        rows = blocks * shape.block_size
        return 2.0 * (tokens * (target + context) + 3 * rows * shape.layers * layer + head)

    def _run_batch(self) -> None:
        found = self.predict(self.inputs, want_final=self.objective.terms.distils)
        weights = self._decay * found.counts
        teacher = None
        if found.final is not None:
            # The state at a token predicts the next one.
            before = (found.index - 1).flatten(1).unsqueeze(-1).expand(-1, -1, found.final.shape[-1])
            teacher = found.final.gather(1, before).flatten(0, 1)
        rows = Rows(
            found.hidden.flatten(0, 2), found.labels.flatten(), weights.flatten(), teacher, self.inputs.seed
        )
        losses = head_loss(rows, self.target.head, self.objective)
        for total, new in zip(
            self._gradients, torch.autograd.grad(losses.total, self.network.parameters), strict=True
        ):
            total.add_(new)
        with torch.no_grad():
            weight = losses.weights.sum()
            self._weight += weight
            each = losses.rows.view_as(weights) * found.counts
            self._sums[0, 0] += losses.total
            self._sums[1, 0] += weight
            self._sums[0, 1:] += each.sum((0, 1))
            self._sums[1, 1:] += found.counts.sum((0, 1))

    @torch.no_grad()
    def _run_update(self) -> None:
        share = 1 / self._weight.clamp_min(1e-12)
        for gradient in self._gradients:
            gradient.mul_(share)
        self.optimizer.update(self._gradients)
        for tensor in (*self._gradients, self._weight):
            tensor.zero_()

    def _capture(self, example: Batch) -> None:
        """Record both halves of a step. They run for it, so what they change is put back."""
        changed = [*self.network.parameters, *self.optimizer.state().values(), *self._gradients]
        changed += [self._weight, self._sums, self.optimizer.norm]
        before = [tensor.detach().clone() for tensor in changed]
        self.inputs.load(example)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._run_batch()
                self._run_update()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._batch = _recorded(self._run_batch)
        self._update = _recorded(self._run_update)
        with torch.no_grad():
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)


def _recorded(work: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    # Other threads (batches being made) may go on talking to the device meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay
