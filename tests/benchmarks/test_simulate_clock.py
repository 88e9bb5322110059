"""Virtual time, and pools of cores that share it: exact times, in no time."""

from __future__ import annotations

import asyncio
import time

import pytest

from benchmarks.simulation import clock
from benchmarks.simulation.pools import Pool, Thread


def test_an_hour_passes_at_once_and_exactly() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await asyncio.sleep(3600.0)
        return begun, loop.time()

    begun = time.process_time()
    assert clock.run(main()) == (0.0, 3600.0)
    assert time.process_time() - begun < 60.0, "an hour was waited for"


def test_timers_fire_in_the_order_of_their_times_and_equal_ones_as_they_were_set() -> None:
    fired: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number, at in enumerate([5.0, 1.0, *[3.0] * 40, 2.0, 1.0]):
            loop.call_at(at, fired.append, number)
        await asyncio.sleep(6.0)

    clock.run(main())
    assert fired == [1, 43, 42, *range(2, 42), 0]


def test_a_timeout_goes_by_the_virtual_clock() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert clock.run(main()) == 7.5


def test_waiting_for_nothing_is_a_defect_and_not_a_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(clock.Stuck):
        clock.run(main())


def _ends(capacity: float, works: list[tuple[float, float, float, float]]) -> list[float]:
    """When pieces of work (start, seconds, demand, weight) end."""
    ends = [0.0] * len(works)

    async def main() -> float:
        pool = Pool(capacity)
        loop = asyncio.get_running_loop()

        async def one(place: int, start: float, seconds: float, demand: float, weight: float) -> None:
            await asyncio.sleep(start)
            await pool.run(seconds, demand=demand, weight=weight)
            ends[place] = loop.time()

        await asyncio.gather(*(one(place, *work) for place, work in enumerate(works)))
        return pool.busy_s

    busy = clock.run(main())
    assert busy == pytest.approx(sum(seconds * demand for _, seconds, demand, _ in works))
    return ends


@pytest.mark.parametrize(
    ("capacity", "works", "ends"),
    [
        # Alone: as long as it says.
        (2.0, [(0.0, 3.0, 2.0, 1.0)], [3.0]),
        # Both fit: nobody is slowed down.
        (2.0, [(0.0, 3.0, 1.0, 1.0), (1.0, 3.0, 1.0, 0.1)], [3.0, 4.0]),
        # Two that want everything, 3 to 1: at 3/4 and 1/4 until the first is through at 4, then alone.
        (2.0, [(0.0, 3.0, 2.0, 3.0), (0.0, 3.0, 2.0, 1.0)], [4.0, 6.0]),
        # One core of two is wanted beside a pass on both: shares 2 : 1 of threads, two thirds of each.
        (2.0, [(0.0, 2.0, 2.0, 1.0), (0.0, 2.0, 1.0, 1.0)], [3.0, 3.0]),
        # A light thread gets no more than it asks for; the rest is the other's.
        (2.0, [(0.0, 3.0, 2.0, 1.0), (0.0, 1.0, 0.5, 8.0)], [3.25, 1.0]),
        # A GPU for two that take 1.6 times as long beside each other.
        (1.25, [(0.0, 1.0, 1.0, 1.0), (0.0, 1.0, 1.0, 1.0)], [1.6, 1.6]),
    ],
)  # fmt: skip
def test_work_takes_as_long_as_its_share_of_the_pool_says(
    capacity: float, works: list[tuple[float, float, float, float]], ends: list[float]
) -> None:
    assert _ends(capacity, works) == pytest.approx(ends)


def test_a_thread_does_one_thing_after_another() -> None:
    ends: list[tuple[str, float]] = []

    async def main() -> None:
        thread = Thread(Pool(4.0))
        loop = asyncio.get_running_loop()
        for name, seconds in (("a", 1.0), ("nothing", 0.0), ("b", 2.0)):
            thread.post(seconds, lambda name=name: ends.append((name, loop.time())))
        await thread.work(1.0)
        ends.append(("c", loop.time()))

    clock.run(main())
    assert ends == [("a", 1.0), ("nothing", 1.0), ("b", 3.0), ("c", 4.0)]
