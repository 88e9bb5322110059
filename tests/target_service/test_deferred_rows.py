"""Deferred rows: fewer chunks, the same rows; nothing is lost when the draft, the ring or the text ends."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from fake_sink import FakeSink
from toy_target import (
    GATEWAY,
    TOY_LIMITS,
    Client,
    ToyRunner,
    chain_tree,
    make_engine,
    open_request,
    random_tree,
)

from specbridge.rounds import FinishReason, SessionKey, TargetResultKind, Verify
from specbridge.tree import EMPTY_TREE, DraftTree
from target_service.capture import HOLD_ROWS

PROMPT = [random.Random(0).randrange(12) for _ in range(21)]
KEY = SessionKey(GATEWAY, 1)


class Stream:
    """One session whose rounds are verified by hand."""

    def __init__(self, *, slots: int = 256, max_tokens: int = 100) -> None:
        self.engine = make_engine(ToyRunner(num_pages=TOY_LIMITS.num_pages), TOY_LIMITS)
        self.sink = FakeSink(slots=slots)
        self.engine.connect_channel(self.sink)
        self.engine.start()
        self.engine.prepare_taps((1, 3), False)
        self.engine.channel_attached("inline", "test")
        self.client = Client(self.engine)
        first = self.client.open(open_request(1, PROMPT, max_tokens=max_tokens))
        self.kv_length = first.kv_length
        self.text = [*PROMPT, *first.tokens]
        self.finish = first.finish_reason
        self.context = True
        self.sink.ack()

    def round(self, *, defer: bool, tree: DraftTree = EMPTY_TREE) -> None:
        (result,) = self.client.verify([Verify(KEY, self.kv_length, tree, defer)]).results
        assert result.error is None
        self.kv_length, self.finish = result.kv_length, result.finish_reason
        self.context = result.draft_has_context
        self.text += result.tokens

    @property
    def announced(self) -> int:
        """Rows the draft knows; asserts that they are the text's, without a gap."""
        context = self.sink.context_of(KEY)
        assert context == self.text[: len(context)]
        return len(context)

    def end(self) -> None:
        self.client.send(releases=[KEY])
        self.client.result(KEY, TargetResultKind.RELEASED)


@pytest.fixture
def stream() -> Iterator[type[Stream]]:
    made: list[Stream] = []

    class Kept(Stream):
        def __init__(self, **kwargs: int) -> None:
            super().__init__(**kwargs)
            made.append(self)

    yield Kept
    for each in made:
        each.engine.close()
        assert not each.sink.open, "room was neither announced nor given back"


def test_deferred_rows_come_in_one_chunk_once_they_are_asked_for(stream: type[Stream]) -> None:
    s = stream()
    chunks = len(s.sink.chunks)
    for _ in range(5):
        s.round(defer=True)
    assert len(s.sink.chunks) == chunks
    assert s.announced == len(PROMPT)
    assert s.context, "the draft can follow: nothing is missing, it only has not been told"
    s.round(defer=False)
    assert len(s.sink.chunks) == chunks + 1
    assert s.announced == s.kv_length
    assert s.sink.chunks[-1].anchor == s.text[-1]
    states = s.sink.chunks[-1].rows[:, :2].tolist()
    assert states == [[float(s.text[p]), float(p)] for p in range(len(PROMPT), s.kv_length)]


def test_each_step_that_writes_rows_marks_them_once(stream: type[Stream]) -> None:
    """Whether they are announced or not; a span held over steps is announced behind the mark of the last."""
    text = stream()
    for defer in (True, True, False):
        before = text.sink.marks
        text.round(defer=defer)
        assert text.sink.marks == before + 1
    assert not text.sink.open
    text.sink.attached = False
    before = text.sink.marks
    text.round(defer=False)
    assert text.sink.marks == before


def test_a_full_span_is_announced_by_itself(stream: type[Stream]) -> None:
    s = stream()
    for _ in range(HOLD_ROWS):
        s.round(defer=True)
    assert s.announced == s.kv_length
    assert s.sink.used == HOLD_ROWS


def test_a_tree_that_no_longer_fits_opens_a_new_span(stream: type[Stream]) -> None:
    s = stream()
    rng = random.Random(3)
    for _ in range(12):
        s.round(defer=True, tree=random_tree(rng, nodes=12, depth=6, vocab=12))
        assert s.announced >= s.kv_length - HOLD_ROWS
    s.round(defer=False)
    assert s.announced == s.kv_length


def test_the_text_s_end_announces_what_is_held(stream: type[Stream]) -> None:
    s = stream(max_tokens=6)
    while s.finish is FinishReason.RUNNING:
        s.round(defer=True)
    assert s.announced == s.kv_length
    s.end()


def test_a_release_announces_what_is_held(stream: type[Stream]) -> None:
    """The rows' pages stay as a prefix at the target, so the draft should hold them, too."""
    s = stream()
    for _ in range(3):
        s.round(defer=True)
    s.end()
    assert s.announced == s.kv_length


def test_a_ring_with_little_room_is_not_held_on_to(stream: type[Stream]) -> None:
    s = stream(slots=HOLD_ROWS + 8)
    for _ in range(10):
        s.round(defer=True)
        s.sink.ack()
        assert s.announced == s.kv_length


def test_a_draft_that_asks_for_held_rows_gets_them(stream: type[Stream]) -> None:
    s = stream()
    for _ in range(4):
        s.round(defer=True)
    s.engine.request_recapture(KEY, len(PROMPT), "gap")
    s.round(defer=True)
    assert s.announced == s.kv_length - 1
    s.round(defer=False)
    assert s.announced == s.kv_length


def test_a_draft_that_goes_takes_the_held_rows_with_it(stream: type[Stream]) -> None:
    s = stream()
    for _ in range(4):
        s.round(defer=True)
    s.engine.channel_detached("test")
    s.round(defer=True)
    assert not s.sink.open and not s.context


def test_rows_that_follow_a_suspension_are_recaptured_behind_the_held_ones(stream: type[Stream]) -> None:
    s = stream()
    for _ in range(4):
        s.round(defer=True)
    s.sink.hold = True
    # Too deep for the rest of the span: it needs room of its own, and there is none.
    s.round(defer=False, tree=chain_tree([0] * 14))
    assert not s.context
    assert s.announced == len(PROMPT) + 4
    s.sink.hold = False
    for _ in range(200):
        s.round(defer=False)
        if s.context:
            break
    assert s.announced == s.kv_length
