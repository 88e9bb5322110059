"""`specbridge explain` without a stack: its arithmetic by hand, and reports of made-up counters whose answers
are known beforehand.
"""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages import check_page

from specbridge.clients import Model
from specbridge.errors import ConfigError
from specbridge.explain import account, campaign, charts, command, find, measure, svg, switches
from specbridge.explain.account import Point, Work
from specbridge.explain.answers import Curve, Measured
from specbridge.explain.clients import Samples
from specbridge.explain.comparisons import Comparison, comparison_json, drift, verdict
from specbridge.explain.html import page
from specbridge.explain.measure import Arm, Burst, Load
from specbridge.explain.report import report
from specbridge.explain.words import PARTS
from specbridge.rounds import CostPoint, DraftInfo, Footprint, TargetInfo
from specbridge.serve import serve_settings
from specbridge.settings import load

# SmolLM2-135M in bf16 with fp32 activations, by its published configuration: what the report has to come to.
LAYERS, KV_HEADS, HEAD, HIDDEN, MLP, VOCAB = 30, 3, 64, 576, 1536, 49152
MATRICES = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * HEAD + 3 * HIDDEN * MLP) + VOCAB * HIDDEN
TARGET = Footprint(
    weight_bytes=2 * MATRICES,
    products_per_row=MATRICES,
    kv_bytes_per_token=2 * LAYERS * KV_HEADS * HEAD * 4,
    num_kv_heads=KV_HEADS,
    copy_bytes_per_s=10_000_000_000,
)
DRAFT = Footprint(weight_bytes=75_000_000, kv_bytes_per_token=4608, num_kv_heads=3,
                  copy_bytes_per_s=10_000_000_000, append_weight_bytes=4_000_000)  # fmt: skip


# ---- arithmetic -----------------------------------------------------------------------------------


def test_the_constants_are_the_published_model_s() -> None:
    assert pytest.approx(134.5e6, rel=0.001) == MATRICES
    assert TARGET.kv_bytes_per_token == 46080


def test_reads_and_floors_by_hand() -> None:
    work = Work(rows=6, committed=2.5, context_rows=100, context_rows_read=150, hidden_row_bytes=11520,
                draft_passes=1, draft_context_rows=100, appends=1)  # fmt: skip
    found = account.reads(work, TARGET, DRAFT)
    assert {(r.service, r.kind): r.bytes for r in found if r.what != "weights, context appends"} == {
        ("target", "weights"): 2 * MATRICES,
        ("target", "context_kv"): 150 * 46080,
        ("draft", "weights"): 75_000_000,
        ("draft", "context_kv"): 460_800,
        ("draft", "hidden_states"): 28_800,
    }
    assert account.times_read(work) == 1.5
    floor = account.floor(found, "target", TARGET.copy_bytes_per_s)
    assert floor == pytest.approx((2 * MATRICES + 150 * 46080) / 1e10)
    assert account.floor(found, "draft", 0) is None
    assert {read.service for read in account.reads(work, TARGET, None)} == {"target"}
    assert account.times_read(replace(work, context_rows=0)) == 0


def test_what_a_node_buys() -> None:
    points = [
        Point(4, 2.4, 0.050, 0.04, 0.01),
        Point(0, 1.0, 0.040, 0.04, 0),
        Point(2, 2.0, 0.044, 0.04, 0.01),
    ]
    steps = account.marginal(points)
    assert [(s.first, s.last) for s in steps] == [(0, 2), (2, 4)]
    assert steps[0].tokens == pytest.approx(0.5) and steps[0].seconds == pytest.approx(0.002)
    # 45.5 tokens a second against 25 before, then 48.
    assert [s.pays for s in steps] == [True, True]
    assert not account.marginal([*points, Point(8, 2.5, 0.080, 0.06, 0.02)])[-1].pays


def test_a_context_row_s_cost_alone_and_in_a_tree() -> None:
    def point(rows: int, context: int, ms: float) -> CostPoint:
        return CostPoint(rows, context, int(ms * 1e6))

    shared = [point(1, 128, 10), point(4, 128, 11), point(1, 1128, 11), point(4, 1128, 12.5)]
    slope = account.context_slope(shared)
    assert slope is not None and (slope.rows, slope.contexts) == (4, (128, 1128))
    assert slope.alone_s == pytest.approx(1e-6) and slope.ratio == pytest.approx(1.5)
    assert account.context_slope(shared[:2]) is None
    assert (
        account.context_slope([point(1, 127, 1), point(8, 127, 2), point(1, 128, 1), point(8, 128, 2)])
        is None
    )
    assert account.context_slope([point(2, 128, 1), point(2, 1024, 1)]) is None
    faster = [point(1, 128, 10), point(4, 128, 11), point(1, 1128, 9), point(4, 1128, 12.5)]
    assert account.context_slope(faster) is None


def test_more_ranks_by_hand() -> None:
    footprint = Footprint(weight_bytes=8_000, kv_bytes_per_token=10, num_kv_heads=2, copy_bytes_per_s=1_000)
    two, four, eight = account.more_ranks(
        footprint, tp_size=1, num_layers=4, context_rows_read=200, round_s=20.0
    )
    # 10 s now; weights halve, and key/value heads until there is one a rank.
    assert (two.floor_s, four.floor_s, eight.floor_s) == (5.0, 3.0, 2.0)
    assert two.saved_s == 5.0 and two.collectives == 9 and two.break_even_s == pytest.approx(5 / 9)
    assert two.best_ratio == pytest.approx(20 / 15)
    # From two ranks on, of which each holds a head.
    [more, most] = account.more_ranks(footprint, tp_size=2, num_layers=4, context_rows_read=200, round_s=20.0)
    assert (more.ranks, more.context_bytes, more.weight_bytes) == (4, 2_000, 4_000) and most.ranks == 8
    # A round that is faster than its floor says nothing.
    assert account.more_ranks(footprint, tp_size=1, num_layers=4, context_rows_read=200, round_s=4.0) == ()
    assert account.more_ranks(Footprint(), tp_size=1, num_layers=4, context_rows_read=1, round_s=1) == ()


# ---- samples, pairs, turns ------------------------------------------------------------------------

PAGE = """# HELP a_total text
# TYPE a_total counter
a_total{stage="draft"} 3.0
a_total{stage="say \\"x\\""} 2.0
# TYPE b_seconds histogram
b_seconds_bucket{le="0.1"} 1.0
b_seconds_bucket{le="+Inf"} 4.0
b_seconds_count 4.0
b_seconds_sum 0.5
"""


def test_samples_of_a_page() -> None:
    found = Samples.parse(PAGE)
    assert found.total("a_total") == 5 and found.total("a_total", stage="draft") == 3
    assert found.by("a_total", "stage") == {"draft": 3, 'say "x"': 2}
    assert found.total("b_seconds_count") == 4 and found.total("b_seconds_bucket") == 0
    later = Samples.parse(PAGE.replace("3.0", "7.0").replace("_count 4.0", "_count 6.0"))
    assert later.since(found).total("a_total") == 4 and later.since(found).total("b_seconds_count") == 2
    assert found.since(Samples({})).total("a_total") == 5
    assert found.plus(later).total("a_total", stage="draft") == 10


def test_a_verdict_needs_pairs_that_agree() -> None:
    assert verdict([]) == "missing" and verdict([1.2, 1.3, 1.2]) == "open"
    assert verdict([1.2, 1.3, 1.2, 1.1]) == "gives" and verdict([0.9, 0.8, 0.9, 0.95]) == "costs"
    assert verdict([1.2, 1.3, 1.2, 0.9]) == "open"
    assert verdict([1.2] * 7 + [0.9]) == "gives" and verdict([1.2] * 6 + [0.9] * 2) == "open"


def test_drift_is_of_the_same_request() -> None:
    # Two requests, twice: each came back within 10 and 20 % of itself, though they differ tenfold.
    bursts = [burst(rate=rate) for rate in (10, 100, 11, 120)]
    assert drift(bursts, 2) == pytest.approx((1 / 10.5 + 20 / 110) / 2)
    assert drift(bursts[:2], 2) is None


async def test_sides_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, tuple[str, ...]]] = []

    class Fake:
        async def burst(self, arm: Arm, prompts: Sequence[str], load: Load) -> Burst:
            asked.append((arm.name, tuple(prompts)))
            return burst()

    sides: Any = [(Fake(), Arm(name, streams=2)) for name in ("a", "b")]
    found = await measure.in_turns(sides, Load(("p", "q", "r"), 8, 2))
    assert [len(own) for own in found] == [4, 4]
    warm, asked = asked[:2], asked[2:]
    assert [name for name, _ in warm] == ["a", "b"]
    # Groups of two, the last filled up from the start; the order turns round each time.
    assert asked == [
        *[("a", ("p", "q")), ("b", ("p", "q")), ("b", ("r", "p")), ("a", ("r", "p"))],
        *[("a", ("p", "q")), ("b", ("p", "q")), ("b", ("r", "p")), ("a", ("r", "p"))],
    ]


# ---- where a stack is, and what is switched off ---------------------------------------------------


def test_a_stack_is_found_by_its_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = {
        "rest": "http://127.0.0.1:8000/v1",
        "grpc": "127.0.0.1:50050",
        "gateway metrics": "http://127.0.0.1:8000/metrics",
        "target metrics": "http://127.0.0.1:9001/metrics",
    }
    for name, grpc in (("specbridge-a", "127.0.0.1:1"), ("specbridge-b", "127.0.0.1:50050")):
        (tmp_path / name).mkdir()
        state = {"endpoints": {**endpoints, "grpc": grpc}, "pids": {"target": 1, "gateway": 2}}
        (tmp_path / name / "stack.json").write_text(json.dumps(state))
    (tmp_path / "specbridge-c").mkdir()
    monkeypatch.setattr(find, "_run_folders", lambda: sorted(tmp_path.iterdir()))
    found = find.running("127.0.0.1:50050")
    assert found is not None and found.rest == "http://127.0.0.1:8000"
    assert found.target == f"unix:{tmp_path}/specbridge-b/target.sock" and found.draft == ""
    assert found.metrics_of("target").endswith(":9001/metrics") and found.metrics_of("draft") == ""
    assert find.running("127.0.0.1:2") is None
    with pytest.raises(ConfigError, match=r"specbridge-c.*stack\.json"):
        find.of_folder(tmp_path / "specbridge-c")
    told = find.told(find.Addresses("h:1"), rest="http://h:2", target="h:3", draft_metrics="http://h:4/m")
    assert told.metrics_of("gateway") == "http://h:2/metrics" and told.target == "h:3"
    assert told.metrics_of("draft") == "http://h:4/m"


def test_options_of_a_stack_without_a_part() -> None:
    base: Any = load(serve_settings(), tree_budget="16", http_port="8000", run_dir="/x")
    for switch in switches.BY_FLAG:
        # Every switch is one of serve's options, with a value that its service takes.
        other = switches.changed(base, switch.off)
        assert not switches.same(base, switch.off)
        assert switches.same(other, switch.off) and switches.same(other, {"tree_budget": "16"})
        assert (other.http_port, other.run_dir) == ("0", "")
    assert switches.same(base, {"eager": True}) and switches.same(base, {})


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(0, []), (4, [1, 2, 4]), (32, [1, 2, 4, 8, 16, 32]), (128, [1, 8, 16, 32, 64, 128])],
)
def test_sizes_of_trees_to_try(most: int, sizes: list[int]) -> None:
    assert campaign.sizes(most) == sizes


# ---- reports --------------------------------------------------------------------------------------


def counters(rounds: int, stages: Mapping[str, float], *, nodes: float, tokens: float, context: float) -> Any:
    """What the services would count in so many rounds; stages: seconds of one."""
    gateway = {("specbridge_gateway_round_seconds_count", ()): rounds}
    gateway[("specbridge_gateway_round_seconds_sum", ())] = rounds * sum(stages.values())
    for stage, seconds in stages.items():
        gateway[("specbridge_gateway_round_stage_seconds_total", (("stage", stage),))] = rounds * seconds
    for name, value in (("sessions", 1.0), ("nodes", nodes), ("rows", nodes + 1)):
        gateway[(f"specbridge_gateway_round_{name}_sum", ())] = rounds * value
    gateway[("specbridge_gateway_round_tokens_total", ())] = rounds * tokens
    gateway[("specbridge_gateway_generation_tokens_total", ())] = TOKENS + 1
    target = {
        ("specbridge_target_service_seconds_sum", ()): rounds * stages["verify"],
        ("specbridge_target_queue_seconds_sum", ()): rounds * 0.0002,
        ("specbridge_target_context_rows_total", ()): rounds * context,
        ("specbridge_target_context_rows_read_total", ()): rounds * context,
        ("specbridge_target_captured_rows_total", ()): rounds * tokens,
        ("specbridge_target_channel_bytes_total", (("transport", "shared_memory"),)): rounds * tokens * 11520,
    }
    draft = {
        ("specbridge_draft_stage_seconds_sum", (("stage", "service"),)): rounds * stages["draft"],
        ("specbridge_draft_stage_seconds_sum", (("stage", "forward"),)): rounds * stages["draft"] / 2,
        ("specbridge_draft_eager_drafts_total", (("fate", "used"),)): rounds if nodes else 0,
        ("specbridge_draft_appends_total", (("trigger", "eager"),)): rounds,
    }
    return {
        name: Samples({key: float(value) for key, value in found.items()})
        for name, found in (("gateway", gateway), ("target", target), ("draft", draft))
    }


def burst(*, rate: float = 20.0, rounds: int = 0, counted: Any = None, texts: Any = ((1, 2),)) -> Burst:
    return Burst(TOKENS, TOKENS / rate, rounds, TOKENS + 1, texts, counted or {})


TOKENS = 40
"""Of a burst after its first ones, which is one."""
TREES = {"draft": 0.010, "channel_wait": 0.001, "verify": 0.045, "rpc": 0.003, "gateway": 0.001}
PLAIN = {"draft": 0.0, "channel_wait": 0.0, "verify": 0.040, "rpc": 0.002, "gateway": 0.001}


def measured(**changes: Any) -> Measured:
    trees = [
        burst(
            rate=40 / (16 * 0.060), rounds=16, counted=counters(16, TREES, nodes=5, tokens=2.5, context=100)
        )
        for _ in range(4)
    ]
    plain = [
        burst(rate=1 / 0.043, rounds=40, counted=counters(40, PLAIN, nodes=0, tokens=1, context=100))
        for _ in range(4)
    ]
    half = {**TREES, "verify": 0.042}
    two = [burst(rounds=20, counted=counters(20, half, nodes=2, tokens=2, context=100))]
    info = TargetInfo(
        model_id="m", fingerprint="f", vocab_size=VOCAB, eos_token_ids=(), hidden_size=HIDDEN,
        num_layers=LAYERS, page_size=16, max_length=8192, tp_size=1, max_sessions=8, max_tree_nodes=64,
        total_pages=99, dtype="bfloat16", device="cpu", instance=b"i" * 16, footprint=TARGET,
    )  # fmt: skip
    draft = DraftInfo(
        drafter_id="d", fingerprint="f", block_size=8, mask_token_id=1, target_layer_ids=(1,), max_nodes=64,
        vocab_size=VOCAB, instance=b"i" * 16, footprint=DRAFT,
    )  # fmt: skip
    made = Measured(
        model=Model("smollm2-135m", "smollm2-135m-dflash", 8, 5),
        load=Load(("p", "q"), 40, 2),
        trees=trees,
        plain=plain,
        curve=Curve({0: plain, 2: two, 5: trees}, fixed=True),
        comparisons=[
            Comparison("speculation", "Speculation", "plain decoding", trees, plain),
            Comparison("cuda_graphs", "CUDA graphs", "launch by launch", missing="there are none"),
        ],
        target=info,
        draft=draft,
        budget={"policy": "cost", "marginal_gain": [[0, 1.0, 43.0, 23.3], [5, 2.4, 60.0, 40.0]]},
    )
    return replace(made, **changes)


def test_a_report_answers_every_question() -> None:
    made = json.loads(json.dumps(report(measured())))
    for part in PARTS:
        assert made[part]["answer"].strip().endswith(".")
    by_kind = made["bytes"]["by_kind"]
    assert by_kind["weights"] == pytest.approx(2 * MATRICES + 75e6 + 4e6)
    assert by_kind["context_kv"] == pytest.approx(100 * 46080 + 100 * 4608)
    assert by_kind["hidden_states"] == pytest.approx(2.5 * 11520)
    assert made["bytes"]["context"]["times_read"] == 1
    assert "once" in made["bytes"]["answer"]
    # The stages make the round, and what target, draft and clients saw agrees with it.
    part = made["round"]
    assert sum(s["seconds"] for s in part["stages"]) == pytest.approx(part["seconds"]) == pytest.approx(0.060)
    assert [check["agrees"] for check in part["checks"]] == [True, True, True]
    assert part["floor_s"] == pytest.approx((by_kind["weights"] + by_kind["context_kv"] + 28800) / 1e10)
    assert [p["nodes"] for p in made["candidates"]["points"]] == [0, 2, 5]
    assert made["candidates"]["chosen"]["nodes"] == 5
    assert made["candidates"]["expected"][1] == [5, 2.4, 60.0, 40.0]
    assert made["candidates"]["products_per_row"] == MATRICES
    [speculation, graphs] = made["parts"]["comparisons"]
    assert speculation["ratio"] == pytest.approx(2.5 / 0.060 * 0.043)
    assert (speculation["verdict"], speculation["pairs"], speculation["same_text"]) == ("gives", 4, True)
    assert graphs["ratio"] is None and graphs["missing"] == "there are none"
    assert [e["ranks"] for e in made["ranks"]["estimates"]] == [2, 4, 8]
    assert made["ranks"]["answer"].startswith("No, not on this machine")
    assert made["notes"] == []


def test_a_report_says_what_to_doubt() -> None:
    slow = {**TREES, "verify": 0.060}  # the target says it worked longer than its stage was
    off = counters(16, TREES, nodes=5, tokens=2.5, context=100)
    off["target"] = counters(16, slow, nodes=5, tokens=2.5, context=100)["target"]
    off["gateway"] = off["gateway"].plus(Samples({("specbridge_gateway_generation_tokens_total", ()): 9.0}))
    other = [burst(rounds=16, counted=off, texts=((9,),))]
    plain = [replace(one, seconds=one.seconds * (1 + 0.2 * n)) for n, one in enumerate(measured().plain)]
    comparison = Comparison("x", "X", "y", other, [burst()])
    notes = "\n".join(report(measured(trees=other, plain=plain, comparisons=[comparison]))["notes"])
    assert "target's and draft's own clocks" in notes and "clients' time" in notes
    assert "served 9 tokens to others" in notes
    assert "not quiet" in notes and "texts differed" in notes


def test_a_report_without_the_processes_says_so() -> None:
    nothing = [burst()]
    made = report(measured(trees=nothing, plain=nothing, curve=None, target=None, draft=None, budget=None))
    for part in ("bytes", "candidates", "round", "ranks"):
        assert made[part]["answer"].startswith("Not known")
    assert page(made)


def test_the_page_needs_nothing_else() -> None:
    text = page(json.loads(json.dumps(report(measured()))))
    check_page(text)
    assert text.count("<svg") == 6  # bytes, three curves, parts, the round
    for words in ("What does a round read?", "Would more tensor-parallel ranks help?", "(chosen)"):
        assert words in text


def test_names_on_the_page_are_words_only() -> None:
    model = Model("<script>alert(1)</script>", '"><img src=x>', 8, 5)
    text = page(report(measured(model=model, notes=("<b>note</b>",))))
    check_page(text)
    assert "&lt;script&gt;" in text and "&lt;b&gt;note" in text


def test_the_picture_is_an_svg_of_its_own() -> None:
    root = ET.fromstring(charts.excerpt(report(measured())))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [element.text for element in root.iter() if element.text]
    assert any("a round" in text for text in texts)


def test_what_is_no_number_is_not_drawn() -> None:
    assert svg.number(1.0) == "1" and svg.number(2.26) == "2.3"
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="can't be drawn"):
            svg.number(value)


@pytest.mark.parametrize("low, high", [(0, 1), (0, 0.003), (0.7, 1.4), (3, 1e6), (5, 5)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    found = svg.ticks(low, high, 4)
    assert 1 <= len(found) <= 7 and all(low <= tick <= high * 1.0001 for tick in found)


def test_a_saved_report_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, shown = tmp_path / "report.json", tmp_path / "page.html"
    saved.write_text(json.dumps(report(measured())))
    assert command.main(["--from", str(saved), "--html", str(shown)]) == 0
    told = capsys.readouterr().out
    for words in ("Speculation", "channel wait", "<- chosen", "tokens/s", "1.00"):
        assert words in told
    check_page(shown.read_text())
    assert command.main(["--from", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == 1
    saved.write_text("{}")
    with pytest.raises(ConfigError, match="no report"):
        command.main(["--from", str(saved)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "--repeats is 0"),
        (["--local", "--only", "luck"], "'luck' is no part"),
        (["--run-dir", "/nonexistent"], "no stack.json"),
    ],
)
def test_wrong_options_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        command.main(words)


def test_comparison_of_nothing() -> None:
    entry = comparison_json(Comparison("x", "X", "y", missing="why"))
    assert (entry["ratio"], entry["on"], entry["verdict"]) == (None, None, "missing")
