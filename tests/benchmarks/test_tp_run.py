"""benchmarks.tp_run: what counts as equal, what its parts make of what they see, a rank killed on the CPU."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import gpu_round, tp_run
from benchmarks.gpu.clock import Budget
from benchmarks.gpu.setup import Part
from benchmarks.gpu.stack import Burst, Stream
from benchmarks.gpu.target import HEADER as TARGET_HEADER
from benchmarks.tp import compare, equality, killed, models, replicas, shapes, stacks
from benchmarks.tp.compare import Ask, Judge
from benchmarks.tp.equality import Options, Variant
from specbridge.rounds import SamplingParams
from target_service.offline import OfflineRequest, load_generator

GREEDY, WARM = SamplingParams(), SamplingParams(temperature=0.8, seed=5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> models.Model:
    return models.make("tiny", tmp_path_factory.mktemp("models"), 4)


def options(device: str = "cpu", gpus: int = 0, tp: tuple[int, ...] = (8, 4), **more: Any) -> Options:
    return Options(device, gpus, tp, ("tiny",), 4, 16, compare.NEAR_TIE, **more)


# ---- what counts as equal ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "at"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0)]
)
def test_the_first_difference(a: list[int], b: list[int], at: int | None) -> None:
    assert compare.first_difference(a, b) == at == compare.first_difference(b, a)


class Scores:
    """The same scores for every prefix; which were asked for."""

    def __init__(self, *scores: float) -> None:
        self._scores = torch.tensor(scores, dtype=torch.float64)
        self.asked: list[tuple[tuple[int, ...], SamplingParams]] = []

    def scores(self, tokens: Sequence[int], sampling: SamplingParams) -> torch.Tensor:
        self.asked.append((tuple(tokens), sampling))
        return self._scores


ASKS = [Ask((7, 8), GREEDY), Ask((7, 8), WARM)]


def test_two_tokens_that_are_both_all_but_the_best_are_a_near_tie() -> None:
    scorer = Scores(1.0, 5.0, 5.0 - 4e-4, 0.0)
    found = compare.compare(ASKS, [[0, 1, 3], [1, 1]], [[0, 2, 2], [1, 1]], scorer)
    assert [(f.stream, f.kind, f.at, f.expected, f.got, f.near) for f in found] == [
        (0, "greedy", 1, 1, 2, True)
    ]
    assert found[0].gap == pytest.approx(4e-4)
    # Asked once, about what both had before they parted, by the stream's own rule.
    assert scorer.asked == [((7, 8, 0), GREEDY)]
    assert compare.compared([[0, 1, 3], [1, 1]], found) == 3


@pytest.mark.parametrize(
    "scores",
    [(1.0, 5.0, 4.9, 0.0), (5.2, 5.0, 5.0, 0.0)],
    ids=["one is not the best", "both tie below a third"],
)
def test_other_differences_are_wrong(scores: tuple[float, ...]) -> None:
    found = compare.compare(ASKS, [[3], [1]], [[3], [2]], Scores(*scores))
    assert [(f.stream, f.kind, f.near) for f in found] == [(1, "T=0.8", False)]
    assert "NOT A NEAR-TIE" in found[0].text()


def test_a_shorter_text_is_wrong_and_needs_no_model() -> None:
    scorer = Scores(0.0)
    found = compare.compare(ASKS, [[3, 3], [1]], [[3], [1]], scorer)
    assert not found[0].near and found[0].got is None and not scorer.asked
    assert "shorter" in found[0].text()


def test_a_near_tie_is_as_near_as_is_asked_for() -> None:
    (found,) = compare.compare(ASKS[:1], [[1]], [[0]], Scores(1.0, 1.01), near_tie=0.1)
    assert found.near


def test_the_judge_scores_by_the_commit_rule(tiny: models.Model) -> None:
    """The offline generator's texts, greedy and sampled, are the judge's best at every token."""
    generator = load_generator(str(tiny.place), device="cpu", dtype="float32", length=96, slots=4)
    requests = [
        OfflineRequest(2 * n + k, tiny.prompts[n], rule.temperature, rule.seed, 12)
        for n in range(2)
        for k, rule in enumerate((GREEDY, WARM))
    ]
    texts = {text.key: text.tokens for text in generator.generate(requests)}
    assert len(set(texts.values())) == 4
    with Judge(tiny.place, 96) as judge:
        for request in requests:
            rule = (GREEDY, WARM)[request.key % 2]
            text = [*request.tokens, *texts[request.key]]
            for at in range(len(request.tokens), len(text)):
                assert int(judge.scores(text[:at], rule).argmax()) == text[at]
    # Of a token that was not chosen it says so.
    with Judge(tiny.place, 96) as judge:
        first = texts[0][0]
        (found,) = compare.compare(
            [Ask(tiny.prompts[0], GREEDY)], [[first]], [[(first + 1) % tiny.vocab]], judge
        )
    assert not found.near and found.gap > 1e-2


# ---- what is run ----------------------------------------------------------------------------------------


def test_every_way_to_place_the_ranks_is_compared() -> None:
    eight = {v.name: (v.tp, v.flags) for v in equality.variants(options("cuda", 8))}
    assert eight == {
        "tp 8, graphs": (8, ()),
        "tp 8, no graphs": (8, ("--no-cuda-graphs",)),
        "tp 4, graphs": (4, ()),
        "tp 4, no graphs": (4, ("--no-cuda-graphs",)),
        "tp 4 + 1: draft on a GPU of its own": (4, ("--draft-device=cuda:4",)),
    }
    two = [v.name for v in equality.variants(options("cuda", 2, (2,)))]
    assert two == ["tp 2, graphs", "tp 2, no graphs", "tp 1 + 1: draft on a GPU of its own"]
    assert [v.name for v in equality.variants(options())] == ["tp 8", "tp 4"]


def test_ranks_that_can_not_split_a_model_are_left_out_and_said() -> None:
    smollm = models.Model("smollm2", Path(), heads=9, kv_heads=3, vocab=49152, prompts=((1,),), flags=())
    fit, notes = equality.legal(smollm, [Variant("tp 2", 2), Variant("tp 3", 3), Variant("tp 9", 9)])
    assert [v.tp for v in fit] == [3, 9]
    assert len(notes) == 1 and "tp 2: left out" in notes[0] and "1, 3, 9" in notes[0]


def test_stacks_get_flags_that_fit_each_other(tiny: models.Model) -> None:
    flags = dict(flag.removeprefix("--").split("=") for flag in equality.flags_of(tiny, options(), 8, 10, 16))
    assert flags["tp"] == "8" and flags["dtype"] == "float32"
    assert int(flags["max-verify-rows"]) == 10 * (int(flags["tree-budget"]) + 1)
    assert int(flags["kv-tokens"]) >= 10 * int(flags["max-length"])
    assert int(flags["max-length"]) > max(map(len, tiny.prompts)) + 16


def completed(*words: str) -> argparse.Namespace:
    return tp_run.completed(tp_run.parser().parse_args(words))


def test_a_cpu_runs_eight_and_four_ranks_of_tiny_models_by_default() -> None:
    args = completed("--device", "cpu")
    assert args.tp == [8, 4] and args.shapes == ["tiny"] and args.parts == list(tp_run.PARTS)
    assert completed("--device", "cpu", "--tp", "2", "3").tp == [3, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--tp", "2", "--device", "cuda"), "there are 0 GPUs"), (("--device", "cpu", "--parts", "x"), "'x'")],
)
def test_what_can_not_be_run_is_refused(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=message):
        completed(*words)


@pytest.mark.parametrize(("failures", "code"), [(0, 0), (2, 1)])
def test_a_failure_that_a_part_counts_is_the_exit_code(
    failures: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part(figures={equality.FAILURES: failures})
    monkeypatch.setattr(tp_run, "parts_of", lambda *_: {"equality": lambda: part})
    out = tmp_path / "o.json"
    assert tp_run.main(["--device", "cpu", "--out", str(out)]) == code
    found = json.loads(out.read_text())
    assert found["parts"]["equality"]["figures"][equality.FAILURES] == failures
    assert found["provenance"]["argv"] == "python -m benchmarks.tp_run --device cpu --out o.json"


def test_parts_of_an_earlier_run_are_kept_with_where_they_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o.json"
    for name, keep in (("equality", False), ("killed", True), ("killed", True), ("shapes", False)):
        monkeypatch.setattr(
            tp_run, "parts_of", lambda *_, name=name: {name: lambda: Part(notes=[f"of {name}"])}
        )
        tp_run.main(["--device", "cpu", "--revision", name, "--out", str(out), *["--keep"] * keep])
        parts = json.loads(out.read_text())["parts"]
        if keep:
            assert list(parts) == ["equality", "killed"]
            assert parts["equality"]["provenance"]["revision"] == "equality"
            assert parts["killed"]["notes"] == ["of killed"] and "provenance" not in parts["killed"]
    assert list(parts) == ["shapes"]


# ---- shapes ---------------------------------------------------------------------------------------------


def test_gpu_round_understands_how_it_is_called(tmp_path: Path) -> None:
    asked = shapes.Options(
        ("llama-3-70b",), (8,), "cuda", "bfloat16", (1, 64), 1024, (16, 64), "gsm8k-like",
        more=("--arms", "plain"),
    )  # fmt: skip
    words = shapes.command(asked, "llama-3-70b", 8, 99.6, tmp_path / "o.json")
    args = gpu_round.parser().parse_args(words[words.index("benchmarks.gpu_round") + 1 :])
    assert (args.tp, args.concurrency, args.nodes, args.budget_s) == (8, [1, 64], [16, 64], 100.0)
    assert args.out == tmp_path / "o.json" and args.arms == "plain"
    # The floor's products are of a whole model on one GPU: many ranks are there because it does not fit.
    assert "floor" not in args.parts


def test_tables_of_several_runs_are_put_together() -> None:
    rows = [
        ["on", 1, 1024, "0", 1, 0.0, 5.0, 6.0, 4.0, 1.25, 1.0, 1.0, "-"],
        ["off", 1, 1024, "0", 1, 0.0, 8.0, 9.0, 4.0, 2.0, 1.0, 1.0, 2.0],
    ]
    found = {
        "parts": {
            "target": {"tables": {"steps": {"header": TARGET_HEADER, "rows": rows}}, "notes": ["a"]},
            "stack": {"tables": {}, "notes": []},
        }
    }
    made = [dict(zip(shapes.STEP_HEADER, row, strict=True)) for row in shapes.step_rows("s", 8, found)]
    assert [(row["graphs"], row["device / floor"], row["of step"]) for row in made] == [
        ("on", 1.25, "-"),
        ("off", 2.0, 0.25),
    ]
    assert shapes.round_rows("s", 8, found) == [] and shapes.notes_of(found) == ["target: a"]


def test_a_run_that_hangs_ends_with_all_its_processes(tmp_path: Path) -> None:
    """The child's child holds on to the pid file's process, as ranks and services would."""
    script = (
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(RuntimeError, match="did not end within 2 s"):
        shapes.run([sys.executable, "-c", script], 2.0)
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the run's own child still runs"
        time.sleep(0.02)


# ---- replicas -------------------------------------------------------------------------------------------


def test_replicas_share_gpus_and_clients() -> None:
    one, two = replicas.layouts(8)
    assert (one.name, two.name) == ("tp 8", "2 x tp 4") and replicas.layouts(1) == [replicas.Layout(1, 1)]
    own = [f"{n}" for n in range(8)]
    assert two.environments(own) == [
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
        {"CUDA_VISIBLE_DEVICES": "4,5,6,7"},
    ]
    assert two.environments([]) == [{}, {}] and one.environments(own) == [
        {"CUDA_VISIBLE_DEVICES": ",".join(own)}
    ]
    assert replicas.visible_gpus(2, {"CUDA_VISIBLE_DEVICES": "5,3,1"}) == ["5", "3"]
    assert replicas.visible_gpus(2, {}) == ["0", "1"]
    assert replicas.dealt([1, 2, 3, 4, 5], 2) == [[1, 3, 5], [2, 4]]
    bursts = [Burst((Stream([(0.0, 1), (2.0, 4)]),)), Burst((Stream([(1.0, 1), (3.0, 6)]),))]
    assert replicas.together(bursts).window == (4, 1.0)


# ---- a rank killed --------------------------------------------------------------------------------------

LOG = """\
 target | error: tensor-parallel rank 2 died (exit code -9): restart the target service
target exited with code 1; starting it again in 0.5 s (restart 1)
"""


def test_the_log_tells_of_a_clean_end() -> None:
    assert killed.Told.read(LOG).wrong(2) == []
    assert "not rank 1" in killed.Told.read(LOG).wrong(1)[0]
    crashed = LOG.replace("exited with code 1", "was killed by SIGABRT").replace("rank 2 died", "hm")
    assert len(killed.Told.read(crashed).wrong(2)) == 2
    assert len(killed.Told.read(LOG + LOG.splitlines()[1]).wrong(2)) == 1
    assert len(killed.Told.read("").wrong(2)) == 2


def test_the_longest_pause_is_one_after_the_kill() -> None:
    streams = [Stream([(0.0, 1), (5.0, 1), (6.0, 1)]), Stream([(4.0, 1), (7.5, 1)])]
    assert killed.longest_pause(streams, since=5.5) == 3.5
    assert killed.longest_pause(streams, since=8.0) == 0.0


def test_what_outlives_a_stack_is_named() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        (left,) = stacks.left_of([psutil.Process(process.pid)], stacks.shared_memory(), patience_s=0.05)
        assert "sleep" in left
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_rank_killed_while_streams_go_on(tmp_path: Path) -> None:
    """`serve --tp 2`: the service comes back by itself, texts are the undisturbed ones, nothing is left."""
    part = killed.measure(options(tp=(2,), kill_tokens=40), Budget(150.0), tmp_path)
    assert part.figures[equality.FAILURES] == 0, part.text()
    first, again = (dict(zip(killed.HEADER, row, strict=True)) for row in part.tables["a rank killed"][1])
    assert first["rank killed"] == 1 and first["reopened"] > 0
    assert first["tokens"] == 5 * 40 and again["wrong"] == first["wrong"] == 0
