"""The simulated stack against closed formulas, the recorder's accounts, and the real draws of acceptance."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import simulate as command
from benchmarks.simulation.arms import Outcome, Policy, rate, simulate, summary
from benchmarks.simulation.costs import Costs, Worker, of, read
from benchmarks.simulation.load import Lengths, Load
from benchmarks.simulation.planning import Hardware, plan
from benchmarks.simulation.record import Line, costs_of
from benchmarks.simulation.texts import VOCAB, Drafter
from benchmarks.simulation.validate import with_tree
from draft_service.tree import build_trees_from_logits
from kernels.simulate import pack_rows, simulated_marginals
from specbridge.errors import ConfigError
from specbridge.rounds import FinishReason
from tests.helpers.scheduler_harness import Recorder

V, D = 20.0, 8.0
FREE = Costs(
    "free",
    {"measured": False},
    verify=((1, 128, V), (512, 128, V)),
    draft=((1, 256, D), (64, 256, D)),
    block_size=8,
)
"""Passes of constant cost, and nothing else takes time."""
LINEAR = replace(FREE, verify=((1, 128, 1.0), (512, 128, 512.0)), draft=((1, 256, 2.0), (64, 256, 128.0)))
"""Passes that cost as much as they have rows, or sessions."""


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return Drafter.of("3.0", block_size=8)


def load(streams: int, requests: int, *, prompt: int = 8, output: int = 65, arrivals: float = 0.0) -> Load:
    return Load(streams, requests, Lengths.parse(str(prompt)), Lengths.parse(str(output)), arrivals)


def full_rounds(outcome: Outcome, sessions: int) -> list[Any]:
    """Rounds of all sessions that shared their pass with no prompt."""
    rounds = [r for r in outcome.rounds if r.sessions == sessions and not r.target_timings.prefill_rows]
    assert len(rounds) > 10
    return rounds


def test_plain_decoding_of_one_stream_is_a_token_a_step(drafter: Drafter) -> None:
    outcome = simulate(FREE, drafter, Policy("plain"), load(1, 1))
    (seen,) = outcome.seen
    assert seen.tokens == [1] * 65
    assert seen.ttft == pytest.approx(V / 1e3)
    assert seen.itls == pytest.approx([V / 1e3] * 64)
    assert rate(outcome) == pytest.approx(1e3 / V)


def test_a_round_with_a_tree_takes_its_passes_and_nothing_more(drafter: Drafter) -> None:
    outcome = simulate(FREE, drafter, Policy("tree 6"), load(4, 4, output=200), eager=False)
    rounds = full_rounds(outcome, 4)
    assert all(r.nodes == 24 for r in rounds)
    assert [r.total_s for r in rounds] == pytest.approx([(V + D) / 1e3] * len(rounds))
    tokens = sum(r.tokens for r in rounds)
    assert tokens / sum(r.total_s for r in rounds) == pytest.approx(tokens / len(rounds) / ((V + D) / 1e3))


def test_what_the_messages_and_the_gateway_take_is_added_once_each(drafter: Drafter) -> None:
    costs = replace(
        FREE, hop_ms=0.5, gateway_batch_ms=0.25, gateway_session_ms=0.125, commit_ms=1.0, channel_ms=0.1
    )
    exchange = 2 * (0.5 + 0.25 + 4 * 0.125)
    costs = replace(costs, commit_ms=0.4, session_ms=0.2)  # three further sessions make it 1 ms again
    plain = full_rounds(simulate(costs, drafter, Policy("plain"), load(4, 4)), 4)
    assert [1e3 * r.total_s for r in plain] == pytest.approx([V + 1.0 + exchange] * len(plain))
    trees = full_rounds(simulate(costs, drafter, Policy("tree 6"), load(4, 4, output=200), eager=False), 4)
    assert [1e3 * r.total_s for r in trees] == pytest.approx([V + 1.0 + D + 2 * exchange] * len(trees))


@pytest.mark.parametrize("draft", [D, 0.5])
def test_asking_ahead_hides_what_the_question_takes(drafter: Drafter, draft: float) -> None:
    costs = replace(FREE, hop_ms=2.0, draft=((1, 256, draft), (64, 256, draft)))
    outcome = simulate(costs, drafter, Policy("tree 6"), load(1, 1, output=300))
    # A verify there and a tree back: the answer, and the question, are not waited for.
    usual = [1e3 * r.total_s for r in outcome.rounds if r.nodes][1:-6]
    assert usual == pytest.approx([V + draft + 8.0 - 4.0] * len(usual))
    assert outcome.draft_passes["asked"] >= len(usual) > 20
    assert outcome.draft_passes["ahead"] == 0


@pytest.mark.parametrize(("sessions", "nodes", "draft"), [(8, 3, 2.0), (8, 3, 8.0)])
def test_two_cohorts_on_two_devices_overlap_as_the_formula_says(
    drafter: Drafter, sessions: int, nodes: int, draft: float
) -> None:
    # One row a ms and `draft` ms a session: a cohort of half as many takes half as long at either.
    costs = replace(LINEAR, draft=((1, 256, draft), (64, 256, 64 * draft)))
    work = load(sessions, sessions, output=400)
    verify, drafts = sessions * (nodes + 1.0), sessions * draft
    one = full_rounds(simulate(costs, drafter, Policy(f"tree {nodes}"), work, eager=False), sessions)
    assert 1e3 * sum(r.total_s for r in one) / len(one) == pytest.approx(verify + drafts)
    two = full_rounds(simulate(costs, drafter, Policy(f"tree {nodes}", 2), work, eager=False), sessions // 2)
    assert {r.cohort for r in two} == {0, 1}
    # What both wait for is either the busier device or, of one cohort, its own two passes.
    period = max(verify, drafts, verify / 2 + drafts / 2)
    settled = two[8:]
    mean = 1e3 * sum(r.total_s + r.turn_wait_s for r in settled) / len(settled)
    assert mean == pytest.approx(period, rel=0.01)


def test_two_cohorts_on_one_device_gain_nothing(drafter: Drafter) -> None:
    shared = replace(
        LINEAR,
        pools={"gpu": 1.0, "host": 8.0},
        workers={**LINEAR.workers, "target": Worker("gpu"), "draft": Worker("gpu")},
    )
    one = simulate(shared, drafter, Policy("tree 3"), load(8, 8, output=300), eager=False)
    two = simulate(shared, drafter, Policy("tree 3", 2), load(8, 8, output=300), eager=False)
    assert two.seconds >= 0.98 * one.seconds


def test_a_prompt_is_run_in_chunks_and_costs_their_passes(drafter: Drafter) -> None:
    costs = replace(LINEAR, prefill=((8, 128, 8.0), (32, 128, 32.0), (128, 128, 128.0)))
    outcome = simulate(costs, drafter, Policy("plain"), load(1, 1, prompt=300, output=2))
    assert 1e3 * outcome.seen[0].ttft == pytest.approx(300.0)
    assert outcome.passes == 4  # 128, 128, 44 and the round of the second token


@pytest.mark.parametrize("policy", [Policy("plain"), Policy("tree 5"), Policy("cost", 0), Policy("fixed", 2)])
def test_tokens_reconcile_and_everybody_gets_what_was_asked_for(drafter: Drafter, policy: Policy) -> None:
    recorder = Recorder()
    work = Load(5, 15, Lengths.parse("4-60"), Lengths.parse("1-40"))
    costs = replace(FREE, hop_ms=0.2, gateway_event_ms=0.3, append=((1, 0, 0.5), (64, 0, 2.0)), jitter=0.3)
    outcome = simulate(costs, drafter, policy, work, seed=3, observer=recorder)
    recorder.reconcile()
    assert not recorder.reopens and not recorder.rejected
    assert {r.finish_reason for r in recorder.requests} == {FinishReason.LENGTH}
    assert [sum(seen.tokens) for seen in outcome.seen] == [seen.output for seen in outcome.seen]
    assert sum(r.tokens for r in outcome.rounds) == sum(seen.output - 1 for seen in outcome.seen)
    assert sum(seen.output for seen in outcome.seen) == sum(r.output_tokens for r in recorder.requests)


def test_the_same_seed_gives_the_same_numbers(drafter: Drafter, tmp_path: Path) -> None:
    arguments = [
        "--streams", "2", "--policies", "plain", "tree 4", "cost", "--requests", "4",
        "--prompt", "16-64", "--output", "16-24", "--cohorts", "2",
    ]  # fmt: skip
    found = []
    for number in range(2):
        out = tmp_path / f"{number}.json"
        command.main([*arguments, "--out", str(out)])
        found.append(json.loads(out.read_text()))
    assert found[0]["runs"] == found[1]["runs"]
    assert found[0]["rows"] == found[1]["rows"] and found[0]["simulated"]
    command.main([*arguments, "--seed", "1", "--out", str(out)])
    assert json.loads(out.read_text())["runs"] != found[0]["runs"]


def test_shares_are_of_plain_and_of_the_best_fixed_setting(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command.main(
        [
            "--streams",
            "1",
            "--policies",
            "plain",
            "tree 2",
            "tree 5",
            "cost",
            "--requests",
            "4",
            "--out",
            str(out),
        ]
    )
    body = json.loads(out.read_text())
    rates = {run["policy"]: run["tokens_per_s"] for run in body["runs"]}
    best = max(("plain", "tree 2", "tree 5"), key=lambda name: rates[name])
    (verdict,) = body["adaptive"]
    assert verdict["best_fixed"] == best
    assert verdict["of_plain"] == rates["cost"] / rates["plain"]
    assert verdict["of_best_fixed"] == rates["cost"] / rates[best]
    assert verdict["keeps"] == (verdict["of_plain"] >= 0.98 and verdict["of_best_fixed"] >= 0.97)


def test_poisson_arrivals_come_at_their_rate_whatever_the_service_does(drafter: Drafter) -> None:
    outcomes = [
        simulate(FREE, drafter, Policy(name), load(0, 60, output=4, arrivals=4.0))
        for name in ("plain", "tree 4")
    ]
    asked = [[seen.asked for seen in outcome.seen] for outcome in outcomes]
    assert asked[0] == pytest.approx(asked[1])
    assert 60 / asked[0][-1] == pytest.approx(4.0, rel=0.35)


def test_trees_are_those_of_simulated_acceptance(drafter: Drafter) -> None:
    """The real marginals over the whole vocabulary, and the real builder on them: the same nodes."""
    seed, bases = 77, range(20, 60)
    text = drafter.text(seed, 10, 100)
    rows = pack_rows([(seed, base, 0) for base in bases], "cpu")
    logits = simulated_marginals(torch.empty(len(bases), 7, VOCAB), drafter.tables, *rows)
    trees = build_trees_from_logits(logits, [12] * len(bases), max_depths=[7] * len(bases))
    for base, real in zip(bases, trees, strict=True):
        ours = text.tree(base, 12, 7)
        assert ours.parents == real.parents
        assert ours.scores == pytest.approx(real.scores, abs=2e-3)  # real rows are normalised once more
        depths = real.depths()
        right = [token == text.token(base + depth) for token, depth in zip(real.tokens, depths, strict=True)]
        assert right == [t == text.token(base + d) for t, d in zip(ours.tokens, depths, strict=True)]
        ours.validate(vocab_size=VOCAB, max_nodes=12, max_depth=7)


def test_acceptance_is_what_the_file_promises(drafter: Drafter) -> None:
    outcome = simulate(FREE, drafter, Policy("tree 8"), load(8, 8, output=900))
    promised = drafter.acceptance.tree_length(8, 7)
    assert summary(outcome)["acceptance_length"] == pytest.approx(promised, rel=0.04)
    made = with_tree(5, 2.6, block_size=8)
    assert made.acceptance.tree_length(5, 7) == pytest.approx(2.6, abs=1e-3)


# ---- costs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu-smollm2-135m.json", "h200-qwen3-8b.json"])
def test_shipped_costs_say_where_they_are_from_and_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    costs = read(command.BUILT_IN.parent / name)
    assert costs.source["measured"] and costs.source["how"]
    copy = tmp_path / name
    copy.write_text(costs.to_json())
    assert read(copy) == costs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verify": []}, "at least one point"),
        ({"hop_ms": -1.0}, "hop_ms"),
        ({"prefil": []}, "prefil"),
        ({"workers": {"target": {"pool": "gpu"}}}, "workers"),
        ({"prefill": [[1, 128, 3.0]]}, "fewer than 2 rows"),
        ({"verify": [[1, 2]]}, "malformed"),
    ],
)
def test_costs_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of({"name": "x", "source": {}, "verify": [[1, 128, 3.0]], **change})


def test_a_plan_is_the_roofline_of_its_assumptions() -> None:
    folder = command.common.ROOT / "configs" / "llama-3-70b"
    hardware = Hardware(
        bytes_per_s=1e12, flop_per_s=1e15, efficiency=0.5, all_reduce_us=10.0, link_bytes_per_s=1e11,
        host_ms=1.0, host_ranks_ms=2.0,
    )  # fmt: skip
    layer = (64 + 2 * 8) * 128 * 8192 + 64 * 128 * 8192 + 3 * 28672 * 8192
    values = 80 * layer + 128256 * 8192
    costs = plan(folder, tp=8, hardware=hardware)
    assert not costs.source["measured"] and costs.source["hardware"]["bytes_per_s"] == 1e12
    found = {(rows, context): ms for rows, context, ms in costs.verify}
    moved = 2 * 7 / 8 * 1 * 8192 * 2 / 1e11
    expected = 2.0 + 1e3 * (2 * values / 8 / 1e12 / 0.5 + 160 * (10e-6 + moved))
    assert found[1, 0] == pytest.approx(expected, rel=1e-3)  # norms are left out here
    products = 2.0 + 1e3 * (2 * values * 2048 / 8 / 1e15 / 0.5 + 160 * (10e-6 + 2048 * moved))
    assert found[2048, 0] == pytest.approx(products, rel=1e-3)
    kv = 2 * 80 * 8 * 128 * 2 * (1 << 20) / 8 / 1e12 / 0.5
    assert found[1, 1 << 20] - found[1, 0] == pytest.approx(1e3 * kv, rel=1e-3)
    with pytest.raises(ConfigError, match="--tp 3"):
        plan(folder, tp=3, hardware=hardware)


def test_a_record_gives_the_costs_it_was_made_with() -> None:
    def burst(arm: str, streams: int) -> dict[str, Any]:
        rounds = 50.0
        gateway = {
            "specbridge_gateway_round_seconds_count": rounds,
            "specbridge_gateway_round_sessions_sum": rounds * streams,
            "specbridge_gateway_round_tokens_total": rounds * streams,
            # 1 ms and 0.2 ms a session outside of the services.
            "specbridge_gateway_round_stage_seconds_total|stage=rpc": rounds * (0.6 + 0.2 * streams) / 1e3,
            "specbridge_gateway_round_stage_seconds_total|stage=gateway": rounds * 0.4 / 1e3,
        }
        target = {
            "specbridge_target_commit_seconds_sum": rounds * 0.1 / 1e3,
            # As many passes as rounds: 30 ms, and 4 more for each further session.
            "specbridge_target_forward_seconds_sum": rounds * (30.0 + 4.0 * (streams - 1)) / 1e3,
            "specbridge_target_step_rows_count": rounds,
            "specbridge_target_step_rows_sum": rounds * streams,
        }
        draft = {
            "specbridge_draft_pass_sessions_count": 10.0,
            "specbridge_draft_pass_sessions_sum": 20.0,
            "specbridge_draft_stage_seconds_sum|stage=forward": 10 * 11.0 / 1e3,
            "specbridge_draft_stage_seconds_sum|stage=tree": 10 * 1.0 / 1e3,
            "specbridge_draft_stage_seconds_sum|stage=append": 10 * 0.7 / 1e3,
            "specbridge_draft_appends_total|trigger=propose": 10.0,
            "specbridge_draft_append_rows_total": 40.0,
        }
        cpu = {"gateway": rounds * 2.0 * streams / 1e3, "client": rounds * 0.5 * streams / 1e3}
        counted = {"gateway": gateway, "target": target, "draft": draft if arm != "plain" else {}}
        return {"arm": arm, "streams": streams, "tokens": 1, "seconds": 1.0, "counted": counted, "cpu_s": cpu}

    record: dict[str, Any] = {
        "provenance": {"cores": 2},
        "target": {
            "model": "m",
            "device": "cpu",
            "max_length": 512,
            "max_tree_nodes": 64,
            "verify": [[1, 128, 30.0]],
        },
        "draft": {"block_size": 8, "draft": [[8, 256, 50.0], [16, 256, 60.0]]},
        "prefill": [[30, 0, 30 + 29 * 3.0 + 5.0], [130, 0, 30 + 129 * 3.0 + 5.0]],
        "bursts": [burst("plain", 1), burst("plain", 4), burst("tree 5", 2)],
    }
    costs = costs_of(record)
    assert (costs.hop_ms, costs.gateway_batch_ms, costs.channel_ms) == pytest.approx((0.25,) * 3)
    assert costs.gateway_session_ms == pytest.approx(0.1)
    assert costs.gateway_event_ms == pytest.approx(2.0 - 2 * (0.25 + 0.1))
    assert costs.client_event_ms == pytest.approx(0.5)
    assert costs.commit_ms == pytest.approx(0.1)
    assert costs.session_ms == pytest.approx(4.0)
    assert costs.prefill[-1] == pytest.approx((128, 128, 30 + 127 * 3.0))
    assert costs.request_ms == pytest.approx(5.0)
    # Passes of two sessions took 12 ms where the draft said 60.
    assert costs.draft == ((1, 256, 10.0), (2, 256, 12.0))
    assert costs.reported["draft"] == ((1, 256, 50.0), (2, 256, 60.0))
    assert costs.append[0][2] == pytest.approx(0.7)
    assert costs.pools == {"cores": 2.0} and costs.workers["draft"].weight < 1.0
    with pytest.raises(ConfigError, match="plain"):
        costs_of({**record, "bursts": record["bursts"][2:]})


def test_a_line_never_falls_and_never_begins_below_nothing() -> None:
    assert Line.through([(1, 3.0), (3, 7.0)]) == Line(1.0, 2.0)
    assert Line.through([(1, 7.0), (3, 3.0)]) == Line(5.0, 0.0)
    assert Line.through([(1, 1.0), (3, 7.0)]) == Line(0.0, 2.0)
