"""benchmarks.spike: which gaps count, what is made of them, and a run against a real stack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import spike
from benchmarks.load.arms import Arm
from benchmarks.load.request import Outcome

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "tie_word_embeddings": False, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip


def stream(first: float, *gaps: float) -> Outcome:
    return Outcome(0, 0.0, first=first, gaps=list(gaps), chunks=1 + len(gaps))


def test_a_gap_counts_where_it_lies() -> None:
    streams = [stream(1.0, 0.5, 1.0, 4.0), stream(2.25, 0.5), Outcome(1, 0.0)]  # the last has no text
    assert spike.gaps_within(streams, 1.0, 2.5) == [0.5, 1.0]
    assert spike.gaps_within(streams, 1.1, 2.6) == [1.0]
    assert sorted(spike.gaps_touching(streams, 2.6, 3.0)) == [0.5, 4.0]
    assert spike.gaps_touching(streams, 2.75, 3.0) == [4.0], "one that has ended is over"
    assert spike.gaps_touching(streams, 0.0, 1.0) == []


def test_ratios_are_of_middle_times_and_of_percentiles() -> None:
    found = spike.Found(
        alone=[0.5, 0.4, 9.0], beside=[1.0], before=[0.010] * 30, during=[0.010] * 10 + [0.030] * 20,
        chunk_alone=1024.0, chunk_beside=512.0, same=[0.8],
    )  # fmt: skip
    row = dict(zip(spike.HEADER, spike.row("a", 64, 3, found), strict=True))
    assert row["p95 ratio"] == pytest.approx(3.0) and row["max during"] == pytest.approx(30.0)
    assert row["TTFT alone"] == pytest.approx(500.0) and row["ratio"] == pytest.approx(2.0)
    assert row["ratio same"] == pytest.approx(1.25) and row["chunk beside"] == 512.0
    alone = dict(zip(spike.HEADER, spike.row("a", 64, 0, spike.Found(alone=[0.5])), strict=True))
    assert alone["TTFT alone"] == 500.0
    assert {alone[name] for name in ("p95 ratio", "TTFT beside", "ratio", "ratio same")} == {"-"}


@pytest.mark.parametrize(("chunk", "again"), [(30.0, ["--prefill-chunk=30"]), (62.0, [])])
def test_the_same_chunks_have_a_stack_of_their_own_unless_they_are_the_largest(
    chunk: float, again: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, ...]] = []

    @contextmanager
    def opened(arm: Arm, *_: Any) -> Iterator[Any]:
        started.append(arm.flags)
        found = spike.Found(beside=[0.6], chunk_beside=chunk)

        def run(work: Any) -> Any:
            class Bench:
                def alone(self, length: int) -> Any:
                    return [0.1 * len(started)], 64.0

                def beside(self, length: int, one: spike.Found) -> None:
                    one.beside, one.chunk_beside = found.beside, found.chunk_beside

            return work(Bench())

        yield run

    monkeypatch.setattr(spike, "opened", opened)
    args = spike.arguments().parse_args(["--streams", "2", "--prompt", "100"])
    found = {100: spike.Found()}
    spike.measure(Arm("a", ("--x",)), None, args, {}, found)  # type: ignore[arg-type]
    assert started == [("--x",), *([("--x", *again)] if again else [])]
    assert found[100].same == [pytest.approx(0.2 if again else 0.1)] and found[100].beside == [0.6]


def test_what_can_not_be_measured_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert spike.main(["--arms", "vllm"]) == 2
    assert spike.main(["--arms", "peer=http://127.0.0.1:9"]) == 2
    assert "flags of a stack" in capsys.readouterr().err


@pytest.mark.slow
def test_a_prompt_beside_running_streams_of_a_real_stack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    flags = f"--load-format=dummy --config={tmp_path} --dtype=float32 --device=cpu --warmup-repeats=0"
    words = ["--arms", "plain", "--streams", "2", "--prompt", "200", "--input-tokens", "16"]
    words += ["--output-tokens", "480", "--repeats", "1", "--pause", "0.2", f"--flags={flags}", "--no-same"]
    assert spike.main([*words, "--out", str(tmp_path / "o.json")]) == 0
    body = json.loads((tmp_path / "o.json").read_text())
    row = dict(zip(body["header"], body["rows"][0], strict=True))
    assert (row["arm"], row["prompt"], row["streams"]) == ("plain", 200, 2)
    assert row["TTFT alone"] > 0 and row["TTFT beside"] > 0
    assert 100 <= row["chunk alone"] <= 128  # 200 rows in two chunks, the largest of a CPU's having 128
    assert 0 < row["chunk beside"] <= 128
    assert body["synthetic"]["dummy_weights"] and "DUMMY WEIGHTS" in capsys.readouterr().out
    seconds = body["seconds"]["plain"]["200"]
    assert len(seconds["alone"]) == 1 == len(seconds["beside"])
