"""Which worker runs which files, and when: long files first, those that share a started stack together, and
those that wait for processes beside those that compute in several.

A file that is missing here, or has another length by now, costs time and nothing else.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

# These use the session's `stack` (tests/e2e/conftest.py), of which each worker has its own.
ONE_STACK = (
    "tests/e2e/test_prometheus.py",
    "tests/e2e/test_rogue_peers.py",
    "tests/e2e/test_stack_faults.py",
    "tests/e2e/test_stack_surface.py",
)
# Of those that take ten seconds and more: first the ones that start processes, longest first. One worker is
# with the stack above then, which waits much; what computes in one thread would leave a core idle beside it.
SEVERAL_PROCESSES = (
    "tests/target_service/test_launched.py",
    "tests/benchmarks/test_tp_run.py",
    "tests/target_service/test_server.py",
    "tests/e2e/test_other_checkpoints.py",
    "tests/test_deployment.py",
    "tests/e2e/test_explain.py",
    "tests/specbridge/test_stack.py",
    "tests/specbridge/channel/test_processes.py",
    "tests/target_service/test_model_parallel.py",
)
# Longest first.
ONE_PROCESS = (
    "tests/e2e/test_lossless_real_model.py",
    "tests/e2e/test_acceptance.py",
    "tests/e2e/test_lossless_product.py",
    "tests/draft_service/training/test_fit.py",
    "tests/kernels/test_cuda_compiles.py",
    "tests/target_service/test_engine_model.py",
    "tests/e2e/test_synthetic_models.py",
    "tests/kernels/test_ragged_attention.py",
    "tests/draft_service/test_startup_check.py",
    "tests/draft_service/test_device_trees.py",
    "tests/e2e/test_project_on_target.py",
    "tests/specbridge/test_models.py",
    "tests/target_service/test_engine.py",
    "tests/e2e/test_training_eval.py",
    "tests/e2e/test_crowded.py",
    "tests/draft_service/test_selfcheck.py",
    "tests/benchmarks/test_gpu_round.py",
    "tests/benchmarks/test_serve.py",
    "tests/target_service/test_sampling_law.py",
    "tests/gateway/test_text.py",
)
LONG = (*ONE_STACK, *SEVERAL_PROCESSES, *ONE_PROCESS)


def rank(nodeid: str) -> int:
    """Place in the order of running; files that are not listed come last, in their own order."""
    file = nodeid.split("::", 1)[0]
    return LONG.index(file) if file in LONG else len(LONG)


class LongFilesFirst(LoadFileScheduling):
    """xdist's `--dist loadfile`, in the order that the tests come in instead of by their number in a file."""

    def __init__(self, config: Any, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return ONE_STACK[0] if file in ONE_STACK else file
