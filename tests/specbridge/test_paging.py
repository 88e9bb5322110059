"""The page pool and its prefix index: allocation invariants by property, reuse rules by example."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specbridge.errors import CapacityError
from specbridge.paging import PagedSequence, PagePool

PAGE = 4


def found(pool: PagePool, tokens: list[int], **kwargs: Any) -> int:
    """Tokens that a newcomer would find cached."""
    pages = pool.match(tokens, **kwargs)
    pool.release(pages)
    return len(pages) * pool.page_size


def free(pool: PagePool) -> int:
    return pool.available_pages - pool.cached_pages


def filled(pool: PagePool, tokens: list[int], salt: bytes = b"") -> PagedSequence:
    sequence = pool.open(tokens, salt=salt, limit=len(tokens) - 1)
    sequence.extend(tokens[sequence.length :])
    return sequence


def test_a_closed_sequence_is_found_again_in_whole_pages() -> None:
    pool = PagePool(8, PAGE)
    filled(pool, list(range(10))).close()
    assert pool.cached_pages == 2 and free(pool) == 6
    assert found(pool, list(range(10))) == 8
    assert found(pool, list(range(8)), limit=7) == 4
    assert found(pool, [0, 1, 2, 3, 9, 9, 9, 9]) == 4
    assert found(pool, [9, *range(1, 10)]) == 0


def test_a_later_page_is_not_found_without_the_earlier_tokens() -> None:
    pool = PagePool(8, PAGE)
    filled(pool, [1, 1, 1, 1, 2, 2, 2, 2, 3]).close()
    assert found(pool, [2, 2, 2, 2, 2]) == 0
    assert found(pool, [3, 3, 3, 3, 2, 2, 2, 2, 5]) == 0


def test_two_live_sequences_share_pages_and_neither_is_evicted() -> None:
    pool = PagePool(4, PAGE)
    first = filled(pool, list(range(9)))
    second = pool.open(list(range(9)), limit=8)
    assert second.pages == first.pages[:2] and second.length == 8
    first.close()
    assert pool.used_pages == 2
    with pytest.raises(CapacityError, match="3 pages"):
        pool.allocate(3)
    assert pool.available_pages == 2
    second.close()
    assert len(pool.allocate(4)) == 4
    assert found(pool, list(range(9))) == 0


def test_salt_and_fingerprint_separate_prefixes() -> None:
    pool = PagePool(8, PAGE, fingerprint=b"a")
    filled(pool, list(range(9)), b"tenant").close()
    assert found(pool, list(range(9)), salt=b"tenant") == 8
    assert found(pool, list(range(9))) == 0
    assert found(pool, list(range(9)), salt=b"other") == 0
    other = PagePool(8, PAGE, fingerprint=b"b")
    assert other.root(b"tenant") != pool.root(b"tenant")


def test_the_tail_of_the_least_recently_used_prefix_goes_first() -> None:
    pool = PagePool(5, PAGE)
    old, new = [1] * 9, [2] * 9
    filled(pool, old).close()
    filled(pool, new).close()
    assert found(pool, old) == 8 and found(pool, new) == 8
    held = pool.allocate(2)
    assert found(pool, old) == 4 and found(pool, new) == 8
    assert pool.evictions == 1
    pool.release(held)
    pool.open(old, limit=8).close()  # touched: now newer than `new`
    pool.allocate(2 + 2)
    assert found(pool, old) == 4 and found(pool, new) == 0


def test_equal_pages_written_twice_are_indexed_once_and_the_copy_is_freed() -> None:
    pool = PagePool(8, PAGE)
    first, second = pool.open([]), pool.open([])
    first.extend([7] * 4)
    second.extend([7] * 4)
    assert found(pool, [7] * 4) == 4
    second.close()
    assert free(pool) == 7 and pool.cached_pages == 0
    first.close()
    assert free(pool) == 7 and pool.cached_pages == 1


def test_the_index_version_changes_with_what_can_be_found_and_only_then() -> None:
    pool = PagePool(3, PAGE)
    version = pool.index_version
    first = pool.open([])
    first.extend([1] * 3)
    assert pool.index_version == version, "no page is full"
    first.extend([1])
    assert pool.index_version != version, "a page can be found"
    version = pool.index_version
    first.close()
    assert found(pool, [1] * 4) == 4 and pool.index_version == version
    held = pool.allocate(3)
    assert pool.index_version != version, "it was evicted"
    version = pool.index_version
    pool.release(held)
    assert pool.index_version == version


def test_a_pool_without_reuse_keeps_nothing() -> None:
    pool = PagePool(8, PAGE, reuse=False)
    filled(pool, list(range(9))).close()
    assert free(pool) == 8 and found(pool, list(range(9))) == 0 and pool.index_version == 0


def test_a_closed_sequence_takes_nothing_more() -> None:
    pool = PagePool(2, PAGE)
    sequence = filled(pool, [1])
    sequence.close()
    with pytest.raises(AssertionError, match="closed"):
        sequence.extend([2])
    assert free(pool) == 2


def test_reserve_takes_nothing_when_it_fails() -> None:
    pool = PagePool(2, PAGE)
    sequence = pool.open([])
    sequence.extend([1, 2])
    with pytest.raises(CapacityError):
        sequence.reserve(7)
    assert len(sequence.pages) == 1 and free(pool) == 1
    with pytest.raises(CapacityError):
        sequence.extend([0] * 7)
    assert sequence.length == 2


def test_clear_cache_makes_prefixes_unfindable_and_keeps_live_pages() -> None:
    pool = PagePool(8, PAGE)
    filled(pool, [1] * 9).close()
    live = filled(pool, [2] * 9)
    pool.clear_cache()
    assert found(pool, [1] * 9) == 0 and found(pool, [2] * 9) == 0
    assert pool.used_pages == 3 and free(pool) == 5
    live.extend([3] * 8)
    pool.check()
    live.close()
    pool.check()
    assert pool.used_pages == 0


def test_sequences_that_grow_side_by_side_keep_neighbouring_pages() -> None:
    pool = PagePool(100, PAGE)
    first, second = pool.open([]), pool.open([])
    for _ in range(20):
        first.extend([1] * PAGE)
        second.extend([2] * PAGE)
    assert first.pages == list(range(first.pages[0], first.pages[0] + 20))
    assert second.pages == list(range(second.pages[0], second.pages[0] + 20))


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=6),
    st.integers(1, 5),
)
def test_match_equals_the_longest_common_prefix_in_pages(texts: list[list[int]], size: int) -> None:
    pool = PagePool(400, size)
    seen: list[list[int]] = []
    for text in texts:
        common = max((sum(1 for _ in _common(text, other)) // size * size for other in seen), default=0)
        assert found(pool, text) == common
        filled(pool, text).close()
        seen.append(text)
    pool.check()


def _common(a: list[int], b: list[int]) -> list[int]:
    shared = []
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        shared.append(x)
    return shared


class PoolMachine(RuleBasedStateMachine):
    """Random opens, extends and closes; each live page must keep the token it was written with."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(10, 3)
        self.rows: dict[int, int] = {}  # slot -> token written there
        self.live: list[PagedSequence] = []

    def write(self, sequence: PagedSequence, tokens: list[int]) -> None:
        try:
            sequence.reserve(len(tokens))
        except CapacityError:
            return
        for slot, token in zip(sequence.slots(sequence.length, len(tokens)), tokens, strict=True):
            self.rows[slot] = token
        sequence.extend(tokens)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), salt=st.sampled_from([b"", b"x"]))
    def open(self, tokens: list[int], salt: bytes) -> None:
        sequence = self.pool.open(tokens, salt=salt, limit=len(tokens) - 1)
        self.live.append(sequence)
        self.write(sequence, tokens[sequence.length :])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=7))
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        self.write(data.draw(st.sampled_from(self.live)), tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        sequence.close()
        sequence.close()

    @rule()
    def clear(self) -> None:
        self.pool.clear_cache()

    @invariant()
    def live_sequences_read_back_their_tokens(self) -> None:
        for sequence in self.live:
            assert [self.rows[s] for s in sequence.slots(0, sequence.length)] == sequence.tokens

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        assert self.pool.used_pages == len({page for sequence in self.live for page in sequence.pages})


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestPoolMachine = PoolMachine.TestCase
