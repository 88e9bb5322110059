"""The command line: exit codes, messages, which option reaches which service, chat's arithmetic."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specbridge import cli, serve, stack
from specbridge.chat import Answer, Pair, describe, difference, measure, overall, speedup, table
from specbridge.clients import Ask, GenerationClient, Message, Piece, Summary
from specbridge.errors import ConfigError, Unavailable
from specbridge.settings import load

ROOT = Path(__file__).parents[2]


def plan(tmp_path: Path, **values: Any) -> serve.Plan:
    return serve.plan(load(serve.serve_settings(), **values), tmp_path)


def flags(made: serve.Plan, name: str) -> list[str]:
    (service,) = (s for s in made.services if s.name == name)
    return list(service.command)[4:]


@pytest.mark.parametrize("words", [[], ["--help"], *([name, "--help"] for name in cli.COMMANDS)])
def test_help_of_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 0
    assert "usage: specbridge" in capsys.readouterr().out


def test_help_loads_neither_torch_nor_a_service() -> None:
    heavy = [
        "torch",
        "transformers",
        "target_service.engine",
        "draft_service.engine",
        "gateway.server",
        "numpy",
    ]
    code = (
        "import sys\nfrom specbridge import cli\n"
        "for words in (['--help'], ['serve', '--help'], ['target', '--help']):\n"
        "    try: cli.main(words)\n"
        "    except SystemExit: pass\n"
        f"print('LOADED', [name for name in {heavy} if name in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "LOADED []" in output


# Case 34: what doesn't go together is refused before anything is loaded, with the fix in the message.
INCOMPATIBLE = [
    (["--no-draft", "--draft", "some/drafter"], "--no-draft and --draft exclude each other"),
    (["--no-draft", "--draft-device", "cpu"], "--no-draft and --draft-device exclude each other"),
    (["--tree-budget", "100"], "--tree-budget 100 is above --max-tree-nodes 64"),
    (["--min-tree", "32", "--tree-budget", "16"], "--min-tree 32 is above --tree-budget 16"),
    (["--max-running", "500"], "--max-running 500 is above --max-sessions 256"),
    (["--http-port", "7777", "--grpc-port", "7777"], "both 7777"),
    (["--dtype", "int3"], "--dtype / SPECBRIDGE_DTYPE"),
    (["--device", "cpu", "--dtype", "float16"], "float16 on a CPU"),
    (["--tp", "0"], "--tp / SPECBRIDGE_TP"),
    (["--tp", "2", "--deterministic"], "deterministic is not available with tp > 1"),
    (["--kv-tokens", "100", "--max-length", "4096"], "kv_tokens 100 is below max_length 4096"),
    (["--draft-timeout", "0"], "--draft-timeout"),
    (
        ["--draft-timeout", "inf"],
        "--draft-timeout / SPECBRIDGE_DRAFT_TIMEOUT: Input should be a finite number",
    ),
    (["--draft-timeout", "nan"], "finite number (given 'nan')"),
    (
        ["--start-timeout", "inf"],
        "--start-timeout / SPECBRIDGE_START_TIMEOUT: Input should be a finite number",
    ),
    (["--target-session-lease", "1e300"], "must be at most 1e+08"),
    (["--kv-tokens", "99999999999"], "--kv-tokens / SPECBRIDGE_KV_TOKENS: must be at most"),
    (["--target-channel-slots", "8"], "unrecognized arguments"),
    (["--tree-budgets", "8"], "unrecognized arguments"),
    (["--target", "no such model"], "is not a folder here"),
    (["--target", str(ROOT / "tests")], "no drafter comes with target"),
    (["--run-dir", "/tmp/" + "x" * 100], "too long for Unix sockets"),
]


@pytest.mark.parametrize(("words", "message"), INCOMPATIBLE)
def test_options_that_can_t_work_end_with_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(["serve", *words])
    except SystemExit as caught:  # argparse's own errors
        code = int(str(caught.code))
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["target", "draft", "gateway"])
def test_each_service_alone_refuses_nonsense_with_code_2(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name, "--target", "no such model", "--metrics-port", "99999"]) == 2
    assert "--metrics-port / SPECBRIDGE_METRICS_PORT" in capsys.readouterr().err


def test_plan_wires_the_services_together(tmp_path: Path) -> None:
    made = plan(tmp_path, http_port=1234, grpc_port=1235)
    assert [service.name for service in made.services] == ["target", "draft", "gateway"]
    target, draft = f"unix:{tmp_path}/target.sock", f"unix:{tmp_path}/draft.sock"
    assert f"--listen={target}" in flags(made, "target")
    assert {f"--listen={draft}", f"--target-address={target}", "--draft=auto"} <= set(flags(made, "draft"))
    assert {f"--target-address={target}", f"--draft-address={draft}", "--grpc-listen=127.0.0.1:1235"} <= set(
        flags(made, "gateway")
    )
    assert made.endpoints["rest"] == "http://127.0.0.1:1234/v1"
    assert "http://127.0.0.1:1234/v1" in serve.announcement(made)
    for service in made.services:
        assert list(service.command)[:4] == [sys.executable, "-m", "specbridge.cli", service.name]
        assert service.env["OMP_WAIT_POLICY"] == "passive" and service.env["SPECBRIDGE_SUPERVISED"] == "1"


def test_flags_of_every_service_parse_there(tmp_path: Path) -> None:
    """What the supervisor passes is what the service understands, down to the value."""
    from specbridge.flags import add_flags

    made = plan(
        tmp_path, device="cpu", kv_tokens="8192", max_verify_rows="40", target_max_verify_rows="200", tp="2"
    )
    got = {}
    for service in made.services:
        import argparse

        parser = argparse.ArgumentParser(allow_abbrev=False)
        kind = serve.settings_class(service.name)
        add_flags(parser, kind)
        got[service.name] = load(kind, **vars(parser.parse_args(flags(made, service.name)))).model_dump()
    assert got["target"]["device"] == got["draft"]["device"] == "cpu"
    assert got["target"]["kv_tokens"] == got["draft"]["kv_tokens"] == 8192
    assert (got["gateway"]["max_verify_rows"], got["target"]["max_verify_rows"]) == (40, 200)
    assert got["target"]["tp"] == 2


def test_prefixed_option_reaches_one_service_only(tmp_path: Path) -> None:
    made = plan(tmp_path, device="cuda:0", draft_device="cuda:1", target_metrics_port="9101")
    assert "--device=cuda:0" in flags(made, "target") and "--device=cuda:1" in flags(made, "draft")
    assert "--metrics-port=9101" in flags(made, "target")
    assert made.endpoints["target metrics"] == "http://127.0.0.1:9101/metrics"


def test_every_option_is_an_environment_variable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TREE_BUDGET": "8", "TP": "2", "DRAFT_DEVICE": "cuda:1", "HTTP_PORT": "4444", "MAX_VERIFY_ROWS": "9"
    }.items():  # fmt: skip
        monkeypatch.setenv(f"SPECBRIDGE_{name}", value)
    made = plan(tmp_path)
    assert "--tree-budget=8" in flags(made, "gateway") and "--http-port=4444" in flags(made, "gateway")
    assert "--tp=2" in flags(made, "target") and "--device=cuda:1" in flags(made, "draft")
    assert "--max-verify-rows=9" in flags(made, "gateway") and "--max-verify-rows=0" in flags(made, "target")
    for service in made.services:
        left = [name for name in service.env if name.startswith("SPECBRIDGE_")]
        assert left == ["SPECBRIDGE_SUPERVISED"], "read once, by serve; a service must not read them again"
    monkeypatch.setenv("SPECBRIDGE_TP", "many")
    with pytest.raises(ConfigError, match="SPECBRIDGE_TP.*many"):
        plan(tmp_path)


def test_no_draft_starts_two_services(tmp_path: Path) -> None:
    made = plan(tmp_path, no_draft=True)
    assert [service.name for service in made.services] == ["target", "gateway"]
    assert "--draft-address=" in flags(made, "gateway")
    assert plan(tmp_path, no_draft=True, draft_timeout="0.1"), "the gateway's option, whatever its first word"


def test_secrets_are_not_on_command_lines(tmp_path: Path) -> None:
    made = plan(tmp_path, api_key="hunter2")
    for service in made.services:
        assert "hunter2" not in " ".join(service.command)
        assert service.env.get("SPECBRIDGE_API_KEY") == ("hunter2" if service.name == "gateway" else None)


def test_hub_models_are_fetched_once_by_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    made = plan(tmp_path, target="Qwen/Qwen3-8B", draft="z-lab/Qwen3-8B-DFlash-b16")
    assert all(service.env["HF_HUB_OFFLINE"] == "1" for service in made.services)
    assert all("HF_HUB_OFFLINE" not in service.env for service in plan(tmp_path).services)


def test_ranks_share_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specbridge import process

    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(process, "available_cpus", lambda: 8)
    counts = {s.name: s.env["OMP_NUM_THREADS"] for s in plan(tmp_path, tp=4).services}
    assert counts == {"target": "2", "draft": "8", "gateway": "1"}
    counts = {s.name: s.env["OMP_NUM_THREADS"] for s in plan(tmp_path, threads=3).services}
    assert counts == {"target": "3", "draft": "3", "gateway": "1"}


def test_model_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECBRIDGE_CACHE_DIR", str(tmp_path))
    assert cli.main(["model", "list"]) == 0
    assert "smollm2-135m\tnot converted" in capsys.readouterr().out
    assert cli.main(["model", "path"]) == 2
    assert "specbridge model fetch" in capsys.readouterr().err
    assert cli.main(["model", "fetch", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path)
    assert cli.main(["model", "convert", "nope"]) == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("specbridge ")


def test_exit_codes_of_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from specbridge.stack import ServiceFailed

    for error, code in ((Unavailable("gone"), 1), (ServiceFailed("x", 2), 2), (KeyboardInterrupt(), 130)):

        def run(words: Sequence[str], error: BaseException = error) -> int:
            raise error

        monkeypatch.setitem(cli.COMMANDS, "version", run)
        assert cli.main(["version"]) == code
    assert "specbridge: error: gone" in capsys.readouterr().err


def test_chat_without_a_gateway_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    from specbridge.stack import free_port

    assert cli.main(["chat", "hi", "--address", f"127.0.0.1:{free_port()}"]) == 1
    assert "the gateway at" in capsys.readouterr().err


def summary(tokens: int, **values: Any) -> Summary:
    fields = {
        "finish_reason": "stop", "prompt_tokens": 5, "completion_tokens": tokens, "cached_tokens": 0,
        "seed": 0,
        "acceptance_length": 2.5, "rounds": 4, "drafted": 10, "accepted": 6,
    }  # fmt: skip
    return Summary(**{**fields, **values})


def answer(ids: Sequence[int], seconds: float) -> Answer:
    return Answer("text", tuple(ids), 0.1, seconds, len(ids) - 1, summary(len(ids)))


def test_difference_is_the_first_position() -> None:
    base = answer([1, 2, 3], 1.0)
    assert difference(base, answer([1, 2, 3], 9.0)) is None
    assert difference(base, answer([1, 9, 3], 1.0)) == 1
    assert difference(base, answer([1, 2, 3, 4], 1.0)) == 3
    assert difference(answer([], 0.0), base) == 0


def test_speed_up_is_over_all_tokens_not_a_mean_of_ratios() -> None:
    pairs = [
        Pair("a", answer(range(11), 1.0), answer(range(11), 2.0), None),
        Pair("b", answer(range(101), 10.0), answer(range(101), 10.0), 7),
    ]
    assert overall([pair.plain for pair in pairs]) == pytest.approx(110 / 12)
    assert speedup(pairs) == pytest.approx((110 / 11) / (110 / 12))
    assert speedup([]) == 0.0
    assert answer([1], 0.0).rate == 0.0
    assert table(pairs).row_count == 2
    assert "acceptance length 2.50" in describe(pairs[0].plain)


class Scripted(GenerationClient):
    """A gateway that says the same every time."""

    def __init__(self, parts: Sequence[Piece | Summary]) -> None:
        self.parts = parts
        self.asked: list[Ask] = []

    async def generate(self, ask: Ask) -> Any:
        self.asked.append(ask)
        for part in self.parts:
            yield part


async def test_measure_counts_tokens_after_the_first_piece() -> None:
    parts = [
        Piece("The", (1,)),
        Piece(" capital", (2, 3)),
        Piece(" is", ()),
        Piece(" Paris", (4,)),
        summary(4),
    ]
    got = await measure(Scripted(parts), Ask([Message("user", "hi")]))
    assert (got.text, got.token_ids, got.decoded) == ("The capital is Paris", (1, 2, 3, 4), 3)


def test_package_data_and_state_are_json(tmp_path: Path) -> None:
    config = ROOT / "draft_service" / "checkpoints" / "smollm2-135m" / "config.json"
    assert json.loads(config.read_text())["architectures"] == ["DFlashDraftModel"]


def test_a_run_dir_that_cannot_be_a_folder_is_a_setting_that_cannot_work(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")

    async def use() -> None:
        async with stack.run_folder(str(taken)):
            raise AssertionError("not reached")

    with pytest.raises(ConfigError, match="--run-dir"):
        asyncio.run(use())
