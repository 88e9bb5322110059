"""The GPU's way to run a step against the host's: same choices, same pages, same ring. On a CPU through the
kernels' torch references; on a GPU (tests marked gpu) through Triton, eagerly and by CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models as tm
import torch

from specbridge.channel.base import Projection
from specbridge.rounds import SamplingParams
from target_service import step_codec
from target_service.model import device_pass, pass_buffers
from target_service.model import shard as shard_module
from target_service.model.device_pass import LENT_TIMES, DevicePass
from target_service.model.packing import cover
from target_service.runner import Runner, load_runner
from target_service.sampling import ChoiceRule, RowGroup
from target_service.step import CAPTURE, EAGER, LENT, REPLAY, RingSpan, Step

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TREES = (
    ((-1, 0, 0, 1, 2, 2, 4, 0), 19),
    ((-1, 0, 1), 5),
    ((-1,), 11),
)
RULES = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, seed=2**64 - 3, choice=2),
    "filtered": SamplingParams(temperature=1.1, seed=5, top_k=9, top_p=0.9),
}


@pytest.fixture(scope="module", params=["llama-llama3-rope", "mistral-window", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    tm.build(request.param, path)
    return path


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@pytest.fixture
def pair(folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Runner, Runner]]:
    """(device pass, host pass) of the same model, both with taps and a ring."""

    def load(kernels: bool) -> Runner:
        monkeypatch.setattr(shard_module, "uses_kernels", lambda device, dtype: kernels)
        runner = load_runner(
            folder, device=device, dtype="float32", num_pages=32, page_size=tm.PAGE, max_rows=96
        )
        runner.set_taps((1, 0), normed_last_layer=False)
        runner.set_ring(torch.zeros(64, 2 * runner.config.hidden_size, device=device))
        return runner

    with load(True) as ours, load(False) as oracle:
        yield ours, oracle


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, tm.VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def memory(runner: Runner) -> torch.Tensor:
    return runner._shard._pass._memory.page_rows


def compare(pair: tuple[Runner, Runner], step: Step) -> tuple[int, ...]:
    """Run `step` on both; everything it leaves behind must be alike."""
    ours, oracle = (runner.run(step) for runner in pair)
    assert ours.choices == oracle.choices
    if step.read_logits and len(oracle.logits):
        torch.testing.assert_close(ours.logits, oracle.logits, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(memory(pair[0]), memory(pair[1]), atol=2e-4, rtol=2e-4)
    rings = [runner._ring for runner in pair]
    assert rings[0] is not None and rings[1] is not None
    torch.testing.assert_close(rings[0], rings[1], atol=2e-4, rtol=2e-4)
    return oracle.choices


def prefilled(pair: tuple[Runner, Runner]) -> list[tuple[int, ...]]:
    """Sessions of TREES' contexts, in chunks, captured; returns their pages."""
    pages = [tm.pages_for(30), tm.pages_for(30, 8), tm.pages_for(30, 16)]
    for n, (own, (_, context)) in enumerate(zip(pages, TREES, strict=True)):
        for first, count in ((0, context // 2), (context // 2, context - context // 2)):
            step = tm.chain_step(ids(count, 10 * n + first), first, own, commit=True)
            span = RingSpan(20 * n, 1 if first else 0)
            compare(pair, replace(step, segments=(replace(step.segments[0], ring=span),)))
    return pages


def verify(
    pair: tuple[Runner, Runner], pages: list[tuple[int, ...]], rule: SamplingParams, seed: int
) -> Step:
    """A step over all sessions in which tree 0 accepts a path of two nodes and tree 1 one of one."""
    runner = pair[1]
    rows = [ids(len(parents), seed + n) for n, (parents, _) in enumerate(TREES)]
    for _ in range(3):
        step = with_rule(
            tm.tree_step(
                [(r, p, c, own) for r, (p, c), own in zip(rows, TREES, pages, strict=True)], commit=True
            ),
            rule,
        )
        choices = runner.run(replace(step, slots=None)).choices
        rows[0][2], rows[0][4] = choices[0], choices[2]
        rows[1][1] = choices[8]
    segments = tuple(
        replace(segment, ring=None if n == 1 else RingSpan(3 + 20 * n, n))
        for n, segment in enumerate(step.segments)
    )
    return replace(step, segments=segments)


def with_rule(step: Step, sampling: SamplingParams) -> Step:
    positions = (step.positions + 1).tolist()
    return replace(step, groups=(RowGroup(ChoiceRule(sampling), 0, positions),))


@pytest.mark.parametrize("rule", RULES)
def test_chunks_and_trees_leave_the_same_behind(pair: tuple[Runner, Runner], rule: str) -> None:
    pages = prefilled(pair)
    step = verify(pair, pages, RULES[rule], seed=100)
    before = memory(pair[1]).clone()
    compare(pair, step)
    changed = (memory(pair[1]) != before).any(-1).any(0).nonzero().view(-1).tolist()
    wanted = [*tm.slots(pages[0], [19, 20, 21]), *tm.slots(pages[1], [5, 6]), *tm.slots(pages[2], [11])]
    assert sorted(changed) == sorted(int(slot) for slot in wanted)


def test_a_projection_is_applied_to_what_is_captured(pair: tuple[Runner, Runner]) -> None:
    """Rows of the ring are what the drafter would have made of the taps."""
    hidden = pair[0].config.hidden_size
    generator = torch.Generator().manual_seed(3)
    matrix, norm = torch.randn(16, 2 * hidden, generator=generator), torch.randn(16, generator=generator)
    pages = prefilled(pair)
    step = verify(pair, pages, RULES["greedy"], seed=150)
    taps = pair[1].run(replace(step, slots=None)).taps
    assert taps is not None
    wanted = torch.nn.functional.rms_norm(taps.cpu() @ matrix.T, (16,), norm, 1e-6)
    for runner in pair:
        runner.set_ring(None)
        runner.set_taps((1, 0), normed_last_layer=False, projection=Projection(matrix, norm, 1e-6))
        runner.set_ring(torch.zeros(64, 16, device=runner.device))
    compare(pair, step)
    ring = pair[0]._ring
    assert ring is not None  # tree 0 accepts rows 0, 2, 4, captured from slot 3 on
    torch.testing.assert_close(ring[3:6].cpu(), wanted[[0, 2, 4]], atol=2e-4, rtol=2e-4)


def test_logits_that_nobody_reads_change_nothing(pair: tuple[Runner, Runner]) -> None:
    step = verify(pair, prefilled(pair), RULES["sampled"], seed=200)
    compare(pair, replace(step, read_logits=False))


@pytest.mark.parametrize("rule", RULES)
def test_read_back_is_said_only_where_the_host_has_waited_for_the_ring(
    pair: tuple[Runner, Runner], device: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By it the draft is told that rows are there: said too early, it would read what is not written yet."""
    ours, pages = pair[0], prefilled(pair)
    waited: list[str] = []
    if device == "cpu":  # which has nothing to wait for
        assert not ours.run(verify(pair, pages, RULES[rule], seed=300)).read_back
        event = SimpleNamespace(record=lambda: None, synchronize=lambda: waited.append("waited"))
        monkeypatch.setattr(ours._shard._pass, "_done", event)
    assert ours.run(verify(pair, pages, RULES[rule], seed=300)).read_back
    assert waited == (["waited"] if device == "cpu" else [])
    chunk = tm.chain_step(ids(4, 7), 5, pages[1], commit=True)
    chunk = replace(chunk, groups=(), segments=(replace(chunk.segments[0], ring=RingSpan(9)),))
    assert not ours.run(chunk).read_back
    if device == "cuda":
        ring = ours._ring
        assert ring is not None
        ours.set_ring(torch.zeros_like(ring, device="cpu"))
        assert not ours.run(verify(pair, pages, RULES[rule], seed=300)).read_back


def test_a_mask_goes_the_way_of_filters(pair: tuple[Runner, Runner]) -> None:
    """min_tokens: the best token is masked, so another one must be chosen."""
    pages = prefilled(pair)
    step = tm.tree_step([(ids(1, 3), (-1,), 19, pages[0])])
    best = pair[1].run(step).choices[0]
    masked = ChoiceRule(SamplingParams(), (best,), 99)
    choices = compare(pair, replace(step, groups=(RowGroup(masked, 0, [20]),)))
    assert choices[0] != best


def mixed_step(pages: Sequence[Sequence[int]], seed: int, rows: int = 9) -> Step:
    """A verify and a prompt chunk of so many rows."""
    tree = tm.tree_step([(ids(8, seed), TREES[0][0], 19, pages[0])], commit=True)
    chunk = tm.chain_step(ids(rows, seed + 1), 5, pages[1], logits="last", commit=True)
    assert tree.slots is not None and chunk.slots is not None
    (segment,) = chunk.segments
    return Step(
        torch.cat((tree.tokens, chunk.tokens)),
        torch.cat((tree.positions, chunk.positions)),
        (*tree.segments, replace(segment, first_row=8, ring=RingSpan(40))),
        torch.cat((tree.logit_rows, chunk.logit_rows + 8)),
        slots=torch.cat((tree.slots, chunk.slots)),
        groups=(*tree.groups, RowGroup(tm.GREEDY, 8, [5 + rows])),
    )


def test_a_verify_and_a_prompt_chunk_in_one_step(pair: tuple[Runner, Runner]) -> None:
    compare(pair, mixed_step(prefilled(pair), 7))


def test_padding_rows_are_nowhere(pair: tuple[Runner, Runner]) -> None:
    """Deterministic mode pads a segment; no padding row may be committed or captured."""
    pages = prefilled(pair)
    step = tm.chain_step(ids(9, 8), 5, pages[1], commit=True)
    assert step.slots is not None
    segment = replace(step.segments[0], padding=3, ring=RingSpan(50))
    slots = torch.cat((step.slots[:6], torch.full((3,), -1)))
    compare(pair, replace(step, segments=(segment,), slots=slots, read_logits=False))
    ring = pair[0]._ring
    assert ring is not None and not ring[56:60].any()


def test_a_bad_row_is_told_and_the_walk_ends_there(pair: tuple[Runner, Runner]) -> None:
    pages = prefilled(pair)
    step = verify(pair, pages, RULES["greedy"], seed=300)
    with torch.inference_mode():
        for runner in pair:
            memory(runner)[:, int(tm.slots(pages[1], [2])[0])] = float("nan")
    ours, oracle = (runner.run(step) for runner in pair)
    assert ours.choices == oracle.choices
    assert ours.choices[8:11] == (-1, -1, -1) and min(ours.choices[:8]) >= 0


# ---- CUDA graphs
# --------------------------------------------------------------------------------------------


def modes(runner: Runner, step: Step) -> int:
    return runner._shard.plan(step, runner._taps, runner._ring).mode


class Recorded:
    """A graph on a CPU: a replay is the pass again, into the tensors that recording left."""

    passes: DevicePass

    def __init__(self) -> None:
        self.memory: list[torch.Tensor] = []

    def pool(self) -> int:
        return 0

    def replay(self) -> None:
        passes = self.passes
        (buffers,) = (b for b in passes._kept.values() if b.graph is self)
        held = buffers.logits, buffers.taps
        self.memory = self.memory or [x for x in held if x is not None]
        passes._forward(buffers, passes._captured.taps)
        passes._finish(buffers, passes._choose(buffers), passes._captured.ring)
        for into, made in zip(self.memory, (buffers.logits, buffers.taps), strict=True):
            assert made is not None
            into.copy_(made)
        buffers.logits, buffers.taps = held


@pytest.fixture
def recording(pair: tuple[Runner, Runner], device: str, monkeypatch: pytest.MonkeyPatch) -> DevicePass:
    """The device pass, with graphs on a CPU, too."""
    passes = pair[0]._shard._pass
    assert isinstance(passes, DevicePass)
    if device == "cpu":
        monkeypatch.setattr(Recorded, "passes", passes, raising=False)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
        monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: contextlib.nullcontext())
        monkeypatch.setattr(device_pass, "_on_loan", lambda x: x)
        passes._graphs = True
    return passes


def test_a_replay_after_an_eager_pass_of_its_bucket_gives_its_own_logits_and_taps(
    pair: tuple[Runner, Runner], recording: DevicePass
) -> None:
    """A filtered step runs eagerly in the bucket of plain ones; logprobs then come from the replay."""
    pages = prefilled(pair)
    steps = [verify(pair, pages, RULES["greedy"], seed=700 + n) for n in range(3)]
    for step in (*steps[:2], with_rule(steps[0], RULES["filtered"])):
        compare(pair, step)
    shape = recording._bucket(steps[2])
    assert shape is not None and recording._kept[shape].graph is not None
    ours, oracle = (runner.run(steps[2]) for runner in pair)
    torch.testing.assert_close(ours.logits, oracle.logits, atol=2e-4, rtol=2e-4)
    assert ours.taps is not None and oracle.taps is not None
    torch.testing.assert_close(ours.taps, oracle.taps, atol=2e-4, rtol=2e-4)


def test_buckets_keep_nothing_of_eager_passes(pair: tuple[Runner, Runner]) -> None:
    """There are hundreds, and logits of one may take 100 MB."""
    compare(pair, verify(pair, prefilled(pair), RULES["filtered"], seed=750))
    kept = pair[0]._shard._pass._kept.values()
    assert kept and all(buffers.logits is None and buffers.taps is None for buffers in kept)


def test_of_too_many_buckets_the_one_longest_unused_goes(
    pair: tuple[Runner, Runner], recording: DevicePass, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_buffers, "MOST_BUCKETS", 2)
    monkeypatch.setattr(device_pass, "LENT_TIMES", 0)
    pages = prefilled(pair)

    def one(seed: int) -> Step:
        return tm.tree_step([(ids(1, seed), (-1,), 11, pages[2])])

    for turn in range(3):  # run, captured, replayed
        compare(pair, verify(pair, pages, RULES["greedy"], seed=800 + turn))
    shape = recording._bucket(verify(pair, pages, RULES["greedy"], seed=800))
    assert shape is not None and recording._kept[shape].graph is not None and len(recording._kept) == 2
    compare(pair, one(1))
    compare(pair, verify(pair, pages, RULES["greedy"], seed=810))  # the younger of the two by now
    compare(pair, mixed_step(pages, 811, rows=3))
    assert shape in recording._kept and len(recording._kept) == 2
    compare(pair, one(2))
    assert shape not in recording._kept and len(recording._kept) == 2 and recording._pool is None
    assert shape not in recording._ready and len(recording.examples()) <= 2
    for turn in range(3):
        compare(pair, verify(pair, pages, RULES["greedy"], seed=820 + turn))
    assert recording._kept[shape].graph is not None


def test_a_pass_without_a_graph_of_its_own_runs_by_a_larger_one_s(
    pair: tuple[Runner, Runner], recording: DevicePass
) -> None:
    pages = prefilled(pair)

    def full(seed: int) -> Step:
        return verify(pair, pages, RULES["sampled"], seed=seed)

    def fewer(seed: int) -> Step:
        step = tm.tree_step(
            [
                (ids(len(parents), seed + n), parents, context, own)
                for n, ((parents, context), own) in enumerate(zip(TREES[:2], pages, strict=False))
            ],
            commit=True,
        )
        return with_rule(step, RULES["sampled"])

    for turn in range(3):
        compare(pair, full(900 + turn))
    small, large = recording._bucket(fewer(0)), recording._bucket(full(0))
    assert small is not None and large is not None and small != large
    assert cover(small, [large]) == large
    found = []
    for turn in range(LENT_TIMES + 3):
        step = fewer(910 + turn)
        found.append(modes(pair[0], step))
        recording._lent[small] -= found[-1] == LENT  # planning it is counted once more below
        if found[-1] == EAGER:
            recording._ready.discard(small)
        compare(pair, replace(step, read_logits=turn % 2 == 0))
        compare(pair, full(930 + turn))  # whose own replays are none the worse for it
    assert found == [LENT] * LENT_TIMES + [EAGER, CAPTURE, REPLAY]


def test_rank_0_says_whose_graph_runs_a_lent_pass(pair: tuple[Runner, Runner], recording: DevicePass) -> None:
    """The others keep graphs of an earlier ring, that of the pass's own size among them."""
    pages = prefilled(pair)
    full = verify(pair, pages, RULES["greedy"], seed=960)
    trees = [(ids(len(p), 960), p, c, own) for (p, c), own in zip(TREES[:2], pages, strict=False)]
    fewer = with_rule(tm.tree_step(trees), RULES["greedy"])
    for step in (full, fewer):
        pair[0].warm_up([replace(step, slots=None, warms=True)])
    small, large = recording._bucket(fewer), recording._bucket(full)
    assert small is not None and large is not None and small != large
    there = dict(recording._kept)
    recording._kept[small].graph = None  # rank 0 has let it go
    planned = recording.plan(fewer, recording._captured.taps, recording._captured.ring)
    assert planned.mode == LENT
    recording._kept[small].graph = there[large].graph  # another rank has not
    told = step_codec.decode(step_codec.encode_step(planned))
    assert told is not None and recording._buffers(told) is there[large]


def test_where_rounding_must_not_vary_no_graph_is_lent(
    pair: tuple[Runner, Runner], recording: DevicePass
) -> None:
    pages = prefilled(pair)
    recording._lends = False
    for turn in range(2):
        compare(pair, verify(pair, pages, RULES["greedy"], seed=970 + turn))
    trees = [(ids(len(p), 970), p, c, own) for (p, c), own in zip(TREES[:2], pages, strict=False)]
    fewer = with_rule(tm.tree_step(trees), RULES["greedy"])
    assert [modes(pair[0], fewer)] == [EAGER]


def test_only_what_will_be_replayed_is_called_cold(
    pair: tuple[Runner, Runner], recording: DevicePass
) -> None:
    pages = prefilled(pair)

    def cold(step: Step) -> bool:
        return pair[0].run(replace(step, slots=None)).cold

    step = verify(pair, pages, RULES["greedy"], seed=950)
    assert [cold(step) for _ in range(4)] == [True, True, False, False]
    assert not cold(with_rule(step, RULES["filtered"]))  # never captured: this is what it takes
    assert not pair[1].run(replace(step, slots=None)).cold


@pytest.mark.gpu
def test_replays_equal_eager_passes_and_nothing_is_stale(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The classic fault of captured passes is an old address: the same bucket, time and again, with other
    tokens, contexts, pages, rules, and ring places, and with other buckets in between."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setattr(device_pass, "LENT_TIMES", 1)  # by a larger one's graph, too, and by its own
    runners = []
    for graphs in (True, False):
        runner = load_runner(
            folder,
            device="cuda",
            dtype="float32",
            num_pages=32,
            page_size=tm.PAGE,
            max_rows=96,
            cuda_graphs=graphs,
        )
        runner.set_taps((1, 0), normed_last_layer=False)
        runner.set_ring(torch.zeros(64, 2 * runner.config.hidden_size, device="cuda"))
        runners.append(runner)
    pair = (runners[0], runners[1])
    pages = prefilled(pair)
    seen = []
    for turn in range(8):
        for rule in ("greedy", "sampled"):
            step = verify(pair, pages, RULES[rule], seed=400 + turn)
            planned = pair[0]._shard._pass
            before = {shape: b.graph for shape, b in planned._kept.items()}
            compare(pair, replace(step, read_logits=turn % 2 == 0))
            after = {shape: b.graph for shape, b in planned._kept.items()}
            seen.append(sum(shape.trees and graph is not None for shape, graph in after.items()))
            assert all(after[shape] is graph for shape, graph in before.items() if graph is not None)
        compare(pair, with_rule(tm.tree_step([(ids(1, turn), (-1,), 11, pages[2])]), RULES["sampled"]))
        # Chunks of several sizes fall into one bucket, padding rows and padding logits in it.
        compare(pair, mixed_step(pages, 600 + turn, rows=3 + turn))
        pages = [pages[0], pages[2], pages[1]] if turn == 4 else pages
    assert seen[0] == 0 and seen[-1] >= 2
    assert any(not shape.trees and b.graph is not None for shape, b in planned._kept.items())
    # Another ring: the captured addresses are of no use any more.
    for runner in pair:
        runner.set_ring(torch.zeros(64, 2 * runner.config.hidden_size, device="cuda"))
    for turn in range(4):
        compare(pair, verify(pair, pages, RULES["sampled"], seed=500 + turn))
    for runner in pair:
        runner.close()


def test_a_bucket_is_run_then_captured_then_replayed(pair: tuple[Runner, Runner]) -> None:
    ours = pair[0]
    passes = ours._shard._pass
    passes._graphs = True
    step = tm.tree_step([(ids(1, 1), (-1,), 0, ())])
    assert modes(ours, step) == EAGER
    assert modes(ours, step) == CAPTURE
    assert [modes(ours, tm.chain_step(ids(n, 1), 0, ())) for n in (4, 3)] == [EAGER, CAPTURE]
    assert [modes(ours, tm.chain_step(ids(n, 1), 0, ())) for n in (400, 400)] == [EAGER, EAGER]
    filtered = with_rule(step, RULES["filtered"])
    assert modes(ours, filtered) == EAGER
    assert modes(ours, filtered) == EAGER
