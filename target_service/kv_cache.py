"""KV pages of the target: one page table per session over the shared page pool.

Owns the session's table: which pages it holds, how many came from the prefix index, how far its committed
tokens have been entered there. Only committed tokens are ever entered, so a rejected branch or text past a
stop can't be reused. The pool (reference counts, hash chain, LRU eviction) is specbridge.paging's; the
tensors behind the pages are target_service.runner's; who is preempted when pages run short is
target_service.planner's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specbridge.paging import PagePool


@dataclass(slots=True, eq=False)
class PageTable:
    """Pages of one session, in order. Mutated by PageCache only.

    pages: page ids; page i holds positions [i * page_size, (i + 1) * page_size).
    cached_tokens: leading tokens whose pages were taken from the index. indexed: leading pages entered there.
    digest: chain digest of the last indexed page.
    """

    digest: bytes
    pages: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    indexed: int = 0
    open: bool = True


class PageCache:
    """`num_pages` pages of `page_size` tokens. Not thread-safe: the engine's thread owns it.

    fingerprint: of the model; prefixes of other weights are never found. reuse: keep released pages as
    prefixes.
    """

    def __init__(self, num_pages: int, page_size: int, *, fingerprint: str, reuse: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.pool = PagePool(num_pages, page_size, fingerprint=fingerprint.encode())
        self._reuse = reuse

    @property
    def used(self) -> int:
        """Pages held by tables."""
        return self.pool.used_pages

    @property
    def cached(self) -> int:
        """Indexed pages held by nobody; evicted, least recently used first, when pages are needed."""
        return self.pool.cached_pages

    def pages_for(self, length: int) -> int:
        """Pages that `length` tokens need."""
        return self.pool.pages_for(length)

    def open(self, tokens: Sequence[int], *, salt: bytes, limit: int) -> PageTable:
        """A table with the longest cached prefix of `tokens`, in whole pages, at most `limit` tokens."""
        table = PageTable(self.pool.root(salt))
        if not self._reuse:
            return table
        table.pages = list(self.pool.match(tokens, salt=salt, limit=limit))
        for _ in table.pages:
            self._advance(table, tokens)
        table.cached_tokens = len(table.pages) * self.page_size
        return table

    def grow(self, table: PageTable, length: int) -> None:
        """Make `table` cover `length` tokens. Raises CapacityError, taking nothing, if pages run short."""
        assert table.open
        missing = self.pages_for(length) - len(table.pages)
        if missing > 0:
            table.pages += self.pool.allocate(missing, after=table.pages[-1] if table.pages else None)

    def commit(self, table: PageTable, tokens: Sequence[int], length: int) -> None:
        """Enter the full pages of the committed prefix tokens[:length] into the index.

        A page whose content is indexed already stays private to its table.
        """
        assert table.open and length <= len(table.pages) * self.page_size
        while self._reuse and (table.indexed + 1) * self.page_size <= length:
            page = table.pages[table.indexed]
            self._advance(table, tokens)
            self.pool.publish(page, table.digest)

    def release(self, table: PageTable) -> None:
        """Let go of all pages; indexed ones that nobody else holds stay as prefixes. Idempotent."""
        if table.open:
            table.open = False
            self.pool.release(table.pages)
            table.pages = []

    def _advance(self, table: PageTable, tokens: Sequence[int]) -> None:
        first = table.indexed * self.page_size
        table.digest = self.pool.chain(table.digest, tokens[first : first + self.page_size])
        table.indexed += 1
