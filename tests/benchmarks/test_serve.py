"""The load generator against a scripted server: what it sends, what it reads, and that its sums are right."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, serve
from benchmarks.load import picture
from benchmarks.load.arms import Arm, Server, assign, opened, order, parse_arm
from benchmarks.load.figures import collect, meets
from benchmarks.load.http import EventParser, StreamClient
from benchmarks.load.loops import Load, Turn, run_turn
from benchmarks.load.request import Outcome, Style, perform
from benchmarks.load.work import Ask
from specbridge.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent))

from scripted_server import Scripted, scripted


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with scripted() as found:
        yield found


async def asked(server: Scripted, script: Any, **more: Any) -> Outcome:
    style = more.pop("style", Style())
    text = script if isinstance(script, str) else json.dumps(script)
    more = {"timeout_s": 20.0, **more}
    async with StreamClient(server.url, headers={"authorization": "Bearer k"}) as client:
        return await perform(client, Ask(3, text, 7, seed=5), style, "m", due=time.perf_counter(), **more)


# ---- one request ----------------------------------------------------------------------------


async def test_a_request_asks_and_reads_no_more_than_openai_has(server: Scripted) -> None:
    outcome = await asked(server, {"tokens": 9, "chunks": 4, "pause": 0.01})
    assert outcome.ok, outcome.message
    assert (outcome.chunks, len(outcome.gaps), outcome.completion_tokens) == (4, 3, 9)
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.usage) == (10, 4, True)
    assert (outcome.rounds, outcome.spec_steps, outcome.accepted) == (4, 2, 3)
    # The role event came at once, but is no text: the first text came after a pause.
    assert 0.01 <= outcome.ttft <= outcome.e2e
    assert sum(outcome.gaps) == pytest.approx(outcome.last - outcome.first)
    assert outcome.tpot == pytest.approx(sum(outcome.gaps) / 8)
    body = server.bodies[-1]
    assert set(body) == {"model", "max_tokens", "stream", "stream_options", "messages", "temperature", "seed"}
    assert body["stream_options"] == {"include_usage": True} and body["seed"] == 5
    assert server.headers[-1]["authorization"] == "Bearer k"

    style = Style(chat=False, temperature=None, ignore_eos=True, extra={"max_tokens": 3, "top_k": 4})
    outcome = await asked(server, {"do": "bare", "chunks": 2}, style=style)
    assert outcome.ok and not outcome.usage and outcome.completion_tokens == 2  # its chunks
    assert (
        set(server.bodies[-1]) >= {"prompt", "ignore_eos", "top_k"} and server.bodies[-1]["max_tokens"] == 3
    )


@pytest.mark.parametrize(
    ("do", "kind", "says"),
    [
        ("break", "HTTP 500", "a defect"),
        ("drop", "connection", "closed before"),
        ("hang", "timeout", "0.2 s"),
        ("cut", "cut off", "finish_reason"),
        ("garbage", "malformed", "{not json"),
        ("error", "error event", "went wrong"),
        ("silent", "no text", "without text"),
        ("plain", "malformed", "application/json"),
    ],
)
async def test_failures_are_counted_by_kind(server: Scripted, do: str, kind: str, says: str) -> None:
    outcome = await asked(server, {"do": do}, timeout_s=0.2)
    assert outcome.error == kind and says in outcome.message
    assert outcome.ended > outcome.sent and not meets(outcome, {})
    # Nothing of it stays in the way of the next.
    assert (await asked(server, {})).ok


async def test_nobody_listening_is_a_connection_error() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        async with StreamClient(f"http://127.0.0.1:{sock.getsockname()[1]}/v1") as client:
            outcome = await perform(client, Ask(0, "x", 1), Style(), "m", due=0.0, timeout_s=1.0)
    assert outcome.error == "connection"


async def test_a_refusal_is_tried_again_only_if_asked_to(server: Scripted) -> None:
    once = await asked(server, {"do": "refuse", "key": "a", "times": 2})
    assert (once.error, once.refusals, once.message) == ("HTTP 429", 1, "full")
    thrice = await asked(server, {"do": "refuse", "key": "b", "times": 2}, retries=2)
    assert thrice.ok and thrice.refusals == 2 and thrice.ttft >= 0.02  # the waits are the request's own time


async def test_a_kept_connection_that_the_server_closed_is_no_failure() -> None:
    """The second request finds the kept connection closed just as it is sent, and takes a new one."""
    connections, ended = 0, asyncio.Semaphore(0)

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b'"m"')
        event = b'data: {"choices": [{"text": "x", "finish_reason": "stop"}]}\n\n'
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {len(event)}\r\n\r\n"
        writer.write(head.encode() + event)
        with contextlib.suppress(asyncio.IncompleteReadError):  # after the second request the client goes
            await reader.readuntil(b"POST")  # the next request begins, and is dropped
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        ended.release()

    listening = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with StreamClient(f"http://127.0.0.1:{port}") as client:
        for _ in range(2):
            outcome = await perform(client, Ask(0, "x", 1), Style(), "m", due=0.0, timeout_s=5.0)
            assert outcome.ok, outcome.message
    assert connections == 2
    listening.close()
    for _ in range(2):
        await ended.acquire()


def test_events_are_the_same_however_the_bytes_are_cut() -> None:
    data = ": hi\n\ndata: one\n\nevent: x\r\ndata:two\r\ndata: three ü\r\n\r\ndata: [DONE]\n\n".encode()
    rng = random.Random(1)
    for _ in range(200):
        parser, events, at = EventParser(), [], 0
        while at < len(data):
            size = rng.randint(1, 12)
            events += parser.feed(data[at : at + size])
            at += size
        assert events == [b"one", "two\nthree ü".encode(), b"[DONE]"]
    parser = EventParser()
    assert parser.feed(b"data: last\n") == [] and parser.end() == [b"last"]


# ---- loops ----------------------------------------------------------------------------------


async def run(server: Scripted, load: Load, asks: list[Ask], due: list[float]) -> Turn:
    turn = Turn("a", load, 1)
    async with StreamClient(server.url) as client:

        async def send(ask: Ask, at: float) -> Outcome:
            return await perform(client, ask, Style(), "m", due=at, timeout_s=20.0)

        await run_turn(turn, asks, send, due)
    return turn


async def test_a_closed_loop_keeps_its_streams_busy_and_an_open_one_its_times(server: Scripted) -> None:
    server.most = 0
    asks = [Ask(i, json.dumps({"pause": 0.005}), 8) for i in range(12)]
    turn = await run(server, Load(streams=3), asks, [])
    assert server.most == 3 and turn.complete
    assert [o.index for o in turn.outcomes] == list(range(12)) and all(o.ok for o in turn.outcomes)
    assert turn.tokens_per_second == pytest.approx(12 * 8 / turn.seconds)

    due = [0.0, 0.01, 0.05, 0.2]
    turn = await run(server, Load(rate=20.0), asks[:4], due)
    began = turn.outcomes[0].due
    assert [o.due - began for o in turn.outcomes] == pytest.approx(due)
    assert all(o.sent >= o.due for o in turn.outcomes) and turn.late < 5


async def test_256_streams_in_one_process(server: Scripted) -> None:
    server.most = 0
    asks = [Ask(i, json.dumps({"pause": 0.05, "chunks": 6}), 8) for i in range(256)]
    turn = await run(server, Load(streams=256), asks, [])
    assert len(turn.outcomes) == 256 and {o.error for o in turn.outcomes} == {""}
    assert server.most > 128  # at a time, indeed


async def test_a_cancelled_turn_keeps_what_had_ended() -> None:
    async def send(ask: Ask, at: float) -> Outcome:
        if ask.index == 2:
            await asyncio.sleep(60)
        now = time.perf_counter()
        return Outcome(ask.index, at, sent=now, first=now, last=now, ended=now, completion_tokens=5)

    turn = Turn("a", Load(streams=1), 1)
    task = asyncio.create_task(run_turn(turn, [Ask(i, "", 1) for i in range(4)], send))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [o.index for o in turn.outcomes] == [0, 1] and not turn.complete
    [found] = collect([turn], ["a"], {})
    assert found.partial and found.requests == 2


# ---- arms -----------------------------------------------------------------------------------


def test_arms_take_turns_in_both_orders() -> None:
    arms = [Arm(name) for name in "abc"]
    orders = ["".join(arm.name for arm in order(arms, repeat)) for repeat in range(4)]
    assert orders == ["abc", "cba", "abc", "cba"]


def test_arms_by_preset_flags_and_address() -> None:
    assert parse_arm("plain", spec_flags=["--draft=x"], flags=["--dtype=float32"]).flags == (
        "--dtype=float32", "--no-draft",
    )  # fmt: skip
    assert parse_arm("chain:7", spec_flags=["--draft=x"], most_streams=4).flags == (
        "--draft=x", "--budget=fixed", "--top-k=1", "--tree-budget=7", "--max-verify-rows=32", "--min-tree=4",
    )  # fmt: skip
    assert parse_arm("adaptive", most_streams=128).flags == ("--budget=cost", "--max-running=128")
    assert parse_arm("w=--tree-budget 9 --log-level 'x y'").flags == (
        "--tree-budget",
        "9",
        "--log-level",
        "x y",
    )
    assert parse_arm("peer=http://h:1/").url == parse_arm("peer=http://h:1/v1").url == "http://h:1/v1"
    for word in ("vllm", "plain:3", "tree:", "tree:0", "a b=--x", "x=serve", "x=--a 'b"):
        with pytest.raises(ConfigError, match=re.escape(word)):
            parse_arm(word)
    peers = [Arm("p", url="http://h/v1"), Arm("q", url="http://i/v1"), Arm("own")]
    assert assign(peers, ["q=two", "one"], "--model") == {"p": "one", "q": "two"}
    with pytest.raises(ConfigError, match="--api-key"):
        assign([Arm("own")], ["k"], "--api-key")


def test_a_server_by_address_says_what_is_not_real_in_it(server: Scripted) -> None:
    arm = Arm("peer", url=server.url)
    try:
        with opened(arm) as found:
            assert (found.model, found.synthetic) == ("scripted", {})
        server.model = {"id": "q", "dummy_weights": True, "simulated_acceptance": "3"}
        with opened(arm) as found:
            assert (found.model, found.synthetic) == (
                "q",
                {"dummy_weights": True, "simulated_acceptance": "3"},
            )
        server.model = {}
        with opened(Arm("peer", url=server.url, model="named")) as found:
            assert found.model == "named"
        with pytest.raises(ConfigError, match="--model peer=NAME"), opened(arm):
            pass
    finally:
        server.model = {"id": "scripted"}


@pytest.mark.parametrize("preset", ["plain", "chain", "tree", "adaptive", "chain:7", "tree:100"])
def test_presets_are_flags_that_a_stack_takes(preset: str) -> None:
    from command_lines import check_specbridge

    arm = parse_arm(preset, most_streams=256)
    check_specbridge(["specbridge", "serve", *arm.flags])


# ---- the whole ------------------------------------------------------------------------------


def test_a_run_from_arguments_to_report_and_picture(
    server: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "--arm", f"one={server.url}", "--arm", f"two={server.url}", "--streams", "1", "2", "--requests", "4",
        "--repeats", "2", "--output-tokens", "3:0.5", "6:0.5", "--input-tokens", "12", "--tokenizer", "bytes",
        "--goodput", "ttft:5000", "--out", str(tmp_path / "r.json"), "--api-key", "two=secret",
        "--keep-requests",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["serve.py", *words])
    server.headers.clear()
    assert serve.main(words) == 0
    shown = capsys.readouterr()
    text = (tmp_path / "r.json").read_text()
    body = json.loads(text)
    assert "secret" not in text and body["provenance"]["argv"][-2] == "***"
    measured = [(t["streams"], t["arm"]) for t in body["turns"]]
    both = [
        "one",
        "two",
        "two",
        "one",
        "one",
        "two",
    ]  # warm-up in the order that leaves the first turn to one
    assert [arm for _, arm in measured] in ([*both, *both], [*both[::-1], *both[::-1]])
    keys = [h.get("authorization", "") for h in server.headers]
    assert keys.count("Bearer secret") == 4 * 6 and keys.count("") == 4 * 6
    assert [row[:2] for row in body["rows"]] == [
        ["1 stream", "one"], ["1 stream", "two"], ["2 streams", "one"], ["2 streams", "two"],
    ]  # fmt: skip
    row = dict(zip(body["header"], body["rows"][1], strict=True))
    assert (
        row["good %"] == 100.0 and row["requests"] == 8 and row["errors"] == "0" and row["tokens/round"] > 0
    )
    assert "TTFT p50" in shown.out and "| 2 streams | two |" in shown.out
    assert len(body["turns"][0]["outcomes"]) == 4 and body["ended"] == ""


def test_load_points_have_counts_and_arms_have_fields_of_their_own(server: Scripted, tmp_path: Path) -> None:
    words = [
        "--arm", f"one={server.url}", "--arm", f"two={server.url}", "--streams", "1", "3",
        "--requests", "2", "5", "--repeats", "1", "--warmup", "1", "--short-warmup",
        "--extra-body", '{"top_k": 3, "user": "all"}', "--extra-body", 'two={"top_k": 7}',
        "--out", str(tmp_path / "r.json"),
    ]  # fmt: skip
    server.bodies.clear()
    assert serve.main(words) == 0
    turns = json.loads((tmp_path / "r.json").read_text())["turns"]
    counts = {(t["streams"], t["repeat"] > 0, t["requests"]) for t in turns}
    assert counts == {(1, False, 1), (1, True, 2), (3, False, 3), (3, True, 5)}
    assert [b["top_k"] for b in server.bodies].count(7) == 11 == len(server.bodies) // 2
    assert {b["user"] for b in server.bodies} == {"all"}


def test_an_interrupted_run_reports_what_it_has(
    server: Scripted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = 0

    def interrupted(turn: Turn) -> None:
        nonlocal turns
        turns += 1
        if turns == 3:  # after the warm-up and one measured turn
            raise KeyboardInterrupt

    monkeypatch.setattr(serve, "_say", interrupted)
    words = ["--arm", f"one={server.url}", "--arm", f"two={server.url}", "--streams", "2", "--requests", "2"]
    assert serve.main(words) == 130
    shown = capsys.readouterr().out
    assert "| 2 streams | one |" in shown or "| 2 streams | two |" in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_first_turn_shows_what_had_ended(server: Scripted, number: signal.Signals) -> None:
    words = ["--arm", f"one={server.url}", "--streams", "2", "--warmup", "0", "--requests", "100000"]
    before = len(server.bodies)
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serve", *words], cwd=common.ROOT.parent, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        while len(server.bodies) < before + 20:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        out, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "interrupted" in said and "one (partial)" in out


def test_one_at_a_time_opens_a_stack_for_its_turn_only(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    @contextmanager
    def opened(arm: Arm) -> Iterator[Server]:
        events.append(f"open {arm.name}")
        yield Server(arm, server.url, "scripted", {})
        events.append(f"close {arm.name}")

    monkeypatch.setattr(serve, "opened", opened)
    monkeypatch.setattr(serve, "_say", lambda turn: events.append(f"{turn.load.streams} {turn.repeat}"))
    words = "--arms plain tree --streams 1 2 --requests 2 --repeats 2 --one-at-a-time"
    assert serve.main(words.split()) == 0
    turn = {r: ["1 0", f"1 {r}", "2 0", f"2 {r}"] for r in (1, 2)}
    assert events == [
        "open plain", *turn[1], "close plain", "open tree", *turn[1], "close tree",
        "open tree", *turn[2], "close tree", "open plain", *turn[2], "close plain",
    ]  # fmt: skip


def test_a_stack_that_does_not_start_leaves_what_was_measured(
    server: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def second_fails(arm: Arm) -> Iterator[Server]:
        if arm.name == "tree":
            raise SystemExit("specbridge serve ended with exit code 3")
        yield Server(arm, server.url, "scripted", {})

    monkeypatch.setattr(serve, "opened", second_fails)
    out = tmp_path / "r.json"
    words = "--arms plain tree --streams 1 --requests 2 --repeats 1 --warmup 0 --one-at-a-time --out"
    assert serve.main([*words.split(), str(out)]) == 1
    shown = capsys.readouterr()
    assert "exit code 3; what was measured" in shown.err and "| 1 stream | plain |" in shown.out
    assert json.loads(out.read_text())["ended"].endswith("exit code 3")
    with pytest.raises(SystemExit, match="exit code 3"):
        serve.main(["--arms", "tree", "--streams", "1"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--streams", "0"], "--streams 0"),
        (["--streams", "1", "--rates", "2"], "exclude each other"),
        (["--rates", "-1"], "--rates -1"),
        (["--repeats", "0"], "--repeats 0"),
        (["--timeout", "0"], "--timeout 0"),
        (["--streams", "4", "8", "--requests", "7"], "--requests 7"),
        (["--extra-body", "[1]"], "[1]"),
        (["--extra-body", "plain={"], "plain={"),
        (["--streams", "4", "8", "--requests", "8", "8", "8"], "3 numbers for 2 load points"),
        (["--streams", "4", "8", "--requests", "8", "7"], "--requests 7"),
        (["--arms", "plain", "plain"], "'plain'"),
        (["--plot", "x.bmp"], "x.bmp"),
        (["--arm", "x=http://127.0.0.1:1", "--streams", "1"], "127.0.0.1:1"),
        (["--model", "m"], "--model"),
    ],
)
def test_wrong_arguments_are_named(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(words) == 2
    assert says in capsys.readouterr().err


def test_documented_commands_are_runs_that_could_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    from command_lines import ROOT, check_specbridge, in_documents

    monkeypatch.setattr(picture, "check", lambda path: None)  # the extra may be missing here
    lines = [line for page in (ROOT / "docs/benchmarks.md",) for line in in_documents(page)]
    runs = [shlex.split(line)[3:] for line in lines if line.startswith("python -m benchmarks.serve")]
    runs += [
        shlex.split(line)[3:]
        for line in (serve.__doc__ or "").splitlines()
        if line.startswith("    python -m benchmarks.serve")
    ]
    assert len(runs) >= 7
    for words in runs:
        for arm in serve.Campaign(serve.arguments().parse_args(words)).arms:
            if not arm.url:
                check_specbridge(["specbridge", "serve", *arm.flags])
