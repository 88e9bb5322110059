"""SessionTable: whose sessions are whose, and what a broken stream leaves."""

from __future__ import annotations

from typing import Any, cast

from draft_service.session import Session, SessionTable
from specbridge.rounds import SamplingParams, SessionKey

GATEWAYS = [bytes([i]) * 16 for i in range(4)]


def table_of(*places: tuple[int, int]) -> SessionTable:
    """A table with sessions (gateway, number)."""
    table = SessionTable(lease_s=10.0)
    for gateway, number in places:
        key = SessionKey(GATEWAYS[gateway], number)
        table.add(Session(key, SamplingParams(), b"", cast(Any, None)))
    return table


def test_a_broken_stream_gives_its_gateways_a_lease_each() -> None:
    table = table_of((0, 1), (0, 2), (1, 1))
    table.seen(GATEWAYS[0], "a")
    table.seen(GATEWAYS[1], "b")
    table.stream_closed("a", 100.0)
    assert table.next_expiry() == 110.0 and not table.expired(109.0)
    gone = table.expired(110.0)
    assert list(gone) == [GATEWAYS[0]] and [s.key.number for s in gone[GATEWAYS[0]]] == [1, 2]
    assert table.next_expiry() is None


def test_a_gateway_that_comes_back_on_another_stream_keeps_its_sessions() -> None:
    table = table_of((0, 1))
    table.seen(GATEWAYS[0], "a")
    table.stream_closed("a", 100.0)
    table.seen(GATEWAYS[0], "b")
    assert not table.expired(1e9)
    table.stream_closed("a", 200.0)  # the older stream's end is told twice, or late
    assert table.next_expiry() is None


def test_gateways_without_a_session_are_forgotten_with_their_stream() -> None:
    table = table_of((0, 1))
    table.seen(GATEWAYS[0], "a")
    for i in range(1000):
        table.seen(i.to_bytes(16, "big"), "a")
    table.stream_closed("a", 100.0)
    assert list(table.expired(1e9)) == [GATEWAYS[0]]
    assert not table._stream_of and not table._expires


def test_sessions_that_nobody_speaks_of_become_idle_and_the_others_do_not() -> None:
    table = SessionTable(lease_s=10.0, idle_s=40.0)
    assert table.next_expiry() is None
    for number in (1, 2):
        table.add(Session(SessionKey(GATEWAYS[0], number), SamplingParams(), b"", cast(Any, None)))
    for now in range(100, 200, 10):
        at = table.next_expiry()
        assert at is not None and at <= now
        idle = table.idle(float(now))
        assert [s.key.number for s in idle] == ([1] if now == 140 else [])
        for session in idle:
            table.remove(session)
        assert table.get(SessionKey(GATEWAYS[0], 2)) is not None
