"""Tensor parallelism over processes: the same logits on 2 and 4 ranks; split rules; a dead or silent rank.

Eight ranks: as threads in test_model_families_parallel.py, as processes in test_server.py.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tm
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbridge.errors import ConfigError, Unavailable
from target_service import parallel, step_codec
from target_service.runner import Runner, load_runner
from target_service.step import Segment, Step


@pytest.fixture(scope="module", autouse=True)
def _imported_once() -> Iterator[None]:
    """Seven ranks come and go here: they are forked from one process that has imported all they need. Ranks
    spawned as the service does it are those of test_server.py.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["target_service.worker"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda method=None: context)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    built = {}
    for name in ("llama-8kv", "llama-2kv-of-8", "qwen3-2kv-of-8"):
        folder = tmp_path_factory.mktemp(name)
        built[name] = (folder, tm.build(name, folder))
    return built


@pytest.fixture(
    scope="module",
    params=[(2, "llama-8kv"), (4, "qwen3-2kv-of-8")],
    ids=lambda p: f"tp{p[0]}-{p[1]}",
)
def ranks(
    request: pytest.FixtureRequest, folders: dict[str, tuple[Path, Any]]
) -> Iterator[tuple[Runner, Any]]:
    size, name = request.param
    folder, theirs = folders[name]
    with load_runner(
        folder, device="cpu", dtype="float32", tp=size, num_pages=32, page_size=tm.PAGE, max_rows=64
    ) as runner:
        assert runner.tp_size == size
        yield runner, theirs


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, tm.VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_logits_and_taps_equal_transformers(ranks: tuple[Runner, Any]) -> None:
    runner, theirs = ranks
    tokens = ids(31, 0)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens]), output_hidden_states=True)
    runner.set_taps((0, 1), normed_last_layer=True)
    outputs = tm.feed(runner, tokens, tm.pages_for(31), chunks=(14, 9, 1, 1))
    runner.set_taps((), normed_last_layer=False)
    logits = torch.cat([o.logits for o in outputs])
    torch.testing.assert_close(logits, expected.logits[0], atol=1e-4, rtol=1e-4)
    taps = torch.cat([o.taps for o in outputs if o.taps is not None])
    torch.testing.assert_close(
        taps, torch.cat([s[0] for s in expected.hidden_states[1:]], -1), atol=1e-4, rtol=1e-4
    )


def test_a_tree_commits_on_every_rank(ranks: tuple[Runner, Any]) -> None:
    runner, theirs = ranks
    prompt, pages, parents = ids(9, 1), tm.pages_for(20, 8), (-1, 0, 0, 2, 3)
    tm.feed(runner, prompt, pages)
    tree = tm.accepted_tree(runner, ids(5, 2), parents, 9, pages, [0, 2, 3])
    runner.run(tm.tree_step([(tree, parents, 9, pages)], commit=True))
    got = runner.run(tm.chain_step([7], 12, pages)).logits[0]
    text = [*prompt, tree[0], tree[2], tree[3], 7]
    with torch.inference_mode():
        expected = theirs(torch.tensor([text])).logits[0, -1]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_the_collectives_of_a_pass_are_timed(ranks: tuple[Runner, Any]) -> None:
    runner, _ = ranks
    clock = runner.collectives
    assert clock is not None
    steps, seconds = clock.steps, clock.seconds
    tm.feed(runner, ids(3, 3), tm.pages_for(3), chunks=(2, 1))
    assert clock.steps == steps + 2 and clock.seconds > seconds


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stuck"])
def test_a_lost_rank_is_an_error_not_a_hang(
    how: signal.Signals, folders: dict[str, tuple[Path, Any]]
) -> None:
    runner = load_runner(
        folders["llama-8kv"][0],
        device="cpu",
        dtype="float32",
        tp=2,
        num_pages=8,
        page_size=tm.PAGE,
        max_rows=16,
        collective_timeout_s=3.0,
    )
    assert runner._pool is not None
    victim = runner._pool._processes[0]
    try:
        runner.run(tm.chain_step([1, 2], 0, ()))
        assert victim.pid is not None
        os.kill(victim.pid, how)
        begin = time.monotonic()
        with pytest.raises(Unavailable, match=r"rank 1 died|stuck"):
            for _ in range(1000):
                runner.run(tm.chain_step([1, 2], 0, ()))
        assert time.monotonic() - begin < 60  # a hang guard, not a measurement
        with pytest.raises(Unavailable):
            runner.check()
    finally:
        runner.close()
    assert not victim.is_alive()
    with pytest.raises(Unavailable, match="closed"):
        runner.run(tm.chain_step([1], 0, ()))


def test_check_notices_a_death_while_idle(folders: dict[str, tuple[Path, Any]]) -> None:
    with load_runner(
        folders["llama-8kv"][0], device="cpu", dtype="float32", tp=2, num_pages=8, page_size=4, max_rows=8
    ) as runner:
        runner.check()
        assert runner._pool is not None
        runner._pool._processes[0].kill()
        assert multiprocessing.connection.wait([runner._pool._processes[0].sentinel], timeout=10)
        with pytest.raises(Unavailable, match="rank 1 died"):
            runner.check()


@pytest.mark.parametrize("size", [3, 5, 16])
def test_a_size_that_cannot_split_the_heads_names_those_that_can(
    size: int, folders: dict[str, tuple[Path, Any]]
) -> None:
    with pytest.raises(ConfigError, match=rf"--tp {size} .*1, 2, 4, 8"):
        load_runner(folders["llama-2kv-of-8"][0], device="cpu", tp=size, num_pages=8, max_rows=8)


@given(st.integers(1, 200), st.integers(1, 16))
def test_shares_cover_everything_once(total: int, size: int) -> None:
    for split in (parallel.share, parallel.padded_share):
        spans = [split(total, rank, size) for rank in range(size)]
        assert [i for span in spans for i in range(span.start, span.stop)] == list(range(total))


@pytest.mark.parametrize("kv,size", [(2, 8), (1, 4), (8, 8), (8, 2), (4, 4)])
def test_each_ranks_queries_find_their_kv_head(kv: int, size: int) -> None:
    heads = 8
    for rank in range(size):
        queries, keys = parallel.share(heads, rank, size), parallel.kv_share(kv, rank, size)
        needed = {q * kv // heads for q in range(queries.start, queries.stop)}
        assert needed == set(range(keys.start, keys.stop))


@given(
    st.lists(
        st.tuples(
            st.integers(1, 6), st.integers(0, 40), st.lists(st.integers(0, 99), max_size=5), st.booleans()
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 4),
)
def test_a_step_survives_the_flat_tensor(parts: list[tuple[int, int, list[int], bool]], wanted: int) -> None:
    segments, first = [], 0
    for rows, context, pages, tree in parts:
        parents = tuple(range(-1, rows - 1)) if tree else None
        segments.append(Segment(first, rows, context, tuple(pages), parents, padding=wanted))
        first += rows
    step = Step(
        torch.arange(first),
        torch.arange(first) + 7,
        tuple(segments),
        torch.arange(min(wanted, first)),
        torch.arange(first) * 3 - 1 if wanted % 2 else None,
    )
    message = step_codec.encode_step(step)
    assert message.dtype == torch.int64 and message.dim() == 1
    again = step_codec.decode(message)
    assert isinstance(again, Step)
    assert again.segments == step.segments
    for name in ("tokens", "positions", "logit_rows"):
        assert torch.equal(getattr(again, name), getattr(step, name))
    if step.slots is None:
        assert again.slots is None
    else:
        assert again.slots is not None and torch.equal(again.slots, step.slots)


def test_stop_survives_too() -> None:
    assert step_codec.decode(step_codec.encode_stop()) is None


def test_a_long_message_takes_a_second_broadcast(ranks: tuple[Runner, Any]) -> None:
    """More page ids than the first broadcast holds; entries past the context are not read."""
    runner, _ = ranks
    tokens = ids(3, 5)
    plain = runner.run(tm.chain_step(tokens, 0, ())).logits.clone()
    long = Step(torch.tensor(tokens), torch.arange(3), (Segment(0, 3, 0, (0,) * 9000),), torch.arange(3))
    torch.testing.assert_close(runner.run(long).logits, plain, atol=0, rtol=0)
