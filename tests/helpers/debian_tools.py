"""Programs that come as Debian packages, for tests that need the real ones.

A program on the PATH is used as it is. Otherwise its package is fetched by apt and unpacked into a folder of
the cache: nothing is installed, no root is needed, and machines without apt, or without its servers, skip the
test and say why.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specbridge-test-tools"
FETCH_S = 60.0


def program(name: str, *, package: str, also: tuple[str, ...] = ()) -> str:
    """The path of `name`, of Debian's `package`, which needs those `also` beside it. Skips the test if it
    can't be had.
    """
    try:
        return _find(name, package, also)
    except _Missing as missing:
        pytest.skip(f"needs {name}, of Debian's package {package}: {missing}")


class _Missing(Exception):
    """Why there is none."""


@functools.cache
def _find(name: str, package: str, also: tuple[str, ...]) -> str:
    on_path = shutil.which(name)
    if on_path:
        return on_path
    unpacked = CACHE / package
    found = unpacked / "usr/bin" / name
    if not found.exists():
        _unpack(package, unpacked, also)
    if not found.exists():
        raise _Missing(f"the package has no {name}")
    return str(found)


def _unpack(package: str, into: Path, also: tuple[str, ...]) -> None:
    if not sys.platform.startswith("linux") or not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise _Missing("not on the PATH, and there is no apt here")
    CACHE.mkdir(parents=True, exist_ok=True)
    # The suite's workers start together: one fetches, the others wait for it.
    with (CACHE / f"{package}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if into.exists():
            return
        work = CACHE / f"{package}.part"
        shutil.rmtree(work, ignore_errors=True)
        (work / "lists/partial").mkdir(parents=True)
        try:
            # The machine's own lists of packages may never have been fetched; ours, then.
            own_lists = ["-o", f"Dir::State::Lists={work / 'lists'}", "-o", f"Dir::Cache={work}"]
            if not _ran(["apt-get", "download", package, *also], work):
                _ran(["apt-get", *own_lists, "update"], work)
                _ran(["apt-get", *own_lists, "download", package, *also], work)
            files = list(work.glob("*.deb"))
            if len(files) < 1 + len(also):
                raise _Missing("not on the PATH, and apt can't download it")
            for file in files:
                if not _ran(["dpkg-deb", "-x", str(file), str(work / "unpacked")], work):
                    raise _Missing(f"{file.name} can't be unpacked")
            (work / "unpacked").rename(into)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _ran(command: list[str], folder: Path) -> bool:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=FETCH_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
