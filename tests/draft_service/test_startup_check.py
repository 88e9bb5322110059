"""The start-up self-check: through an oracle drafter, a scripted target, and the real models."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_bench import Bench, FakeChunk, text
from oracle_drafter import oracle, tapped
from tiny import VOCAB_SIZE, write_tokenizer
from tiny_drafters import HIDDEN, TARGET_LAYERS, VOCAB, layout

from draft_service import startup_check
from draft_service.drafter import Drafter, Reading
from draft_service.proposer import Ask, Place, Proposed
from draft_service.selfcheck import AcceptanceMonitor, accepted
from draft_service.startup_check import CheckText, Outcome, StartupCheck
from specbridge.errors import CapacityError, Unavailable
from specbridge.rounds import (
    FinishReason,
    SessionKey,
    TargetInfo,
    TargetReply,
    TargetRequest,
    TargetResult,
    TargetResultKind,
)
from specbridge.tree import DraftTree

INFO = TargetInfo(
    model_id="tiny", fingerprint="print", vocab_size=VOCAB, eos_token_ids=(), hidden_size=HIDDEN,
    num_layers=TARGET_LAYERS, page_size=16, max_length=512, tp_size=1, max_sessions=8,
    max_tree_nodes=64, total_pages=32, dtype="float32", device="cpu", instance=b"t" * 16,
)  # fmt: skip
LIMIT_S = 60.0


class ScriptedTarget:
    """A target whose text is known beforehand. `before_verify` runs before each answer to a tree."""

    def __init__(self, bench: Bench, tokens: Sequence[int]) -> None:
        self.bench = bench
        self.tokens = list(tokens)
        self.opened: list[SessionKey] = []
        self.released: list[SessionKey] = []
        self.lengths: list[int] = []
        self.refuse: Exception | None = None
        self.before_verify: Callable[[], None] = lambda: None
        self._replies: asyncio.Queue[TargetReply] = asyncio.Queue()

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[ScriptedTarget]:
        yield self

    async def send(self, request: TargetRequest) -> None:
        results = [TargetResult(key, TargetResultKind.RELEASED) for key in request.releases]
        self.released += request.releases
        for item in request.opens:
            self.opened.append(item.session)
            if self.refuse is not None:
                results.append(TargetResult(item.session, TargetResultKind.ERROR, error=self.refuse))
                continue
            count = len(item.tokens)
            assert list(item.tokens) == self.tokens[:count] and item.stop.ignore_eos and item.speculate
            self._publish(item.session, 0, count)
            results.append(TargetResult(item.session, TargetResultKind.OPENED))
            first = (self.tokens[count],)
            results.append(TargetResult(item.session, TargetResultKind.FIRST, kv_length=count, tokens=first))
        for item in request.verifies:
            self.before_verify()
            length = accepted(item.tree, self.tokens[item.base + 1 :]).length
            self.lengths.append(length)
            end = item.base + length
            self._publish(item.session, item.base, end)
            committed = tuple(self.tokens[item.base + 1 : end + 1])
            results.append(
                TargetResult(
                    item.session, TargetResultKind.VERIFIED, base=item.base, kv_length=end, tokens=committed
                )
            )
        self._replies.put_nowait(TargetReply(request.batch_id, tuple(results)))

    async def receive(self) -> TargetReply:
        return await self._replies.get()

    def _publish(self, key: SessionKey, first: int, stop: int) -> None:
        bench = self.bench
        rows = bench.states(self.tokens[:stop], bench.drafter.config.feature_size)[first:]
        bench.engine.on_chunk(
            FakeChunk(next(bench.ids), key, first, stop - first, tuple(self.tokens[first:stop]),
                      self.tokens[stop], rows)
        )  # fmt: skip


Make = Callable[..., Bench]


@pytest.fixture
def bench(build: Callable[..., Any]) -> Iterator[Make]:
    """bench(shift=None): a random drafter, or the oracle at a target whose taps are off by `shift`."""
    made: list[Bench] = []

    def make(shift: int | None = None, **options: Any) -> Bench:
        built = build(layout("z-lab"), dtype=torch.float32)
        if shift is not None:
            generator = torch.Generator().manual_seed(0)
            embedding = torch.nn.functional.normalize(torch.randn(VOCAB, HIDDEN, generator=generator), dim=-1)
            weights = oracle(built.config, embedding)
            drafter = Drafter(built.config, weights, dtype=torch.float32, max_position=512)
            built = replace(built, drafter=drafter)
            options["states"] = tapped(embedding, shift)
        made.append(Bench(built, **options))
        return made[-1]

    yield make
    for item in made:
        item.engine.close()
        item.cache.pool.check()
        assert item.cache.pool.used_pages == 0
        assert item.count("defects_total") == 0


async def check(
    bench: Bench, target: ScriptedTarget, count: int = 20, info: TargetInfo = INFO, masks: Sequence[int] = ()
) -> Outcome:
    prompt = CheckText(tuple(target.tokens[:count]), tuple(masks))
    made = StartupCheck(
        bench.engine, bench.drafter.config, prompt, threshold=1.2, metrics=bench.metrics
    )  # fmt: skip
    async with asyncio.timeout(LIMIT_S):
        return await made.run(target.dial, info)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("shift", [0, 1, -1])
async def test_an_oracle_passes_and_a_shifted_tap_is_flagged(
    shift: int, bench: Make, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = AcceptanceMonitor(rounds=2)
    b = bench(shift, monitor=monitor)
    assert math.isnan(b.count("selfcheck_acceptance"))
    target = ScriptedTarget(b, [11] * 200)
    with caplog.at_level(logging.INFO):
        outcome = await check(b, target)
    b.settle()
    said = [m for m in warnings(caplog) if m.startswith("self-check")]
    if shift == 0:
        assert outcome is Outcome.PASSED and not said
        assert b.count("selfcheck_acceptance") == b.drafter.config.horizon + 1 == target.lengths[0]
        assert "self-check: acceptance length 6.00" in caplog.text
    else:
        assert outcome is Outcome.FAILED and b.count("selfcheck_acceptance") == 1.0
        assert len(said) == 1 and "target_layer_ids off by one" in said[0]
    assert b.count("selfcheck_failed") == (shift != 0)
    assert b.count("selfchecks_total", result=outcome.value) == 1
    # It is over, here and there, and was no traffic.
    assert target.released == target.opened and target.opened[0].gateway == b.engine.own_gateway
    assert b.count("sessions") == 0 and b.count("acceptance_length_count") == 0
    assert math.isnan(monitor.mean)


def chains(tokens: Sequence[int], offset: int) -> Callable[[int], DraftTree]:
    """Trees that fit the text `offset` positions later than they should."""

    def at(base: int) -> DraftTree:
        part = tuple(tokens[base + 1 + offset : base + 6 + offset])
        return DraftTree(part, tuple(range(-1, 4)), tuple(-0.1 * (i + 1) for i in range(5)))

    return at


@pytest.mark.parametrize("first_row", [0, 1])
async def test_the_other_block_convention_is_named(
    first_row: int, bench: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench()
    monkeypatch.setattr(b.drafter, "config", replace(b.drafter.config, first_row=first_row))
    target = ScriptedTarget(b, [3 + (7 * i) % 60 for i in range(200)])
    wrong, right = chains(target.tokens, 1 if first_row else -1), chains(target.tokens, 0)
    seen: list[Reading] = []

    def propose(asks: Sequence[Ask]) -> Proposed:
        return Proposed(tuple(wrong(ask.session.sequence.length) for ask in asks), 0, 0)

    def replay(session: Any, places: Sequence[Place], *, reading: Reading, max_nodes: int) -> Any:
        assert [p.anchor for p in places] == [target.tokens[p.base] for p in places]
        seen.append(reading)
        return tuple(right(place.base) for place in places)

    monkeypatch.setattr(b.proposer, "propose", propose)
    monkeypatch.setattr(b.proposer, "replay", replay)
    assert await check(b, target, masks=(7, 8)) is Outcome.FAILED
    assert seen == [Reading(1 - first_row, 5)]
    (said,) = [m for m in warnings(caplog) if "self-check" in m]
    value = "true" if first_row else "false"
    assert f"read the other way, the same rows give 5.57: set sample_from_anchor {value}" in said
    # Without the rows to try it on, the proposals themselves tell.
    caplog.clear()
    monkeypatch.setattr(b.proposer, "replay", lambda session, places, **_: [DraftTree()] * len(places))
    assert await check(b, target) is Outcome.FAILED
    assert f"set sample_from_anchor {value}" in caplog.text and b.count("selfcheck_failed") == 1


async def test_another_mask_token_is_named(
    bench: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench()
    target = ScriptedTarget(b, text(1, 200))
    right = chains(target.tokens, 0)

    def replay(session: Any, places: Sequence[Place], *, reading: Reading, max_nodes: int) -> Any:
        fits = reading == Reading(1, 9)
        return tuple(right(place.base) if fits else DraftTree() for place in places)

    monkeypatch.setattr(b.proposer, "replay", replay)
    assert await check(b, target, masks=(5, 8, 9, 10)) is Outcome.FAILED
    assert "mask_token_id: 5 is configured, with 9 the same rows give 5.55" in caplog.text


def test_a_replay_gives_the_trees_of_that_reading(
    bench: Make, build: Callable[..., Any], tmp_path: Path
) -> None:
    b = bench()
    tokens = text(2, 60)
    b.open(1, tokens[:20])
    b.chunk(1, tokens, 0, 40)
    b.settle()
    places = [Place(base, tokens[base]) for base in (20, 27, 40)]
    session = next(iter(b.engine._sessions)).key
    for reading in (Reading(1, 5), Reading(0, 5), Reading(1, 8)):
        trees = b.engine.replay(session, places, reading=reading, max_nodes=6).result(LIMIT_S)
        config = layout("z-lab")
        config["dflash_config"]["mask_token_id"] = reading.mask_token_id
        other = build(config, dtype=torch.float32, sample_from_anchor=reading.first_row == 0)
        b.drafter = other.drafter
        for place, tree in zip(places, trees, strict=True):
            expected = b.expected(tokens, place.base, nodes=6, depth=5)
            assert tree.tokens == expected.tokens and tree.parents == expected.parents
    b.send(releases=(session,))
    b.results(1)


async def test_it_gives_way_to_traffic_and_frees_its_sessions(bench: Make) -> None:
    b = bench(0)
    target = ScriptedTarget(b, [11] * 200)
    arrived = asyncio.Event()

    def somebody_comes() -> None:
        b.open(1, text(3, 10))
        arrived.set()

    target.before_verify = somebody_comes
    target._replies = Silent(target)  # what a target busy with others looks like
    assert await check(b, target) is Outcome.INTERRUPTED and arrived.is_set()
    b.settle()
    assert b.count("sessions") == 1 and target.released == target.opened
    # With sessions open it does not begin at all.
    again = ScriptedTarget(b, [11] * 200)
    assert await check(b, again) is Outcome.INTERRUPTED and not again.opened
    assert b.count("selfchecks_total", result="interrupted") == 2
    b.send(releases=tuple(s.key for s in b.engine._sessions))
    b.results(1)


class Silent(asyncio.Queue[TargetReply]):
    """Replies to a tree are never delivered."""

    def __init__(self, target: ScriptedTarget) -> None:
        super().__init__()

    def put_nowait(self, item: TargetReply) -> None:
        if all(result.kind is not TargetResultKind.VERIFIED for result in item.results):
            super().put_nowait(item)


async def test_errors_and_silence_end_it_quietly(
    bench: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(0)
    refusing = ScriptedTarget(b, [11] * 200)
    refusing.refuse = CapacityError("no room")
    assert await check(b, refusing) is Outcome.ERROR

    @asynccontextmanager
    async def unreachable() -> AsyncIterator[ScriptedTarget]:
        raise Unavailable("nobody there")
        yield refusing

    gone = ScriptedTarget(b, [11] * 200)
    monkeypatch.setattr(gone, "dial", unreachable)
    assert await check(b, gone) is Outcome.ERROR
    silent = ScriptedTarget(b, [11] * 200)
    silent._replies = Silent(silent)
    monkeypatch.setattr(startup_check, "LIMIT_S", 0.3)
    assert await check(b, silent) is Outcome.ERROR
    b.settle()
    assert b.count("sessions") == 0 and silent.released == silent.opened
    assert b.count("selfchecks_total", result="error") == 3 and not warnings(caplog)


async def test_it_is_skipped_where_it_can_say_nothing(bench: Make) -> None:
    b = bench(0)
    target = ScriptedTarget(b, [11] * 200)
    for info in (replace(INFO, max_length=40), replace(INFO, max_tree_nodes=0)):
        assert await check(b, target, info=info) is Outcome.SKIPPED
    made = StartupCheck(b.engine, b.drafter.config, None, threshold=1.2, metrics=b.metrics)
    assert await made.run(target.dial, INFO) is Outcome.SKIPPED
    assert not target.opened and Outcome.SKIPPED.settled


async def test_a_text_that_ends_early_says_nothing(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench(0)
    target = ScriptedTarget(b, [11] * 200)

    async def finished(request: TargetRequest) -> None:
        kinds = TargetResultKind
        results = [TargetResult(key, kinds.RELEASED) for key in request.releases]
        results += [
            TargetResult(
                o.session, kinds.FIRST, kv_length=20, tokens=(11,), finish_reason=FinishReason.LENGTH
            )
            for o in request.opens
        ]
        target._replies.put_nowait(TargetReply(1, tuple(results)))

    monkeypatch.setattr(target, "send", finished)
    assert await check(b, target) is Outcome.ERROR


def test_the_text_comes_from_the_targets_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert CheckText.read(tmp_path, VOCAB_SIZE) is None
    write_tokenizer(tmp_path)
    found = CheckText.read(tmp_path, VOCAB_SIZE)
    assert found is not None and len(found.tokens) == startup_check.MAX_PROMPT
    # The one named so, the first id without a token, the other special ones.
    assert found.masks == (259, 260, 256, 257, 258)
    assert CheckText.read(tmp_path, 50) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert CheckText.read(tmp_path, VOCAB_SIZE) is None and "does not load" in caplog.text


@pytest.mark.model
@pytest.mark.parametrize("sample_from_anchor", [None, True])
def test_the_packaged_drafter_and_its_other_reading(
    sample_from_anchor: bool | None, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from product import LiveProduct

    from draft_service.clients import target_info, target_rounds
    from specbridge.models import resolve_draft

    sizes = {"dtype": "float32", "max_length": 512, "kv_tokens": 1024}
    drafter = resolve_draft("auto", "smollm2-135m")
    settings = {**sizes, "sample_from_anchor": sample_from_anchor}
    with LiveProduct(model_folder, drafter, target=sizes, draft=settings) as product:
        address = f"unix:{product._sockets}/target.sock"
        loaded = product._loaded
        made = StartupCheck(
            loaded.engine, loaded.config, loaded.check_text, threshold=1.2, metrics=product.draft_metrics
        )

        async def run() -> Outcome:
            return await made.run(lambda: target_rounds(address), await target_info(address))

        with caplog.at_level(logging.INFO):
            outcome = product._await(run())
        value = product.draft_metrics.registry.get_sample_value("specbridge_draft_selfcheck_acceptance")
    if sample_from_anchor is None:
        assert outcome is Outcome.PASSED and value is not None and value > 1.8
    else:
        assert outcome is Outcome.FAILED and "set sample_from_anchor false" in caplog.text
