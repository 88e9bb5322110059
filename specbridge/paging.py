"""Pages of committed tokens and the prefix index over them, shared by the target's KV and the draft's context
cache.

Owns: which page is free, used or cached; the index that finds pages again by the tokens they hold; reference
counts; eviction. Does not own what lies in a page (tensors are the services') nor threads: one engine thread
uses it.

A page is *used* while sequences hold references to it, *cached* when nobody does but the index still knows
its tokens, else *free*. Only full pages of committed tokens enter the index, so a shared page is never
written again. Pages are found by a hash chain: digest(page i) = blake2b(digest(page i-1) + the page's token
ids), started from a keyed hash of the model's fingerprint and the tenant's salt: equal digests mean equal
tokens from position 0 on, under the same weights.

Two levels: `PagePool` (match, allocate, publish, release) and `PagedSequence`, one session's pages on top of
it, which keeps tokens, length and page table in step:

    pool = PagePool(1024, 16, fingerprint=b"...")
    sequence = pool.open(tokens, limit=len(tokens) - 1)
        # pins cached pages: sequence.length tokens are there already
    sequence.reserve(count)
        # pages for count more tokens, or CapacityError
    slots = sequence.slots(sequence.length, count)
        # where their rows go: page * page_size + offset
    sequence.extend(new_tokens)
        # they are written and committed: full pages become findable
    sequence.close()
        # full pages stay cached until evicted
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from specbridge.errors import CapacityError

DIGEST_BYTES = 16
RUN_PAGES = 32
"""A new run of pages begins this many after the latest one, so that sequences can grow into neighbouring
pages.
"""


class PagePool:
    """`num_pages` pages of `page_size` tokens. Page ids are 0..num_pages-1.

    reuse: False keeps the index empty: no page is ever shared or kept.
    """

    def __init__(
        self, num_pages: int, page_size: int, *, fingerprint: bytes = b"", reuse: bool = True
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages: num_pages={num_pages}, page_size={page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.reuse = reuse
        self.evictions = 0
        """Cached pages given to somebody else, since the pool was made."""
        self.index_version = 0
        """Changes whenever a `match` might find something else than before."""
        self._key = hashlib.blake2b(fingerprint, digest_size=32).digest()
        self._refs = [0] * num_pages
        self._free = dict.fromkeys(range(num_pages))
        self._cursor = -RUN_PAGES
        self._index: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        # Cached pages, least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()

    # ---- counts ------------------------------------------------------------------------------

    @property
    def cached_pages(self) -> int:
        """Pages nobody uses whose tokens can still be found; evicted when space is needed."""
        return len(self._cached)

    @property
    def used_pages(self) -> int:
        """Pages held by at least one sequence."""
        return self.num_pages - len(self._free) - len(self._cached)

    @property
    def available_pages(self) -> int:
        """Pages an `allocate` can hand out now, evicting if it must."""
        return len(self._free) + len(self._cached)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens fill or begin."""
        return -(-num_tokens // self.page_size)

    # ---- index -------------------------------------------------------------------------------

    def root(self, salt: bytes = b"") -> bytes:
        """Start of the hash chain for a tenant's salt (empty: shared by all)."""
        return hashlib.blake2b(salt, key=self._key, digest_size=DIGEST_BYTES).digest()

    def chain(self, digest: bytes, tokens: Sequence[int]) -> bytes:
        """Digest of the page that holds `tokens` (one page's worth) and follows the page of `digest`."""
        return hashlib.blake2b(digest + array("q", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()

    def match(self, tokens: Sequence[int], *, salt: bytes = b"", limit: int | None = None) -> tuple[int, ...]:
        """Pin the longest run of cached pages that holds tokens[:limit] and return them in order.

        Whole pages only. The caller holds a reference to each until `release`.
        """
        pages = self._lookup(tokens, salt, limit)
        for page in pages:
            self._cached.pop(page, None)
            self._refs[page] += 1
        return tuple(pages)

    def publish(self, page: int, digest: bytes) -> bool:
        """Make a full page findable. False if another page with the same tokens is already indexed, or the
        pool keeps nothing: then this one serves its owner only and is freed on release."""
        assert self._refs[page] > 0, "only a held page can be published"
        assert page not in self._digest_of, "a page is published once"
        if not self.reuse or digest in self._index:
            return False
        self.index_version += 1
        self._index[digest] = page
        self._digest_of[page] = digest
        return True

    def forget(self, pages: Sequence[int]) -> None:
        """Make held pages unfindable for newcomers; whoever holds them keeps them."""
        for page in pages:
            assert self._refs[page] > 0, "only a held page can be forgotten"
            if page in self._digest_of:
                self._forget(page)

    # ---- allocation --------------------------------------------------------------------------

    def allocate(self, count: int, *, after: int | None = None) -> tuple[int, ...]:
        """Hand out `count` pages, evicting least recently used cached ones if needed.

        Neighbouring pages are preferred, beginning behind page `after`: attention reads those without a copy.
        Raises CapacityError, taking nothing, if so many are not to be had.
        """
        if count > self.available_pages:
            raise CapacityError(
                f"{count} pages of {self.page_size} tokens wanted, {self.available_pages} of "
                f"{self.num_pages} available: wait for sessions to end, or start with more kv tokens",
                retry_after=1.0,
            )
        while len(self._free) < count:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
            self._free[page] = None
            self.evictions += 1
        pages: list[int] = []
        for _ in range(count):
            after = self._take(after)
            pages.append(after)
            self._refs[after] = 1
        return tuple(pages)

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference to each page. Published pages stay cached, others become free."""
        # Last page first, so that the tail of a prefix is evicted before its head: a head without its tail is
        # still of use, a tail without its head can't be found.
        for page in reversed(pages):
            assert self._refs[page] > 0, f"page {page} released more often than taken"
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            if page in self._digest_of:
                self._cached[page] = None
            else:
                self._free[page] = None

    def clear_cache(self) -> None:
        """Forget all cached prefixes, e.g. because the weights that made them are gone; used pages stay used
        but can't be found by newcomers any more.
        """
        self._free.update(self._cached)
        self._cached.clear()
        self._index.clear()
        self.index_version += 1
        self._digest_of.clear()

    def open(self, tokens: Sequence[int], *, salt: bytes = b"", limit: int | None = None) -> PagedSequence:
        """A sequence that begins with the cached pages of tokens[:limit]."""
        pages = self.match(tokens, salt=salt, limit=limit)
        return PagedSequence(self, pages, tokens[: len(pages) * self.page_size], salt)

    def check(self) -> None:
        """Raise AssertionError if the books don't balance; for tests and soak runs."""
        free, cached = set(self._free), set(self._cached)
        assert not free & cached, "a page is free and cached"
        for page in range(self.num_pages):
            assert (self._refs[page] > 0) == (page not in free and page not in cached), f"page {page} is lost"
        assert {page: digest for digest, page in self._index.items()} == self._digest_of, (
            "index and digests differ"
        )
        assert cached <= set(self._digest_of), "a cached page can't be found"

    def _lookup(self, tokens: Sequence[int], salt: bytes, limit: int | None) -> list[int]:
        if not self.reuse:
            return []
        usable = len(tokens) if limit is None else max(0, min(limit, len(tokens)))
        digest = self.root(salt)
        pages: list[int] = []
        for start in range(0, usable - self.page_size + 1, self.page_size):
            digest = self.chain(digest, tokens[start : start + self.page_size])
            page = self._index.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def _take(self, after: int | None) -> int:
        """A free page: the one behind `after`, else the start of a run with room, else any."""
        if after is not None and after + 1 in self._free:
            page = after + 1
        else:
            for _ in range(-(-self.num_pages // RUN_PAGES)):
                self._cursor = (self._cursor + RUN_PAGES) % self.num_pages
                if self._cursor in self._free:
                    break
            page = self._cursor if self._cursor in self._free else next(iter(self._free))
        del self._free[page]
        return page

    def _forget(self, page: int) -> None:
        del self._index[self._digest_of.pop(page)]
        self.index_version += 1


class PagedSequence:
    """One session's committed tokens and the pages they lie in.

    pages: page ids in order; may run ahead of `length` by what `reserve` took.
    tokens: ids at positions [0, length). found: how many of them were in the index when it was opened.
    """

    def __init__(self, pool: PagePool, pages: Sequence[int], tokens: Sequence[int], salt: bytes) -> None:
        assert len(tokens) == len(pages) * pool.page_size
        self.pool = pool
        self.pages: list[int] = list(pages)
        self.tokens: list[int] = list(tokens)
        self._digest = pool.root(salt)
        for start in range(0, len(self.tokens), pool.page_size):
            self._digest = pool.chain(self._digest, self.tokens[start : start + pool.page_size])
        self.found = len(self.tokens)
        self._published = len(self.pages)
        self._open = True

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.tokens)

    def missing_pages(self, count: int) -> int:
        """Pages that `reserve(count)` would have to allocate."""
        return max(0, self.pool.pages_for(self.length + count) - len(self.pages))

    def reserve(self, count: int) -> None:
        """Hold pages for `count` tokens after `length`. Raises CapacityError, changing nothing."""
        assert self._open, "a closed sequence takes no pages"
        missing = self.missing_pages(count)
        if missing:
            self.pages.extend(self.pool.allocate(missing, after=self.pages[-1] if self.pages else None))

    def slots(self, first: int, count: int) -> list[int]:
        """Row slots (page * page_size + offset) of the reserved positions [first, first + count)."""
        size = self.pool.page_size
        pages = self.pages
        assert first >= 0 and first + count <= len(pages) * size, "slots of positions without pages"
        return [pages[p // size] * size + p % size for p in range(first, first + count)]

    def extend(self, tokens: Sequence[int]) -> None:
        """Commit tokens whose rows have been written; pages they fill enter the prefix index.

        Raises CapacityError (nothing committed) if they were not reserved and can't be now.
        """
        assert self._open, "a closed sequence takes no tokens"
        self.reserve(len(tokens))
        self.tokens.extend(tokens)
        size = self.pool.page_size
        while self.pool.reuse and (self._published + 1) * size <= len(self.tokens):
            start = self._published * size
            self._digest = self.pool.chain(self._digest, self.tokens[start : start + size])
            self.pool.publish(self.pages[self._published], self._digest)
            self._published += 1

    @property
    def closed(self) -> bool:
        return not self._open

    def close(self, *, keep: bool = True) -> None:
        """Give the pages back; idempotent. The sequence is empty afterwards.

        keep: False takes its pages out of the index, because what lies in them is wrong.
        """
        if self._open:
            self._open = False
            if not keep:
                self.pool.forget(self.pages)
            self.pool.release(self.pages)
            self.pages, self.tokens = [], []
