"""The drafter on a GPU: the same trees as on the CPU, with and without graphs, whatever ran before."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from draft_bench import Bench
from tiny_drafters import VOCAB, changed
from tree_scenes import CASES, Scene, assert_same_trees, features, some_bigrams

from draft_service.conditional_tree import Conditioner
from draft_service.context_cache import AppendFailures, ContextCache, NewRows
from draft_service.device_appends import ROW_BUCKETS
from draft_service.device_trees import SESSION_BUCKETS, DeviceTrees
from draft_service.host_trees import HostTrees
from draft_service.proposer import Proposer
from draft_service.simulation import Simulation, tables_of
from kernels import cuda
from specbridge.acceptance_model import resolve

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

DEVICE = "cuda"


def on_both(build: Callable[..., Any], config: dict[str, Any], **options: Any) -> tuple[Scene, Scene]:
    """The same drafter and sessions on the GPU and on the CPU."""
    bases = options.pop("bases", None)
    more = {} if bases is None else {"bases": bases}
    scenes = []
    for device in (DEVICE, "cpu"):
        drafter = build(config, **{"dtype": torch.float32, **options, "device": device}).drafter
        scenes.append(Scene(drafter, **more))
    return scenes[0], scenes[1]


def device_trees(scene: Scene, *, graphs: bool = True, **options: Any) -> DeviceTrees:
    return DeviceTrees(
        scene.drafter, scene.pages, **{"top_k": None, "simulation": None, **options}, graphs=graphs
    )


def host_trees(scene: Scene, **options: Any) -> HostTrees:
    return HostTrees(scene.drafter, scene.pages, **{"top_k": None, "simulation": None, **options})


@contextmanager
def no_waiting() -> Iterator[None]:
    """Torch raises where the host would wait for the device; a wait for an event is none of those."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "launches"])
@pytest.mark.parametrize("case", CASES)
def test_trees_equal_the_cpu_s(case: str, graphs: bool, build: Callable[..., Any]) -> None:
    config, options = CASES[case]
    here, there = on_both(build, config, **options)
    torch.testing.assert_close(here.pages.k.cpu(), there.pages.k, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(here.pages.v.cpu(), there.pages.v, rtol=1e-4, atol=1e-5)
    shape = {"nodes": (16, 5, 12), "depths": (9, 2, 4)}
    trees = device_trees(here, graphs=graphs)
    assert_same_trees(trees.grow(here.asks(**shape)).trees, host_trees(there).grow(there.asks(**shape)).trees)
    assert trees.captured == (graphs and cuda.available())


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "launches"])
@pytest.mark.parametrize("top_k", [None, 1])
@pytest.mark.parametrize("case", ["sliding and full", "reduced vocabulary, biases"])
def test_conditional_trees_equal_the_cpu_s(
    case: str, top_k: int | None, graphs: bool, build: Callable[..., Any]
) -> None:
    config, options = CASES[case]
    here, there = on_both(build, config, **options)
    horizon = here.drafter.config.horizon
    trees = device_trees(
        here, graphs=graphs, top_k=top_k, conditioner=Conditioner(some_bigrams(DEVICE), horizon)
    )
    host = host_trees(there, top_k=top_k, conditioner=Conditioner(some_bigrams(), horizon))
    for nodes in (5, 40):
        shape = {"nodes": (nodes, 3, nodes - 1), "depths": (9, 2, 4)}
        assert_same_trees(trees.grow(here.asks(**shape)).trees, host.grow(there.asks(**shape)).trees)
        ours = here.asks(**shape)
        with no_waiting():
            trees.grow(ours)
    assert trees.captured == (2 if graphs and cuda.available() else 0)


def test_float64_runs_by_the_references(build: Callable[..., Any]) -> None:
    here, there = on_both(build, CASES["sliding and full"][0], dtype=torch.float64)
    trees = device_trees(here)
    assert_same_trees(trees.grow(here.asks()).trees, host_trees(there).grow(there.asks()).trees)
    assert trees.captured == 0


def test_graphs_replay_what_is_there_now(build: Callable[..., Any]) -> None:
    """The classic fault: a graph that reads what was there when it was captured, and nobody sees it."""
    here, there = on_both(build, CASES["sliding and full"][0], bases=(0, 3, 17, 40, 8, 1, 30, 5, 12))
    replayed, launched, host = device_trees(here), device_trees(here, graphs=False), host_trees(there)
    sizes = ((1, 8), (3, 16), (9, 16), (2, 40), (1, 8), (5, 8), (3, 16), (9, 40))
    for turn, (count, nodes) in enumerate(sizes * 2):
        ours, theirs = here.asks(nodes=(nodes, 3)), there.asks(nodes=(nodes, 3))
        first = turn % (len(ours) - count + 1)
        chosen = slice(first, first + count)
        got = replayed.grow(ours[chosen]).trees
        assert got == launched.grow(ours[chosen]).trees
        assert_same_trees(got, host.grow(theirs[chosen]).trees)
        for scene in (here, there):
            for session in scene.sessions[turn % 2 :: 2]:
                scene.append(session, 1 + turn % 3)
    assert replayed.captured == len({(1, 8), (4, 16), (16, 16), (2, 64), (8, 8), (16, 64)})


def test_captured_at_the_start_while_another_thread_uses_the_device(build: Callable[..., Any]) -> None:
    here, there = on_both(build, CASES["full"][0])
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            size = 1 << 22
            torch.empty(size, device=DEVICE).fill_(1.0)
            torch.cuda.Event().record()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        trees = device_trees(here)
        trees.warm_up(max_sessions=8, max_nodes=32)
    finally:
        stop.set()
        thread.join()
    assert trees.captured == 4 * 3
    assert_same_trees(trees.grow(here.asks()).trees, host_trees(there).grow(there.asks()).trees)
    assert trees.captured == 4 * 3


def test_appends_of_features_on_the_device_wait_for_nothing(build: Callable[..., Any]) -> None:
    here, there = on_both(build, CASES["full"][0], bases=())
    for variant in ("fused", "sequential"):
        here, there = on_both(build, CASES["scales"][0], bases=(), append=variant)
        sizes = [1, 3, 64, 2, 200, 5, 1, 1, 17, 4, 90]  # more than there are staging buffers
        first = 0
        drafter = here.drafter
        for size in sizes:
            rows = features(drafter, 1, first, size)
            at = torch.arange(first, first + size)
            slots = (at * 7) % 640
            there.drafter.append(there.pages, rows, at, slots)
            ring = rows.to(DEVICE)
            with no_waiting():
                drafter.append(here.pages, ring, at, slots)
            first += size
        torch.testing.assert_close(here.pages.k.cpu(), there.pages.k, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(here.pages.v.cpu(), there.pages.v, rtol=1e-4, atol=1e-5)
        assert here.pages.k.abs().sum() > 0


def test_appends_by_replay_equal_the_cpu_s(build: Callable[..., Any]) -> None:
    """Through the cache, of several sessions at once, in sizes that share buckets and in larger ones."""
    here, there = on_both(build, CASES["scales"][0], bases=())
    caches = [
        ContextCache(scene.drafter, num_tokens=2048, fingerprint="test", page_size=4)
        for scene in (here, there)
    ]
    caches[0].warm_up()
    captured = caches[0].captured
    assert captured == (len(ROW_BUCKETS) if cuda.available() else 0)
    assert not caches[0].pages.k.any(), "warming up writes nowhere"
    sequences = [[cache.pool.open((), salt=bytes([s])) for s in range(3)] for cache in caches]
    for turn, sizes in enumerate([(1, 2, 5), (7,), (3, 1), (130,), (1,), (16, 16, 16), (1, 1, 1), (2,)]):
        rows = [features(here.drafter, s, 10 * turn, size) for s, size in enumerate(sizes)]
        tokens = [list(range(size)) for size in sizes]
        ring = [row.to(DEVICE, copy=True) for row in rows]
        with no_waiting():
            items = [NewRows(q, t, r) for q, t, r in zip(sequences[0], tokens, ring, strict=False)]
            assert caches[0].append(items) == AppendFailures()
        for row in ring:
            row.fill_(float("nan"))  # what was read has been read, as far as the stream goes
        items = [NewRows(q, t, r) for q, t, r in zip(sequences[1], tokens, rows, strict=False)]
        assert caches[1].append(items) == AppendFailures()
        torch.testing.assert_close(caches[0].pages.k.cpu(), caches[1].pages.k, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(caches[0].pages.v.cpu(), caches[1].pages.v, rtol=1e-4, atol=1e-5)
    assert caches[0].captured == captured


def test_a_proposal_waits_once(build: Callable[..., Any]) -> None:
    here, _ = on_both(build, CASES["reduced vocabulary, biases"][0])
    for graphs in (True, False):
        trees = device_trees(here, graphs=graphs)
        expected = trees.grow(here.asks()).trees
        with no_waiting():
            assert trees.grow(here.asks()).trees == expected


def test_simulated_trees_equal_the_cpu_s(build: Callable[..., Any]) -> None:
    here, there = on_both(build, CASES["full"][0])
    acceptance = resolve("2.5", depths=here.drafter.config.horizon)

    def simulation(device: str) -> Simulation:
        return Simulation("2.5", tables_of(acceptance, vocab_size=VOCAB, device=device))

    expected = host_trees(there, simulation=simulation("cpu")).grow(there.asks()).trees
    for graphs in (True, False):
        trees = device_trees(here, simulation=simulation(DEVICE), graphs=graphs)
        assert_same_trees(trees.grow(here.asks()).trees, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_and_is_near(dtype: torch.dtype, build: Callable[..., Any]) -> None:
    config = CASES["sliding and full"][0]
    here, _ = on_both(build, config, dtype=dtype)
    _, there = on_both(build, config)
    got = device_trees(here).grow(here.asks()).trees
    assert got == device_trees(here, graphs=False).grow(here.asks()).trees
    expected = host_trees(there).grow(there.asks()).trees
    for ours, theirs in zip(got, expected, strict=True):
        ours.validate(vocab_size=VOCAB, max_nodes=16, max_depth=5)
        scores, exact = torch.tensor(ours.scores), torch.tensor(theirs.scores)
        torch.testing.assert_close(scores, exact, rtol=0.05, atol=0.2)


def test_more_sessions_than_a_pass_takes(build: Callable[..., Any]) -> None:
    bases = [(7 * i) % 9 for i in range(SESSION_BUCKETS[-1] + 6)]
    here, there = on_both(build, CASES["full"][0], bases=bases)

    def propose(scene: Scene, **options: Any) -> Any:
        cache = ContextCache(scene.drafter, num_tokens=64, fingerprint="test")
        cache.pages = scene.pages
        proposer = Proposer(scene.drafter, cache, top_k=None, **options)
        proposer.take_thread()
        return proposer.propose(scene.asks(nodes=(8, 0, 12), depths=(3, 5))).trees

    expected = propose(there)
    assert_same_trees(propose(here), expected)
    assert_same_trees(propose(here, cuda_graphs=False), expected)


def test_the_engine_drafts_on_the_gpu(build: Callable[..., Any]) -> None:
    """Sessions through the whole service, drafting ahead, with the cost curve measured by replays."""
    built = build(changed("z-lab"), dtype=torch.float32, device=DEVICE)
    bench = Bench(built, eager=True)
    measured: list[Any] = []
    bench.engine.call(lambda: bench.proposer.warm_up(max_sessions=4, max_nodes=16))
    bench.engine.call(lambda: measured.extend(bench.proposer.measure((1, 3), 40, 3)))
    bench.settle()
    assert [point.rows for point in measured] == [6, 18] and all(point.time_ns > 0 for point in measured)
    text = [(5 * i + 3) % VOCAB for i in range(60)]
    bases = (0, 20, 23, 24, 29)
    # Before the engine has anything to do: two threads must not append at once.
    expected = {base: bench.expected(text, base) for base in bases[1:]}
    try:
        bench.open(1, text[:20])
        for before, base in itertools.pairwise(bases):
            bench.chunk(1, text, before, base)
            assert_same_trees([bench.propose(1, text, base).tree], [expected[base]])
    finally:
        bench.engine.close()
