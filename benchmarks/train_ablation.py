"""What options of `train fit` are worth: several runs beside each other, one table of their estimates.

    python -m benchmarks.train_ablation --data DATA --work WORK --common "minutes=3" --per-gpu 2 \
        --run "base:" --run "kl: loss=kl" --run "deep: layers=5 loss=ce:0.5,l1:0.5"

A run is a name and options of `specbridge train fit`, on top of --common. As many run at a time as GPUs times
--per-gpu (without a GPU: --per-gpu on the CPU), so compare runs of equal `steps`, or of equal `minutes` only
among those that shared a GPU with as many. The held-out responses are the same for all: train's split does
not depend on what is trained on. Columns: acceptance lengths of chains by draft_service.training.estimate
(another block size is another horizon), then the share of greedy blocks that are right up to each depth.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import arguments, report
from draft_service.training.fit import fit
from draft_service.training.fit_settings import load_fit

DEPTHS = (1, 2, 3, 5, 7)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--data", required=True, help="training data, as --data of train fit")
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs' drafters, one each")
    parser.add_argument("--common", default="", help='options of all runs: "steps=2000 rows=16"')
    parser.add_argument("--run", action="append", required=True, help='"name: option=value ..."')
    parser.add_argument("--per-gpu", type=int, default=1, help="runs at a time on a GPU")
    given = parser.parse_args()
    gpus = torch.cuda.device_count()
    free = [f"cuda:{i % gpus}" if gpus else "cpu" for i in range(max(1, gpus) * given.per_gpu)]
    runs = [(name.strip(), options(text)) for name, _, text in (run.partition(":") for run in given.run)]
    common = {"data": given.data, **options(given.common)}
    rows: dict[str, list[object]] = {}
    spawned = multiprocessing.get_context("spawn")
    with spawned.Manager() as manager, ProcessPoolExecutor(len(free), mp_context=spawned) as pool:
        devices = manager.Queue()
        for device in free:
            devices.put(device)
        waiting = {
            pool.submit(train, devices, {**common, **own, "out": str(given.work / name)}): name
            for name, own in runs
        }
        for done in as_completed(waiting):
            name = waiting[done]
            try:
                rows[name] = row(name, done.result())
                print(rows[name], file=sys.stderr, flush=True)
            except Exception as error:  # one set of options that fails does not take the others' results
                print(f"{name}: {error}", file=sys.stderr, flush=True)
    header = ["run", "steps", "ms/step", "loss", "greedy", "sampled", "shared noise"]
    header += [f"depth {k}" for k in DEPTHS]
    ordered = [rows[name] for name, _ in runs if name in rows]
    report("train_ablation", header, ordered, given.out, common=common, runs=dict(runs), device=free)
    return 0 if len(ordered) == len(runs) else 1


def options(text: str) -> dict[str, str]:
    """Words of the form option=value: `steps=10 loss=kl`."""
    pairs = (word.partition("=") for word in text.split())
    return {name.replace("-", "_"): value for name, _, value in pairs}


def train(devices: Any, flags: dict[str, str]) -> dict[str, Any]:
    """One run, in a process of the pool, on the next free device: the last lines of its log, merged."""
    device = devices.get()
    try:
        began = time.perf_counter()
        ended = fit(load_fit({"device": device, **flags}))
        log = Path(flags["out"]) / "run" / "log.jsonl"
        found: dict[str, Any] = {"steps": ended.steps, "wall": time.perf_counter() - began}
        for line in log.read_text(encoding="utf-8").splitlines():
            found |= json.loads(line)
        return {**found, "seconds": ended.seconds}
    finally:
        devices.put(device)


def row(name: str, found: dict[str, Any]) -> list[object]:
    lengths = [
        found.get(f"acceptance/{kind}", float("nan")) for kind in ("greedy", "sampled", "shared_noise")
    ]
    depths = [found.get(f"acceptance/greedy/{k}", float("nan")) for k in DEPTHS]
    return [name, found["steps"], 1e3 * found["seconds"] / found["steps"], found["loss"], *lengths, *depths]


if __name__ == "__main__":
    sys.exit(main())
