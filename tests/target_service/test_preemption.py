"""Who gets pages when they are short: urgency and age, room left by newcomers, idle peers."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from toy_target import GATEWAY, PROMPT, TOY_LIMITS, Client, Start, expected, open_request

from specbridge.errors import Stale
from specbridge.rounds import SessionKey, StopParams, TargetResult, TargetResultKind, Verify

KEYS = [SessionKey(GATEWAY, n) for n in range(8)]
PROMPTS = [[(t + n) % 12 for t in PROMPT] for n in range(8)]


class Streams:
    """Sessions that decode side by side; who was preempted, in order."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.texts: dict[int, list[int]] = {}
        self._kv: dict[int, int] = {}
        self.preempted: list[int] = []

    def open(self, n: int, **kwargs: object) -> None:
        first = self._client.open(open_request(n, PROMPTS[n], max_tokens=99, **kwargs))  # type: ignore[arg-type]
        assert first.error is None
        self.texts[n], self._kv[n] = list(first.tokens), first.kv_length

    def round(self) -> None:
        running = [n for n in self._kv if n not in self.preempted]
        for result in self._client.verify([Verify(KEYS[n], self._kv[n]) for n in running]).results:
            self.take(result)

    def take(self, result: TargetResult) -> None:
        n = result.session.number
        if result.kind is TargetResultKind.PREEMPTED:
            self.preempted.append(n)
        else:
            assert result.error is None
            self.texts[n] += result.tokens
            self._kv[n] = result.kv_length


@pytest.mark.parametrize(
    ("places", "order"),
    [
        ({1: {}, 2: {}, 3: {}}, [3, 2]),  # the youngest
        ({1: {}, 2: {}, 3: {"age_ms": 60_000}}, [2, 1]),  # young here, old in truth: it was preempted before
        ({1: {"priority": 2}, 2: {"priority": 1}, 3: {}}, [1, 2]),  # the least urgent
        ({1: {"priority": 1}, 2: {"priority": -1}, 3: {"priority": 1, "age_ms": 9000}}, [1, 3]),
    ],
)
def test_the_least_urgent_is_preempted_of_those_the_youngest(
    start: Start, places: dict[int, dict[str, int]], order: list[int]
) -> None:
    # 13 pages: three sessions of 37 tokens begin in 9 and leave 4, and outgrow them.
    runner, engine, client = start(replace(TOY_LIMITS, num_pages=13, max_length=208))
    streams = Streams(client)
    for n, place in places.items():
        streams.open(n, **place)
    while len(streams.preempted) < 2:
        streams.round()
    assert streams.preempted == order
    for n, text in streams.texts.items():
        assert text == expected(runner, PROMPTS[n], stop=StopParams(99))[0][: len(text)]
    value = engine._metrics.registry.get_sample_value
    assert value("specbridge_target_preemptions_total", {"cause": "round"}) == 2


def test_a_newcomer_leaves_room_for_the_next_pages_of_those_that_run(start: Start) -> None:
    """Else it would begin and be preempted at once."""
    # Two sessions hold 3 pages each, for 48 tokens. The third needs 3, and there are 4.
    _, _, client = start(replace(TOY_LIMITS, num_pages=10, max_length=160))
    streams = Streams(client)
    for n in (1, 2):
        streams.open(n)
    for _ in range(5):
        streams.round()
    client.send(opens=[open_request(3, PROMPTS[3])])
    client.result(KEYS[3], TargetResultKind.OPENED)
    for _ in range(21):  # to 63 tokens each: one page more for each, which they find
        streams.round()
        assert not [r for reply in client.replies for r in reply.results if r.kind is TargetResultKind.FIRST]
    assert not streams.preempted
    client.send(releases=[KEYS[1]])
    assert client.result(KEYS[3], TargetResultKind.FIRST).error is None


def test_an_urgent_prompt_takes_pages_from_a_less_urgent_stream_and_from_no_other(start: Start) -> None:
    runner, engine, client = start(replace(TOY_LIMITS, num_pages=8, max_length=128))
    streams = Streams(client)
    streams.open(1, priority=1)
    streams.open(2, age_ms=5)
    client.send(opens=[open_request(3, PROMPTS[3], age_ms=60_000)])  # older, but no more urgent than 2
    preempted = client.result(KEYS[1], TargetResultKind.PREEMPTED)
    first = client.result(KEYS[3], TargetResultKind.FIRST)
    assert preempted.session == KEYS[1]
    assert list(first.tokens) == expected(runner, PROMPTS[3])[0][:1]
    client.send(opens=[open_request(4, PROMPTS[4], priority=1)])
    client.result(KEYS[4], TargetResultKind.OPENED)
    for _ in range(5):
        streams.preempted = [1]
        streams.round()
    assert streams.preempted == [1] and engine.num_sessions == 3
    value = engine._metrics.registry.get_sample_value
    assert value("specbridge_target_preemptions_total", {"cause": "prompt"}) == 1


def test_a_waiting_prompt_s_prefix_is_given_up_before_a_stream_is(start: Start) -> None:
    runner, engine, client = start(replace(TOY_LIMITS, num_pages=8, max_length=128))
    client.generate(open_request(7, PROMPTS[7], max_tokens=1))  # leaves two pages behind
    streams = Streams(client)
    for n in (1, 2):
        streams.open(n)
    client.send(opens=[open_request(6, [*PROMPTS[7], *PROMPTS[6]])])  # 5 pages, two of them found
    client.result(KEYS[6], TargetResultKind.OPENED)
    for _ in range(26):
        streams.round()  # the streams take the last two pages
    assert not streams.preempted and len(streams.texts[1]) == 27
    client.send(releases=[KEYS[1], KEYS[2]])
    first = client.result(KEYS[6], TargetResultKind.FIRST)
    assert first.cached_tokens == 0
    assert list(first.tokens) == expected(runner, [*PROMPTS[7], *PROMPTS[6]])[0][:1]


def test_replies_say_how_many_pages_are_left(start: Start) -> None:
    _, engine, client = start()
    client.send(opens=[open_request(1, PROMPT)])
    reply = client.wait(lambda r: any(x.kind is TargetResultKind.FIRST for x in r.results))
    assert reply.available_pages == TOY_LIMITS.num_pages - 3
    client.send(releases=[KEYS[1]])
    reply = client.wait(lambda r: any(x.kind is TargetResultKind.RELEASED for x in r.results))
    assert reply.available_pages == TOY_LIMITS.num_pages


def test_a_session_of_a_connected_peer_that_asks_nothing_is_freed(start: Start) -> None:
    _, engine, client = start(replace(TOY_LIMITS, idle_lease=0.3))
    idle = client.open(open_request(1, PROMPTS[1]))
    streams = Streams(client)
    streams.open(2)
    deadline = time.monotonic() + 20
    while engine.num_sessions > 1 and time.monotonic() < deadline:
        streams.round()
        time.sleep(0.01)
    told = client.result(idle.session, TargetResultKind.ERROR)
    assert isinstance(told.error, Stale) and "0.3 s" in str(told.error)
    assert engine.num_sessions == 1
    value = engine._metrics.registry.get_sample_value
    assert value("specbridge_target_idle_timeouts_total") == 1
    assert value("specbridge_target_lease_timeouts_total") == 0
