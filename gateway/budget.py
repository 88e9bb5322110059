"""How many tree nodes each session may draft and verify this round.

Owns the policy interface, the rules that hold for any policy, and the simple policy: one cap per tree, one
pool of verify rows. Pure: no I/O, no clock. The policy that goes by measured costs is cost_budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.generation import RoundRecord
from gateway.report import BudgetReport
from specbridge.errors import InvalidRequest
from specbridge.fixed_rows import FixedRows
from specbridge.rounds import DraftInfo, TargetInfo
from specbridge.tree import EMPTY_TREE, DraftTree

__all__ = [
    "Beside",
    "BudgetPolicy",
    "Candidate",
    "Chosen",
    "Expected",
    "Outcome",
    "Plan",
    "SharedRows",
    "depth_limit",
    "fit_tree",
]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One running session as a policy sees it.

    max_nodes   this session's own cap (request, draft and target limits); 0: it can't speculate this round
    max_depth   deepest tree that can still be used
    context     committed rows, for context-dependent cost curves
    sampled     whether its tokens are sampled (calibration differs from greedy)
    behind      its last rows were held back from the draft: a round must bring them before it is drafted for
    """

    number: int
    max_nodes: int
    max_depth: int
    context: int
    sampled: bool = False
    behind: bool = False


@dataclass(frozen=True, slots=True)
class Beside:
    """The other cohort, whose round goes on at the same time: its tokens and seconds of verifying a round."""

    tokens: float
    verify_s: float


@dataclass(frozen=True, slots=True)
class Expected:
    """What a policy expects of a round: tokens of its own sessions, seconds from its start to its end."""

    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask the draft for.

    nodes[i]   most nodes for candidate i
    skipped    why none is asked, if so
    hold[i]    its rows may be held back from the draft: it will not be asked soon; () is none
    probe      a round that is run to learn: "plain", "draft", or ""
    expected   of a round without any tree, if the policy knows
    """

    nodes: tuple[int, ...]
    skipped: str = ""
    hold: tuple[bool, ...] = ()
    probe: str = ""
    expected: Expected | None = None
    beside: Beside | None = None

    @property
    def drafts(self) -> bool:
        return any(self.nodes)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The trees to verify, each a prefix of the one drafted. probe "explore": larger than what pays."""

    trees: tuple[DraftTree, ...]
    expected: Expected | None = None
    probe: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one session's tree; indexes of the accepted nodes, root to leaf.

    ended: the text ended in it, so that nodes after that were not judged.
    """

    number: int
    tree: DraftTree
    accepted: tuple[int, ...]
    sampled: bool = False
    ended: bool = False


class BudgetPolicy(Protocol):
    """plan, cut (if the draft was asked) and observe are called once a round each, in this order, by one
    cohort's loop; with two cohorts the calls of two rounds interleave.

    probes: whether it drafts now and then where it would not, to learn what that brings.
    """

    probes: bool

    def measured(self, target: TargetInfo, draft: DraftInfo | None) -> None:
        """The services as they are now, with the costs they have measured; called when one (re)appears."""
        ...

    def plan(self, candidates: Sequence[Candidate], beside: Beside | None = None, *, others: int = 0) -> Plan:
        """Before the draft: what to ask for. Zero everywhere skips the draft. others: sessions of the other
        cohort, whether or not anything is known of its rounds.
        """
        ...

    def cut(self, candidates: Sequence[Candidate], plan: Plan, trees: Sequence[DraftTree]) -> Chosen:
        """After the draft: what to verify. trees[i] is empty where nothing came."""
        ...

    def observe(self, record: RoundRecord, outcomes: Sequence[Outcome]) -> None:
        """After the round: what it cost and what was accepted."""
        ...

    def throughput(self, sessions: int, cohorts: int) -> float | None:
        """Tokens per second forecast for so many sessions in one or two cohorts; None: can't tell."""
        ...

    def spares(self, sessions: int) -> bool:
        """Whether, with so many sessions, no draft will be asked for long: new ones are not opened there."""
        ...

    def wants_draft(self, sessions: int) -> bool:
        """Whether sessions that were spared should be opened there now; asked once a round."""
        ...

    def worth_capturing(self, *, rows: int, remaining: int, sessions: int) -> bool:
        """Whether running a session's `rows` rows again for the draft pays with `remaining` tokens to go."""
        ...

    def report(self) -> BudgetReport:
        """What it knows, for people."""
        ...


def depth_limit(*, block_size: int, remaining: int, max_length: int, num_tokens: int) -> int:
    """Deepest usable tree: min(B-1, remaining-1, max_length-num_tokens-1), never below 0.

    block_size counts the anchor; remaining = tokens the request may still get; num_tokens = prompt and
    output. A tree of depth d commits up to d + 1 tokens, the bonus included.
    """
    return max(0, min(block_size - 1, remaining - 1, max_length - num_tokens - 1))


def fit_tree(tree: DraftTree, *, max_nodes: int, max_depth: int, vocab_size: int) -> DraftTree:
    """The best part of `tree` that may be verified. Raises InvalidRequest if the tree itself is malformed.

    Deeper or larger than asked for is not malformed: a prefix of best-first order is the best smaller tree.
    """
    size = len(tree.tokens)
    if size == 0 and not tree.parents and not tree.scores:
        return EMPTY_TREE
    if not tree.well_formed(vocab_size):
        tree.validate(vocab_size=vocab_size, max_nodes=max(size, 1), max_depth=max(size, 1))
    if max_nodes <= 0 or max_depth <= 0:
        return EMPTY_TREE
    # A tree of no more nodes than levels can't be too deep.
    return (tree if size <= max_depth else tree.limit_depth(max_depth)).prefix(max_nodes)


WANTED_ROUNDS = 8
"""So many rounds in a row must want a draft before sessions that were spared are opened there: a gap between
two requests is no change of load."""


class SharedRows:
    """The simple policy: a cap per tree, a pool of verify rows shared by all, no draft pass for crumbs.

    Every running session has its anchor row in any case; what is left of `max_verify_rows` is shared evenly
    by the sessions that can speculate. Leftover rows go to the first ones. Of two cohorts each has its
    sessions' part of the rows, so that drafting pays, or does not, as with one. Where so many run that the
    draft is skipped, sessions that come are not opened there: what it appends for them takes a CPU's cores,
    and what it does not hold of their prompts yet would be computed again.
    """

    probes = False

    def __init__(
        self,
        *,
        tree_budget: int,
        max_verify_rows: int,
        min_tree: int,
        rows_before: Callable[[TargetInfo], FixedRows] | None = None,
    ) -> None:
        """rows_before(target): the first two once a target is there; None: the same before any."""
        for name, value in (("tree_budget", tree_budget), ("min_tree", min_tree)):
            if value < 0:
                raise InvalidRequest(f"{name} is {value}; it must be at least 0", param=name)
        if max_verify_rows < 1:
            raise InvalidRequest(
                f"max_verify_rows is {max_verify_rows}; it must be at least 1", param="max_verify_rows"
            )
        self.tree_budget = tree_budget
        self.max_verify_rows = max_verify_rows
        self.min_tree = min_tree
        self._rows_before = rows_before
        self._wanting = 0

    def measured(self, target: TargetInfo, draft: DraftInfo | None) -> None:
        if self._rows_before is not None:
            rows = self._rows_before(target)
            self.tree_budget, self.max_verify_rows = rows.tree_budget, rows.max_verify_rows

    def plan(self, candidates: Sequence[Candidate], beside: Beside | None = None, *, others: int = 0) -> Plan:
        none = (0,) * len(candidates)
        if self.tree_budget == 0:
            return Plan(none, "budget")
        able = [i for i, c in enumerate(candidates) if c.max_nodes > 0 and c.max_depth > 0]
        if not able:
            return Plan(none)
        # By all who run, as `spares` counts: who has been spared the draft takes the others' rows as well.
        running = len(candidates) + others
        if not self._worth_drafting(running):
            return Plan(none, "budget", hold=(True,) * len(candidates))
        rows = self.max_verify_rows * len(candidates) // running
        share, extra = divmod(max(0, rows - len(candidates)), len(able))
        nodes = list(none)
        for place, i in enumerate(able):
            nodes[i] = min(self.tree_budget, candidates[i].max_nodes, share + (1 if place < extra else 0))
        return Plan(tuple(nodes))

    def cut(self, candidates: Sequence[Candidate], plan: Plan, trees: Sequence[DraftTree]) -> Chosen:
        return Chosen(tuple(trees))

    def observe(self, record: RoundRecord, outcomes: Sequence[Outcome]) -> None:
        return None

    def throughput(self, sessions: int, cohorts: int) -> float | None:
        return None

    def _worth_drafting(self, sessions: int) -> bool:
        """Whether a share of so many sessions is worth a draft pass."""
        share = max(0, self.max_verify_rows - sessions) // max(sessions, 1)
        # A budget the operator set below min_tree is meant: only sharing may make the draft not worth it.
        return share >= max(1, min(self.min_tree, self.tree_budget))

    def _drafts(self, sessions: int) -> bool:
        """Whether rounds draft with so many sessions in all cohorts."""
        return self.tree_budget > 0 and self._worth_drafting(sessions)

    def spares(self, sessions: int) -> bool:
        return not self._drafts(sessions)

    def wants_draft(self, sessions: int) -> bool:
        self._wanting = self._wanting + 1 if self._drafts(sessions) else 0
        return self._wanting > WANTED_ROUNDS

    def worth_capturing(self, *, rows: int, remaining: int, sessions: int) -> bool:
        # Two cores take a tenth of a step for a row, and a third of a step is what a drafted token saves.
        return 2 * remaining >= rows

    def report(self) -> BudgetReport:
        return BudgetReport("fixed")
