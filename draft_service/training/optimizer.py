"""AdamW over flat tensors, with the clipping of the whole gradient, as operations a CUDA graph can hold.

Owns the update (Loshchilov and Hutter's, as torch.optim.AdamW has it: a test holds it against that), its
state, and the learning rate's schedule. Does not own the gradient's sum over batches and ranks (trainer).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

EPSILON = 1e-8


def learning_rate(progress: float, peak: float, warmup: float) -> float:
    """Linear from 0 over the share `warmup` of the run, then a half cosine to 0 at progress 1.

    >>> [round(learning_rate(p, 1.0, 0.5), 3) for p in (0.0, 0.25, 0.5, 0.75, 1.0)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if progress < warmup:
        return peak * progress / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


class AdamW:
    """parameters: flat tensors, each with its weight decay. One step is `update`."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        decays: Sequence[float],
        *,
        betas: tuple[float, float],
        clip: float,
    ) -> None:
        self._parameters, self._decays = tuple(parameters), tuple(decays)
        self._betas, self._clip = betas, clip
        self.first = tuple(torch.zeros_like(p, requires_grad=False) for p in parameters)
        self.second = tuple(torch.zeros_like(p, requires_grad=False) for p in parameters)
        # Of the device: a graph that was captured once goes on counting and follows the schedule.
        self.steps, self.rate, self.norm = (
            torch.zeros((), dtype=parameters[0].dtype, device=parameters[0].device) for _ in range(3)
        )

    @torch.no_grad()
    def update(self, gradients: Sequence[torch.Tensor]) -> None:
        """One step at the rate in `rate`. The gradients are scaled in place; `norm` is theirs before it."""
        beta1, beta2 = self._betas
        self.steps += 1
        self.norm.copy_(
            torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        )
        scale = (self._clip / (self.norm + 1e-6)).clamp_max_(1.0)
        # 1 - beta^steps, on the device.
        size = self.rate / -torch.expm1(self.steps * _log(beta1))
        unbiased = torch.rsqrt(-torch.expm1(self.steps * _log(beta2)))
        for p, g, m, v, decay in zip(
            self._parameters, gradients, self.first, self.second, self._decays, strict=True
        ):
            g.mul_(scale)
            if decay:
                p.mul_(1 - self.rate * decay)
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            p.sub_(m / (v.sqrt().mul_(unbiased).add_(EPSILON)) * size)

    def state(self) -> dict[str, torch.Tensor]:
        """All that a resumed run needs; the tensors themselves."""
        named = {"steps": self.steps}
        for i, (m, v) in enumerate(zip(self.first, self.second, strict=True)):
            named |= {f"first.{i}": m, f"second.{i}": v}
        return named
