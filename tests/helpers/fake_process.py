"""A stand-in for a service process: answers health checks and misbehaves as told. Run as a script.

usage: fake_process.py ADDRESS [--serve-after S] [--exit-at-once] [--ignore-term] [--say TEXT]
       [--does exit|freeze|unready --when FILE: once it serves and FILE exists, end with --code N, answer
       nothing any more, or be NOT_SERVING]
       [--once FILE: misbehave only while FILE does not exist] [--child: start a process of its own]
       [--drain S: seconds between SIGTERM and the end] [--log FILE: append what happens]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from specbridge.process import end_with_parent
from specbridge.server import Server


def note(args: argparse.Namespace, text: str) -> None:
    if args.log:
        with Path(args.log).open("a") as file:
            file.write(f"{args.name} {text} {os.getpid()}\n")


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--name", default="fake")
    parser.add_argument("--serve-after", type=float, default=0.0)
    parser.add_argument("--exit-at-once", action="store_true")
    parser.add_argument("--does", choices=("exit", "freeze", "unready"), default="")
    parser.add_argument("--when", type=Path)
    parser.add_argument("--code", type=int, default=1)
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--say", default="")
    parser.add_argument("--once")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--drain", type=float, default=0.0)
    parser.add_argument("--log")
    args = parser.parse_args()
    end_with_parent()
    if args.say:
        print(args.say, file=sys.stderr, flush=True)
    if args.child:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        note(args, f"child {child.pid}")
    note(args, "started")
    misbehave = args.once is None or not Path(args.once).exists()
    if args.once:
        Path(args.once).touch()
    if misbehave and args.exit_at_once:
        return args.code
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(
            signum, (lambda: None) if args.ignore_term else stop.set
        )
    server = Server(args.address, ["fake.Service"], add=lambda _: None, drain_s=0.2)
    await server.start()
    await asyncio.sleep(args.serve_after)
    await server.set_serving()
    while not stop.is_set():
        if misbehave and args.does and args.when.exists():
            if args.does == "exit":
                os._exit(args.code)
            if args.does == "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            await server.set_not_serving()
        await asyncio.sleep(0.02)
    note(args, "term")
    await asyncio.sleep(args.drain)
    await server.stop()
    note(args, "ended")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
