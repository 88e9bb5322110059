"""The engine on the real runner with tiny random models in fp64: equal to transformers' plain loop, no
tolerance.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from fake_sink import FakeSink
from toy_target import (
    GATEWAY,
    TOY_LIMITS,
    Client,
    chain_tree,
    make_engine,
    open_request,
    random_tree,
    reference,
)
from transformers import AutoModelForCausalLM

from specbridge.rounds import SamplingParams, SessionKey, StopParams, TargetResultKind, Verify
from specbridge.tree import EMPTY_TREE, DraftTree
from target_service.config import Limits
from target_service.engine import Engine
from target_service.runner import Runner, load_runner
from target_service.step import Segment, Step, StepOutput

RNG = random.Random(3)
PROMPT = [RNG.randrange(256) for _ in range(41)]
SAMPLED = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, seed=77)
TOKENS = 24

Propose = Callable[[list[int], int], DraftTree]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_target(tmp_path_factory.mktemp("model"), family=request.param)


@pytest.fixture(scope="module")
def logits_after(folder: Path) -> Callable[[Sequence[int]], torch.Tensor]:
    """The oracle: transformers over the whole text, every time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    @torch.inference_mode()
    def logits(tokens: Sequence[int]) -> torch.Tensor:
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1:].float()

    return logits


def load(folder: Path, limits: Limits) -> Runner:
    return load_runner(
        folder,
        device="cpu",
        dtype="float64",
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        max_rows=limits.max_rows,
    )


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Client]]:
    engines: list[Engine] = []

    def build(limits: Limits = TOY_LIMITS, **kwargs: object) -> Client:
        engine = make_engine(load(folder, limits), limits, **kwargs)
        engines.append(engine)
        engine.start()
        return Client(engine)

    yield build
    for engine in engines:
        engine.close()
        engine._cache.pool.check()


def proposals(output: list[int], prompt: list[int], seed: int = 0) -> dict[str, Propose]:
    rng = random.Random(seed)

    def mixed(text: list[int], depth: int) -> DraftTree:
        """A random tree with the right path woven in as its second branch."""
        ahead = output[len(text) - len(prompt) :][: min(depth, 5)]
        noise = random_tree(rng, nodes=12, depth=depth, vocab=320)
        if not ahead or ahead[0] in [t for t, p in zip(noise.tokens, noise.parents, strict=True) if p < 0]:
            return noise
        base = len(noise)
        tokens = (*noise.tokens, *ahead)
        parents = (*noise.parents, -1, *range(base, base + len(ahead) - 1))
        return DraftTree(tokens, parents, tuple(-0.1 * i for i in range(len(tokens))))

    return {
        "empty": lambda text, depth: EMPTY_TREE,
        "oracle": lambda text, depth: chain_tree(output[len(text) - len(prompt) :][: min(depth, 7)]),
        "mixed": mixed,
        "random": lambda text, depth: random_tree(rng, nodes=30, depth=depth, vocab=320),
        "adversarial": lambda text, depth: random_tree(rng, nodes=64, depth=min(depth, 1), vocab=320),
    }


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_that_of_the_plain_loop(
    start: Callable[..., Client],
    logits_after: Callable[[Sequence[int]], torch.Tensor],
    sampling: SamplingParams,
) -> None:
    stop = StopParams(TOKENS)
    want, reason = reference(logits_after, PROMPT, sampling=sampling, stop=stop, eos=(tiny.EOS_ID,))
    for chunk in (5, 64):
        client = start(replace(TOY_LIMITS, prefill_chunk=chunk))
        for number, (name, propose) in enumerate(proposals(want, PROMPT).items()):
            got = client.generate(open_request(number, PROMPT, sampling=sampling, stop=stop), propose)
            assert got.tokens == want, (chunk, name)
            assert got.finish_reason is reason
            assert got.cached_tokens == (32 if number else 0)
            if name == "oracle":
                assert got.accepted == len(want) - 1 - got.rounds or len(want) < TOKENS


def test_concurrent_sessions_and_a_reopen_keep_their_texts(
    start: Callable[..., Client], logits_after: Callable[[Sequence[int]], torch.Tensor]
) -> None:
    client = start(replace(TOY_LIMITS, prefill_chunk=16))
    prompts = {n: [*PROMPT[: 18 + 3 * n], n] for n in range(4)}
    sampling = {n: replace(SAMPLED, seed=n) if n % 2 else SamplingParams() for n in prompts}
    stop = StopParams(12, ignore_eos=True)
    want = {n: reference(logits_after, prompts[n], sampling=sampling[n], stop=stop)[0] for n in prompts}
    keys = {n: SessionKey(GATEWAY, n) for n in prompts}
    client.send(opens=[open_request(n, prompts[n], sampling=sampling[n], stop=stop) for n in prompts])
    got: dict[int, list[int]] = {}
    kv: dict[int, int] = {}
    for n in prompts:
        first = client.result(keys[n], TargetResultKind.FIRST)
        got[n], kv[n] = list(first.tokens), first.kv_length
    rng = random.Random(4)
    reopened = False
    while any(len(tokens) < 12 for tokens in got.values()):
        running = [n for n in prompts if len(got[n]) < 12]
        verifies = []
        for n in running:
            depth = 12 - len(got[n]) - 1
            tree = rng.choice([EMPTY_TREE, chain_tree(want[n][len(got[n]) :][: min(depth, 2)])])
            verifies.append(Verify(keys[n], kv[n], tree))
        for n, result in zip(running, client.verify(verifies).results, strict=True):
            assert result.error is None
            got[n] += result.tokens
            kv[n] = result.kv_length
        if not reopened and len(got[1]) < 9:
            reopened = True
            keys[1] = SessionKey(GATEWAY, 1, 1)
            request = open_request(
                1,
                [*prompts[1], *got[1]],
                incarnation=1,
                prompt_length=len(prompts[1]),
                sampling=sampling[1],
                stop=stop,
            )
            first = client.open(request)
            got[1] += first.tokens
            kv[1] = first.kv_length
    assert reopened and got == want


def test_captured_hidden_states_are_those_of_a_plain_pass(folder: Path) -> None:
    """Whatever way a row came to be committed: prompt chunk, anchor, accepted node, re-capture."""
    limits = replace(TOY_LIMITS, prefill_chunk=16)
    engine = make_engine(load(folder, limits), limits)
    sink = FakeSink(width=96, dtype=torch.float64)
    engine.connect_channel(sink)
    engine.start()
    engine.prepare_taps((0, 2), False)
    engine.channel_attached("inline", "test")
    client = Client(engine)
    rng = random.Random(8)
    got = client.generate(
        open_request(1, PROMPT, max_tokens=12),
        lambda text, depth: random_tree(rng, nodes=20, depth=depth, vocab=320),
    )
    text = [*PROMPT, *got.tokens]
    sent = len(sink.context_of(SessionKey(GATEWAY, 1)))
    # The oracle: one pass over the whole text, no page read. (That taps are the right layers:
    # test_model_logits.py.)
    with load(folder, replace(limits, prefill_chunk=64)) as plain:
        plain.set_taps((0, 2), normed_last_layer=False)
        step = Step(
            torch.tensor(text[:sent]), torch.arange(sent), (Segment(0, sent, 0, ()),), torch.tensor([0])
        )
        want = plain.run(step).taps
    assert want is not None
    rows = torch.cat([chunk.rows for chunk in sink.chunks])
    torch.testing.assert_close(rows, want, rtol=1e-9, atol=1e-9)
    # Again from row 3 on, as a re-capture.
    client.open(open_request(2, PROMPT, draft_prefix=37))
    sink.chunks.clear()
    engine.request_recapture(SessionKey(GATEWAY, 2), 3, "gap")
    deadline = time.monotonic() + 30
    while len(sink.context_of(SessionKey(GATEWAY, 2), 3)) < len(PROMPT) - 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    rows = torch.cat([chunk.rows for chunk in sink.chunks])
    torch.testing.assert_close(rows, want[3 : len(PROMPT)], rtol=1e-9, atol=1e-9)
    engine.close()


class Recorder:
    """A runner that keeps, for the sessions' own steps, first position, pages and the bits of the logits."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.steps: list[tuple[int, tuple[int, ...], torch.Tensor]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def run(self, step: Step) -> StepOutput:
        output = self._runner.run(step)
        (segment,) = step.segments
        self.steps.append((int(step.positions[0]), segment.pages, output.logits.clone()))
        return output


def neighbours(pages: Sequence[int]) -> bool:
    return all(b == a + 1 for a, b in itertools.pairwise(pages))


@pytest.mark.parametrize("rows", [15, 160], ids=["small", "flash"])
def test_deterministic_runs_are_bit_equal_whatever_else_runs(folder: Path, rows: int) -> None:
    """fp32, the same request and trees: alone; and among others, in pages that lie apart, after a session
    whose rounds made the same prefix."""
    limits = replace(
        TOY_LIMITS, deterministic=True, max_tree_nodes=rows, num_pages=24, max_length=300, prefill_chunk=rows
    )
    prompt = PROMPT[:5]

    def run(*, crowded: bool) -> list[tuple[int, tuple[int, ...], torch.Tensor]]:
        runner = load_runner(
            folder,
            device="cpu",
            dtype="float32",
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_rows=limits.max_rows,
            deterministic=True,
        )
        recorder = Recorder(runner)
        engine = make_engine(recorder, limits)
        engine.start()
        client = Client(engine)
        others: dict[int, int] = {}
        if crowded:
            # The prompt's own tokens, by rounds; their pages would serve as a prefix.
            got = client.generate(open_request(2, prompt[:5], stop=StopParams(36, ignore_eos=True)))
            assert [*prompt[:5], *got.tokens] == prompt
            # A page in use in every third place, so that nobody has neighbours for long.
            for n in range(24):
                client.open(open_request(10 + n, [n + 1] * 3, max_tokens=200))
            client.send(releases=[SessionKey(GATEWAY, 10 + n) for n in range(24) if n % 3])
            others = {10 + n: 3 for n in range(0, 24, 3)}
        else:
            got = client.generate(open_request(2, prompt, stop=StopParams(36, ignore_eos=True)))
            prompt.extend(got.tokens)
            recorder.steps.clear()
        first = client.open(open_request(1, prompt, stop=StopParams(120, ignore_eos=True)))
        assert first.cached_tokens == 0 and len(prompt) == 41
        kv = first.kv_length
        rng = random.Random(6)
        for _ in range(30):
            tree = random_tree(rng, nodes=6, depth=2, vocab=320)
            verifies = [Verify(SessionKey(GATEWAY, n), length) for n, length in others.items()]
            reply = client.verify([*verifies, Verify(SessionKey(GATEWAY, 1), kv, tree)])
            assert all(result.error is None for result in reply.results)
            # They keep to their one page each.
            others = {
                n: result.kv_length
                for n, result in zip(others, reply.results, strict=False)
                if result.kv_length < 15
            }
            kv = reply.results[-1].kv_length
        engine.close()
        return [step for step in recorder.steps if step[0] >= len(prompt) - rows]

    alone, crowded = run(crowded=False), run(crowded=True)
    assert neighbours(alone[-1][1]) and not neighbours(crowded[-1][1])
    assert alone[-1][0] >= len(prompt) + 29
    for position, pages, logits in alone:
        if position >= len(prompt):
            same = [other for at, _, other in crowded if at == position]
            assert len(same) == 1 and torch.equal(logits, same[0]), (position, pages)
