"""The engine on a model of integers: exact text under every tree, with prefixes and re-opens, and its
reports.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from toy_target import (
    GATEWAY,
    PROMPT,
    SAMPLED,
    TOY_LIMITS,
    Client,
    Start,
    ToyRunner,
    chain_tree,
    expected,
    open_request,
    oracle,
    random_tree,
)

from specbridge.rounds import FinishReason, SamplingParams, SessionKey, StopParams, TargetResultKind, Verify
from specbridge.tree import EMPTY_TREE, DraftTree
from target_service.step import NO_SLOT, Step, StepOutput

# ---- the text -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_the_text_does_not_depend_on_trees_chunks_or_prefixes(
    start: Start, sampling: SamplingParams, chunk: int
) -> None:
    runner, _, client = start(replace(TOY_LIMITS, prefill_chunk=chunk))
    output, reason = expected(runner, PROMPT, sampling=sampling, stop=StopParams(30))
    rng = random.Random(chunk)
    trees: dict[str, Callable[[list[int], int], DraftTree]] = {
        "empty": lambda text, depth: EMPTY_TREE,
        "oracle": oracle(PROMPT, output),
        "random": lambda text, depth: random_tree(
            rng, nodes=rng.choice([0, 1, 7, 32, 64]), depth=depth, vocab=12
        ),
        "adversarial": lambda text, depth: (
            chain_tree([(output[len(text) - len(PROMPT)] + 1) % 12]) if depth else EMPTY_TREE
        ),
        "every child": lambda text, depth: (
            DraftTree(tuple(range(12)), (-1,) * 12, (-1.0,) * 12) if depth else EMPTY_TREE
        ),
    }
    for number, (name, propose) in enumerate(trees.items()):
        got = client.generate(open_request(number, PROMPT, max_tokens=30, sampling=sampling), propose)
        assert got.tokens == output, name
        assert got.finish_reason is reason
        assert got.cached_tokens == (0 if number == 0 else 32)
        if name == "oracle":
            # Full acceptance: first token, then 8 a round (7 nodes and the bonus), cases.md 28.
            assert got.rounds == 4
        if name == "adversarial":
            assert got.accepted == 0


def test_many_sessions_in_one_batch_answer_in_one_reply(start: Start) -> None:
    runner, _, client = start()
    prompts = {n: PROMPT[: 5 + n] for n in range(9)}
    want = {n: expected(runner, p)[0] for n, p in prompts.items()}
    client.send(opens=[open_request(n, p) for n, p in prompts.items()])
    keys = {n: SessionKey(GATEWAY, n) for n in prompts}
    first = {n: client.result(key, TargetResultKind.FIRST) for n, key in keys.items()}
    got = {n: list(r.tokens) for n, r in first.items()}
    kv = {n: r.kv_length for n, r in first.items()}
    rng = random.Random(2)
    running = set(prompts)
    while running:
        order = sorted(running)
        verifies = []
        for n in order:
            depth = 20 - len(got[n]) - 1
            tree = rng.choice(
                [
                    EMPTY_TREE,
                    chain_tree(want[n][len(got[n]) :][: min(depth, 5)]),
                    random_tree(rng, nodes=9, depth=depth, vocab=12),
                ]
            )
            verifies.append(Verify(keys[n], kv[n], tree))
        reply = client.verify(verifies)
        assert [r.session for r in reply.results] == [keys[n] for n in order]
        assert reply.timings is not None and reply.timings.rows >= len(order)
        for n, result in zip(order, reply.results, strict=True):
            assert result.error is None
            got[n] += result.tokens
            kv[n] = result.kv_length
            if result.finish_reason:
                running.discard(n)
    assert got == want


def test_a_round_is_not_followed_by_an_idle_turn(start: Start) -> None:
    """The engine's thread sleeps right behind its answer: the event loop needs the interpreter to send it."""
    _, engine, client = start()
    messages: list[int] = []
    taken = engine._next_work

    def next_work(*, wait: bool) -> list[Callable[[], None]]:
        work = taken(wait=wait)
        messages.append(len(work))
        return work

    engine._next_work = next_work  # type: ignore[method-assign]
    prompt = PROMPT[:10]  # one chunk
    got = client.generate(open_request(1, prompt, max_tokens=20), lambda text, depth: EMPTY_TREE)
    assert got.rounds == 19
    assert messages.count(1) >= 20 and messages.count(0) <= 1


def test_a_batch_larger_than_a_forward_is_split_and_still_answered_at_once(start: Start) -> None:
    runner, _, client = start(replace(TOY_LIMITS, max_verify_rows=4, max_tree_nodes=3))
    keys = [SessionKey(GATEWAY, n) for n in range(5)]
    client.send(opens=[open_request(n, PROMPT[:6]) for n in range(5)])
    firsts = [client.result(key, TargetResultKind.FIRST) for key in keys]
    steps = len(runner.steps)
    reply = client.verify(
        [Verify(k, f.kv_length, chain_tree([0, 1])) for k, f in zip(keys, firsts, strict=True)]
    )
    assert len(reply.results) == 5 and all(r.kind is TargetResultKind.VERIFIED for r in reply.results)
    assert len(runner.steps) - steps == 5


def test_stop_ids_eos_and_min_tokens(start: Start) -> None:
    runner, _, client = start()
    output, _ = expected(runner, PROMPT, stop=StopParams(40))
    stop_at = output[6]
    for number, stop in enumerate(
        [
            StopParams(40, stop_token_ids=(stop_at,)),
            StopParams(40, stop_token_ids=(stop_at,), min_tokens=12),
            StopParams(3, stop_token_ids=(stop_at,)),
            StopParams(1),
        ]
    ):
        want, reason = expected(runner, PROMPT, stop=stop)
        got = client.generate(open_request(number, PROMPT, stop=stop), oracle(PROMPT, want, depth=11))
        assert (got.tokens, got.finish_reason) == (want, reason)
        if stop.min_tokens:
            assert stop_at not in got.tokens[:12]


def test_eos_ends_the_text_unless_ignored(start: Start) -> None:
    eos = expected(ToyRunner(), PROMPT)[0][4]
    runner, _, client = start(eos=(eos,))
    for number, ignore in enumerate([False, True]):
        stop = StopParams(20, ignore_eos=ignore)
        want, reason = expected(runner, PROMPT, stop=stop, eos=(eos,))
        got = client.generate(open_request(number, PROMPT, stop=stop), oracle(PROMPT, want))
        assert (got.tokens, got.finish_reason) == (want, reason)
    assert reason is FinishReason.LENGTH


def test_the_text_ends_at_the_model_s_length(start: Start) -> None:
    runner, _, client = start(replace(TOY_LIMITS, max_length=45))
    want, reason = expected(runner, PROMPT, stop=StopParams(99), max_length=45)
    got = client.generate(open_request(1, PROMPT, max_tokens=99), oracle(PROMPT, want))
    assert (got.tokens, got.finish_reason) == (want, reason)
    assert len(PROMPT) + len(got.tokens) == 45


def test_nothing_past_a_stop_enters_the_prefix_index(start: Start) -> None:
    """The row of a stop id inside a tree is committed, what the tree holds behind it is not."""
    runner, engine, client = start()
    prompt = PROMPT[:14]
    output, _ = expected(runner, prompt)
    stop = StopParams(20, stop_token_ids=(output[1],))
    want, _ = expected(runner, prompt, stop=stop)
    client.generate(open_request(1, prompt, stop=stop), oracle(prompt, output, depth=9))
    longer = [*prompt, *output]
    cached = client.open(open_request(2, longer)).cached_tokens
    assert cached <= len(prompt) + len(want)


def test_a_second_turn_reuses_the_first_one_s_pages(start: Start) -> None:
    """cases.md 31: speculation does not cost the prefix hits."""
    runner, _, client = start()
    output, _ = expected(runner, PROMPT)
    client.generate(open_request(1, PROMPT), oracle(PROMPT, output))
    turn = [*PROMPT, *output, 3, 1, 4]
    want, _ = expected(runner, turn)
    got = client.generate(open_request(2, turn), oracle(turn, want))
    assert got.cached_tokens == 48 and got.tokens == want


def test_sessions_that_share_a_prefix_do_not_disturb_each_other(start: Start) -> None:
    """cases.md 29: tree rows never touch shared pages."""
    runner, _, client = start()
    rng = random.Random(7)
    prompts = [PROMPT[:32] + [n] for n in range(4)]
    client.generate(open_request(99, PROMPT[:33]))
    results: dict[int, list[int]] = {}

    def one(n: int) -> None:
        mine = Client(client.engine)
        request = open_request(n, prompts[n], sampling=replace(SAMPLED, seed=n))
        out = mine.generate(request, lambda text, depth: random_tree(rng, nodes=20, depth=depth, vocab=12))
        assert out.cached_tokens == 32
        results[n] = out.tokens

    threads = [threading.Thread(target=one, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for n in range(4):
        assert results[n] == expected(runner, prompts[n], sampling=replace(SAMPLED, seed=n))[0]


def test_a_reopened_session_goes_on_with_the_same_text(start: Start) -> None:
    runner, _, client = start()
    stop = StopParams(20, min_tokens=3, stop_token_ids=(11,))
    want, _ = expected(runner, PROMPT, sampling=SAMPLED, stop=stop)
    key = SessionKey(GATEWAY, 1)
    first = client.open(open_request(1, PROMPT, sampling=SAMPLED, stop=stop))
    text = [*PROMPT, *first.tokens]
    (result,) = client.verify([Verify(key, first.kv_length, chain_tree(want[1:4]))]).results
    text += result.tokens
    assert text[len(PROMPT) :] == want[: len(text) - len(PROMPT)]
    again = open_request(1, text, incarnation=1, prompt_length=len(PROMPT), sampling=SAMPLED, stop=stop)
    got = client.generate(again, lambda t, d: chain_tree(want[len(t) - len(PROMPT) :][:d]))
    assert text[len(PROMPT) :] + got.tokens == want


def test_logprobs_are_aligned_with_the_tokens(start: Start) -> None:
    runner, _, client = start()
    output, _ = expected(runner, PROMPT)
    key = SessionKey(GATEWAY, 1)
    first = client.open(open_request(1, PROMPT, want_logprobs=3))
    (result,) = client.verify([Verify(key, first.kv_length, chain_tree(output[1:5]))]).results
    assert len(result.tokens) == len(result.logprobs) == 5
    text = [*PROMPT, *first.tokens]
    for token, logprob in zip(result.tokens, result.logprobs, strict=True):
        row = runner.logits_after(text)[0].log_softmax(-1)
        assert logprob.chosen == pytest.approx(float(row[token]), abs=1e-6)
        assert list(logprob.top_ids) == row.topk(2).indices.tolist()
        text.append(token)
    assert len(first.logprobs) == 1


def test_a_long_run_keeps_its_indices_in_bounds(start: Start) -> None:
    """cases.md 35: 20,000 sampled decode steps with fresh seeds over few pages, every index checked.

    Steps of several sessions share a pass, so that the run stays short; trees are there in every fourth text.
    """
    pages, width = 24, 32
    runner, engine, client = start(replace(TOY_LIMITS, num_pages=pages * width, max_length=120))
    checked = 0
    run = runner.run

    def check_step(step: Step) -> StepOutput:
        nonlocal checked
        for segment in step.segments:
            assert 0 <= segment.context_length < 120
            assert -(-segment.context_length // 16) <= len(segment.pages) <= -(-120 // 16)
            assert all(0 <= page < pages * width for page in segment.pages)
            checked += segment.parents is not None
        assert int(step.positions.max()) < 120 and int(step.logit_rows.numel()) <= len(step.tokens)
        assert step.slots is not None and len(step.slots) == len(step.tokens)
        assert int(step.slots.min()) > NO_SLOT and int(step.slots.max()) < pages * width * 16
        return run(step)

    runner.run = check_step  # type: ignore[method-assign]
    rng = random.Random(3)
    seed = 0
    while checked < 20_000:
        prompts = {seed + n: [rng.randrange(12) for _ in range(rng.randrange(1, 20))] for n in range(width)}
        seed += width
        client.send(
            opens=[
                open_request(n, tokens, max_tokens=100, sampling=replace(SAMPLED, seed=n))
                for n, tokens in prompts.items()
            ]
        )
        running = {}
        for n in prompts:
            first = client.result(SessionKey(GATEWAY, n), TargetResultKind.FIRST)
            running[n] = (first.kv_length, list(first.tokens))
        texts = {n: tokens for n, (_, tokens) in running.items()}
        while running:
            verifies = []
            for n, (kv, tokens) in running.items():
                depth = min(99 - len(tokens), 118 - len(prompts[n]) - len(tokens))
                tree = random_tree(rng, nodes=3, depth=depth, vocab=12) if n % 4 == 0 else EMPTY_TREE
                verifies.append(Verify(SessionKey(GATEWAY, n), kv, tree))
            for result in client.verify(verifies).results:
                assert result.error is None
                n = result.session.number
                texts[n] += result.tokens
                running[n] = (result.kv_length, texts[n])
                if result.finish_reason:
                    del running[n]
        client.send(releases=[SessionKey(GATEWAY, n) for n in prompts])
        # The last ones' texts, against the plain loop.
        n = seed - 1
        want = expected(runner, prompts[n], sampling=replace(SAMPLED, seed=n), stop=StopParams(100))[0]
        assert texts[n] == want
    client.result(SessionKey(GATEWAY, seed - 1), TargetResultKind.RELEASED)
    assert engine._cache.used == 0


# ---- what it reports ------------------------------------------------------------------------------


def test_warm_up_measures_the_cost_of_rows_and_context(start: Start) -> None:
    runner, engine, _ = start(replace(TOY_LIMITS, warmup_repeats=1))
    points = engine.info().verify_cost
    usual = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 130}
    contexts = sorted({p.context for p in points})
    assert len(contexts) >= 3
    by_context = {context: {p.rows for p in points if p.context == context} for context in contexts}
    assert by_context.pop(contexts[0]) >= usual  # and wider ones, as long as they are quick
    assert all(rows == usual for rows in by_context.values())
    assert all(p.time_ns > 0 for p in points)
    assert all(slot is None for slot in runner.slots), "warm-up must not write pages"
    assert engine._stepper.planner._chunks.times is not None, "prompt chunks go by what was measured"


def test_metrics_reconcile_with_what_was_delivered(start: Start) -> None:
    runner, engine, client = start()
    output, _ = expected(runner, PROMPT)
    got = client.generate(open_request(1, PROMPT), oracle(PROMPT, output))
    client.generate(open_request(2, PROMPT))
    value = engine._metrics.registry.get_sample_value
    assert value("specbridge_target_tokens_total") == 40
    assert value("specbridge_target_accepted_tokens_total") == got.accepted
    assert value("specbridge_target_prefill_rows_total") == len(PROMPT) + len(PROMPT) - 32
    assert value("specbridge_target_prefill_chunks_total") == 3 + 1
    assert value("specbridge_target_prefix_hit_tokens_total") == 32
    assert value("specbridge_target_prefix_query_tokens_total") == 2 * len(PROMPT)
    assert value("specbridge_target_kv_pages_capacity") == TOY_LIMITS.num_pages


def test_deterministic_steps_have_one_session_and_fixed_rows(start: Start) -> None:
    runner, _, client = start(replace(TOY_LIMITS, deterministic=True, max_tree_nodes=9))
    want = {n: expected(runner, PROMPT[: 20 + n])[0] for n in range(3)}
    results: dict[int, list[int]] = {}

    def one(n: int) -> None:
        prompt = PROMPT[: 20 + n]
        propose = oracle(prompt, want[n], depth=n * 3)
        results[n] = Client(client.engine).generate(open_request(n, prompt), propose).tokens

    threads = [threading.Thread(target=one, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == want
    assert all(len(step.segments) == 1 for step in runner.steps)
    assert {len(step.tokens) for step in runner.steps} == {16}
