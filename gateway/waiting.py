"""FairQueue: who waits for a place, and who is next.

Owns the order: urgent ones first, requests that lost their place before newcomers, and among the tenants of
one priority deficit round robin over tokens (Shreedhar and Varghese, 1995). Does not own when somebody may
enter (gateway.admission). No clock of its own, no I/O.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    item: T
    priority: int
    tenant: str
    cost: int
    since: float
    born: float


class _Class(Generic[T]):
    """Those of one priority: whoever lost a place, then the newcomers, a lane a tenant, in turns."""

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._returned: list[_Entry[T]] = []
        self._lanes: OrderedDict[str, deque[_Entry[T]]] = OrderedDict()
        self._deficits: dict[str, int] = {}
        self._granted = False  # the first lane has had this turn's quantum

    def __bool__(self) -> bool:
        return bool(self._returned or self._lanes)

    def put(self, entry: _Entry[T]) -> None:
        self._lanes.setdefault(entry.tenant, deque()).append(entry)
        self._deficits.setdefault(entry.tenant, 0)

    def put_back(self, entry: _Entry[T]) -> None:
        self._returned.append(entry)
        self._returned.sort(key=lambda other: other.born)

    def since(self) -> float:
        """When the one came that has waited longest."""
        return min(entry.since for entry in (*self._returned, *(lane[0] for lane in self._lanes.values())))

    def next(self) -> _Entry[T]:
        """Whose turn it is. The same until `remove`, unless somebody joins."""
        if self._returned:
            return self._returned[0]
        if len(self._lanes) > 1:
            # Turns in which nobody could afford a request are taken in one.
            short = (lane[0].cost - self._deficits[tenant] for tenant, lane in self._lanes.items())
            idle = min(-(-missing // self._quantum) for missing in short) - 1
            for tenant in self._deficits:
                self._deficits[tenant] += max(idle, 0) * self._quantum
        while True:
            tenant, lane = next(iter(self._lanes.items()))
            if len(self._lanes) == 1 or self._deficits[tenant] >= lane[0].cost:
                return lane[0]
            if not self._granted:
                self._deficits[tenant] += self._quantum
                self._granted = True
            else:
                self._lanes.move_to_end(tenant)
                self._granted = False

    def remove(self, entry: _Entry[T], *, served: bool) -> None:
        if entry in self._returned:
            self._returned.remove(entry)
            return
        lane = self._lanes[entry.tenant]
        lane.remove(entry)
        if served:
            self.charge(entry.tenant, entry.cost)
        if not lane:
            # Who has nothing to ask for saves nothing up, and owes nothing for what nobody else wanted.
            if next(iter(self._lanes)) == entry.tenant:
                self._granted = False
            del self._lanes[entry.tenant], self._deficits[entry.tenant]

    def charge(self, tenant: str, tokens: int) -> None:
        if tenant in self._deficits and len(self._lanes) > 1:
            self._deficits[tenant] -= tokens


class FairQueue(Generic[T]):
    """Items by identity. quantum: tokens a tenant gets a turn. ageing_s: seconds of waiting that count as one
    step of priority, so that no priority waits for ever.
    """

    def __init__(self, *, quantum: int, ageing_s: float) -> None:
        self._quantum = quantum
        self._ageing_s = ageing_s
        self._entries: dict[int, _Entry[T]] = {}
        self._classes: dict[int, _Class[T]] = {}
        self.tokens = 0
        """Costs of all that wait, together."""

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, item: T, *, priority: int, tenant: str, cost: int, now: float) -> None:
        """A newcomer. priority: lower is earlier. cost: tokens, as far as one can tell."""
        entry = _Entry(item, priority, tenant, max(cost, 1), now, now)
        self._enter(entry).put(entry)

    def put_back(self, item: T, *, priority: int, cost: int, born: float, now: float) -> None:
        """One that had a place and lost it; it comes before all newcomers of its priority. born: when it
        first got a place: the oldest returns first.
        """
        entry = _Entry(item, priority, "", max(cost, 1), now, born)
        self._enter(entry).put_back(entry)

    def peek(self, now: float) -> T | None:
        """Who is next. It keeps its place until `take`."""

        def urgency(priority: int) -> tuple[int, int]:
            waited = max(now - self._classes[priority].since(), 0.0)
            return priority - int(waited / self._ageing_s), priority

        if not self._classes:
            return None
        return self._classes[min(self._classes, key=urgency)].next().item

    def take(self, item: T) -> None:
        """`item` gets its place; its tenant pays."""
        self._leave(item, served=True)

    def remove(self, item: T) -> None:
        """`item` waits no more."""
        self._leave(item, served=False)

    def settle(self, *, priority: int, tenant: str, tokens: int) -> None:
        """A request of the tenant has cost `tokens` more (less, if negative) than was thought."""
        if priority in self._classes:
            self._classes[priority].charge(tenant, tokens)

    def _enter(self, entry: _Entry[T]) -> _Class[T]:
        assert id(entry.item) not in self._entries, "it waits already"
        self._entries[id(entry.item)] = entry
        self.tokens += entry.cost
        return self._classes.setdefault(entry.priority, _Class(self._quantum))

    def _leave(self, item: T, *, served: bool) -> None:
        entry = self._entries.pop(id(item))
        self.tokens -= entry.cost
        waiting = self._classes[entry.priority]
        waiting.remove(entry, served=served)
        if not waiting:
            del self._classes[entry.priority]
