"""Rank 0's watch over a step: a GPU's collectives neither fail nor return when a peer hangs."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from specbridge.errors import Unavailable
from target_service import ranks, step_codec
from target_service.ranks import RankLink

MESSAGE = torch.tensor([step_codec.STEP])


class FakeGroup:
    """A step waits on `device` as the host waits for kernels: until something sets it."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.device = threading.Event()
        self.aborts = 0
        self.ends_on_abort = True
        self.fails = False

    def broadcast_message(self, message: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise Unavailable("tensor-parallel rank 0 lost its peers: connection reset")
        self.sent.append(int(message[0]))
        return message

    def abort(self) -> None:
        self.aborts += 1
        if self.ends_on_abort:
            self.device.set()

    def close(self) -> None: ...


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> FakeGroup:
    monkeypatch.setattr(ranks, "WATCH_S", 0.02)
    return FakeGroup()


def link(group: FakeGroup, limit: float | None) -> RankLink:
    made = RankLink(step_timeout_s=limit)
    made.start(group)  # type: ignore[arg-type]
    return made


def test_a_step_that_does_not_end_is_given_up(group: FakeGroup) -> None:
    made = link(group, 0.2)
    with (
        pytest.raises(Unavailable, match=r"longer than 0 s: a tensor-parallel rank is stuck"),
        made.step(MESSAGE),
    ):
        assert group.device.wait(30), "nobody gave the step up"
    assert group.aborts >= 1
    for again in (made.check, lambda: made.step(MESSAGE).__enter__()):
        with pytest.raises(Unavailable, match="stuck"):
            again()
    made.close()
    assert step_codec.STOP not in group.sent


def test_steps_in_time_and_pauses_between_them_are_nobody_s_business(group: FakeGroup) -> None:
    made = link(group, 0.2)
    for _ in range(3):
        with made.step(MESSAGE):
            pass
        time.sleep(0.3)
    made.check()
    made.close()
    assert group.sent == [step_codec.STEP] * 3 + [step_codec.PING, step_codec.STOP] and not group.aborts


def test_a_step_that_can_not_even_be_given_up_ends_the_process(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "LET_GO_S", 0.1)
    ended: list[int] = []

    def end(code: int) -> None:
        ended.append(code)
        group.device.set()

    monkeypatch.setattr(ranks.os, "_exit", end)
    group.ends_on_abort = False
    made = link(group, 0.1)
    with pytest.raises(Unavailable, match="stuck"), made.step(MESSAGE):
        assert group.device.wait(30)
    assert set(ended) == {1}
    made.close()


def test_a_lost_peer_is_found_by_asking(group: FakeGroup) -> None:
    made = link(group, None)
    made.check()
    group.fails = True
    with pytest.raises(Unavailable, match=r"connection reset; a rank died, is stuck or was cut off"):
        made.check()
    group.fails = False
    with pytest.raises(Unavailable, match="cut off"), made.step(MESSAGE):
        pytest.fail("a step after a rank was lost")
    made.close()
