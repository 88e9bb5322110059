"""The GPU's way to run a step on several ranks: tokens, pages' effect and ring of one rank. On the CPU over
gloo through the kernels' torch references; on two GPUs (tests marked multi_gpu) over NCCL, with and without
CUDA graphs.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models as tm
import torch
from thread_ranks import thread_ranks

from specbridge.errors import Unavailable
from specbridge.rounds import SamplingParams
from target_service.model import shard as shard_module
from target_service.model.device_pass import DevicePass
from target_service.runner import Runner, load_runner
from target_service.sampling import ChoiceRule, RowGroup
from target_service.step import CAPTURE, REPLAY, RingSpan, Step

PARENTS = ((-1, 0, 0, 1, 2, 2), (-1, 0, 1), (-1,))
CONTEXTS = (17, 6, 9)
RULES = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.9, seed=2**64 - 3, choice=1),
    "filtered": SamplingParams(temperature=1.2, seed=5, top_k=11, top_p=0.9),
}
SIZES = {"num_pages": 32, "page_size": tm.PAGE, "max_rows": 64}


def ids(count: int, seed: int, vocab: int) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def capture(runner: Runner, device: str) -> None:
    runner.set_taps((1, 0), normed_last_layer=True)
    runner.set_ring(torch.zeros(64, 2 * runner.config.hidden_size, device=device))


def round_of(runner: Runner, pages: list[tuple[int, ...]], rule: SamplingParams, seed: int) -> Step:
    """A verify step in which tree 0 accepts two nodes and tree 1 one; decided by `runner`, one rank."""
    vocab = runner.config.vocab_size
    rows = [ids(len(parents), seed + n, vocab) for n, parents in enumerate(PARENTS)]
    for _ in range(3):
        trees = [(r, p, c, own) for r, p, c, own in zip(rows, PARENTS, CONTEXTS, pages, strict=True)]
        step = tm.tree_step(trees, commit=True)
        step = replace(step, groups=(RowGroup(ChoiceRule(rule), 0, (step.positions + 1).tolist()),))
        choices = runner.run(replace(step, slots=None)).choices
        rows[0][2], rows[0][4] = choices[0], choices[2]
        rows[1][1] = choices[6]
    segments = tuple(replace(s, ring=RingSpan(3 + 20 * n, n)) for n, s in enumerate(step.segments))
    return replace(step, segments=segments)


def session(one: Runner, several: Runner, rules: list[str], turns: int = 1) -> None:
    """Prompts in chunks, then rounds over all sessions: equal choices, rings, and logits where read."""
    pages = [tm.pages_for(30, 8 * n) for n in range(3)]
    vocab = one.config.vocab_size
    for n, (own, context) in enumerate(zip(pages, CONTEXTS, strict=True)):
        for first, count in ((0, context // 2), (context // 2, context - context // 2)):
            step = tm.chain_step(ids(count, 50 * n + first, vocab), first, own, commit=True)
            same(one, several, replace(step, groups=(), logit_rows=step.logit_rows[:0], read_logits=False))
    for turn in range(turns):
        for rule in rules:
            step = round_of(one, pages, RULES[rule], seed=100 + turn)
            same(one, several, replace(step, read_logits=turn % 2 == 0))


def same(one: Runner, several: Runner, step: Step) -> None:
    expected, got = one.run(step), several.run(step)
    assert got.choices == expected.choices
    if step.read_logits:
        torch.testing.assert_close(got.logits, expected.logits, atol=2e-4, rtol=2e-4)
    assert one._ring is not None and several._ring is not None
    torch.testing.assert_close(several._ring, one._ring, atol=2e-4, rtol=2e-4)


@pytest.fixture
def device_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_module, "uses_kernels", lambda device, dtype: True)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_choose_what_one_chooses(device_passes: None, tmp_path: Path, size: int) -> None:
    """The vocabulary divides by neither size: the last share is narrower."""
    tm.build("qwen3-2kv-of-8", tmp_path)
    with ExitStack() as stack:
        one = stack.enter_context(load_runner(tmp_path, device="cpu", dtype="float32", **SIZES))
        several = stack.enter_context(thread_ranks(tmp_path, size, dtype="float32", **SIZES))
        assert isinstance(several._shard._pass, DevicePass) and several.tp_size == size
        for runner in (one, several):
            capture(runner, "cpu")
        session(one, several, list(RULES), turns=2)


def test_the_host_s_way_agrees(tmp_path: Path) -> None:
    """The same over HostPass, by threads: the frame of these tests is no part of what they find."""
    tm.build("qwen3-2kv-of-8", tmp_path)
    with (
        load_runner(tmp_path, device="cpu", dtype="float32", **SIZES) as one,
        thread_ranks(tmp_path, 2, dtype="float32", **SIZES) as several,
    ):
        for runner in (one, several):
            capture(runner, "cpu")
        session(one, several, ["greedy", "filtered"])


def test_a_bad_share_leaves_no_choice_on_any_rank(device_passes: None, tmp_path: Path) -> None:
    """A NaN in one rank's columns alone: the row has no choice, as on one rank."""
    tm.build("llama-8kv", tmp_path)
    with thread_ranks(tmp_path, 2, dtype="float32", **SIZES) as several:
        step = tm.tree_step([(ids(1, 3, tm.VOCAB), (-1,), 0, ())])
        assert several.run(step).choices[0] >= 0
        head = several._shard._pass._decoder._weights
        with torch.inference_mode():
            head.final_norm.fill_(torch.nan)  # rank 0's alone
        assert several.run(step).choices == (-1,)


def test_a_failure_of_rank_0_within_a_step_ends_the_group(device_passes: None, tmp_path: Path) -> None:
    """The other rank waits in the middle of the step: nothing can follow it."""
    tm.build("llama-8kv", tmp_path)
    with (
        pytest.raises(AssertionError, match="good order"),
        thread_ranks(tmp_path, 2, timeout_s=3.0, dtype="float32", **SIZES) as ranks,
    ):
        shard, run = ranks._shard, ranks._shard.run
        step = tm.chain_step([1, 2], 0, ())
        ranks.run(step)

        def broken(*args: object) -> None:
            raise RuntimeError("out of memory")

        shard.run = broken  # type: ignore[method-assign,assignment]
        with pytest.raises(Unavailable, match=r"rank 0 failed within a step .*out of memory"):
            ranks.run(step)
        shard.run = run  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="rank 0 failed"):
            ranks.run(step)
        ranks._pool._closing.set()  # type: ignore[union-attr]
        ranks._pool.group.abort()  # type: ignore[union-attr]


# ---- two GPUs ------------------------------------------------------------------------------------------


@pytest.fixture
def qwen(tmp_path: Path) -> Iterator[Path]:
    tm.build("qwen3-2kv-of-8", tmp_path)
    yield tmp_path


@pytest.mark.multi_gpu
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_two_gpus_choose_what_one_chooses(qwen: Path, graphs: bool) -> None:
    options = {"device": "cuda", "dtype": "float32", "cuda_graphs": graphs, **SIZES}
    with load_runner(qwen, **options) as one, load_runner(qwen, tp=2, **options) as several:
        for runner in (one, several):
            capture(runner, "cuda")
        session(one, several, list(RULES), turns=6)
        # Another ring: every rank has to capture anew, or rank 0 alone would replay.
        for runner in (one, several):
            capture(runner, "cuda")
        session(one, several, list(RULES), turns=4)
        several.check()


@pytest.mark.multi_gpu
def test_ranks_capture_and_replay_alike(qwen: Path) -> None:
    options = {"device": "cuda", "dtype": "float32", **SIZES}
    with load_runner(qwen, tp=2, **options) as runner:
        step = tm.tree_step([(ids(3, 1, tm.VOCAB), (-1, 0, 1), 0, ())])

        def mode() -> int:
            return runner._shard.plan(step, runner._taps, None).mode

        # The first run must come first: it compiles and connects, which a capture must not.
        assert runner.run(step).choices
        assert mode() == CAPTURE
        first = runner.run(step).choices
        assert mode() == REPLAY
        assert runner.run(step).choices == first


@pytest.mark.multi_gpu
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stuck"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_lost_gpu_rank_is_an_error_not_a_hang(qwen: Path, how: signal.Signals, graphs: bool) -> None:
    """Its kernels wait on the device for a peer that will not come, and the host for the kernels."""
    options = {"device": "cuda", "dtype": "float32", "cuda_graphs": graphs, **SIZES}
    runner = load_runner(qwen, tp=2, collective_timeout_s=20.0, **options)
    victim = runner._pool._processes[0]  # type: ignore[union-attr]
    step = tm.tree_step([(ids(3, 1, tm.VOCAB), (-1, 0, 1), 0, ())])
    try:
        for _ in range(4):
            runner.run(step)
        os.kill(victim.pid, how)
        begin = time.monotonic()
        with pytest.raises(Unavailable, match=r"rank 1 died|stuck"):
            for _ in range(1000):
                runner.run(step)
        assert time.monotonic() - begin < 120  # a hang guard, not a measurement
        with pytest.raises(Unavailable):
            runner.check()
    finally:
        runner.close()
    assert not victim.is_alive()
