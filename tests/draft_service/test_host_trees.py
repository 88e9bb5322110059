"""Blocks without the rows that no tree of a pass can use: passes of drafters whose blocks are that short."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tree_scenes import CASES, Scene

from draft_service.drafter import Drafter
from draft_service.host_trees import LEAST_OF_BLOCK, HostTrees

DEEP = ("full", "windows from the anchor", "anchor row predicts", "causal everywhere")


def pass_of(drafter: Drafter, nodes: int, *, trim: bool) -> torch.Tensor:
    scene = Scene(drafter)
    trees = HostTrees(drafter, scene.pages, top_k=None, simulation=None, trim_block=trim)
    return trees.logits(scene.asks(nodes=(nodes, 1), depths=(99,)))


def shortened(config: dict[str, Any], rows: int) -> dict[str, Any]:
    """`config` with blocks of `rows`, wherever its layout says that."""
    own = config.get("dflash_config")
    inner = {"dflash_config": {**own, "block_size": rows}} if isinstance(own, dict) else {}
    return {**config, **inner, "block_size": rows}


@pytest.mark.parametrize("case", DEEP)
@pytest.mark.parametrize("nodes", [1, 2, 5, 6, 7, 8, 40])
def test_a_trimmed_block_is_that_of_a_drafter_with_shorter_blocks(
    case: str, nodes: int, build: Callable[..., Any]
) -> None:
    config, options = CASES[case]
    drafter = build(config, **options).drafter
    whole = drafter.config.block_size
    rows = min(whole, max(drafter.config.first_row + nodes, math.ceil(LEAST_OF_BLOCK * whole)))
    short = build(shortened(config, rows), **options).drafter
    assert short.config.block_size == rows
    assert torch.equal(pass_of(drafter, nodes, trim=True), pass_of(short, nodes, trim=False))


def test_rows_look_at_those_below_them(build: Callable[..., Any]) -> None:
    """So that trimming changes what is drafted, unless the block is causal."""
    for case, same in (("full", False), ("causal everywhere", True)):
        config, options = CASES[case]
        drafter = build(config, **options).drafter
        trimmed, whole = pass_of(drafter, 2, trim=True), pass_of(drafter, 2, trim=False)
        assert trimmed.shape == whole.shape and not torch.equal(trimmed, torch.zeros_like(whole))
        assert torch.allclose(trimmed, whole, atol=1e-9) is same


@pytest.mark.parametrize("case", DEEP)
def test_nothing_is_left_out_unless_asked_for(case: str, build: Callable[..., Any]) -> None:
    config, options = CASES[case]
    drafter = build(config, **options).drafter
    scene = Scene(drafter)
    assert HostTrees(drafter, scene.pages, top_k=None, simulation=None)._drafter_of(1) is drafter
