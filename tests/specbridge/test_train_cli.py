"""`specbridge train` as docs/training.md leads through it, on a smaller scale."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from specbridge import cli, train_cli, train_common, train_eval

DOC = Path(__file__).parents[2] / "docs" / "training.md"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the page's script makes."""
    folder = tmp_path_factory.mktemp("training")
    found = re.search(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    (folder / "tiny_target.py").write_text(found[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        runpy.run_path("tiny_target.py")
    return folder


@pytest.fixture(autouse=True)
def _here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    # This process has chosen its threads and its logs.
    monkeypatch.setattr(train_cli, "default_environment", lambda **_: None)
    monkeypatch.setattr(train_cli, "configure_logging", lambda *_: None)


def data(*more: str) -> int:
    return cli.main(
        ["train", "data", "train.jsonl", "--target", "tiny-target", "--out", "data", "--device", "cpu",
         "--max-tokens", "12", "--exclude", "held-out.jsonl", *more]
    )  # fmt: skip


def test_from_prompts_to_a_drafter(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data("--limit", "40", "--temperatures", "0:1", "1:1", "--license", "ours") == 0
    manifest = json.loads((place / "data" / "manifest.json").read_text())
    assert manifest["responses"] == 40 and manifest["temperatures"] == [0.0, 1.0]
    assert manifest["sources"] == {"train": 280} and manifest["notes"]["license"] == "ours"
    # The same again has nothing to do; without the limit, the rest.
    before = sorted(path.name for path in (place / "data").glob("*.safetensors"))
    assert data("--limit", "40", "--temperatures", "0:1", "1:1") == 0
    assert sorted(path.name for path in (place / "data").glob("*.safetensors")) == before
    assert "40 of 40 answers are in data (0 tokens new)" in capsys.readouterr().err

    fit = ["train", "fit", "--target", "tiny-target", "--data", "data", "--out", "drafter", "--device", "cpu",
           "--layers", "1", "--block-size", "4", "--mask-token-id", "259", "--steps", "3"]  # fmt: skip
    assert cli.main(fit) == 0
    assert cli.main(["train", "head", "drafter", "--data", "data", "--size", "64"]) == 0
    with safe_open("drafter/draft_vocabulary.safetensors", "pt") as kept:
        assert len(kept.get_tensor("draft_vocabulary")) == 64 and 0 < float(kept.metadata()["coverage"]) < 1
    assert cli.main(["train", "bigrams", "drafter", "--data", "data", "--pairs", "50"]) == 0
    assert re.search(
        r"draft_bigrams.safetensors: \d+ pairs, which are \d+\.\d\d% of all", capsys.readouterr().err
    )

    compare = ["train", "eval", "held-out.jsonl", "train.jsonl", "--target", "tiny-target", "--device", "cpu",
               "--draft", "whole=drafter@0", "--draft", "cut=drafter", "--count", "2", "--max-tokens", "8",
               "--nodes", "0,4", "--rules", "plain", "shared", "bigrams", "--out", "eval.json"]  # fmt: skip
    assert cli.main(compare) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\| whole \| T=0 \| held-out \| \d\.\d\d", printed)
    assert re.search(r"\| cut \| T=1 shared noise \| all \| \d\.\d\d ±\d\.\d\d", printed)
    results = json.loads((place / "eval.json").read_text())["results"]
    assert len(results) == 2 * 5 * 3 * 2 and all(row["acceptance_length"] >= 1 for row in results)
    assert {row["texts"] for row in results if row["prompts"] == "all"} == {4}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--part", "3/2"], "--part '3/2' is not I/N"),
        (["--samples", "0"], "--samples is 0; it must be 1 or more"),
        (["--max-prompt-tokens", "3"], "no prompt is left"),
        (["--temperatures", "hot"], "--temperatures 'hot'"),
        (["--out", "train.jsonl"], "--out: nothing can be written to the folder 'train.jsonl'"),
        (["--out", "train.jsonl/below"], "--out: nothing can be written to the folder 'train.jsonl/below'"),
    ],
)
def test_what_can_not_work_is_said(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "train.jsonl/told.json"], "--out: nothing can be written to the folder 'train.jsonl'"),
        (["--out", "tiny-target"], "--out 'tiny-target' is a folder: name the JSON file"),
        (["--skip", "300"], "--skip 300 leaves no prompt"),
    ],
)
def test_what_can_not_be_evaluated_is_said_before_the_work(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(train_eval, "load_generator", work)
    told = ["train", "eval", "held-out.jsonl", "--target", "tiny-target", "--draft", "tiny-target", *words]
    assert cli.main(told) == 2
    assert message in capsys.readouterr().err


def test_no_time_to_go_is_told_from_the_first_of_many(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wave of 32 texts side by side takes 40 s: one of 560 ended so far says 22,360 s, the wave 660 s."""
    clock = [0.0]
    monkeypatch.setattr(train_common.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(train_common.sys.stderr, "isatty", lambda: False, raising=False)
    with train_common.Bar("answers", 560) as bar:
        for second, done in ((40.0, 1), (40.0, 32), (80.0, 64)):
            clock[0] = second
            bar.show(done, "3 tokens/s")
    assert capsys.readouterr().err.splitlines() == [
        "1 of 560 answers, 3 tokens/s",
        "64 of 560 answers, 3 tokens/s, 620 s to go",
    ]


def test_what_is_complete_when_a_run_is_terminated_is_kept(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draft_service.training.shards import ShardWriter

    handler, add, added = signal.getsignal(signal.SIGTERM), ShardWriter.add, []

    def third(self: ShardWriter, *args: object, **kwargs: object) -> None:
        add(self, *args, **kwargs)  # type: ignore[arg-type]
        added.append(1)
        if len(added) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ShardWriter, "add", third)
    assert data("--limit", "10", "--out", "cut") == 130
    assert signal.getsignal(signal.SIGTERM) is handler
    assert json.loads((place / "cut" / "manifest.json").read_text())["responses"] == len(added) == 3
    assert data("--limit", "10", "--out", "cut") == 0
    assert json.loads((place / "cut" / "manifest.json").read_text())["responses"] == len(added) == 10


def test_parts_are_a_whole(place: Path) -> None:
    from draft_service.training.shards import Shards

    for part in ("1/2", "2/2"):
        words = ["--limit", "14", "--part", part, "--out", f"part-{part[0]}", "--max-tokens", "3"]
        assert data(*words, "--temperatures", "0") == 0
    both = Shards([place / "part-1", place / "part-2"])
    assert len(both) == len(set(both.keys.tolist())) == 14
    assert torch.tensor(both.prompt_lengths).min() > 20  # the chat template's words are there
