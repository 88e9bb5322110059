"""Logits and taps of our decoder against transformers', for every family: chunked prefill, decode, trees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tm
import torch

from target_service.runner import Runner, load_runner
from target_service.step import Segment, Step

SINGLE = [name for name in tm.MODELS if not name.endswith(("8kv", "of-8"))]


@dataclass(frozen=True, slots=True)
class Pair:
    ours: Runner
    theirs: Any
    atol: float


@pytest.fixture(scope="module", params=[(n, d) for n in SINGLE for d in ("float32", "float64")], ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    name, dtype = request.param
    folder = tmp_path_factory.mktemp(name)
    theirs = tm.build(name, folder, dtype=getattr(torch, dtype))
    with load_runner(folder, device="cpu", dtype=dtype, num_pages=64, page_size=tm.PAGE, max_rows=96) as ours:
        # transformers computes rotary angles in float32 also for a float64 model.
        yield Pair(ours, theirs, 1e-4)


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, tm.VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def reference(theirs: Any, tokens: list[int]) -> Any:
    return theirs(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)


@pytest.mark.parametrize("chunks", [(), (1,), (7, 8, 5), (33, 3)], ids=str)
def test_prefill_in_chunks(pair: Pair, chunks: tuple[int, ...]) -> None:
    tokens = ids(45)
    got = torch.cat([o.logits for o in tm.feed(pair.ours, tokens, tm.pages_for(45), chunks=chunks)])
    assert got.dtype == torch.float32
    torch.testing.assert_close(
        got, reference(pair.theirs, tokens).logits[0].float(), atol=pair.atol, rtol=1e-4
    )


def test_decode_row_by_row(pair: Pair) -> None:
    tokens = ids(20, 1)
    pages = tm.pages_for(20, 9)
    tm.feed(pair.ours, tokens[:9], pages)
    got = torch.cat([o.logits for o in tm.feed(pair.ours, tokens[9:], pages, chunks=(1,) * 11, context=9)])
    expected = reference(pair.theirs, tokens).logits[0, 9:].float()
    torch.testing.assert_close(got, expected, atol=pair.atol, rtol=1e-4)


PARENTS = (-1, 0, 0, 1, 1, 2, 3, 3, 6)


def path_to(node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = PARENTS[node]
    return path[::-1]


def test_tree_rows_equal_their_paths(pair: Pair) -> None:
    """Two sessions with trees of different size, a decoding one and a prefill chunk, all in one step."""
    prompts = [ids(13, 2), ids(6, 3), ids(17, 4)]
    pages = [tm.pages_for(40, 0), tm.pages_for(40, 12), tm.pages_for(40, 24)]
    for prompt, own in zip(prompts, pages, strict=True):
        tm.feed(pair.ours, prompt, own)
    tree, small = ids(9, 5), ids(6, 6)
    step = tm.tree_step(
        [
            (tree, PARENTS, 13, pages[0]),
            (small, PARENTS[:6], 6, pages[1]),
            (tree[:1], (-1,), 17, pages[2]),
        ]
    )
    chunk = ids(11, 7)
    n = step.tokens.numel()
    step = Step(
        torch.cat((step.tokens, torch.tensor(chunk))),
        torch.cat((step.positions, torch.arange(11))),
        (*step.segments, Segment(n, 11, 0, ())),
        torch.arange(n + 11),
    )
    logits = pair.ours.run(step).logits

    def check(row: int, tokens: list[int]) -> None:
        expected = reference(pair.theirs, tokens).logits[0, -1].float()
        torch.testing.assert_close(logits[row], expected, atol=pair.atol, rtol=1e-4)

    for node in range(9):
        check(node, prompts[0] + [tree[i] for i in path_to(node)])
    for node in range(6):
        check(9 + node, prompts[1] + [small[i] for i in path_to(node)])
    check(15, prompts[2] + tree[:1])
    for i in range(11):
        check(16 + i, chunk[: i + 1])


def test_committing_a_path_equals_having_fed_it(pair: Pair) -> None:
    prompt, pages = ids(10, 8), tm.pages_for(40)
    tm.feed(pair.ours, prompt, pages)
    accepted = path_to(6)  # rows 0, 1, 3, 6: not neighbours in the tree
    tree = tm.accepted_tree(pair.ours, ids(9, 9), PARENTS, 10, pages, accepted)
    pair.ours.run(tm.tree_step([(tree, PARENTS, 10, pages)], commit=True))
    text = prompt + [tree[i] for i in accepted]
    got = pair.ours.run(tm.chain_step([5, 6], len(text), pages)).logits
    expected = reference(pair.theirs, [*text, 5, 6]).logits[0, -2:].float()
    torch.testing.assert_close(got, expected, atol=pair.atol, rtol=1e-4)


@pytest.mark.parametrize("normed", [False, True])
def test_taps_are_the_hidden_states_after_each_layer(pair: Pair, normed: bool) -> None:
    tokens = ids(12, 10)
    pair.ours.set_taps((1, 0, 2), normed_last_layer=normed)
    taps = pair.ours.run(tm.chain_step(tokens, 0, (), logits="last")).taps
    pair.ours.set_taps((), normed_last_layer=False)
    assert taps is not None and taps.dtype == pair.ours.activation_dtype
    states = reference(pair.theirs, tokens).hidden_states
    last = states[3][0]
    if not normed:  # the tuple's last entry is taken after the final norm
        caught: list[torch.Tensor] = []
        hook = pair.theirs.model.layers[-1].register_forward_hook(
            lambda _module, _inputs, output: caught.append(output[0] if isinstance(output, tuple) else output)
        )
        reference(pair.theirs, tokens)
        hook.remove()
        last = caught[0].reshape(12, -1)
    expected = torch.cat((states[2][0], states[1][0], last), -1)
    torch.testing.assert_close(taps, expected.to(taps.dtype), atol=pair.atol, rtol=1e-4)
    assert pair.ours.run(tm.chain_step(tokens, 0, ())).taps is None


def test_chosen_logit_rows_come_in_the_order_asked(pair: Pair) -> None:
    tokens = ids(12, 11)
    every = pair.ours.run(tm.chain_step(tokens, 0, ())).logits
    step = tm.chain_step(tokens, 0, ())
    some = pair.ours.run(Step(step.tokens, step.positions, step.segments, torch.tensor([7, 2, 11]))).logits
    torch.testing.assert_close(some, every[[7, 2, 11]], atol=1e-5, rtol=1e-5)
    none = pair.ours.run(tm.chain_step(tokens, 0, (), logits="none")).logits
    assert none.shape == (0, tm.VOCAB)


def test_a_step_that_is_not_committed_leaves_no_trace(pair: Pair) -> None:
    prompt, pages = ids(9, 12), tm.pages_for(40)
    tm.feed(pair.ours, prompt, pages)
    before = pair.ours.run(tm.chain_step([3], 9, pages)).logits.clone()
    pair.ours.run(tm.chain_step(ids(20, 13), 9, pages))
    torch.testing.assert_close(pair.ours.run(tm.chain_step([3], 9, pages)).logits, before, atol=0, rtol=0)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    theirs = tm.build("llama", tmp_path, dtype=torch.bfloat16)
    tokens = ids(30, 14)
    expected = reference(theirs.float(), tokens).logits[0]
    with load_runner(tmp_path, device="cpu", num_pages=16, page_size=tm.PAGE, max_rows=64) as ours:
        assert ours.dtype == torch.bfloat16
        got = torch.cat([o.logits for o in tm.feed(ours, tokens, tm.pages_for(30), chunks=(20,))])
        # Float32 activations unless this CPU has bfloat16 arithmetic.
        share = 0.02 if ours.activation_dtype == torch.float32 else 0.15
    assert (got - expected).abs().max() < share * expected.abs().max()
