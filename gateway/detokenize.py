"""Token ids → text, piece by piece: incremental decoding and stop strings.

Owns what a client may see of a running text: a piece leaves only when no later token can change it or cut
it off. Does not own when the target stops by itself (eos, stop ids, max_tokens) nor the tokenizer's files
(gateway.text).

What is promised, whatever the sizes of the blocks in which the tokens arrive:

- the deltas' texts add up to exactly the one-shot decoding of the ids (up to a stop string);
- of all stop strings the one whose last character comes first ends the text, at its first character; of
  several that end there, the longest. With `include_stop` the text ends behind it;
- ids go with their text: an id is kept if some of its text lies before the cut (an id without text of its
  own goes with the id before it), and it is handed out no sooner than its first character. So the text of
  the kept ids is the kept text, plus at most the rest of one token.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import tokenizers
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"


class TokenDecoder(Protocol):
    """Decodes one sequence of ids. `pending`: ids taken in whose text is still to come."""

    @property
    def pending(self) -> bool: ...

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """Text of what is pending when nothing follows (a truncated character is U+FFFD)."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins byte-level tokenizers use for the 256 byte values: character → byte."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in kept}
    moved = (byte for byte in range(256) if byte not in set(kept))
    table.update({chr(0x100 + place): byte for place, byte in enumerate(moved)})
    return table


class ByteTable:
    """Bytes of every token of a byte-level vocabulary; ids in `skip` have none."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, skip: Iterable[int] = ()) -> None:
        alphabet = _byte_alphabet()
        skipped = frozenset(skip)
        self._bytes: list[bytes] = [b""] * tokenizer.get_vocab_size(with_added_tokens=True)
        for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
            if token_id in skipped:
                continue
            if token_id >= len(self._bytes):  # ids may have holes
                self._bytes.extend([b""] * (token_id + 1 - len(self._bytes)))
            try:
                self._bytes[token_id] = bytes([alphabet[char] for char in text])
            except KeyError:  # an added token is stored as plain text
                self._bytes[token_id] = text.encode()

    def __getitem__(self, token_id: int) -> bytes:
        # Models pad their vocabulary beyond the tokenizer's: such ids have no text.
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""


class ByteLevelDecoder:
    """Decoder of byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM2): an id is a string of bytes.

    DecodeStream gives the same text at some ten times the cost per token, which counts at 32 streams a round.
    """

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.pending = False

    def push(self, token_id: int) -> str:
        data = self._table[token_id]
        if not self.pending and data.isascii():
            return data.decode("ascii")
        text = self._utf8.decode(data)
        self.pending = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        self.pending = False
        return self._utf8.decode(b"", True)


class StreamDecoder:
    """Decoder of all other vocabularies, on tokenizers' DecodeStream.

    With byte fallback (Llama 2, Mistral) a later byte can make the one-shot decoder turn characters that were
    complete into U+FFFD; those were delivered and stay, only the broken rest is replaced.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._context: list[int] = []  # ids of the last text given out: the decoder's left context
        self._waiting: list[int] = []  # ids since then

    @property
    def pending(self) -> bool:
        return bool(self._waiting)

    def push(self, token_id: int) -> str:
        self._waiting.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # DecodeStream has no error class of its own: "invalid prefix" of broken bytes
            *broken, last = self._waiting
            # Twice the id, minus once: its text as it is inside a sequence, not at the start of one.
            once, twice = (self._decode([last] * count) for count in (1, 2))
            self._stream = DecodeStream([last], skip_special_tokens=self._skip)
            self._context, self._waiting = [last], []
            return REPLACEMENT * len(broken) + twice[len(once) :]
        if not text:
            both = [*self._context, *self._waiting]
            if self._decode(both) == self._decode(self._context):  # a special token: nothing to come of it
                self._context, self._waiting = both, []
            return ""
        self._context, self._waiting = self._waiting, []
        return text

    def flush(self) -> str:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return ""
        before, both = self._decode(self._context), self._decode([*self._context, *waiting])
        return both[len(before) :] if both.startswith(before) else REPLACEMENT * len(waiting)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What became final: text, and the ids that go with it. `stop`: the stop string that ended the text."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    stop: str | None = None


class TextStream:
    """One request's text.

    stops         stop strings, none empty
    min_tokens    a stop string counts only if it ends behind the text of that many tokens
    include_stop  leave the stop string (or the text of the id that ended the text) in
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._decoder = decoder
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._held = ""  # decoded, but maybe the beginning of a stop string
        self._total = 0  # characters decoded
        self._queue: deque[tuple[int, int]] = deque()  # (id, its first character) of ids not handed out
        self._last_start = -1
        self._scan_from = 0 if min_tokens == 0 else None  # first end position a stop string may have
        self.num_seen = 0
        """Ids taken in."""
        self.num_tokens = 0
        """Ids handed out: those the client is told about and pays for."""
        self.matched: str | None = None
        """The stop string that ended the text."""

    @property
    def holds_back(self) -> bool:
        """Whether ids taken in may be cut off again."""
        return bool(self._stops)

    def push(self, tokens: Sequence[int], *, last_stops: bool = False) -> TextDelta:
        """Take in newly accepted ids. `last_stops`: the last one is an eos or stop id; its text is not shown.

        After a stop string ended the text further ids are ignored.
        """
        if self.matched is not None:
            return TextDelta()
        pieces: list[str] = []
        hidden = len(tokens) - 1 if last_stops and not self._include_stop else -1
        for index, token_id in enumerate(tokens):
            pending = self._decoder.pending
            text = self._decoder.push(token_id) if index != hidden else ""
            # Its text begins at the current end, unless it has none: then it goes with the id before it.
            if text or (self._decoder.pending and index != hidden) or (pending and index != hidden):
                self._last_start = self._total
            self._queue.append((token_id, self._last_start))
            self._total += len(text)
            self.num_seen += 1
            if self._scan_from is None and self.num_seen >= self._min_tokens:
                self._scan_from = self._total + (1 if self._min_tokens else 0)
            if text:
                pieces.append(text)
        return self._advance("".join(pieces))

    def finish(self) -> TextDelta:
        """The rest, when no further id will come."""
        if self.matched is not None:
            return TextDelta()
        tail = self._decoder.flush()
        self._total += len(tail)
        delta = self._advance(tail)
        if delta.stop is not None:
            return delta
        held, self._held = self._held, ""
        return TextDelta(delta.text + held, delta.token_ids + self._release(self._total + 1))

    def _advance(self, new: str) -> TextDelta:
        if not self._stops:
            return TextDelta(new, self._release(self._total))
        text = self._held + new
        begin = self._total - len(text)
        cut = self._find(text, begin) if new else None
        if cut is not None:
            end, stop = cut
            self.matched = stop
            keep = end if self._include_stop else end - len(stop)
            ids = self._release(begin + keep)
            self._queue.clear()
            self._held = ""
            return TextDelta(text[:keep], ids, stop)
        hold = self._ambiguous(text)
        self._held = text[len(text) - hold :]
        return TextDelta(text[: len(text) - hold], self._release(self._total - hold))

    def _find(self, text: str, begin: int) -> tuple[int, str] | None:
        """End (in `text`) and name of the stop string that completes first."""
        if self._scan_from is None:
            return None
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, self._scan_from - begin - len(stop)))
            if at < 0:
                continue
            end = at + len(stop)
            if best is None or end < best[0] or (end == best[0] and len(stop) > len(best[1])):
                best = (end, stop)
        return best

    def _ambiguous(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _release(self, end: int) -> tuple[int, ...]:
        """Hand out the ids whose text begins before `end`."""
        queue = self._queue
        ids: list[int] = []
        while queue and queue[0][1] < end:
            ids.append(queue.popleft()[0])
        self.num_tokens += len(ids)
        return tuple(ids)
