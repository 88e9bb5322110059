"""What waiting OpenMP threads cost: asleep at once, a short spin (as shipped), spinning on; by thread count.

Two processes run one after the other, like target and draft in a round: while one computes, the other waits
for its turn with its OpenMP pool idle. The table shows the time of a full turn (both) for each waiting policy
and thread count; lower is better. `python -m benchmarks.threads [--rounds N]`
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

from specbridge.process import SPIN_COUNT

# Like one decoding step: many small products with short gaps between them.
WORKER = """
import sys, torch
from kernels.linear import PackedLinear, activation_dtype
def packed(rows, columns):
    return PackedLinear(torch.randn(rows, columns), None, dtype=torch.bfloat16, device="cpu")
layers = [(packed(1536, 576), packed(576, 1536)) for _ in range(30)]
x = torch.randn(6, 576, dtype=activation_dtype(torch.bfloat16, "cpu"))
print("ready", flush=True)
with torch.inference_mode():
    for line in sys.stdin:
        y = x
        for up, down in layers:
            y = torch.nn.functional.silu(down(up(y))) * 1e-3
        print("done", flush=True)
"""
POLICIES = {
    "passive": {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"},
    "short spin": {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": SPIN_COUNT},
    "default": {},
    "active": {"OMP_WAIT_POLICY": "active"},
}


class Pair:
    """Two workers that take turns."""

    def __init__(self, threads: int, policy: dict[str, str]) -> None:
        outer = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_", "KMP_", "GOMP_"))}
        env = {**outer, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **policy}
        self.workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for _ in range(2)
        ]
        for worker in self.workers:
            self._answer(worker)

    def turn(self) -> float:
        """Seconds for both workers, one after the other."""
        began = time.perf_counter()
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(b"go\n")
            worker.stdin.flush()
            self._answer(worker)
        return time.perf_counter() - began

    def close(self) -> None:
        for worker in self.workers:
            worker.communicate()

    @staticmethod
    def _answer(worker: subprocess.Popen[bytes]) -> None:
        assert worker.stdout is not None
        if not worker.stdout.readline():
            raise RuntimeError(f"a worker ended with {worker.wait()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=30, help="measured turns per setting (default: %(default)s)"
    )
    args = parser.parse_args()
    cpus = len(os.sched_getaffinity(0))
    print(f"{cpus} CPUs, {args.rounds} turns each after 5 unmeasured, medians; 90th percentile in brackets")
    print(f"{'threads':>8}" + "".join(f"{name:>22}" for name in POLICIES))
    for threads in sorted({max(2, cpus // 2), cpus}):
        times: dict[str, list[float]] = {name: [] for name in POLICIES}
        # Short blocks, interleaved, so that a disturbance hits all alike. Only the measured pair exists:
        # a spinning one in the background would disturb the others.
        for _ in range(3):
            for name, policy in POLICIES.items():
                pair = Pair(threads, policy)
                for _ in range(5):
                    pair.turn()
                times[name] += [pair.turn() for _ in range(args.rounds // 3)]
                pair.close()
        cells = [
            f"{statistics.median(t) * 1e3:.1f} ms ({sorted(t)[len(t) * 9 // 10] * 1e3:.1f})"
            for t in times.values()
        ]
        print(f"{threads:>8}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
