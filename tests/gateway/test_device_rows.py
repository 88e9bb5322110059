"""A gateway that nobody told the fixed budget's rows takes those of the device that its target runs on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_services import FakeDraft, FakeTarget, linked, oracle
from scheduler_harness import Recorder, collect, make_request, run_scheduler

from gateway.budget import SharedRows
from gateway.config import GatewaySettings
from gateway.policies import largest_tree, policy_for
from gateway.scheduler import Scheduler
from specbridge.fixed_rows import ON_CPU, ON_GPU
from specbridge.rounds import TargetInfo

CPU = FakeTarget().make_info()
GPU = replace(CPU, device="cuda:1")


def rows(target: TargetInfo, **given: Any) -> tuple[int, int]:
    """Nodes of a tree and rows of a pass of a gateway with these flags that meets `target`."""
    limits = GatewaySettings(**given).limits()
    policy = policy_for(limits)
    assert isinstance(policy, SharedRows)
    policy.measured(target, None)
    assert largest_tree(limits, target) == policy.tree_budget
    return policy.tree_budget, policy.max_verify_rows


def test_the_target_s_device_decides_what_nobody_gave() -> None:
    assert rows(CPU) == (ON_CPU.tree_budget, ON_CPU.max_verify_rows) == (5, 12)
    assert rows(GPU) == (ON_GPU.tree_budget, ON_GPU.max_verify_rows) == (16, 264)
    assert rows(replace(GPU, max_tree_nodes=7)) == (7, 264)


def test_what_was_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows(GPU, tree_budget=8) == (8, 264)
    assert rows(GPU, max_verify_rows=12) == (16, 12)
    assert rows(GPU, tree_budget=0) == (0, 264)
    # Also where it is what a CPU would have had, and where the environment gives it.
    assert rows(GPU, tree_budget=5, max_verify_rows=12) == (5, 12)
    monkeypatch.setenv("SPECBRIDGE_TREE_BUDGET", "5")
    assert rows(GPU) == (5, 264)


def test_a_target_that_comes_back_on_another_device_has_that_one_s() -> None:
    limits = GatewaySettings().limits()
    policy = policy_for(limits)
    assert isinstance(policy, SharedRows)
    for target, nodes in ((GPU, 16), (CPU, 5), (GPU, 16)):
        policy.measured(target, None)
        assert policy.tree_budget == nodes
    assert largest_tree(limits, None) == 5


@pytest.mark.parametrize(("device", "nodes"), [("cpu", 5), ("cuda:0", 16)])
def test_rounds_go_by_it(device: str, nodes: int) -> None:
    class Target(FakeTarget):
        def make_info(self) -> TargetInfo:
            return replace(super().make_info(), device=device)

    target, draft = Target(), FakeDraft(oracle)
    linked(target, draft)
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        await collect(scheduler, make_request(1, max_tokens=40, ignore_eos=True))

    run_scheduler(body, target, draft, limits=GatewaySettings().limits(), observer=observer)
    assert max(record.asked for record in observer.rounds) == nodes
