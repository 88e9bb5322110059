"""A service process that gets no further than the call of one function, and tells its children then."""

from __future__ import annotations

import asyncio
import signal
import sys

import psutil

STUCK = """
import importlib, multiprocessing, sys, threading
from specbridge.cli import main

owner = importlib.import_module({module!r})
*path, name = {name!r}.split(".")
for part in path:
    owner = getattr(owner, part)
real = getattr(owner, name)

def stuck(*args, **more):
    {before}
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    threading.Event().wait()

setattr(owner, name, stuck)
sys.exit(main([{service!r}, *sys.argv[1:]]))
"""


def stuck(service: str, module: str, name: str, *, first: bool = False) -> str:
    """Python code of it. first: the function does its work before it is stuck."""
    before = "real(*args, **more)" if first else "pass"
    return STUCK.format(service=service, module=module, name=name, before=before)


async def ends_by_sigterm(code: str, *flags: str, children: int = 0) -> None:
    """Run `code`, and check that SIGTERM ends it and its children where it is stuck, as no failure."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, *flags),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    found: list[int] = []
    try:
        assert process.stdout is not None
        found = [int(word) for word in (await asyncio.wait_for(process.stdout.readline(), 120)).split()]
        assert len(found) == children
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 120) == 0
        assert not any(psutil.pid_exists(child) for child in found)
    finally:
        if process.returncode is None:
            process.kill()
        for child in filter(psutil.pid_exists, found):
            psutil.Process(child).kill()
        _, log = await process.communicate()
    assert b"before it was ready" in log, log.decode()
    # Children that were ended are no failure.
    assert b"Traceback" not in log and b"died" not in log and b" ERROR " not in log, log.decode()
