"""The load generator's parts without a server: plans, lengths, arrivals, figures, pictures."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import common
from benchmarks.load import picture
from benchmarks.load.figures import collect, parse_goals, percentile, steady_rate, warnings
from benchmarks.load.loops import Load, Turn
from benchmarks.load.request import Outcome
from benchmarks.load.work import ByteTokens, Planner, Prompts, arrivals, load_texts, parse_mix, spread
from specbridge.errors import ConfigError

# ---- work -----------------------------------------------------------------------------------


def test_arrivals_are_poisson_and_the_seeds_own() -> None:
    times = arrivals(4.0, 4000, random.Random(7))
    assert times == arrivals(4.0, 4000, random.Random(7)) != arrivals(4.0, 4000, random.Random(8))
    assert times[0] == 0.0 and times == sorted(times)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    # Of an exponential: its deviation is its mean, and 1 - 1/e of it lies below that.
    assert gaps.std() == pytest.approx(0.25, rel=0.08)
    assert (gaps < 0.25).mean() == pytest.approx(1 - 1 / math.e, abs=0.03)


def test_lengths_come_in_their_shares() -> None:
    mix = parse_mix(["32:6", "512:3", "4096:1"], "--input-tokens")
    assert mix == ((32, 0.6), (512, 0.3), (4096, 0.1)) and parse_mix(["9"], "x") == ((9, 1.0),)
    for count in range(1, 60):
        lengths = spread(mix, count, random.Random(count))
        assert len(lengths) == count
        for tokens, share in mix:
            assert abs(lengths.count(tokens) - share * count) < 1
    assert spread(mix, 40, random.Random(1)) != sorted(spread(mix, 40, random.Random(1)))
    for word in ("x", "0", "5:0", "5:-1", "5:nan", ""):
        with pytest.raises(ConfigError, match=re.escape(repr(word))):
            parse_mix([word], "--input-tokens")


def test_prompts_are_joined_and_cut_to_length() -> None:
    texts = ["short", "a somewhat longer prompt", "müßig"]
    prompts = Prompts(texts, ByteTokens)
    endless = [("\n\n".join(texts[i:] + texts * 9)) for i in range(3)]
    for index in range(7):
        assert prompts.make(index, None) == texts[index % 3]
        for length in (1, 4, 5, 30, 100):
            # A cut through a character loses it.
            expected = endless[index % 3].encode()[:length].decode(errors="ignore")
            assert prompts.make(index, length) == expected
    assert prompts.make(0, 8, "[x] ") == "[x] shor" and prompts.make(0, None, "[x] ") == "[x] short"


def test_a_plan_is_its_turns_own_and_the_same_for_every_arm() -> None:
    def planner(**more: Any) -> Planner:
        return Planner(Prompts(["some prompt"], ByteTokens), parse_mix(["4", "8"], "o"), **more)

    plain = planner()
    assert plain.plan("1", 8) == plain.plan("1", 8) and {ask.seed for ask in plain.plan("1", 8)} == {None}
    assert sorted(ask.max_tokens for ask in plain.plan("1", 8)) == [4] * 4 + [8] * 4
    fresh = planner(fresh=True, sampled=True, inputs=((20, 1.0),))
    asks = [*fresh.plan("1", 8), *fresh.plan("2", 8)]
    assert len({ask.prompt[:12] for ask in asks}) == len({ask.seed for ask in asks}) == 16
    assert {len(ask.prompt) for ask in asks} == {20}


def test_real_prompts_and_files_are_read(tmp_path: Path) -> None:
    assert len(load_texts(common.SETS)) == 72
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "x"}\n')
    for names, says in ((["nosuch"], "nosuch"), ([str(bad)], "prompt")):
        with pytest.raises(ConfigError, match=says):
            load_texts(names)


# ---- figures --------------------------------------------------------------------------------


def outcome(index: int, rng: random.Random, error: str = "") -> Outcome:
    due = rng.uniform(0, 5)
    gaps = [rng.uniform(0.01, 0.2) for _ in range(rng.randint(0, 9))]
    first = due + rng.uniform(0.05, 1.0)
    last = first + sum(gaps)
    tokens = 1 + 2 * len(gaps)
    return Outcome(
        index, due, due, first, last, last + 0.01, gaps, 1 + len(gaps), 20, 5, tokens, True, 4, 3, 6, 0, error
    )  # fmt: skip


def test_figures_against_their_definitions_written_out() -> None:
    rng = random.Random(3)
    turns = []
    for repeat in (0, 1, 2, 3):
        for arm in ("a", "b"):
            outs = [outcome(i, rng, error="timeout" if rng.random() < 0.2 else "") for i in range(20)]
            turns.append(Turn(arm, Load(streams=4), repeat, outs, rng.uniform(3, 6), cpu=0.1, complete=True))
    turns[-1].complete = False  # b's third turn was interrupted
    goals = parse_goals(["ttft:600", "tpot:60"])
    a, b = collect(turns, ["a", "b"], goals)
    mine = [t for t in turns if t.arm == "b" and 1 <= t.repeat <= 2]
    ok = [o for t in mine for o in t.outcomes if not o.error]
    gaps = [gap for o in ok for gap in o.gaps]
    tpots = [(o.last - o.first) / (o.completion_tokens - 1) for o in ok if o.completion_tokens > 1]
    for p in (50, 90, 95, 99):
        assert b.times["itl", p] == pytest.approx(np.percentile(gaps, p))
        assert b.times["tpot", p] == pytest.approx(np.percentile(tpots, p))
        assert b.times["ttft", p] == pytest.approx(np.percentile([o.first - o.due for o in ok], p))
        assert b.times["e2e", p] == pytest.approx(np.percentile([o.ended - o.due for o in ok], p))
    rates = {
        (t.arm, t.repeat): sum(o.completion_tokens for o in t.outcomes if not o.error) / t.seconds
        for t in turns
    }
    ratios = [rates["b", r] / rates["a", r] for r in (1, 2)]
    assert b.ratio == pytest.approx(np.median(ratios)) and b.lowest == pytest.approx(min(ratios))
    assert b.tokens_per_second == pytest.approx(np.median([rates["b", 1], rates["b", 2]]))
    assert a.ratio is None and a.turns == 3 and b.turns == 2 and not b.partial
    met = []
    for t in mine:
        n = 0
        for o in t.outcomes:
            single = o.completion_tokens == 1
            within = single or (o.last - o.first) / (o.completion_tokens - 1) <= 0.06
            n += not o.error and o.first - o.due <= 0.6 and within
        met.append(n)
    assert 0 < sum(met) < len(ok)  # else this proves nothing
    assert b.good == pytest.approx(
        (np.median([n / t.seconds for n, t in zip(met, mine, strict=True)]), sum(met) / 40)
    )
    assert b.errors == {"timeout": 40 - len(ok)} and b.requests == 40
    assert b.acceptance == pytest.approx(1 + 6 / 3) and b.cached == pytest.approx(0.25)
    assert b.per_round == pytest.approx(sum(o.completion_tokens - 1 for o in ok) / (4 * len(ok)))


def test_the_steady_part_is_what_lies_between_filling_and_draining() -> None:
    def asked_at(index: int, sent: float, texts: list[float], tokens: int, error: str = "") -> Outcome:
        gaps = [b - a for a, b in zip(texts, texts[1:], strict=False)]
        return Outcome(
            index, sent, sent, texts[0], texts[-1], texts[-1] + 0.5, gaps, len(texts), 9, 0, tokens, True,
            error=error,
        )  # fmt: skip

    # Two streams: both show text from 2 on; the last request goes out at 5.5, and at 7.5 one has no more.
    outcomes = [
        asked_at(0, 0.0, [1.0, 2.5, 5.0], 9),  # 3 tokens an event; the first came before it was steady
        asked_at(1, 0.0, [2.0, 3.0, 7.0], 6),  # the first comes as it begins: not in it
        asked_at(2, 5.5, [6.0, 7.25, 9.0], 30),  # the last one comes while the load goes down
    ]
    turn = Turn("a", Load(streams=2), 1, outcomes, 9.5, complete=True)
    assert steady_rate(turn) == pytest.approx((2 * 3 + 2 * 2 + 2 * 10) / (7.5 - 2.0))
    assert collect([turn], ["a"], {})[0].steady == steady_rate(turn)
    outcomes[2].error = "timeout"
    assert steady_rate(turn) == pytest.approx((2 * 3 + 2 * 2) / (7.5 - 2.0))
    turn.complete = False
    assert steady_rate(turn) is None
    # Each stream has one request, and one is over before the other begins to answer.
    never = [asked_at(0, 0.0, [1.0, 1.2], 4), asked_at(1, 0.0, [3.0, 4.0], 4)]
    assert steady_rate(Turn("a", Load(streams=2), 1, never, 4.5, complete=True)) is None
    # Open loop: arrivals at 0, 1, ... 19; the second of them ends the first tenth.
    many = [asked_at(i, float(i), [i + 0.5, i + 0.75], 4) for i in range(20)]
    turn = Turn("a", Load(rate=1.0), 1, many, 20.0, complete=True)
    assert steady_rate(turn) == pytest.approx(4 * 17 / 17)
    assert steady_rate(Turn("a", Load(rate=1.0), 1, [], 0.0, complete=True)) is None


def test_percentiles_of_little() -> None:
    assert percentile([3.0], 99) == 3.0 and math.isnan(percentile([], 50))
    for word in ("ttft", "itl:5", "ttft:x", "ttft:0", "tpot:-3"):
        with pytest.raises(ConfigError, match=re.escape(repr(word))):
            parse_goals([word])


def test_what_makes_figures_doubtful_is_said() -> None:
    rng = random.Random(1)
    turn = Turn("a", Load(rate=2.0), 1, [outcome(0, rng)], 1.0, cpu=0.9, late=0.2, complete=True)
    turn.outcomes[0].usage, turn.outcomes[0].refusals = False, 2
    said = " ".join(warnings(collect([turn], ["a"], {})))
    assert (
        "90 % of a core" in said
        and "200 ms late" in said
        and "no usage" in said
        and "2 answers of 429" in said
    )
    turn.cpu, turn.late, turn.outcomes[0].usage, turn.outcomes[0].refusals = 0.8, 0.0, True, 0
    assert warnings(collect([turn], ["a"], {})) == []


# ---- pictures ----------------------------------------------------------------------------------


def test_a_picture_needs_its_extra_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"specbridge\[bench\]"):
        picture.check(Path("x.svg"))


def test_the_picture_shows_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rng = random.Random(2)
    turns = [
        Turn(arm, Load(streams=n), 1, [outcome(i, rng) for i in range(4)], 2.0, complete=True)
        for n in (1, 8)
        for arm in ("a", "b")
    ]
    found = collect(turns, ["a", "b"], {})
    figure = picture.draw(found, "what it was")
    drawn = [lambda f: f.tokens_per_second]
    drawn += [lambda f, name=name: 1000 * f.times[name, 95] for name in ("itl", "tpot")]
    for axes, value in zip(figure.axes, drawn, strict=True):
        for line, arm in zip(axes.lines, "ab", strict=True):
            assert line.get_label() == arm and list(line.get_xdata()) == [1, 8]
            assert list(line.get_ydata()) == [value(f) for f in found if f.arm == arm]
    picture.save(found, "what it was", tmp_path / "p.svg")
    assert (tmp_path / "p.svg").read_text().count("<svg") == 1
