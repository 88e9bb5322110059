"""The supervisor, over real processes that answer health checks and misbehave as told."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from specbridge import process, stack
from specbridge.clients import wait_attached
from specbridge.errors import ConfigError
from specbridge.stack import Limits, Service, ServiceFailed, Stack

FAKE = str(Path(__file__).parents[1] / "helpers" / "fake_process.py")
ROOT = str(Path(__file__).parents[2])
QUICK = Limits(
    start_timeout=30.0, max_restarts=2, calm=60.0, backoff_first=0.05, backoff_max=0.2, drain=5.0, stop=5.0
)


@pytest.fixture
async def folder() -> AsyncIterator[Path]:
    async with stack.run_folder() as made:
        yield made


def service(folder: Path, name: str, *options: str) -> Service:
    address = f"unix:{folder / name}.sock"
    env = stack.service_environment(1, 1, (), PYTHONPATH=ROOT)
    return Service(name, [sys.executable, FAKE, address, "--name", name, *options], address, env)


async def gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)


async def restarted(child: stack.Child, count: int = 1) -> None:
    async with asyncio.timeout(30):
        while child.restarts < count:
            await asyncio.sleep(0.02)
        await child.serving.wait()


async def test_start_waits_for_health_then_stop_ends_the_last_started_first(folder: Path) -> None:
    log, waits, lines = folder / "log", [], []
    made = Stack(
        [
            service(folder, "target", "--log", str(log), "--serve-after", "1.2"),
            service(folder, "gateway", "--log", str(log), "--drain", "0.3", "--say", "hello"),
        ],
        QUICK,
        write=lines.append,
    )
    await made.start(lambda missing, seconds: waits.append(missing))
    assert all(child.serving.is_set() for child in made.children)
    assert waits and waits[-1] == "target"
    pids = [child.pid for child in made.children]
    await made.stop()
    events = [line.rsplit(" ", 1)[0] for line in log.read_text().splitlines()]
    assert events[2:] == ["gateway term", "gateway ended", "target term", "target ended"]
    assert any(line == "gateway | hello" for line in lines)
    for pid in pids:
        assert pid is not None
        await gone(pid)


async def test_killed_service_comes_back_at_its_address_and_the_others_stay(folder: Path) -> None:
    changes: list[list[int | None]] = []
    made = Stack(
        [service(folder, "target"), service(folder, "draft")],
        QUICK,
        write=lambda line: None,
        on_change=lambda s: changes.append([child.pid for child in s.children]),
    )
    await made.start()
    target, draft = made.children
    before, other = target.pid, draft.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    await restarted(target)
    assert target.pid not in (None, before) and draft.pid == other and draft.restarts == 0
    assert changes[-1] == [target.pid, other]
    await made.stop()


async def test_death_before_serving_ends_the_stack_with_its_last_lines_and_no_retry(folder: Path) -> None:
    log = folder / "log"
    made = Stack(
        [
            service(folder, "target", "--log", str(log)),
            service(
                folder,
                "draft",
                "--exit-at-once",
                "--code",
                "3",
                "--say",
                "no such file",
                "--log",
                str(log),
            ),
        ],
        QUICK,
        write=lambda line: None,
    )
    with pytest.raises(
        ServiceFailed, match=r"(?s)draft exited with code 3 before it served.*no such file"
    ) as caught:
        await made.start()
    assert caught.value.code == 1
    await made.stop()
    assert log.read_text().count("draft started") == 1
    assert not any(child.pid for child in made.children)


async def test_config_error_of_a_service_is_the_stack_s_exit_code(folder: Path) -> None:
    made = Stack([service(folder, "target", "--exit-at-once", "--code", "2")], QUICK, write=lambda line: None)
    with pytest.raises(ServiceFailed) as caught:
        await made.start()
    assert caught.value.code == 2
    await made.stop()


async def test_crash_loop_ends_the_stack(folder: Path) -> None:
    told = folder / "told"
    crashes = service(folder, "draft", "--does", "exit", "--when", str(told), "--say", "boom")
    made = Stack([crashes], QUICK, write=lambda line: None)
    await made.start()
    told.touch()
    with pytest.raises(ServiceFailed, match=r"(?s)draft exited with code 1; its last lines:.*boom"):
        async with asyncio.timeout(30):
            await made.wait()
    assert made.children[0].restarts == QUICK.max_restarts
    await made.stop()


async def test_crash_that_does_not_repeat_is_survived(folder: Path) -> None:
    once, told = str(folder / "once"), folder / "told"
    crashes = service(folder, "draft", "--does", "exit", "--when", str(told), "--once", once)
    made = Stack([crashes], QUICK, write=lambda line: None)
    await made.start()
    told.touch()
    await restarted(made.children[0])
    await made.stop()


@pytest.mark.parametrize(
    ("how", "said"), [("freeze", "has not answered its health check"), ("unready", "has been NOT_SERVING")]
)
async def test_service_that_hangs_is_killed_and_started_again(
    folder: Path, how: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    limits = dataclasses.replace(QUICK, hang_timeout=1.5)
    told = folder / "told"
    hangs = service(folder, "target", "--does", how, "--when", str(told), "--once", str(folder / "once"))
    made = Stack([hangs, service(folder, "draft")], limits, write=lambda line: None)
    await made.start()
    target, draft = made.children
    pid, other = target.pid, draft.pid
    assert pid is not None
    told.touch()
    await restarted(target)
    await gone(pid)
    assert f"target {said} for 1.5 s: killing it" in caplog.text
    assert f"target {said} for 1.5 s; starting it again" in caplog.text
    # What came back is well, and stays.
    await asyncio.sleep(2 * limits.hang_timeout)
    assert (target.restarts, draft.restarts, draft.pid) == (1, 0, other)
    await made.stop()


async def test_gateway_without_its_target_and_a_hang_limit_of_0_are_no_hangs(folder: Path) -> None:
    told = folder / "told"
    unready = "--does", "unready", "--when", str(told)
    mirrors = dataclasses.replace(service(folder, "gateway", *unready), mirrors_others=True)
    made = Stack([mirrors], dataclasses.replace(QUICK, hang_timeout=0.4), write=lambda line: None)
    patient = dataclasses.replace(QUICK, hang_timeout=0.0)
    other = Stack([service(folder, "draft", *unready)], patient, write=lambda line: None)
    await asyncio.gather(made.start(), other.start())
    told.touch()
    await asyncio.sleep(2.0)
    assert made.children[0].restarts == other.children[0].restarts == 0
    assert made.children[0].pid and other.children[0].pid
    await asyncio.gather(made.stop(), other.stop())


async def test_restarted_service_that_never_serves_is_not_waited_for_for_ever(folder: Path) -> None:
    limits = dataclasses.replace(QUICK, max_restarts=1)
    made = Stack([service(folder, "draft", "--log", str(folder / "log"))], limits, write=lambda line: None)
    await made.start()
    child = made.children[0]
    child._limits = dataclasses.replace(limits, start_timeout=1.0)
    child.service = service(folder, "draft", "--serve-after", "60")
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ServiceFailed, match=r"draft did not become ready within"):
        async with asyncio.timeout(30):
            await made.wait()
    await made.stop()


async def test_service_deaf_to_sigterm_is_killed_with_what_it_started(folder: Path) -> None:
    log = folder / "log"
    limits = Limits(drain=0.5, stop=0.5)
    made = Stack(
        [service(folder, "target", "--ignore-term", "--child", "--log", str(log))],
        limits,
        write=lambda line: None,
    )
    await made.start()
    child = int(log.read_text().split("child ")[1].split()[0])
    pid = made.children[0].pid
    assert pid is not None and psutil.pid_exists(child)
    await made.stop()
    await gone(pid)
    await gone(child)


async def test_start_gives_up_on_a_service_that_never_serves(folder: Path) -> None:
    limits = Limits(start_timeout=1.5, drain=2.0, stop=2.0)
    made = Stack([service(folder, "target", "--serve-after", "60")], limits, write=lambda line: None)
    with pytest.raises(ServiceFailed, match="target did not become ready within"):
        await made.start()
    await made.stop()
    assert made.children[0].pid is None


async def test_nobody_is_orphaned_when_the_supervisor_is_killed(folder: Path) -> None:
    log = folder / "log"
    script = (
        "import asyncio, sys\n"
        "from specbridge import stack\n"
        "async def main():\n"
        f"    env = stack.service_environment(1, 1, ())\n"
        f"    address = 'unix:{folder}/t.sock'\n"
        f"    command = [sys.executable, {FAKE!r}, address, '--log', {str(log)!r}]\n"
        f"    s = stack.Service('t', command, address, env)\n"
        "    made = stack.Stack([s])\n"
        "    await made.start()\n"
        "    print(made.children[0].pid, flush=True)\n"
        "    await made.wait()\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, "PYTHONPATH": ROOT}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env
    ) as supervisor:
        assert supervisor.stdout is not None
        pid = int(await asyncio.to_thread(supervisor.stdout.readline))
        supervisor.kill()
    await gone(pid)
    assert "fake ended" in log.read_text(), "it should drain on its own, not be shot"


async def test_state_file_says_who_runs_where(folder: Path) -> None:
    made = Stack([service(folder, "target")], QUICK, write=lambda line: None)
    await made.start()
    stack.write_state(folder / "stack.json", made, {"grpc": "127.0.0.1:1"})
    state = json.loads((folder / "stack.json").read_text())
    assert state == {"endpoints": {"grpc": "127.0.0.1:1"}, "pids": {"target": made.children[0].pid}}
    await made.stop()


async def test_run_folder_is_private_and_removed(tmp_path: Path) -> None:
    async with stack.run_folder() as made:
        assert made.stat().st_mode & 0o077 == 0
        assert len(str(made / "gateway.sock")) < 108
    assert not made.exists()
    async with stack.run_folder(str(tmp_path / "own")) as made:
        pass
    assert made.exists(), "a folder the user named is the user's"
    with pytest.raises(ConfigError, match="too long for Unix sockets"):
        async with stack.run_folder(str(tmp_path / ("x" * 90))):
            pass


def test_service_environment_drops_options_and_keeps_the_user_s_thread_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECBRIDGE_TREE_BUDGET", "9")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    env = stack.service_environment(0, 1, {"SPECBRIDGE_TREE_BUDGET"}, HF_HUB_OFFLINE="1")
    assert "SPECBRIDGE_TREE_BUDGET" not in env
    assert (env["OMP_NUM_THREADS"], env["OMP_WAIT_POLICY"], env["HF_HUB_OFFLINE"]) == ("3", "passive", "1")
    assert stack.service_environment(5, 1, ())["OMP_NUM_THREADS"] == "5", "a flag wins over the environment"


def test_available_cpus_respects_a_container_s_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(process, "_CPU_MAX", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert process.available_cpus() == 8
    quota.write_text("150000 100000\n")
    assert process.available_cpus() == 2
    quota.write_text("max 100000\n")
    assert process.available_cpus() == 8
    assert process.thread_environment(processes=4)["OMP_NUM_THREADS"] == "2"
    assert process.thread_environment(processes=16)["OMP_NUM_THREADS"] == "1"


def test_grpc_knows_the_variables_we_set_and_reads_them_after_us() -> None:
    """An experiment that a newer gRPC has dropped is reported at import; an earlier import misses them."""
    script = (
        "import sys, specbridge.cli, specbridge.process; assert 'grpc' not in sys.modules\n"
        "import os; os.environ.update(specbridge.process.rpc_environment()); import grpc"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_free_ports_differ() -> None:
    assert len({stack.free_port() for _ in range(20)}) > 1


async def test_stop_while_starting_leaves_nothing(folder: Path) -> None:
    made = Stack([service(folder, "target", "--serve-after", "60")], QUICK, write=lambda line: None)
    starting = asyncio.create_task(made.start())
    async with asyncio.timeout(30):
        while made.children[0].pid is None:
            await asyncio.sleep(0.01)
    pid = made.children[0].pid
    starting.cancel()
    began = time.monotonic()
    await made.stop()
    await gone(pid)
    assert time.monotonic() - began < QUICK.drain + 4.0


async def test_a_draft_that_does_not_attach_delays_the_start_but_does_not_stop_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stack, "JOIN_S", 0.3)
    draft = dataclasses.replace(service(folder, "draft"), follows="target", joined=wait_attached)
    made = Stack([service(folder, "target"), draft], QUICK, write=lambda line: None)
    await made.start()
    assert "draft has not joined target" in caplog.text
    await made.stop()


async def test_work_on_its_own_thread_ends_with_the_thread_and_raises_what_it_raised() -> None:
    """OpenMP keeps a team of workers for every thread that lives (specbridge.process)."""
    before = set(threading.enumerate())
    ident, doubled = await process.run_in_own_thread(lambda n: (threading.get_ident(), 2 * n), 21)
    assert doubled == 42 and ident != threading.get_ident()
    with pytest.raises(ConfigError, match="told so"):
        await process.run_in_own_thread(_raise, ConfigError("told so"))
    for _ in range(100):
        if set(threading.enumerate()) <= before:
            break
        await asyncio.sleep(0.01)
    assert set(threading.enumerate()) <= before


def _raise(error: Exception) -> None:
    raise error
