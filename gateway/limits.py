"""The scheduler's numbers: sizes, time-outs and rates, with their checks.

config.py builds this from the gateway's settings; tests build it directly. Owns no behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from specbridge.errors import ConfigError
from specbridge.fixed_rows import ON_CPU, FixedRows, rows_on
from specbridge.rounds import TargetInfo


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Counts are sessions, nodes or rows; times are seconds.

    budget             "cost": what is drafted and verified follows measured costs; "fixed": the next three
    tree_budget        most nodes of a session's tree; 0: never speculate
    max_verify_rows    rows of one verify pass, shared by the running sessions (anchors included); with two
                       cohorts of both passes together
    by_device          names of those of the last two that the target's device decides: nobody gave them
    min_tree           a share below this many nodes is not worth a draft pass: the round skips it
    max_queue          requests waiting for admission before CapacityError
    max_queue_tokens   their tokens, prompts and expected outputs, before the same
    fair_quantum       tokens that an API key gets at its turn when several have requests waiting
    priority_ageing    waiting for so long makes a request one step of priority more urgent
    max_running        sessions opening or running at once (the target's own limit also holds)
    cohorts            groups of sessions whose rounds alternate: 1, 2, or 0 for whatever brings more
    draft_timeout      wait for a propose batch; then the round goes on with what came
    draft_stall        an unanswered propose this old: the draft's stream is dropped and opened anew
    target_timeout     wait for a verify batch; then the target's stream is dropped and sessions re-opened
    open_timeout       wait for the draft to acknowledge an open
    first_timeout      wait for a prefill's first token before the open is tried again
    give_up            a request that the target has not served for this long fails
    reopen_backoff     first wait before a session is opened again at the target; doubles up to
                       reopen_backoff_max
    draft_reopens_per_s  running sessions re-opened at the draft a second (each costs a re-capture)
    connect_timeout    wait for such a draft's answer to that
    recheck            pause before a draft that does not fit the target is asked again who it is
    draft_reopen_min_tokens  not re-opened at the draft with fewer tokens left than this
    """

    budget: str = "fixed"
    tree_budget: int = ON_CPU.tree_budget
    max_verify_rows: int = ON_CPU.max_verify_rows
    by_device: frozenset[str] = frozenset()
    min_tree: int = 4
    max_queue: int = 256
    max_queue_tokens: int = 1 << 20
    fair_quantum: int = 1024
    priority_ageing: float = 30.0
    max_running: int = 64
    cohorts: int = 1
    draft_timeout: float = 1.0
    draft_stall: float = 10.0
    target_timeout: float = 60.0
    open_timeout: float = 2.0
    first_timeout: float = 600.0
    give_up: float = 60.0
    reopen_backoff: float = 0.05
    reopen_backoff_max: float = 2.0
    draft_reopens_per_s: float = 20.0
    draft_reopen_min_tokens: int = 4
    connect_timeout: float = 5.0
    recheck: float = 2.0

    def __post_init__(self) -> None:
        if self.budget not in ("cost", "fixed"):
            raise ConfigError(f"budget is {self.budget!r}; it must be 'cost' or 'fixed'")
        if self.cohorts > 2:
            raise ConfigError(f"cohorts is {self.cohorts}; it must be 1, 2 or 0 (whatever brings more)")
        zero_legal = ("tree_budget", "max_queue", "min_tree", "draft_reopen_min_tokens", "cohorts")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, str | frozenset):
                continue
            if not (value >= 0 if item.name in zero_legal else value > 0):
                legal = "at least 0" if item.name in zero_legal else "positive"
                raise ConfigError(f"{item.name} is {value}; it must be {legal}")

    def rows_before(self, target: TargetInfo) -> FixedRows:
        """tree_budget and max_verify_rows in front of `target`."""
        given = FixedRows(self.tree_budget, self.max_verify_rows)
        devices = rows_on(target.device, target.max_tree_nodes)
        return replace(given, **{name: getattr(devices, name) for name in self.by_device})
