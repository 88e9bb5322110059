"""Simulated acceptance on the draft's side: marginals drawn from an acceptance file over the real logits.

Owns turning a setting into tables on the device, and a batch of asks into their arguments. The real pass runs
first and keeps its cost. Trees are grown from the marginals as they stand, whatever the temperature: the
recorded ranks are those after the shared noise. Does not own the draws (kernels.simulate) nor the file
(specbridge.acceptance).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.simulate import MarginalTables, marginal_tables, pack_rows, simulated_marginals
from specbridge.acceptance import Acceptance
from specbridge.acceptance_model import label, resolve
from specbridge.errors import ConfigError
from specbridge.rounds import SamplingParams

log = logging.getLogger(__name__)

NEGLIGIBLE = 1e-3
"""Probability that may be missing from a row without a word."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """label: as GetInfo reports it. tables: on the drafter's device."""

    label: str
    tables: MarginalTables

    @torch.inference_mode()  # the logits are an inference tensor
    def marginals(
        self, logits: torch.Tensor, samplings: Sequence[SamplingParams], bases: Sequence[int]
    ) -> torch.Tensor:
        """Overwrite logits fp32 [sessions, depth, vocab]; one sampling and base a session. Returns them."""
        rows = [(s.seed, base, s.choice) for s, base in zip(samplings, bases, strict=True)]
        return simulated_marginals(logits, self.tables, *pack_rows(rows, logits.device))


def load_simulation(
    setting: str, *, horizon: int, vocab_size: int, device: torch.device | str
) -> Simulation | None:
    """What --simulate-acceptance asks for; None for nothing.

    Raises ConfigError for a file that is damaged or too short, or a vocabulary that is too small for it.
    """
    if not setting:
        return None
    acceptance = resolve(setting, depths=horizon)
    if vocab_size <= acceptance.ranks:
        raise ConfigError(
            f"--simulate-acceptance {setting} has {acceptance.ranks} candidates per position, the vocabulary "
            f"{vocab_size} ids; it needs {acceptance.ranks + 1} or more: take a file with fewer ranks"
        )
    tables = tables_of(acceptance, vocab_size=vocab_size, device=device)
    if tables.folded > NEGLIGIBLE:
        log.warning(
            "the vocabulary of %d is small for acceptance %s: up to %.3f of a position's probability has no "
            "place beyond the candidates and is spread over them",
            vocab_size,
            acceptance.label,
            tables.folded,
        )
    log.warning(
        "SIMULATED ACCEPTANCE: %s; %.2f tokens a round with a chain, %.2f with trees of 64",
        label(setting),
        acceptance.chain_length(horizon),
        acceptance.tree_length(64, horizon),
    )
    return Simulation(label(setting), tables)


def tables_of(
    acceptance: Acceptance, *, vocab_size: int, device: torch.device | str = "cpu"
) -> MarginalTables:
    """A file's tables on a device."""
    classes = acceptance.classes
    return marginal_tables(
        [c.weight for c in classes],
        [c.true for c in classes],
        [c.after_miss for c in classes],
        [c.draft for c in classes],
        vocab_size=vocab_size,
        device=device,
    )
