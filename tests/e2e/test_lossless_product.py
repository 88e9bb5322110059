"""The product on tiny models in fp64: the text is plain decoding's, token for token, whatever was drafted.

Two oracles, no tolerance: plain decoding on transformers by the letter of the commit rule (plain_decoding),
and the same product with speculation off. Each case ends with nothing left: no session, page or ring slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_scripts import adversary, oracle, target_itself
from pairwise import pairwise
from plain_decoding import PlainDecoding
from product import LiveProduct, Run, Script, request_for
from tiny import make_drafter, make_target

from gateway.generation import GenerationRequest
from specbridge.rounds import FinishReason, SamplingParams

HOT = 0.8
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=HOT),
    "top_k": SamplingParams(temperature=HOT, top_k=20),
    "top_p": SamplingParams(temperature=HOT, top_p=0.9),
    "min_p": SamplingParams(temperature=HOT, min_p=0.05),
    "all_filters": SamplingParams(temperature=1.1, top_k=40, top_p=0.95, min_p=0.01),
}
FACTORS: dict[str, Sequence[Any]] = {
    "sampling": list(SAMPLINGS),
    "budget": [0, 1, 7, 32, 64],
    "drafter": ["random", "oracle", "adversary"],
    "service": ["llama-8-shared", "qwen3-16-inline", "llama-16-chunk5", "qwen2-8-chunk16"],
    "count": [1, 9],
    "second_turn": [False, True],
}
CASES = pairwise(FACTORS)
# name -> model family, block size, target settings, draft settings
SERVICES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "llama-8-shared": ("llama", 8, {}, {"transport": "shared_memory"}),
    "qwen3-16-inline": ("qwen3", 16, {}, {"transport": "inline", "append": "sequential"}),
    "llama-16-chunk5": ("llama", 16, {"prefill_chunk": 5}, {"transport": "inline", "eager": False}),
    "qwen2-8-chunk16": ("qwen2", 8, {"prefill_chunk": 16}, {"transport": "shared_memory", "window": 24}),
}
TOKENS = 24


class Bench:
    """Products and oracles by name, made when first needed."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self._root, self._stack = root, stack
        self._products: dict[str, LiveProduct] = {}
        self._plain: dict[str, PlainDecoding] = {}

    def product(self, service: str) -> LiveProduct:
        if service not in self._products:
            family, block, target, draft = SERVICES[service]
            drafter = make_drafter(self._root / f"draft-{block}", block_size=block)
            product = LiveProduct(self._target(family), drafter, target=target, draft=draft)
            self._products[service] = self._stack.enter_context(product)
        return self._products[service]

    def plain(self, service: str) -> PlainDecoding:
        family = SERVICES[service][0]
        if family not in self._plain:
            self._plain[family] = PlainDecoding(self._target(family), torch.float64)
        return self._plain[family]

    def _target(self, family: str) -> Path:
        folder = self._root / family
        return folder if folder.exists() else make_target(folder, family=family)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(tmp_path_factory.mktemp("lossless"), stack)


def prompt(i: int, length: int | None = None) -> tuple[int, ...]:
    """Prompts of 3 .. 43 tokens, around the page size of 16, with different beginnings."""
    return tuple((37 * i + 11 * j + j * j) % 250 for j in range(length or 3 + 5 * i))


def scripts(name: str, plain: PlainDecoding, texts: Sequence[Sequence[int]]) -> Script | None:
    if name == "random":
        return None
    if name == "oracle":
        return oracle(texts)
    return adversary(texts, [plain.logits(text) for text in texts])


def expected_acceptance(tokens: int, limit: int) -> list[int]:
    """Nodes of an oracle's trees of depth `limit` accepted, round by round, after the prefill's token."""
    accepted, remaining = [], tokens - 1
    while remaining:
        accepted.append(min(limit, remaining - 1))
        remaining -= accepted[-1] + 1
    return accepted


def accepted(run: Run, i: int) -> list[int]:
    return list(run.texts[i].stats.per_step_accepted)


def nothing_fell_back(run: Run) -> None:
    assert not run.recorder.fallbacks and not run.recorder.reopens


def check(bench: Bench, case: dict[str, Any], prompts: Sequence[tuple[int, ...]]) -> Run:
    """One turn of all `prompts` with the case's drafter, compared with both oracles."""
    product, plain = bench.product(case["service"]), bench.plain(case["service"])
    sampling, budget = SAMPLINGS[case["sampling"]], case["budget"]
    expected = plain.texts(prompts, sampling, seeds=range(100, 100 + len(prompts)), count=TOKENS)
    texts = [(*p, *text) for p, text in zip(prompts, expected, strict=True)]

    def requests(speculate: bool) -> list[GenerationRequest]:
        return [
            request_for(p, sampling, seed=100 + i, max_tokens=TOKENS, speculate=speculate)
            for i, p in enumerate(prompts)
        ]

    run = product.run(requests(True), budget=budget, script=scripts(case["drafter"], plain, texts))
    product.assert_idle()
    assert run.tokens == expected
    nothing_fell_back(run)
    if budget:
        assert all(text.stats.num_draft_tokens > 0 for text in run.texts)
        if case["drafter"] == "oracle":
            full = expected_acceptance(TOKENS, min(budget, product.horizon))
            for i in range(len(prompts)):
                # Rounds without a tree (nothing left to draft for) are no speculative steps.
                assert accepted(run, i) == [n for n in full if n]
                assert run.texts[i].stats.num_rounds == len(full)
    else:
        assert all(text.stats.num_draft_tokens == 0 for text in run.texts)
    off = product.run(requests(False), budget=budget)
    product.assert_idle()
    assert off.tokens == expected
    assert all(text.stats.num_draft_tokens == 0 for text in off.texts)
    return run


@pytest.mark.parametrize(
    "case", CASES, ids=["-".join(str(value) for value in case.values()) for case in CASES]
)
def test_text_is_that_of_plain_decoding(bench: Bench, case: dict[str, Any]) -> None:
    product = bench.product(case["service"])
    prompts = [prompt(i) for i in (range(9) if case["count"] == 9 else [4])]
    first = check(bench, case, prompts)
    if case["second_turn"]:
        turns = [(*p, *text, 5, 6, 7) for p, text in zip(prompts, first.tokens, strict=True)]
        second = check(bench, case, turns)
        for turn, text in zip(turns, second.texts, strict=True):
            # What the first turn committed is in pages, and the whole ones are found. Hidden states of the
            # last round may reach the draft after the release: then its own last pages are not full.
            full = (len(turn) - 4) // 16 * 16
            late = product.horizon // 16 * 16 + 16 if case["budget"] else 0
            assert max(full - late, 16) <= text.events[0].cached_tokens <= full


def test_cases_cover_what_is_asked_for() -> None:
    for name, values in FACTORS.items():
        assert {case[name] for case in CASES} == set(values)
    for budget in FACTORS["budget"]:
        assert {c["sampling"] for c in CASES if c["budget"] == budget} == set(SAMPLINGS)
        assert {c["service"] for c in CASES if c["budget"] == budget} == set(SERVICES)


@pytest.mark.parametrize("service", ["llama-8-shared", "qwen3-16-inline"])
def test_the_target_as_its_own_drafter_is_always_right_through_the_shared_noise(
    bench: Bench, service: str
) -> None:
    """At T > 0 logits alone do not say which token comes: only the same noise in the same place does."""
    product, plain = bench.product(service), bench.plain(service)
    prompts, count = [prompt(i) for i in range(6)], 40
    sampling = SamplingParams(temperature=1.3)
    expected = plain.texts(prompts, sampling, seeds=range(7, 13), count=count)
    texts = [(*p, *text) for p, text in zip(prompts, expected, strict=True)]
    logits = [plain.logits(text) for text in texts]
    full = expected_acceptance(count, product.horizon)

    def run(noise_of: str) -> Run:
        requests = [request_for(p, sampling, seed=7 + i, max_tokens=count) for i, p in enumerate(prompts)]
        script = target_itself(texts, logits)
        product.trees.limit_top_k(1)
        real = product.trees.noise
        try:
            if noise_of == "a position late":
                product.trees.noise = lambda session, depth: _late(real(session, depth + 1))  # type: ignore[method-assign]
            return product.run(requests, budget=product.horizon, script=script)
        finally:
            product.trees.limit_top_k(None)
            product.trees.noise = real  # type: ignore[method-assign]

    shared = run("the same")
    nothing_fell_back(shared)
    assert [accepted(shared, i) for i in range(len(prompts))] == [[n for n in full if n]] * len(prompts)
    # The comparison can fail: noise of the neighbouring positions gives other trees, yet no other text.
    wrong = run("a position late")
    assert wrong.tokens == shared.tokens == expected
    assert wrong.tokens_per_round < 0.5 * shared.tokens_per_round
    product.assert_idle()


def _late(noise: torch.Tensor | None) -> torch.Tensor | None:
    return None if noise is None else noise[1:]


def test_many_seeds_give_the_committed_text_of_each(bench: Bench) -> None:
    """A block of seeds at once, trees and shared noise on: the first tokens of every one by the rule."""
    product, plain = bench.product("llama-8-shared"), bench.plain("llama-8-shared")
    sampling, start, seeds = SamplingParams(temperature=1.0, top_p=0.95), prompt(2), range(-30, 30)
    run = product.run(
        [request_for(start, sampling, seed=seed, max_tokens=4) for seed in seeds],
        budget=7,
        max_verify_rows=512,
    )
    expected = plain.texts([start] * len(seeds), sampling, seeds=seeds, count=4)
    assert run.tokens == expected
    assert len(set(expected)) > 50
    assert sum(text.stats.num_draft_tokens for text in run.texts) > 0
    product.assert_idle()


@pytest.mark.parametrize("drafter", ["oracle", "adversary"])
@pytest.mark.parametrize("at", [1, 2, 6, 7, 8, 9, 15])
def test_stop_ids_end_the_text_inside_a_block(bench: Bench, drafter: str, at: int) -> None:
    """Nothing of an accepted path is kept behind the stop id, and the prefix index learns nothing of it."""
    service = "llama-8-shared"
    product, plain = bench.product(service), bench.plain(service)
    start = (*prompt(at, 20 + at), len(drafter))  # a prompt of its own: nothing of it is in pages yet
    text = plain.text(start, SamplingParams(), seed=0, count=TOKENS)
    at = text.index(text[at - 1]) + 1  # should the token come up earlier already
    script = scripts(drafter, plain, [(*start, *text)])
    request = request_for(start, SamplingParams(), max_tokens=TOKENS, stop_token_ids=(text[at - 1],))
    run = product.run([request], budget=32, script=script)
    assert run.tokens == [text[:at]]
    assert run.texts[0].finish_reason is FinishReason.STOP
    product.assert_idle()
    # A prompt that goes on as the rejected rest of the block would: only what was committed may be found.
    again = product.run([request_for((*start, *text[:at], *text[at:]), SamplingParams(), max_tokens=2)])
    assert again.texts[0].events[0].cached_tokens <= len(start) + at


def test_mixed_requests_do_not_disturb_each_other(bench: Bench) -> None:
    """Greedy, sampled and filtered, with and without speculation, of different lengths, in one batch."""
    service = "qwen2-8-chunk16"
    product, plain = bench.product(service), bench.plain(service)
    kinds = [*SAMPLINGS.values(), SamplingParams(), SamplingParams(temperature=2.0)]
    lengths = [5, 31, 17, 40, 1, 2, 23, 12]
    prompts = [(*prompt(3, 18), i) for i in range(len(kinds))]  # a page in common
    requests = [
        request_for(p, kind, seed=i, max_tokens=n, speculate=i % 3 > 0)
        for i, (p, kind, n) in enumerate(zip(prompts, kinds, lengths, strict=True))
    ]
    for _ in range(2):  # the second time from prefixes
        run = product.run(requests, budget=16, max_verify_rows=60)
        product.assert_idle()
        assert run.tokens == [
            plain.text(p, kind, seed=i, count=n)
            for i, (p, kind, n) in enumerate(zip(prompts, kinds, lengths, strict=True))
        ]
    assert all(text.events[0].cached_tokens == 16 for text in run.texts)


def test_services_run_as_their_names_say(bench: Bench) -> None:
    for name, (_, block, _, draft) in SERVICES.items():
        product = bench.product(name)
        assert product.transport == draft["transport"]
        assert product.horizon == block - 1
