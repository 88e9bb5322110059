"""The other processes of the tests of cuda_ipc on real GPUs, as the test sees them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HELPERS = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    # This project first, and whatever else the tests themselves were given.
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
}


class Producer:
    """tests/helpers/cuda_producer.py on GPU 0."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.process: subprocess.Popen[str] | None = None

    async def start(self, *, slots: int = 64, width: int = 33, dtype: str = "bfloat16") -> None:
        script = ROOT / "tests" / "helpers" / "cuda_producer.py"
        command = [sys.executable, str(script), self.address, "cuda:0", str(slots), str(width), dtype]
        self.process = subprocess.Popen(
            command,
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert await self._answer() == "serving"

    async def do(self, *words: object) -> Any:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return await self._answer()

    async def _answer(self) -> Any:
        assert self.process is not None and self.process.stdout is not None
        return json.loads(await asyncio.to_thread(self.process.stdout.readline))

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                pipe.close()


class Reader:
    """tests/helpers/cuda_reader.py: a stream that is never let go stays that process's matter."""

    def __init__(self, address: str, device: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HELPERS / "cuda_reader.py"), address, device],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def said(self, timeout: float = 60.0) -> Any:
        """Its next line, which must come."""
        assert self.process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), timeout)
        assert line, f"the reader ended with {self.process.wait()}"
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
