"""benchmarks.gpu_round: its parts on tiny shapes; times are a GPU's matter, what is counted is not."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_round
from benchmarks.draft_pass import load
from benchmarks.gpu import floor, prefill, stack, target
from benchmarks.gpu.clock import Budget
from benchmarks.gpu.loop import Loop
from benchmarks.gpu.setup import Case, Part, Setup, Stage
from target_service.model import shard as shard_module
from target_service.runner import load_runner

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "tie_word_embeddings": False, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip
DRAFTER = {
    **TARGET, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "num_target_layers": 3,
    "block_size": 8, "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 5},
}  # fmt: skip
PLUMBING = "--repeats 2 --concurrency 1 2 --context 40 --nodes 4 9 --max-tokens 12 --texts 1"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "dflash").mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET))
    (folder / "dflash" / "config.json").write_text(json.dumps(DRAFTER))
    return folder


def parsed(tiny: Path, more: str = "", *, device: str = "cpu", dtype: str = "float32") -> argparse.Namespace:
    words = f"--config {tiny} --device {device} --dtype {dtype} {PLUMBING} {more}".split()
    return gpu_round.parser().parse_args(words)


@pytest.fixture(scope="module")
def setup(tiny: Path) -> Setup:
    return gpu_round.make_setup(parsed(tiny))


def run(tiny: Path, out: Path, parts: str, *, device: str = "cpu", dtype: str = "float32") -> dict[str, Any]:
    words = (
        f"--config {tiny} --device {device} --dtype {dtype} {PLUMBING} --parts {parts} --out {out}".split()
    )
    assert gpu_round.main(words) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def check(found: dict[str, Any], tiny: Path) -> None:
    """What every run of floor, target, draft and loop has to hold."""
    assert not str(found).count(str(tiny))
    assert found["synthetic"]["dummy_weights"] and found["rates"]["copy_bytes_per_s"] > 0
    parts = found["parts"]
    assert not any("failed" in note for part in parts.values() for note in part["notes"])
    steps = parts["target"]["tables"]["steps"]
    at = {name: number for number, name in enumerate(steps["header"])}
    shapes = [(row[at["sessions"]], row[at["rows"]]) for row in steps["rows"] if row[at["graphs"]] == "on"]
    assert shapes == [(1, 1), (2, 2), (1, 1), (1, 5), (1, 10), (2, 2), (2, 10), (2, 20)]
    for row in steps["rows"]:
        nodes = row[at["rows"]] // row[at["sessions"]] - 1
        assert row[at["accepted"]] == min(nodes, target.ACCEPTED)
        assert 0 < row[at["device ms"]] < 1e4 and row[at["floor ms"]] > 0
    passes = parts["draft"]["tables"]["draft passes"]["rows"]
    assert [row[1:4] for row in passes if row[0] == "on"] == [[1, 40, 4], [1, 40, 9], [2, 40, 4], [2, 40, 9]]
    assert [row[0] for row in parts["draft"]["tables"]["appends"]["rows"]] == [1, 2, 4, 8, 16]
    assert [row[0] for row in parts["floor"]["tables"]["products alone"]["rows"]] == [1, 17, 65, 129]
    arms = parts["loop"]["tables"]["bare loop"]["rows"]
    assert [row[0] for row in arms] == ["plain", "chain 7", "tree 9"]
    assert arms[0][5] == 1.0 and arms[2][5] > 1.5  # tokens a round: simulated acceptance works
    closing = parts["closing"]["tables"]["stage by stage, one stream"]["rows"]
    assert closing[-1][0] == "sum"
    assert closing[-1][2] == pytest.approx(sum(row[2] for row in closing[:-1]))


def test_the_parts_run_on_a_cpu_and_tell_what_they_measured(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(tiny, tmp_path / "out.json", "floor,target,draft,loop")
    check(found, tiny)
    shown = capsys.readouterr().out
    assert "DUMMY WEIGHTS" in shown and "### steps" in shown and "| draft: tree |" in shown


@pytest.mark.gpu
def test_the_parts_run_on_a_gpu(tiny: Path, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = run(tiny, tmp_path / "out.json", "floor,target,draft,loop", device="cuda", dtype="bfloat16")
    check(found, tiny)
    assert found["parts"]["target"]["tables"]["steps"]["rows"][-1][0] == "off"
    assert any(stage["name"] == "verify: attention" for stage in found["parts"]["target"]["stages"])


def test_a_part_that_fails_is_told_of_and_the_others_go_on(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(setup: Setup) -> Part:
        raise RuntimeError("the shape does not fit")

    monkeypatch.setattr(target, "measure", broken)
    words = f"--config {tiny} --device cpu --dtype float32 {PLUMBING} --parts floor,target,draft".split()
    assert gpu_round.main([*words, f"--out={tmp_path / 'o.json'}"]) == 1
    parts = json.loads((tmp_path / "o.json").read_text())["parts"]
    assert parts["target"]["notes"] == ["failed: RuntimeError: the shape does not fit"]
    assert parts["floor"]["tables"] and parts["draft"]["tables"]


def test_without_time_a_part_is_left_out(setup: Setup) -> None:
    part = floor.measure(replace(setup, budget=Budget(0.0)))
    assert part.tables["products alone"][1] == [] and "want of time" in part.notes[0]


def test_a_prompt_is_run_in_chunks_and_counted_once(tiny: Path, setup: Setup) -> None:
    part = prefill.measure(replace(setup, contexts=(40,)), chunks=(16, 64))
    header, rows = part.tables["prefill"]
    row = dict(zip(header, rows[0], strict=True))
    assert len(rows) == 1 and (row["prompt"], row["chunk"]) == (40, 16)
    assert row["of floor"] == pytest.approx(row["s"] / row["floor s"]) and row["last chunk ms"] > 0
    assert part.notes == ["40 by 64: too short, or left out for want of time"]
    pieces = [prefill.flops(setup.config, first, min(16, 40 - first)) for first in range(0, 40, 16)]
    whole = prefill.flops(setup.config, 0, 40)
    assert sum(pieces) == pytest.approx(whole)
    per_row = 2 * sum(out * inner for out, inner in floor.matrix_shapes(setup.config)) * 3
    assert whole - 40 * per_row == 4 * 3 * 4 * 16 * 40 * 41 / 2  # layers, heads, width, pairs
    assert prefill.flops(setup.config, 0, 40, head_rows=1) - whole == 2 * 320 * 64


def test_a_prompts_steps_are_one_prefill(tiny: Path) -> None:
    sizes = {"num_pages": 4, "max_rows": 64, "load_format": "dummy", "dtype": "float32", "device": "cpu"}
    chosen = []
    for chunk in (16, 40):
        with load_runner(tiny, **sizes) as runner:
            steps = prefill.Prompt(runner, 40, chunk, captured=False).steps()
            chosen.append([runner.run(step).choices for step in steps][-1])
    assert len(chosen[0]) == 1 and chosen[0] == chosen[1]


def test_prefill_runs_only_if_it_is_named(tiny: Path) -> None:
    assert "prefill" not in gpu_round.parts_of(parsed(tiny))
    assert [*gpu_round.parts_of(parsed(tiny, "--parts prefill,floor"))] == ["floor", "prefill"]


def test_bytes_are_those_of_the_weights(tiny: Path, setup: Setup) -> None:
    sizes = floor.target_bytes(setup.config, torch.float32)
    with load_runner(
        tiny, device="cpu", dtype="float32", num_pages=4, max_rows=8, load_format="dummy"
    ) as runner:
        linears = target.linears_of(runner)
        weights = runner._shard._pass._decoder._weights
        memory = runner._shard._pass._memory
    assert sizes.matrices + sizes.head == 4 * sum(x.in_features * x.out_features for x in linears)
    assert sizes.norms == 4 * (
        weights.final_norm.numel()
        + sum(layer.input_norm.numel() + layer.post_norm.numel() + 2 * 16 for layer in weights.layers)
    )
    assert sizes.kv_per_token == memory.page_rows[:, 0].nbytes
    drafter = load(setup.draft_settings, device="cpu", context=16, sessions=1, graphs=False).drafter
    assert setup.drafter is not None
    block = floor.draft_bytes(setup.drafter, torch.float32)
    assert block.matrices + block.head == drafter.pass_bytes
    assert block.kv_per_token == drafter.bytes_per_token
    read = [drafter._fc, *drafter._context_kv]
    assert floor.append_bytes(setup.drafter, torch.float32) == 4 * sum(
        x.in_features * x.out_features for x in read
    )


def test_what_is_too_large_is_left_out_and_said(setup: Setup) -> None:
    plan = target.make_plan(replace(setup, kv_tokens=60, max_rows=7))
    assert plan.cases == (Case(1, 40, 0), Case(1, 40, 0, captured=True), Case(1, 40, 4, captured=True))
    assert plan.session_tokens == (40,)
    assert len(plan.left_out) == 2


@pytest.mark.parametrize("kernels", [False, True], ids=["host pass", "device pass"])
def test_the_bare_loop_s_text_is_plain_decoding_s(
    tiny: Path, setup: Setup, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "uses_kernels", lambda device, dtype: kernels)
    drafter = load(setup.draft_settings, device="cpu", context=96, sessions=1, graphs=False).drafter
    prompt = [int(i) for i in torch.randint(0, 320, (37,), generator=torch.Generator().manual_seed(3))]
    texts = []
    with load_runner(
        tiny, device="cpu", dtype="float32", num_pages=8, max_rows=512, load_format="dummy"
    ) as runner:
        for nodes, top_k in ((0, None), (7, 1), (12, None)):
            found = Loop(runner, drafter, nodes=nodes, length=96, top_k=top_k).decode(prompt, 24)
            texts.append(found.tokens[:24])
            assert found.rounds <= 23
    assert texts[1] == texts[0] and texts[2] == texts[0]


def test_a_burst_counts_tokens_while_all_decode() -> None:
    early = stack.Stream([(0.0, 1), (1.0, 4), (2.0, 4), (3.0, 4)], rounds=3)
    late = stack.Stream([(1.0, 1), (2.0, 2), (3.0, 2), (4.0, 2)], rounds=3)
    both = stack.Burst((early, late))
    assert both.window == (4 + 4 + 2 + 2, 2.0) and early.round_ms == 1000.0
    apart = stack.Burst((early, stack.Stream([(5.0, 1), (6.0, 3)], rounds=1)))
    assert apart.window == (15, 6.0)
    assert stack.tokens_per_s([both, apart]) == pytest.approx(27 / 8)


def test_means_are_of_what_came_in_between() -> None:
    before = {"x_seconds_sum": 5.0, "x_seconds_count": 10.0}
    after = {"x_seconds_sum": 6.0, "x_seconds_count": 14.0}
    assert stack.mean(before, after, "x_seconds") == 0.25
    assert math.isnan(stack.mean(after, after, "x_seconds"))


def test_the_closing_table_adds_up(setup: Setup) -> None:
    parts = {
        "target": Part(
            tables={"steps": (target.HEADER, [["on", 1, 40, "0", 1, 0.0, 4.0, 4.5, 4.0, 1.0, 1.0, 1.0]])},
            stages=[Stage("verify: products", 4.0, 4.2)],
        ),
        "draft": Part(stages=[Stage("draft: tree", 0.0, 0.1)]),
        "channel": Part(stages=[Stage("channel: hand-off", 0.0, 0.2)]),
        "stack": Part(
            figures={"tree round seen by the client, ms": 9.0, stack.TARGET_MS: 5.0, stack.DRAFT_MS: 1.0},
            stages=[Stage("gateway: its own work", 0.0, 0.5)],
        ),
    }
    rows = gpu_round.closing(parts).tables["stage by stage, one stream"][1]
    assert [row[0] for row in rows] == [
        "draft: tree", "verify: products", "channel: hand-off", "gateway: its own work",
        "target: engine around its pass", "draft: engine around its passes", "sum",
        "round seen by the client",
    ]  # fmt: skip
    assert [row[2] for row in rows[4:6]] == pytest.approx([0.8, 0.7])
    assert rows[-2][1:4] == pytest.approx([4.0, 6.5, 2.5])  # the services' own times and the gateway's
    assert rows[-1][3:] == pytest.approx([5.0, 2.0])


def test_stacks_get_flags_that_fit_each_other(setup: Setup) -> None:
    options = stack.Options("", "auto", "2.5", ("plain", "chain", "tree"), 32, 1)
    arms = {arm.name: stack.flags_of(setup, options, arm) for arm in stack.arms_of(setup, options)}
    assert "--no-draft" in arms["plain"] and not any("simulate" in flag for flag in arms["plain"])
    assert {"--top-k=1", "--tree-budget=7", "--max-tree-nodes=7"} <= {*arms["chain"]}
    assert {"--tree-budget=9", "--simulate-acceptance=2.5", "--max-verify-rows=256"} <= {*arms["tree"]}


def test_a_command_line_tells_no_places_of_this_machine() -> None:
    shown = gpu_round.command_line(["--config", "/somewhere/of/mine/tiny", "--out=x.json"])
    assert shown == "python -m benchmarks.gpu_round --config tiny --out=x.json"
