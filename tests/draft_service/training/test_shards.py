"""Training data on disk: written is read back, whole or not at all; an interrupted writer goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from draft_service.training import shards as module
from draft_service.training.shards import Manifest, Shards, ShardWriter
from specbridge.errors import ConfigError


def manifest(**changes: object) -> Manifest:
    fields = {"target": "t", "fingerprint": "f" * 32, "vocab_size": 70000, "temperatures": (0.0, 0.8)}
    return Manifest(**{**fields, **changes})  # type: ignore[arg-type]


def add(writer: ShardWriter, keys: Iterator[int] | range, vocab: int = 70000) -> list[np.ndarray]:
    written = []
    for key in keys:
        rng = np.random.default_rng(key)
        tokens = rng.integers(0, vocab, 5 + key % 7)
        writer.add(tokens.tolist(), 2 + key % 3, 0.8 * (key % 2), (1 << 63) + key, key)
        written.append(tokens)
    return written


@pytest.mark.parametrize(("vocab", "kind"), [(70000, np.int32), (65536, np.uint16)])
def test_what_is_written_is_read(tmp_path: Path, vocab: int, kind: type) -> None:
    with ShardWriter(tmp_path, manifest(vocab_size=vocab), shard_responses=4) as writer:
        written = add(writer, range(10), vocab)
        assert writer.count == 10
    read = Shards(tmp_path)
    assert len(read) == 10 and read.manifest.responses == 10 and read.manifest == Manifest.read(tmp_path)
    assert read.manifest.tokens == sum(map(len, written))
    for key, tokens in enumerate(written):
        response = read.get(key)
        assert response.tokens.tolist() == tokens.tolist()
        assert (response.prompt_length, response.key) == (2 + key % 3, key)
        assert response.temperature == np.float32(0.8 * (key % 2))
        assert response.seed & (2**64 - 1) == (1 << 63) + key
    assert [p.name for p in sorted(tmp_path.glob("*.safetensors"))] == [
        f"shard-0000{i}.safetensors" for i in range(3)
    ]
    assert load_file(tmp_path / "shard-00000.safetensors")["tokens"].dtype == kind


def test_a_killed_writer_loses_no_finished_shard_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at each of the moments at which a file is put in place: nothing half-written is ever read."""

    class Killed(BaseException):
        pass

    @contextmanager
    def killed_at(moment: int) -> Iterator[None]:
        seen = [0]
        real = module._replace

        def count(path: Path, content: bytes) -> None:
            seen[0] += 1
            if seen[0] == moment:
                path.with_name(path.name + ".partial").write_bytes(content[: len(content) // 2])
                raise Killed
            real(path, content)

        with monkeypatch.context() as patch:
            patch.setattr(module, "_replace", count)
            yield

    moment = 1
    done: frozenset[int] = frozenset()
    finished = False
    while not finished:
        with killed_at(moment):
            try:
                writer = ShardWriter(tmp_path, manifest(), shard_responses=4)
                assert writer.done >= done
                assert not list(tmp_path.glob("*.partial"))
                add(writer, [k for k in range(11) if k not in writer.done])  # type: ignore[arg-type]
                writer.close()
                finished = True
            except Killed:
                done = frozenset(int(k) for p in tmp_path.glob("*.safetensors") for k in load_file(p)["keys"])
        moment += 1
    assert moment > 4  # it was killed in between, or this shows nothing
    read = Shards(tmp_path)
    assert sorted(read.keys.tolist()) == list(range(11))
    assert Manifest.read(tmp_path).responses == 11


def test_folders_are_read_together(tmp_path: Path) -> None:
    for number in range(2):
        with ShardWriter(tmp_path / str(number), manifest()) as writer:
            add(writer, range(5 * number, 5 * number + 5))
    read = Shards([tmp_path / "0", tmp_path / "1"])
    alone = Shards(tmp_path / "1")
    assert read.keys.tolist() == list(range(10)) and read.manifest.responses == 10
    assert read.get(7).tokens.tolist() == alone.get(2).tokens.tolist()


def test_data_of_another_target_does_not_mix(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a", manifest()) as writer:
        add(writer, range(2))
    with pytest.raises(ConfigError, match="fingerprint is 'f+', not 'g'"):
        ShardWriter(tmp_path / "a", manifest(fingerprint="g"))
    with ShardWriter(tmp_path / "b", manifest(vocab_size=80000)) as writer:
        add(writer, range(2))
    with pytest.raises(ConfigError, match="vocab_size"):
        Shards([tmp_path / "a", tmp_path / "b"])


def test_what_is_no_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no manifest.json"):
        Shards(tmp_path)
    ShardWriter(tmp_path, manifest()).close()
    with pytest.raises(ConfigError, match="no finished shard"):
        Shards(tmp_path)
    with ShardWriter(tmp_path, manifest()) as writer:
        add(writer, range(2))
    path = tmp_path / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ConfigError, match="no whole shard"):
        Shards(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "other"}')
    with pytest.raises(ConfigError, match="not specbridge-train-data"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("tokens", "prompt", "error"),
    [
        ([1, 2], 2, "no answer"),
        ([1, 2], 0, "no prompt"),
        ([1, 70000], 1, "vocabulary"),
        ([-1, 1], 1, "vocabulary"),
    ],
)
def test_useless_responses_are_refused(tmp_path: Path, tokens: list[int], prompt: int, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ShardWriter(tmp_path, manifest()).add(tokens, prompt, 0.0, 0, 0)
