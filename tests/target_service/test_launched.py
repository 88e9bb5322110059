"""Ranks that torchrun starts: they find each other by its environment, rank 0 serves what one process would,
and a lost rank ends the service with a sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from toy_target import TOY_LIMITS, Client, chain_tree, make_engine, open_request

from draft_service.clients import target_info, target_rounds
from specbridge.clients import is_serving
from specbridge.errors import ConfigError
from specbridge.rounds import StopParams, TargetRequest, TargetResult, TargetResultKind, Verify
from specbridge.settings import Launched, launched_by_torchrun, load
from specbridge.stack import free_port
from target_service.config import TargetSettings
from target_service.launched import find_launch
from target_service.runner import load_runner

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
STOP = StopParams(12, ignore_eos=True)
COMMAND = ("-m", "specbridge.cli", "target")
OPTIONS = ("--device=cpu", "--warmup-repeats=0", "--kv-tokens=256", "--max-length=200", "--metrics-port=-1")
WAIT_S = 180


def model(folder: Path) -> Path:
    return tiny.make_target(folder / "model", layers=2, hidden=64, heads=8, kv_heads=2)


def torchrun_s(rank: int, size: int, port: int, **more: str) -> dict[str, str]:
    """What torchrun sets for a rank of one host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        **more,
    }


@asynccontextmanager
async def processes(
    commands: Sequence[tuple[Sequence[str], dict[str, str]]], logs: Path
) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Python processes whose output goes to logs/0, ..; shown if the test fails, killed at its end."""
    started = []
    logs.mkdir(exist_ok=True)
    try:
        for number, (command, extra) in enumerate(commands):
            with (logs / str(number)).open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *command,
                    env={**os.environ, **extra},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            started.append(process)
        yield started
    except BaseException:
        for path in sorted(logs.iterdir()):
            print(f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}")
        raise
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def serving(address: str, *watched: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await is_serving(address):
            ended = [process.returncode for process in watched if process.returncode is not None]
            assert not ended, f"a process ended with {ended} before it served"
            await asyncio.sleep(0.2)


async def expected(folder: Path) -> list[int]:
    """The text of one rank in this process."""
    runner = load_runner(folder, device="cpu", num_pages=16, page_size=16, max_rows=96)
    engine = make_engine(runner, replace(TOY_LIMITS, num_pages=16, max_length=200))
    engine.start()
    text = await asyncio.to_thread(Client(engine).generate, open_request(1, PROMPT, stop=STOP))
    await asyncio.to_thread(engine.close)
    return list(text.tokens)


async def generated(address: str, want: Sequence[int]) -> list[int]:
    """The text of the service, with trees that are right."""
    found: list[TargetResult] = []
    async with target_rounds(address) as rounds:

        async def result(kind: TargetResultKind) -> TargetResult:
            async with asyncio.timeout(WAIT_S):
                while not (kept := [r for r in found if r.kind is kind]):
                    found.extend((await rounds.receive()).results)
            found.remove(kept[0])
            return kept[0]

        await rounds.send(TargetRequest(1, opens=(open_request(1, PROMPT, stop=STOP),)))
        first = await result(TargetResultKind.FIRST)
        got, kv = list(first.tokens), first.kv_length
        while len(got) < 12:
            tree = chain_tree(want[len(got) :][: min(4, 12 - len(got) - 1)])
            await rounds.send(TargetRequest(len(got) + 1, verifies=(Verify(first.session, kv, tree),)))
            verified = await result(TargetResultKind.VERIFIED)
            got, kv = [*got, *verified.tokens], verified.kv_length
    return got


async def test_two_ranks_serve_what_one_does_and_end_together(tmp_path: Path) -> None:
    """As torchrun starts them, one of them late; SIGTERM to the first ends both in good order."""
    folder, address, port = model(tmp_path), f"unix:{tmp_path}/t.sock", free_port()
    options = (*COMMAND, f"--target={folder}", f"--listen={address}", *OPTIONS)
    commands = [(options, torchrun_s(rank, 2, port)) for rank in range(2)]
    async with processes(commands, tmp_path / "logs") as (first, second):
        want = await expected(folder)
        await serving(address, first, second)
        assert (await target_info(address)).tp_size == 2
        assert await generated(address, want) == want
        first.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert (await first.wait(), await second.wait()) == (0, 0)
    assert "Traceback" not in "".join(path.read_text() for path in (tmp_path / "logs").iterdir())


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_lost_rank_ends_the_others_with_a_sentence(tmp_path: Path, lost: int) -> None:
    """In idle time: nobody asks for anything, and still nobody is left behind."""
    folder, address, port = model(tmp_path), f"unix:{tmp_path}/t.sock", free_port()
    options = (*COMMAND, f"--target={folder}", f"--listen={address}", *OPTIONS)
    commands = [(options, torchrun_s(rank, 2, port)) for rank in range(2)]
    async with processes(commands, tmp_path / "logs") as ranks:
        await serving(address, *ranks)
        ranks[lost].kill()
        async with asyncio.timeout(60):
            assert await ranks[1 - lost].wait() == 1
    said = (tmp_path / "logs" / str(1 - lost)).read_text()
    assert "lost its peers" in said and "Traceback" not in said
    if lost:
        assert "target ends: tensor-parallel rank 0 lost its peers" in said and "a rank died" in said


async def test_ranks_of_different_minds_do_not_start(tmp_path: Path) -> None:
    folder, port = model(tmp_path), free_port()
    listen = f"--listen=unix:{tmp_path}/t.sock"
    commands = [
        ((*COMMAND, f"--target={folder}", listen, *OPTIONS, *more), torchrun_s(rank, 2, port))
        for rank, more in enumerate(((), ("--max-tree-nodes=32", "--max-verify-rows=40")))
    ]
    async with processes(commands, tmp_path / "logs") as (first, second):
        async with asyncio.timeout(WAIT_S):
            assert (await first.wait(), await second.wait()) == (2, 2)
    for number in range(2):
        assert "rank 1 has another model or other settings" in (tmp_path / "logs" / str(number)).read_text()


@pytest.mark.slow
async def test_torchrun_itself(tmp_path: Path) -> None:
    folder, address = model(tmp_path), f"unix:{tmp_path}/t.sock"
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = (*run, *COMMAND, f"--target={folder}", f"--listen={address}", *OPTIONS)
    async with processes([(command, {})], tmp_path / "logs") as (agent,):
        want = await expected(folder)
        await serving(address, agent)
        assert await generated(address, want) == want
        agent.terminate()
        async with asyncio.timeout(60):
            await agent.wait()


# ---- what the environment says --------------------------------------------------------------------------


def environment(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in torchrun_s(1, 4, 29500, **values).items():
        monkeypatch.setenv(name, value)


def test_torchrun_s_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_launch(load(TargetSettings)) is None
    environment(monkeypatch, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="2")
    want = Launched(1, 4, 1, 4, "127.0.0.1", 29500, 2, True)
    assert launched_by_torchrun(required=False) == want
    assert find_launch(load(TargetSettings)) == find_launch(load(TargetSettings, tp=4)) == want
    assert find_launch(load(TargetSettings, launcher="none")) is None


def test_one_rank_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, RANK="0", WORLD_SIZE="1")
    assert find_launch(load(TargetSettings)) is None


@pytest.mark.parametrize(
    ("settings", "values", "said"),
    [
        ({"tp": 2}, {}, "--tp 2, and torchrun started 4 ranks"),
        ({"deterministic": True}, {}, "deterministic"),
        ({}, {"RANK": "four"}, "RANK is 'four' where torchrun sets a number"),
        ({}, {"RANK": "4"}, "RANK 4 is not below WORLD_SIZE 4"),
        ({}, {"MASTER_ADDR": ""}, "MASTER_ADDR is empty"),
    ],
)
def test_contradictions_are_named(
    settings: dict[str, object], values: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch, **values)
    with pytest.raises(ConfigError, match=said):
        find_launch(load(TargetSettings, **settings))


def test_torchrun_asked_for_and_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="RANK is None .* --launcher none"):
        find_launch(load(TargetSettings, launcher="torchrun"))
