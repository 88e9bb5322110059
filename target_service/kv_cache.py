"""KV pages of the target: sequences over the shared page pool, and whether released pages are kept.

Owns what the target asks of specbridge.paging: only committed tokens are ever entered into the index, so a
rejected branch or text past a stop can't be reused. Pages, digests, sharing and eviction are specbridge.
paging's; the tensors behind the pages are target_service.runner's; who is preempted when pages run short is
target_service.planner's matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbridge.paging import PagedSequence, PagePool


class PageCache:
    """`num_pages` pages of `page_size` tokens. Not thread-safe: the engine's thread owns it.

    fingerprint: of the model; prefixes of other weights are never found. reuse: keep released pages as
    prefixes.
    """

    def __init__(self, num_pages: int, page_size: int, *, fingerprint: str, reuse: bool = True) -> None:
        self.pool = PagePool(num_pages, page_size, fingerprint=fingerprint.encode(), reuse=reuse)

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def used(self) -> int:
        """Pages held by sequences."""
        return self.pool.used_pages

    @property
    def available(self) -> int:
        """Pages that sequences can still take: free ones and those kept as prefixes."""
        return self.pool.available_pages

    @property
    def cached(self) -> int:
        """Indexed pages held by nobody; evicted, least recently used first, when pages are needed."""
        return self.pool.cached_pages

    @property
    def evictions(self) -> int:
        """Cached pages given up for others so far."""
        return self.pool.evictions

    @property
    def index_version(self) -> int:
        """Changes whenever an `open` might find another prefix than before."""
        return self.pool.index_version

    def pages_for(self, length: int) -> int:
        """Pages that `length` tokens need."""
        return self.pool.pages_for(length)

    def open(self, tokens: Sequence[int], *, salt: bytes, limit: int) -> PagedSequence:
        """A sequence with the longest cached prefix of `tokens`, in whole pages, at most `limit` tokens."""
        return self.pool.open(tokens, salt=salt, limit=limit)

    def missing(self, sequence: PagedSequence, length: int) -> int:
        """Pages that `grow` to `length` tokens would take."""
        return sequence.missing_pages(max(length - sequence.length, 0))

    def grow(self, sequence: PagedSequence, length: int) -> None:
        """Make `sequence` cover `length` tokens. Raises CapacityError, taking nothing, if pages run short."""
        sequence.reserve(max(length - sequence.length, 0))

    def commit(self, sequence: PagedSequence, tokens: Sequence[int], length: int) -> None:
        """Enter the full pages of tokens[:length], of which those before sequence.length are in already.

        A page whose content is indexed already stays private to its sequence.
        """
        sequence.extend(tokens[sequence.length : length])

    def release(self, sequence: PagedSequence, *, keep: bool = True) -> None:
        """Let go of all pages; indexed ones that nobody else holds stay as prefixes. Idempotent.

        keep: False if their content is wrong: then nobody finds them again.
        """
        sequence.close(keep=keep)
