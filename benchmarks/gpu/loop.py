"""Part loop: the same rounds by the models' passes alone, in this process; what a stack's rounds are held
against.

    block pass and tree -> verify -> walk -> append of the accepted rows from the ring

One stream, greedy, no engines, no messages, no channel. Owns this loop. Its tokens are those of plain
decoding (tests compare them), so that what it measures is the real thing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import common
from benchmarks.draft_pass import load
from benchmarks.gpu.clock import release
from benchmarks.gpu.setup import PAGE, Part, Setup
from draft_service.context_cache import ContextCache, NewRows
from draft_service.device_trees import DeviceTrees
from draft_service.drafter import Drafter
from draft_service.host_trees import Ask
from draft_service.session import Session
from draft_service.simulation import load_simulation
from gateway.text import Tokenizer
from specbridge.rounds import SamplingParams, SessionKey
from specbridge.tree import EMPTY_TREE
from target_service.runner import Runner, load_runner
from target_service.sampling import ChoiceRule, RowGroup
from target_service.step import RingSpan, Segment, Step
from target_service.verify import slots, tree_rows, walk

PREFILL = 512
ENDLESS = 1 << 30
GREEDY = SamplingParams()
HEADER = (
    "arm", "tokens/s", "ms / token", "round ms", "of plain", "tokens / round", "draft ms", "verify ms",
    "append ms",
)  # fmt: skip


@dataclass(slots=True)
class Run:
    """One text. Times in ms, by round."""

    tokens: list[int] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)
    append: list[float] = field(default_factory=list)
    decode_s: float = 0.0

    @property
    def rounds(self) -> int:
        return len(self.verify)


class Loop:
    """Decodes texts of up to `length` tokens. nodes 0: plain decoding, nothing is captured. horizon bounds
    the depth."""

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter | None,
        *,
        nodes: int,
        length: int,
        top_k: int | None = None,
        simulate: str = "",
    ) -> None:
        self._runner, self._nodes, self._length = runner, nodes, length
        self._pages = tuple(range(-(-length // PAGE)))
        self._ring: torch.Tensor | None = None
        runner.set_ring(None)
        runner.set_taps((), normed_last_layer=False)
        if drafter is None or not nodes:
            return
        config = drafter.config
        runner.set_taps(config.target_layer_ids, normed_last_layer=config.normed_last_layer)
        width = len(config.target_layer_ids) * runner.config.hidden_size
        self._ring = torch.zeros(PREFILL, width, dtype=runner.activation_dtype, device=runner.device)
        runner.set_ring(self._ring)
        self._horizon = config.horizon
        self._cache = ContextCache(drafter, num_tokens=length + PAGE, fingerprint="loop", page_size=PAGE)
        simulation = load_simulation(
            simulate, horizon=config.horizon, vocab_size=config.vocab_size, device=drafter.device
        )
        self._trees = DeviceTrees(drafter, self._cache.pages, top_k=top_k, simulation=simulation, graphs=True)

    def decode(self, prompt: Sequence[int], count: int, stop_ids: frozenset[int] = frozenset()) -> Run:
        """`count` tokens or a few more after `prompt`, unless a stop id ends the text."""
        run = Run()
        session = None
        if self._ring is not None:
            session = Session(SessionKey(bytes(16), 0), GREEDY, b"", self._cache.pool.open(()))
        anchor, base = self._prefill(prompt, session), len(prompt)
        run.tokens.append(anchor)
        began = time.perf_counter()
        while len(run.tokens) < count:
            start = time.perf_counter()
            tree = EMPTY_TREE
            if session is not None:
                depth = min(self._horizon, self._length - base - 2)
                tree = self._trees.grow([Ask(session, anchor, self._nodes, depth)]).trees[0]
            drafted = time.perf_counter()
            rows = tree_rows(anchor, base, tree)
            at = slots(self._pages, PAGE, base, rows.depth + 1)
            step = Step(
                torch.tensor(rows.tokens),
                torch.tensor(rows.positions),
                (self._segment(len(rows.tokens), base, rows.parents),),
                torch.arange(len(rows.tokens)),
                slots=torch.tensor([at[position - base] for position in rows.positions]),
                groups=(RowGroup(ChoiceRule(GREEDY), 0, [position + 1 for position in rows.positions]),),
                read_logits=False,
            )
            choices = self._runner.run(step).choices
            found = walk(tree, choices, stop_ids=stop_ids, remaining=ENDLESS, room=ENDLESS)
            verified = time.perf_counter()
            ended = bool(found.finish_reason)
            if session is not None and not ended:
                self._append(session, [anchor, *found.tokens[:-1]])
            base, anchor = base + len(found.tokens), found.tokens[-1]
            run.tokens += found.tokens
            run.draft.append((drafted - start) * 1e3)
            run.verify.append((verified - drafted) * 1e3)
            run.append.append((time.perf_counter() - verified) * 1e3)
            if ended:
                break
        run.decode_s = time.perf_counter() - began
        if session is not None:
            session.sequence.close(keep=False)
        return run

    def _prefill(self, prompt: Sequence[int], session: Session | None) -> int:
        """Returns the first token chosen."""
        choices: tuple[int, ...] = ()
        for start in range(0, len(prompt), PREFILL):
            part = prompt[start : start + PREFILL]
            end = start + len(part)
            last = end == len(prompt)
            choices = self._runner.run(
                Step(
                    torch.tensor(part),
                    torch.arange(start, end),
                    (self._segment(len(part), start, None),),
                    torch.tensor([len(part) - 1] if last else [], dtype=torch.int64),
                    slots=torch.tensor(slots(self._pages, PAGE, start, len(part))),
                    groups=(RowGroup(ChoiceRule(GREEDY), 0, [end]),) if last else (),
                    read_logits=False,
                )
            ).choices
            if session is not None:
                self._append(session, part)
        return choices[0]

    def _segment(self, rows: int, context: int, parents: tuple[int, ...] | None) -> Segment:
        pages = self._pages[: -(-context // PAGE)]
        return Segment(0, rows, context, pages, parents, RingSpan(0) if self._ring is not None else None)

    def _append(self, session: Session, tokens: Sequence[int]) -> None:
        assert self._ring is not None
        failed = self._cache.append([NewRows(session.sequence, tokens, self._ring[: len(tokens)])])
        assert not failed.no_pages and not failed.overtaken


def prompts_of(setup: Setup, model: str, count: int) -> list[list[int]]:
    """Chats of the benchmark's sets for a real model, else random ids of the context's length."""
    if model:
        tokenizer = Tokenizer.load(setup.place)
        texts = common.load_prompts(common.SETS, count)
        return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    generator = torch.Generator().manual_seed(1)
    size = (count, setup.told.context)
    return torch.randint(0, setup.config.vocab_size, size, generator=generator).tolist()


def measure(setup: Setup, *, model: str, simulate: str, max_tokens: int, texts: int) -> Part:
    """Table `bare loop`: plain, chain and tree. model empty: dummy weights and simulated acceptance."""
    part = Part()
    rows: list[list[Any]] = []
    part.tables["bare loop"] = (HEADER, rows)
    prompts = prompts_of(setup, model, texts + 1)
    slack = 2 * PAGE + (setup.drafter.horizon if setup.drafter is not None else 0)
    length = max(map(len, prompts)) + max_tokens + slack
    told = setup.told
    drafter = None
    if setup.drafter is not None:
        drafter = load(
            setup.draft_settings, device=str(setup.device), context=length, sessions=1, graphs=False
        ).drafter
    with load_runner(
        setup.place,
        device=str(setup.device),
        dtype=str(setup.dtype).removeprefix("torch."),
        num_pages=-(-length // PAGE),
        page_size=PAGE,
        max_rows=max(PREFILL, told.nodes + 1),
        load_format=setup.load_format,
        tp=setup.tp,
        simulated=not model,
    ) as runner:
        arms: list[tuple[str, int, int | None]] = [("plain", 0, None)]
        if drafter is not None:
            arms += [(f"chain {drafter.config.horizon}", drafter.config.horizon, 1)]
            arms += [(f"tree {told.nodes}", told.nodes, None)]
        base = None
        stops = frozenset(runner.config.eos_token_ids) if model else frozenset[int]()
        for name, nodes, top_k in arms:
            if not setup.budget.fits(3.0):
                part.notes.append(f"{name}: left out for want of time")
                continue
            loop = Loop(
                runner,
                drafter,
                nodes=nodes,
                length=length,
                top_k=top_k,
                simulate="" if model else simulate,
            )
            # The first text captures.
            runs = [loop.decode(prompt, max_tokens, stops) for prompt in prompts][1:]
            tokens, spent = sum(len(run.tokens) - 1 for run in runs), sum(run.decode_s for run in runs)
            rounds = sum(run.rounds for run in runs)
            base = base or spent / rounds

            def median(stage: str, of: list[Run] = runs) -> float:
                return float(statistics.median(ms for run in of for ms in getattr(run, stage)))

            rows.append(
                [name, tokens / spent, spent / tokens * 1e3, spent / rounds * 1e3, spent / rounds / base,
                 tokens / rounds, median("draft"), median("verify"), median("append")]
            )  # fmt: skip
            del loop
    del runner, drafter
    release(setup.device)
    return part
