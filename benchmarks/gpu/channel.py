"""Part channel: what the hidden-state channel adds to a round, by benchmarks.channel in a process of its own.

A process of its own since it starts others, and a hung hand-off must not take the other parts with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.setup import Part, Setup, Stage

ROWS = 6
"""Of a hand-off: the anchor and an accepted path."""
LONGEST_S = 150.0


def measure(setup: Setup, *, hand_offs: int) -> Part:
    """Raises RuntimeError if it fails or does not end in time."""
    part = Part()
    if setup.drafter is None:
        part.notes.append("there is no drafter")
        return part
    with tempfile.TemporaryDirectory(prefix="specbridge-bench-") as folder:
        out = Path(folder) / "channel.json"
        command = [sys.executable, "-m", "benchmarks.channel", f"--out={out}", f"--rows={ROWS}"]
        command += [f"--taps={len(setup.taps)}", f"--hidden={setup.config.hidden_size}"]
        command += [f"--dtype={str(setup.act).removeprefix('torch.')}", f"--hand-offs={hand_offs}"]
        # Its processes are a session of their own, so that all of them can be ended.
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        limit_s = min(max(setup.budget.left_s, 1.0), LONGEST_S)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"benchmarks.channel did not end within {limit_s:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code:
            raise RuntimeError(f"benchmarks.channel ended with exit code {code}")
        found = json.loads(out.read_text())
    part.tables["hand-off"] = (found["header"], found["rows"])
    best = dict(zip(found["header"], found["rows"][0], strict=True))
    part.stages.append(Stage(f"channel: hand-off by {best['transport']}", 0.0, best["adds us"] / 1e3))
    return part
