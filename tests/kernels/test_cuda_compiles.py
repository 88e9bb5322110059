"""Kernels compile for the GPU, also where there is none: the interpreter takes more than the
compiler does. In a process of its own, since kernels of this one may be interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import cuda

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not cuda.available(), reason="triton is not installed")
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    paths = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "helpers" / "compile_only.py"],
        env={**env, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    ops = {
        "rms_norm",
        "add_rms_norm",
        "silu_mul",
        "split_heads",
        "commit_rows",
        "publish_rows",
        "append_context",
        "token_loss",
        "ragged_attention",
        "conditional_tree",
    }
    assert {op for op, _, _ in lines} == ops
    assert all(int(size) > 0 for _, _, size in lines)
