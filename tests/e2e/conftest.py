"""Tiny models and a running stack, shared by the end-to-end tests of one worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from plain_decoding import NearTies
from running_stack import RunningStack, running_stack
from tiny import make_drafter, make_target


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(target, drafter) on disk, fp32."""
    folder = tmp_path_factory.mktemp("models")
    target = make_target(folder / "target", dtype=torch.float32, max_length=512)
    drafter = make_drafter(folder / "drafter", dtype=torch.float32, max_length=512)
    return target, drafter


@pytest.fixture(scope="session")
def stack(tiny_models: tuple[Path, Path]) -> Iterator[RunningStack]:
    """One for all files that use it (helpers/work_order.py gives them to one worker): a test that kills a
    service, or brings it out of step, waits until everything is well again. Sessions of broken streams are
    waited for in many tests: they outlive them by two seconds instead of ten.
    """
    target, drafter = tiny_models
    flags = ("--dtype=float32", "--tree-budget=8", "--max-verify-rows=64")  # four streams are drafted for
    flags += ("--session-lease=2", "--warmup-repeats=1")
    with running_stack(f"--target={target}", f"--draft={drafter}", *flags) as running:
        yield running


@pytest.fixture(scope="session")
def near_ties(tmp_path_factory: pytest.TempPathFactory) -> NearTies:
    """One allowance for the whole suite: workers have folders of their own under one of the run's."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    return NearTies(root / "near-ties.txt")
