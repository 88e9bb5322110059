"""Who is next: fair shares of tokens, priorities, ageing, those that lost their place."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gateway.waiting import FairQueue

QUANTUM = 100
AGEING = 30.0


class Item:
    """An item of its own identity."""

    def __init__(self, name: str, cost: int, priority: int = 0) -> None:
        self.name = name
        self.cost = cost
        self.priority = priority

    def __repr__(self) -> str:
        return f"{self.name}:{self.cost}"


def queue() -> FairQueue[Item]:
    return FairQueue(quantum=QUANTUM, ageing_s=AGEING)


def put(waiting: FairQueue[Item], name: str, cost: int, *, priority: int = 0, now: float = 0.0) -> Item:
    item = Item(name, cost, priority)
    waiting.put(item, priority=priority, tenant=name[0], cost=cost, now=now)
    return item


def take(waiting: FairQueue[Item], now: float = 0.0) -> Item:
    item = waiting.peek(now)
    assert item is not None and waiting.peek(now) is item, "looking must not change who is next"
    waiting.take(item)
    return item


def drain(waiting: FairQueue[Item], now: float = 0.0) -> list[str]:
    return [take(waiting, now).name for _ in range(len(waiting))]


def test_one_tenant_is_served_in_order() -> None:
    waiting = queue()
    for i, cost in enumerate((5000, 1, 300, 40)):
        put(waiting, f"a{i}", cost)
    assert waiting.tokens == 5341
    assert drain(waiting) == ["a0", "a1", "a2", "a3"]
    assert waiting.tokens == 0 and waiting.peek(0.0) is None


def test_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    waiting = queue()
    for i in range(50):
        put(waiting, f"a{i}", 100)
    put(waiting, "b0", 100)
    put(waiting, "b1", 100)
    assert [name[0] for name in drain(waiting)[:4]] == ["a", "b", "a", "b"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 900)), min_size=1, max_size=60),
    st.integers(0, 10**6),
)
def test_backlogged_tenants_get_equal_tokens(found: list[tuple[str, int]], seed: int) -> None:
    """Deficit round robin: between two tenants that wait throughout, never more apart than a turn and a
    request, whatever the requests' sizes. Newcomers and quitters in between do not change that.
    """
    rng = random.Random(seed)
    waiting = queue()
    present: list[Item] = [put(waiting, f"{tenant}{i}", cost) for i, (tenant, cost) in enumerate(found)]
    served = dict.fromkeys("abc", 0)
    while len(waiting):
        lanes = {item.name[0] for item in present}
        if len(lanes) < 3:
            break  # who ran out of requests has no claim to later tokens
        item = take(waiting)
        present.remove(item)
        served[item.name[0]] += item.cost
        assert max(served.values()) - min(served.values()) <= 2 * (QUANTUM + 900)
        if rng.random() < 0.2 and len(present) > 3:
            quitter = rng.choice(present)
            present.remove(quitter)
            waiting.remove(quitter)
    assert waiting.tokens == sum(item.cost for item in present)
    assert sorted(drain(waiting)) == sorted(item.name for item in present)


def test_a_tenant_pays_for_what_its_requests_really_cost() -> None:
    waiting = queue()
    for i in range(6):
        put(waiting, f"a{i}", 100)
        put(waiting, f"b{i}", 100)
    assert take(waiting).name == "a0"
    waiting.settle(priority=0, tenant="a", tokens=300)  # it has cost 400
    assert [name[0] for name in drain(waiting)[:6]] == ["b", "b", "b", "b", "a", "b"]


def test_urgent_ones_first_then_those_that_lost_their_place() -> None:
    waiting = queue()
    put(waiting, "a0", 10)
    put(waiting, "a1", 10, priority=-1)
    put(waiting, "a2", 10, priority=5)
    for name, born in (("x", 20.0), ("y", 10.0)):
        waiting.put_back(Item(name, 10), priority=0, cost=10, born=born, now=50.0)
    assert drain(waiting, now=50.0) == ["a1", "y", "x", "a0", "a2"]


def test_nobody_waits_for_ever() -> None:
    """A steady stream of more urgent requests: every AGEING seconds a waiting one gains a step on them."""
    waiting = queue()
    put(waiting, "late", 10, priority=2, now=0.0)
    now = 0.0
    for i in range(100):
        now += 1.0
        put(waiting, f"a{i}", 10, now=now)
        if take(waiting, now).name == "late":
            break
    # At equal urgency the class that always was the more urgent goes first.
    assert 2 * AGEING <= now <= 3 * AGEING + 1


def test_among_equals_turns_hold_however_long_they_wait() -> None:
    waiting = queue()
    for i in range(20):
        put(waiting, f"a{i}", 100, now=0.0)
    put(waiting, "b0", 100, now=900.0)
    assert "b0" in drain(waiting, now=1000.0)[:3]
