"""Prompts for training data: read from files, cleared of what is evaluated on, in the target's chat template.

Files are JSON lines, gzipped or not, each row {"prompt": text} or {"messages": [...]}; other fields are left
alone. Owns reading, normalisation, duplicates and overlaps. Does not own templates and tokenizers (whoever
calls brings them), nor what is answered (generate).
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbridge.errors import ConfigError

NGRAM = 13
"""Words in a row that two texts share only if one knows the other (the length is GPT-3's, Brown et al. 2020,
appendix C)."""

_WORD = re.compile(r"\w+", re.UNICODE)
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Prompt:
    """messages: of a chat that ends with the user's turn. source: the file's name without endings."""

    messages: tuple[Mapping[str, str], ...]
    source: str

    @property
    def text(self) -> str:
        """What users wrote, for comparisons."""
        return "\n".join(m["content"] for m in self.messages if m["role"] == "user")


@dataclass(slots=True)
class Counts:
    """What became of the prompts. taken, by source."""

    read: int = 0
    duplicates: int = 0
    excluded_equal: int = 0
    excluded_overlap: int = 0
    too_long: int = 0
    taken: Counter[str] = field(default_factory=Counter)

    def as_notes(self) -> dict[str, Any]:
        return {
            "prompts_read": self.read,
            "duplicates_dropped": self.duplicates,
            "excluded_equal": self.excluded_equal,
            "excluded_overlap": self.excluded_overlap,
            "too_long": self.too_long,
        }


def read_prompts(path: Path) -> list[Prompt]:
    """All rows of a file. Raises ConfigError naming the file and line of a row that holds no prompt."""
    source = re.sub(r"\.jsonl?(\.gz)?$", "", path.name)
    opened = gzip.open if path.suffix == ".gz" else open
    found = []
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    found.append(_row(line, source, f"{path}:{number}"))
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigError(f"{path} can't be read as prompts: {error}") from error
    if not found:
        raise ConfigError(f"{path} holds no prompts")
    return found


def _row(line: str, source: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if isinstance(row, dict) and isinstance(row.get("prompt"), str) and row["prompt"].strip():
        return Prompt(({"role": "user", "content": row["prompt"]},), source)
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and m.get("role") in _ROLES and isinstance(m.get("content"), str)
        for m in messages
    ):
        raise ConfigError(
            f'{where} holds no prompt: a row is {{"prompt": text}} or {{"messages": [{{"role", "content"}}]}}'
        )
    # The response is to be the target's own: what follows the last question goes.
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    if last < 0:
        raise ConfigError(f"{where}: its messages have no turn of the user")
    return Prompt(tuple({"role": m["role"], "content": m["content"]} for m in messages[: last + 1]), source)


def words_of(text: str) -> tuple[str, ...]:
    """The text without case, punctuation and spacing."""
    return tuple(_WORD.findall(text.lower()))


class Exclusions:
    """Texts that must not be trained on; `of` says whether a prompt is one of them or overlaps one."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._whole: set[tuple[str, ...]] = set()
        self._grams: set[int] = set()
        for text in texts:
            words = words_of(text)
            self._whole.add(words)
            self._grams.update(_grams(words))

    def of(self, text: str) -> str:
        """ "equal", "overlap" (NGRAM words in a row) or ""."""
        words = words_of(text)
        if words in self._whole:
            return "equal"
        return "overlap" if any(gram in self._grams for gram in _grams(words)) else ""


def _grams(words: Sequence[str]) -> Iterator[int]:
    return (hash(tuple(words[i : i + NGRAM])) for i in range(len(words) - NGRAM + 1))


def select(prompts: Iterable[Prompt], exclusions: Exclusions, counts: Counts) -> list[Prompt]:
    """Prompts that are not excluded, the first of equal ones; counts are added to."""
    seen: set[tuple[tuple[str, ...], ...]] = set()
    kept = []
    for prompt in prompts:
        counts.read += 1
        # Whoever asks the same under another system prompt, or after another dialogue, asks something else.
        key = tuple((m["role"], *words_of(m["content"])) for m in prompt.messages)
        verdict = exclusions.of(prompt.text)
        if verdict == "equal":
            counts.excluded_equal += 1
        elif verdict:
            counts.excluded_overlap += 1
        elif key in seen:
            counts.duplicates += 1
        else:
            seen.add(key)
            kept.append(prompt)
    return kept
