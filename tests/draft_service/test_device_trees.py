"""The GPU's way from anchors to trees, on a CPU: by the torch references, and in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import as_the_device
from tiny_drafters import changed
from tree_scenes import CASES, PAGE, Scene, assert_same_trees, some_bigrams

from draft_service.conditional_tree import Conditioner
from draft_service.device_trees import DeviceTrees
from draft_service.drafter import Drafter
from draft_service.host_trees import Ask, HostTrees
from draft_service.pass_inputs import InputWriter, PageRows, PassInputs
from draft_service.session import Session
from draft_service.simulation import Simulation, tables_of
from kernels import cuda
from specbridge.acceptance_model import resolve
from specbridge.paging import PagePool
from specbridge.rounds import SamplingParams, SessionKey


def both_ways(drafter: Drafter, scene: Scene, conditioner: Conditioner | None = None) -> None:
    """The same asks by the CPU's way and, in whatever version of the ops runs, by the GPU's."""
    asks = scene.asks(nodes=(16, 5, 12), depths=(9, 2, 4))
    options: dict[str, Any] = {"top_k": None, "simulation": None, "conditioner": conditioner}
    device = DeviceTrees(drafter, scene.pages, graphs=True, **options)
    got = device.grow(asks).trees
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_cpu_too", False)
        expected = HostTrees(drafter, scene.pages, **options).grow(asks).trees
    assert_same_trees(got, expected)


@pytest.mark.parametrize("case", CASES)
def test_trees_equal_the_cpu_path_s(case: str, build: Callable[..., Any]) -> None:
    config, options = CASES[case]
    drafter = build(config, dtype=torch.float32, **options).drafter
    both_ways(drafter, Scene(drafter))


def test_the_host_s_own_work_runs_behind_the_launch_and_before_the_wait(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = build(CASES["sliding and full"][0], dtype=torch.float32).drafter
    scene = Scene(drafter)
    device = DeviceTrees(drafter, scene.pages, graphs=True, top_k=None, simulation=None)
    asks = scene.asks(nodes=(16, 5, 12), depths=(9, 2, 4))
    expected, order = device.grow(asks).trees, []
    launch = device._launch
    monkeypatch.setattr(device, "_launch", lambda *args: (order.append("launch"), launch(*args)))
    monkeypatch.setattr(device, "_wait", lambda: order.append("wait"))
    device.meanwhile = lambda: order.append("meanwhile")
    assert device.grow(asks).trees == expected and order == ["launch", "meanwhile", "wait"]

    def broken() -> None:
        raise OSError("no")

    # What it raises is raised, but never before the device has done with the buffers.
    device.meanwhile = broken
    with pytest.raises(OSError, match="no"):
        device.grow(asks)
    assert order[-1] == "wait"


@pytest.mark.parametrize("case", ["sliding and full", "windows from the anchor"])
def test_the_kernels_trees_equal_the_cpu_path_s(case: str, build: Callable[..., Any]) -> None:
    if not cuda.available() or not cuda.interpreting():
        pytest.skip("Triton kernels are not interpreted in this process")
    config, options = CASES[case]
    drafter = build(config, dtype=torch.float32, **options).drafter
    as_the_device()
    conditioner = Conditioner(some_bigrams(), drafter.config.horizon)
    with np.errstate(all="ignore"), cuda.cpu_tensors_too():
        both_ways(drafter, Scene(drafter, bases=(0, 13)))
        both_ways(drafter, Scene(drafter, bases=(0, 13)), conditioner)


@pytest.mark.parametrize("case", ["full", "reduced vocabulary, biases"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("top_k", [None, 1, 3])
def test_conditional_trees_equal_the_cpu_path_s(
    case: str, shared: bool, top_k: int | None, build: Callable[..., Any]
) -> None:
    config, options = CASES[case]
    drafter = build(config, dtype=torch.float32, **options).drafter
    conditioner = Conditioner(some_bigrams(), drafter.config.horizon)
    scene = Scene(drafter)
    given: dict[str, Any] = {"top_k": top_k, "simulation": None, "shared_noise": shared}
    device = DeviceTrees(drafter, scene.pages, graphs=False, conditioner=conditioner, **given)
    host = HostTrees(drafter, scene.pages, conditioner=conditioner, **given)
    for nodes in (1, 5, 40):
        asks = scene.asks(nodes=(nodes, max(1, nodes - 3)), depths=(9, 2, 4))
        trees = host.grow(asks).trees
        assert_same_trees(device.grow(asks).trees, trees)
        # A prefix of the best is the best: budgets are cut in the order of scores.
        longer = host.grow([replace(ask, max_nodes=40) for ask in asks]).trees
        for tree, more in zip(trees, longer, strict=True):
            cut = more.prefix(len(tree.tokens))
            # Fewer nodes reach less deep.
            if len(set(tree.parents)) == len(set(cut.parents)) and nodes >= drafter.config.horizon:
                assert (cut.tokens, cut.parents) == (tree.tokens, tree.parents)
            assert list(tree.scores) == sorted(tree.scores, reverse=True) and max(tree.scores) <= 0
        if top_k == 1:
            assert all(tree.parents == tuple(range(-1, len(tree.parents) - 1)) for tree in trees)
    plain = HostTrees(drafter, scene.pages, **given).grow(asks).trees
    assert top_k == 1 or any(one.tokens != other.tokens for one, other in zip(plain, trees, strict=True))


@pytest.mark.parametrize("simulated", [False, True])
def test_buckets_top_k_and_simulation_follow_the_cpu_path(simulated: bool, build: Callable[..., Any]) -> None:
    drafter = build(changed("z-lab"), dtype=torch.float32).drafter
    scene = Scene(drafter, bases=(5, 0, 21))
    simulation = None
    if simulated:
        acceptance = resolve("2.5", depths=drafter.config.horizon)
        simulation = Simulation("2.5", tables_of(acceptance, vocab_size=drafter.config.vocab_size))
    for top_k in (None, 2):
        # Simulated marginals are grown from as they stand, whatever table there is.
        conditioner = Conditioner(some_bigrams(), drafter.config.horizon) if simulated else None
        host = HostTrees(drafter, scene.pages, top_k=top_k, simulation=simulation)
        device = DeviceTrees(
            drafter, scene.pages, top_k=top_k, simulation=simulation, graphs=False, conditioner=conditioner
        )
        for count in (1, 2, 3):
            for nodes in (1, 8, 9, 40):
                asks = scene.asks(nodes=(nodes, max(1, nodes - 3)), depths=(5, 1))[:count]
                assert_same_trees(device.grow(asks).trees, host.grow(asks).trees)


def test_without_shared_noise_sampled_sessions_get_the_greedy_ones_trees(build: Callable[..., Any]) -> None:
    drafter = build(changed("z-lab"), dtype=torch.float32).drafter
    sampled, greedy = Scene(drafter), Scene(drafter, sampled=False)
    expected = HostTrees(drafter, greedy.pages, top_k=None, simulation=None).grow(greedy.asks()).trees
    grown = []
    for shared in (True, False):
        host = HostTrees(drafter, sampled.pages, top_k=None, simulation=None, shared_noise=shared)
        device = DeviceTrees(
            drafter, sampled.pages, top_k=None, simulation=None, graphs=False, shared_noise=shared
        )
        grown.append(host.grow(sampled.asks()).trees)
        assert_same_trees(device.grow(sampled.asks()).trees, grown[-1])
    assert_same_trees(grown[1], expected)
    # With it, only the greedy sessions' trees (0 and 3) are those.
    assert [one == other for one, other in zip(*grown, strict=True)] == [True, False, False, True, False]


def test_inputs_are_written_whatever_was_there_before(build: Callable[..., Any]) -> None:
    """Passes over other sessions, longer contexts and grown ones: nothing of an earlier pass stays."""
    drafter = build(changed("z-lab"), dtype=torch.float32).drafter
    scene = Scene(drafter, bases=(40, 3, 17, 0))
    device = DeviceTrees(drafter, scene.pages, top_k=None, simulation=None, graphs=False)
    host = HostTrees(drafter, scene.pages, top_k=None, simulation=None)
    asks = scene.asks()
    for turn in range(4):
        chosen = asks[turn:] + asks[: turn - 1]
        assert_same_trees(device.grow(chosen).trees, host.grow(chosen).trees)
        for session in scene.sessions:
            scene.append(session, 1 + turn)


def test_page_rows_follow_a_growing_sequence() -> None:
    pool = PagePool(64, PAGE)
    rows, one, other = PageRows(), pool.open(()), pool.open(())
    for count in (0, 1, 2, 7, 20):
        for sequence in (one, other):
            sequence.reserve(count * PAGE - sequence.length)
            row = rows.of(sequence, count)
            assert row.dtype == np.int32 and row.tolist() == sequence.pages[:count]
    assert rows.of(one, 3).tolist() == one.pages[:3]


def test_seeds_and_choices_keep_their_bits() -> None:
    inputs = PassInputs.allocate(2, 6, 3, device=torch.device("cpu"))
    writer = InputWriter(inputs, block_size=6, mask_token_id=5, page_size=PAGE, page_rows=PageRows())
    sampling = SamplingParams(temperature=0.25, seed=2**64 - 2, choice=2**31 + 5)
    sequence = PagePool(4, PAGE).open(())
    sequence.extend([1, 2, 3, 4, 5])
    writer.write([Ask(Session(SessionKey(b"g" * 16, 1), sampling, b"", sequence), 9, 16, 3)])
    assert inputs.seeds.tolist()[0] == -2 and inputs.choices.tolist()[0] == 5 - 2**31
    assert inputs.temperature.tolist()[0] == 0.25
    assert inputs.tokens.view(2, 6).tolist() == [[9, 5, 5, 5, 5, 5], [5] * 6]
    assert inputs.positions.view(2, 6)[0].tolist() == [5, 6, 7, 8, 9, 10]
    assert inputs.row_start.tolist() == [0, 6, 6] and inputs.bases.tolist() == [5, 0]
    assert inputs.budgets.tolist() == [16, 0] and inputs.depth_limits.tolist() == [3, 0]
    assert inputs.page_table[0, :2].tolist() == sequence.pages
    writer.write(())
    assert inputs.row_start.tolist() == [0, 0, 0] and not inputs.budgets.any()


def test_warm_up_makes_all_buckets_up_to_the_limits(build: Callable[..., Any]) -> None:
    drafter = build(changed("z-lab"), dtype=torch.float32).drafter
    scene = Scene(drafter, bases=(9,))
    before = scene.pages.k.clone(), scene.pages.v.clone()
    trees = DeviceTrees(drafter, scene.pages, top_k=None, simulation=None, graphs=True)
    trees.warm_up(max_sessions=3, max_nodes=20)
    assert sorted(trees._passes) == [(s, n) for s in (1, 2, 4) for n in (8, 16, 32)]
    assert torch.equal(scene.pages.k, before[0]) and torch.equal(scene.pages.v, before[1])
