"""CollectiveClock: exact on a CPU, sampled and read late on a GPU, never in the way of a capture."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch

from target_service.collective_clock import SAMPLED, CollectiveClock

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def run(clock: CollectiveClock, collectives: int, work: Any = lambda: None) -> None:
    with clock.step():
        for _ in range(collectives):
            with clock:
                work()


def test_a_cpu_pass_takes_what_its_collectives_take() -> None:
    clock = CollectiveClock(CPU)
    begin = time.perf_counter()
    run(clock, 3, lambda: time.sleep(0.01))
    whole = time.perf_counter() - begin
    assert clock.steps == 1 and 0.03 <= clock.seconds <= whole
    with clock:  # outside of a pass: loading, pings
        time.sleep(0.01)
    run(clock, 0)
    assert clock.steps == 2 and clock.seconds <= whole


def test_a_pass_that_fails_is_not_counted() -> None:
    clock = CollectiveClock(CPU)
    with pytest.raises(ZeroDivisionError), clock.step(), clock:
        raise ZeroDivisionError
    assert (clock.steps, clock.seconds) == (0, 0.0)


class Event:
    """Time passes by 2 ms from one record to the next; nothing has come until `done` is set."""

    ticks = itertools.count()
    done = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0

    def record(self) -> None:
        self.at = next(Event.ticks)

    def query(self) -> bool:
        return Event.done

    def elapsed_time(self, end: Event) -> float:
        assert Event.done
        return 2.0 * (end.at - self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CollectiveClock:
    monkeypatch.setattr(Event, "done", False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return CollectiveClock(GPU)


def test_a_gpu_pass_is_read_before_a_later_one_once_its_events_have_come(gpu: CollectiveClock) -> None:
    run(gpu, 3)
    run(gpu, 3)
    assert (gpu.steps, gpu.seconds) == (0, 0.0)
    Event.done = True
    run(gpu, 3)
    assert gpu.steps == 1 and gpu.seconds == pytest.approx(3 * 0.002)


def test_one_gpu_pass_in_so_many_is_measured(gpu: CollectiveClock) -> None:
    Event.done = True
    for _ in range(3 * SAMPLED):
        run(gpu, 2)
    run(gpu, 0)
    assert gpu.steps == 3 and gpu.seconds == pytest.approx(3 * 2 * 0.002)


def test_a_pass_that_is_being_captured_is_left_alone(
    gpu: CollectiveClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    Event.done = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run(gpu, 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(SAMPLED):
        run(gpu, 2)
    assert gpu.steps == 0
    run(gpu, 2)
    assert (gpu.steps, gpu.seconds) == (1, pytest.approx(2 * 0.002))


@pytest.mark.gpu
def test_real_events_time_what_is_between_them_and_a_capture_succeeds() -> None:
    device = torch.device("cuda:0")
    clock = CollectiveClock(device)
    x = torch.ones(4096, 4096, device=device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        x @ x  # loads what it needs
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream), clock.step(), clock:
            x.add_(1.0)
        for _ in range(2 * SAMPLED):
            run(clock, 2, lambda: x @ x)
        torch.cuda.synchronize()
        run(clock, 0)
    assert clock.steps >= 1 and clock.seconds > 0
