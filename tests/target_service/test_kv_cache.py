"""Page tables over the pool: prefixes, sharing, and the invariants under random use."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbridge.errors import CapacityError
from specbridge.paging import PagedSequence
from target_service.kv_cache import PageCache

PAGE = 4


def make(pages: int = 16, **kwargs: object) -> PageCache:
    return PageCache(pages, PAGE, fingerprint="model", **kwargs)  # type: ignore[arg-type]


def run(cache: PageCache, tokens: list[int], *, salt: bytes = b"", limit: int = 10**6) -> PagedSequence:
    """Open, compute and commit all of `tokens`."""
    table = cache.open(tokens, salt=salt, limit=limit)
    cache.grow(table, len(tokens))
    cache.commit(table, tokens, len(tokens))
    return table


def test_a_released_prefix_is_found_again_in_whole_pages() -> None:
    cache = make()
    tokens = list(range(10))
    first = run(cache, tokens)
    pages = list(first.pages)
    cache.release(first)
    again = cache.open(tokens, salt=b"", limit=len(tokens) - 1)
    assert again.found == 8
    assert again.pages == pages[:2]


@pytest.mark.parametrize(("limit", "cached"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (100, 8)])
def test_reuse_keeps_to_the_limit(limit: int, cached: int) -> None:
    cache = make()
    tokens = list(range(8))
    cache.release(run(cache, tokens))
    assert cache.open(tokens, salt=b"", limit=limit).found == cached


def test_a_running_session_shares_its_pages_and_keeps_them_when_the_other_ends() -> None:
    cache = make()
    tokens = list(range(8))
    first = run(cache, tokens)
    second = cache.open(tokens, salt=b"", limit=8)
    assert second.pages == first.pages and cache.used == 2
    cache.release(first)
    assert cache.used == 2 and cache.cached == 0
    cache.release(second)
    assert cache.used == 0 and cache.cached == 2


def test_another_salt_or_model_or_first_page_finds_nothing() -> None:
    cache = make()
    tokens = list(range(8))
    cache.release(run(cache, tokens, salt=b"a"))
    assert cache.open(tokens, salt=b"a", limit=8).found == 8
    assert cache.open(tokens, salt=b"b", limit=8).found == 0
    assert cache.open([9, *tokens[1:]], salt=b"a", limit=8).found == 0
    other = PageCache(4, PAGE, fingerprint="other")
    assert other.pool.root(b"a") != cache.pool.root(b"a")


def test_only_committed_tokens_enter_the_index() -> None:
    cache = make()
    tokens = list(range(8))
    table = cache.open(tokens, salt=b"", limit=8)
    cache.grow(table, 8)
    cache.commit(table, tokens, 7)
    cache.release(table)
    assert cache.open(tokens, salt=b"", limit=8).found == 4


def test_without_reuse_nothing_is_kept() -> None:
    cache = make(reuse=False)
    tokens = list(range(8))
    cache.release(run(cache, tokens))
    assert cache.cached == 0
    assert cache.open(tokens, salt=b"", limit=8).found == 0


def test_shortage_takes_nothing_and_names_the_numbers() -> None:
    cache = make(pages=4)
    table = run(cache, list(range(12)))
    with pytest.raises(CapacityError, match=r"2 pages .* 1 of 4"):
        cache.grow(table, 20)
    assert len(table.pages) == 3 and cache.used == 3
    cache.grow(table, 16)
    assert cache.used == 4


def test_cached_pages_are_evicted_oldest_first() -> None:
    cache = make(pages=4)
    old, new = [1] * 4, [2] * 4
    cache.release(run(cache, old))
    cache.release(run(cache, new))
    cache.grow(cache.open((), salt=b"", limit=0), 12)
    assert cache.open(old, salt=b"", limit=4).found == 0
    assert cache.open(new, salt=b"", limit=4).found == 4


def test_release_is_idempotent() -> None:
    cache = make()
    table = run(cache, list(range(8)))
    cache.release(table)
    cache.release(table)
    cache.pool.check()
    assert cache.used == 0


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), pages=st.integers(2, 12))
def test_under_random_use_no_page_is_lost_shared_wrongly_or_found_with_other_tokens(
    seed: int, pages: int
) -> None:
    """A shadow memory holds what each page was filled with; every hit must read back its own tokens."""
    rng = random.Random(seed)
    cache = make(pages=pages)
    memory: dict[int, tuple[int, ...]] = {}
    live: list[tuple[PagedSequence, list[int], int]] = []
    for _ in range(60):
        action = rng.random()
        if action < 0.45:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
            limit = rng.randrange(len(tokens) + 1)
            table = cache.open(tokens, salt=b"", limit=limit)
            assert table.found <= limit and table.found % PAGE == 0
            for i, page in enumerate(table.pages):
                # The page holds the whole prefix up to its end, not just these four tokens.
                assert memory[page] == tuple(tokens[: (i + 1) * PAGE])
            try:
                cache.grow(table, len(tokens))
            except CapacityError:
                cache.release(table)
                continue
            committed = rng.randrange(table.found, len(tokens) + 1)
            for i in range(table.found // PAGE, committed // PAGE):
                memory[table.pages[i]] = tuple(tokens[: (i + 1) * PAGE])
            cache.commit(table, tokens, committed)
            live.append((table, tokens, committed))
        elif live and action < 0.9:
            table, _, _ = live.pop(rng.randrange(len(live)))
            cache.release(table)
        for table, tokens, committed in live:
            for i in range(committed // PAGE):
                assert memory[table.pages[i]] == tuple(tokens[: (i + 1) * PAGE])
        private = [p for table, _, committed in live for p in table.pages[committed // PAGE :]]
        assert len(private) == len(set(private))
        cache.pool.check()
    for table, _, _ in live:
        cache.release(table)
    assert cache.used == 0
    cache.pool.check()
