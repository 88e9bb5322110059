"""Committing and publishing accepted rows against loops over rows, in torch, interpreted and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.commit import commit_rows, commit_rows_reference, publish_rows, publish_rows_reference

# The fixture only sets a switch that stays the same for all examples.
SWEEP = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True)
class Pass:
    """Packed rows: sessions with their rows' paths, then padding sessions and rows."""

    paths: list[list[int]]
    pad_sessions: int
    pad_rows: int

    @property
    def rows(self) -> int:
        return sum(map(len, self.paths)) + self.pad_rows

    def path(self, device: torch.device) -> torch.Tensor:
        flat = [step for path in self.paths for step in path] + [-1] * self.pad_rows
        return torch.tensor(flat, dtype=torch.int32, device=device)

    def row_start(self, device: torch.device) -> torch.Tensor:
        starts = [0]
        for path in self.paths:
            starts.append(starts[-1] + len(path))
        starts += starts[-1:] * self.pad_sessions
        return torch.tensor(starts, dtype=torch.int32, device=device)


@st.composite
def session_paths(draw: st.DrawFn) -> list[int]:
    """-1 but for 0, 1, ... at growing places: what a walk gives. Empty sessions too."""
    rows = draw(st.integers(0, 9))
    accepted = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    return [sum(accepted[:i]) if accepted[i] else -1 for i in range(rows)]


PASSES = st.builds(
    Pass, st.lists(session_paths(), min_size=1, max_size=5), st.integers(0, 2), st.integers(0, 3)
)


def check_commit(batch: Pass, planes: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    num_slots = 64
    pages = torch.full((planes, num_slots, width), 77.0, dtype=dtype, device=device)
    staged = torch.randn(planes, batch.rows + 2, width, device=device).to(dtype)
    slots = torch.randperm(num_slots)[: batch.rows].to(torch.int32).to(device)
    slots[1::4] = -1
    path = batch.path(device)
    expected = pages.clone()
    for row, (step, slot) in enumerate(zip(path.tolist(), slots.tolist(), strict=True)):
        if step >= 0 and slot >= 0:
            expected[:, slot] = staged[:, row]
    for commit in (commit_rows, commit_rows_reference):
        got = pages.clone()
        commit(got, staged, slots, path)
        assert torch.equal(got, expected)


@SWEEP
@given(
    batch=PASSES.filter(lambda batch: batch.rows > 0),
    planes=st.integers(1, 9),
    width=st.sampled_from([8, 192, 320]),
)
def test_commit_rows(triton_device: torch.device, batch: Pass, planes: int, width: int) -> None:
    check_commit(batch, planes, width, torch.float32, triton_device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [192, 1024, 1040, 3072])
def test_commit_rows_of_many_layers(triton_device: torch.device, dtype: torch.dtype, width: int) -> None:
    check_commit(Pass([[0, -1, 1, 2], [], [0]], 1, 2), 60, width, dtype, triton_device)


def test_commit_without_a_path_takes_every_row_with_a_slot(triton_device: torch.device) -> None:
    pages, staged = torch.zeros(2, 6, 8, device=triton_device), torch.randn(2, 3, 8, device=triton_device)
    commit_rows(pages, staged, torch.tensor([4, -1, 0], device=triton_device))
    assert torch.equal(pages[:, [4, 0]], staged[:, [0, 2]])
    assert not pages[:, [1, 2, 3, 5]].any()


def test_commit_refuses_what_does_not_fit(triton_device: torch.device) -> None:
    pages, slots = torch.zeros(2, 6, 8, device=triton_device), torch.zeros(3, device=triton_device).int()
    with pytest.raises(ValueError, match="in common"):
        commit_rows(pages, torch.zeros(2, 3, 16, device=triton_device), slots)
    with pytest.raises(ValueError, match="in common"):
        commit_rows(pages, torch.zeros(2, 3, 8, device=triton_device).bfloat16(), slots)


def check_publish(
    batch: Pass, skips: list[int], width: int, device: torch.device, ring_dtype: torch.dtype
) -> None:
    sessions = len(batch.paths) + batch.pad_sessions
    ring = torch.full((80, width), 77.0, dtype=ring_dtype, device=device)
    taps = torch.randn(batch.rows, width, device=device)
    first_slot = [(7 * s if s % 3 != 1 else -1) if s < len(batch.paths) else 0 for s in range(sessions)]
    skip = (skips * sessions)[:sessions]
    expected = ring.clone()
    row = 0
    for s, steps in enumerate(batch.paths):
        for step in steps:
            slot = first_slot[s] + step - skip[s]
            if first_slot[s] >= 0 and step >= skip[s]:
                expected[slot] = taps[row].to(ring_dtype)
            row += 1
    for publish in (publish_rows, publish_rows_reference):
        got = ring.clone()
        publish(
            taps,
            got,
            first_slot=torch.tensor(first_slot, dtype=torch.int32, device=device),
            skip=torch.tensor(skip, dtype=torch.int32, device=device),
            row_start=batch.row_start(device),
            path=batch.path(device),
        )
        assert torch.equal(got, expected)


@SWEEP
@given(
    batch=PASSES.filter(lambda batch: batch.rows > 0),
    skips=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    width=st.sampled_from([16, 2880]),
)
def test_publish_rows(triton_device: torch.device, batch: Pass, skips: list[int], width: int) -> None:
    check_publish(batch, skips, width, triton_device, torch.float32)


def test_published_rows_take_the_ring_s_dtype(triton_device: torch.device) -> None:
    check_publish(Pass([[0, 1, -1, 2], [0], [-1]], 0, 1), [0, 1], 100, triton_device, torch.bfloat16)


@pytest.mark.parametrize("first", [2, 3, 10])
def test_no_row_is_written_past_the_ring_s_end(triton_device: torch.device, first: int) -> None:
    whole = torch.full((6, 16), 77.0, device=triton_device)
    publish_rows(
        torch.randn(3, 16, device=triton_device),
        whole[:4],
        first_slot=torch.tensor([first], device=triton_device),
        skip=torch.tensor([0], device=triton_device),
        row_start=torch.tensor([0, 3], device=triton_device),
        path=torch.tensor([0, 1, 2], device=triton_device),
    )
    assert (whole[4:] == 77.0).all()
    assert (whole[:first] == 77.0).all()
