"""Tensor parallelism over all GPUs of a host in one command: the same text, what it costs, and a lost rank.

    python -m benchmarks.tp_run --out tp.json                            # 8, 4 or 2 GPUs, half an hour
    python -m benchmarks.tp_run --parts equality,killed --budget-s 540 --out tp_equal.json
    python -m benchmarks.tp_run --parts replicas --budget-s 540 --keep --out tp_equal.json
    python -m benchmarks.tp_run --parts shapes --tp 8 --budget-s 540 --out tp_shapes_8.json
    python -m benchmarks.tp_run --device cpu --tp 8 4 --out tp_cpu.json  # gloo ranks, tiny models

Parts, each by itself with --parts: equality (token streams of N ranks against one, through whole stacks, in
fp32, drafting; on GPUs with CUDA graphs and without, the draft beside rank 0 and on a GPU of its own), killed
(a rank is killed while streams go on), shapes (plain, chain, tree of large shapes by benchmarks.gpu_round:
steps against their floor, the share of collectives, rounds), replicas (one stack against two on half of the
GPUs each). A part that fails or runs out of time says so; the others go on, and the file is written after
each. Exit code 1 if a part failed, a stream differs by more than a near-tie, or anything was left behind.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_round
from benchmarks.common import arguments, provenance
from benchmarks.gpu import stack as rounds
from benchmarks.gpu.clock import Budget, gpu_facts
from benchmarks.gpu.setup import Part
from benchmarks.tp import compare, equality, killed, models, replicas, shapes
from kernels.device import resolve_device
from specbridge.errors import SpecBridgeError

PARTS = ("equality", "killed", "shapes", "replicas")
CPU_TP = (8, 4)
ON_CPU: dict[str, Any] = {
    "shapes": ["tiny"], "concurrency": [1, 2], "context": 64, "nodes": [16], "dtype": "float32",
    "max_tokens": 48,
}  # fmt: skip
ON_GPU: dict[str, Any] = {
    "shapes": ["llama-3-70b"], "concurrency": [1, 8, 32, 64], "context": 1024, "nodes": [16, 64],
    "dtype": "bfloat16", "max_tokens": 256,
}  # fmt: skip
"""Where nothing else is asked for."""


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--tp", type=int, nargs="+", metavar="N", help="default: all GPUs, and half of them")
    made.add_argument("--parts", default=",".join(PARTS), help="by comma (default: %(default)s)")
    made.add_argument("--budget-s", type=float, default=1500.0, help="seconds for all parts together")
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: ranks over gloo")
    made.add_argument(
        "--keep", action="store_true", help="parts that are not run now stay in --out as they are there"
    )
    made.add_argument("--revision", default="", help="of the code, where there is no git to ask")
    equal = made.add_argument_group("equality, killed")
    equal.add_argument(
        "--models",
        nargs="+",
        default=["tiny"],
        metavar="NAME",
        help=f"{', '.join(models.RANDOM)} (random, made here), or a real one, e.g. smollm2-135m",
    )
    equal.add_argument("--prompts", type=int, default=6, help="each greedily and sampled, all at once")
    equal.add_argument("--equal-tokens", type=int, default=64, metavar="N", help="of each text")
    equal.add_argument("--kill-tokens", type=int, default=160, metavar="N", help="of each text of killed")
    equal.add_argument(
        "--near-tie", type=float, default=compare.NEAR_TIE, help="gap of scores that rounding may bridge"
    )
    costs = made.add_argument_group("shapes, replicas")
    costs.add_argument("--shapes", nargs="+", metavar="NAME", help="folders of benchmarks/configs")
    costs.add_argument("--concurrency", type=int, nargs="+", metavar="N")
    costs.add_argument("--context", type=int, metavar="TOKENS")
    costs.add_argument("--nodes", type=int, nargs="+", metavar="N")
    costs.add_argument("--dtype")
    costs.add_argument("--max-tokens", type=int, metavar="N", help="that a stream generates")
    costs.add_argument("--simulate", default="gsm8k-like", help="acceptance, as gpu_round has it")
    costs.add_argument("--arms", default=",".join(gpu_round.ARMS), help="by comma")
    costs.add_argument("--gpu-round", nargs="*", default=[], metavar="WORD", help="more words, e.g. no-eager")
    return made


def completed(args: argparse.Namespace) -> argparse.Namespace:
    """With what the device suggests where nothing was asked for. Raises ValueError."""
    cpu = args.device == "cpu"
    args.gpus = 0 if cpu else torch.cuda.device_count()
    if not args.tp:
        sizes = [n for n in (8, 4, 2) if n <= args.gpus]
        args.tp = list(CPU_TP) if cpu else sizes[:2]
    if not args.tp or min(args.tp) < 1 or (not cpu and max(args.tp) > args.gpus):
        raise ValueError(f"--tp {args.tp}: there are {args.gpus} GPUs; two are the least, or --device cpu")
    args.tp = sorted(set(args.tp), reverse=True)
    resolve_device(args.device, count=max(args.tp))
    for name, value in (ON_CPU if cpu else ON_GPU).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.parts = [name for name in args.parts.split(",") if name]
    unknown = sorted({*args.parts} - {*PARTS})
    if unknown:
        raise ValueError(f"{unknown[0]!r} is unknown: parts are {', '.join(PARTS)}")
    return args


def place_of(shape: str, folder: Path) -> str:
    """A shape for gpu_round: one of models.RANDOM is written to `folder`."""
    if shape not in models.RANDOM:
        return shape
    if not (folder / shape).is_dir():
        models.write(folder / shape, models.RANDOM[shape])
    return str(folder / shape)


def measure_shapes(args: argparse.Namespace, budget: Budget, folder: Path) -> Part:
    options = shapes.Options(
        shapes=tuple(place_of(shape, folder) for shape in args.shapes),
        tp=tuple(args.tp),
        device=args.device,
        dtype=args.dtype,
        concurrency=tuple(args.concurrency),
        context=args.context,
        nodes=tuple(args.nodes),
        simulate=args.simulate,
        more=(
            *("--max-tokens", str(args.max_tokens), "--arms", args.arms),
            *(f"--{word.removeprefix('--')}" for word in args.gpu_round),
        ),
    )
    return shapes.measure(options, budget, folder)


def measure_replicas(args: argparse.Namespace, budget: Budget, folder: Path) -> Part:
    part = Part()
    for shape in args.shapes:
        words = ["--config", place_of(shape, folder), "--tp", str(max(args.tp)), "--device", args.device]
        words += ["--dtype", args.dtype, "--context", str(args.context), "--simulate", args.simulate]
        words += ["--concurrency", *map(str, args.concurrency), "--nodes", *map(str, args.nodes)]
        words += ["--arms", args.arms, "--max-tokens", str(args.max_tokens)]
        words += ["--budget-s", f"{budget.left_s:.0f}"]
        asked = gpu_round.parser().parse_args(words)
        options = rounds.Options(
            model="",
            draft="auto",
            simulate=gpu_round.acceptance_of(args.simulate),
            arms=tuple(args.arms.split(",")),
            max_tokens=args.max_tokens,
            bursts=2,
        )
        replicas.measure(gpu_round.make_setup(asked), options, part)
    return part


def parts_of(args: argparse.Namespace, budget: Budget, folder: Path) -> dict[str, Callable[[], Part]]:
    """Those that are asked for, in order."""
    options = equality.Options(
        device=args.device,
        gpus=args.gpus,
        tp=tuple(args.tp),
        models=tuple(args.models),
        prompts=args.prompts,
        max_tokens=args.equal_tokens,
        near_tie=args.near_tie,
        kill_tokens=args.kill_tokens,
    )
    known: dict[str, Callable[[], Part]] = {
        "equality": partial(equality.measure, options, budget, folder),
        "killed": partial(killed.measure, options, budget, folder),
        "shapes": partial(measure_shapes, args, budget, folder),
        "replicas": partial(measure_replicas, args, budget, folder),
    }
    return {name: known[name] for name in PARTS if name in args.parts}


def head_of(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """What the file says before its parts."""
    origin = {**provenance(), "argv": gpu_round.command_line(argv, "tp_run")}
    origin["revision"] = args.revision or origin["revision"]
    facts = gpu_facts(torch.device(args.device))
    return {
        "benchmark": "tp_run",
        "tp": args.tp,
        "provenance": origin,
        "device": {**facts, "gpus": args.gpus},
        "collectives": "gloo" if args.device == "cpu" else "nccl",
        "models": args.models,
        "synthetic": {
            "random_weights": [name for name in args.models if name in models.RANDOM],
            "dummy_weights": args.shapes,
            "simulated_acceptance": args.simulate,
        },
    }


def kept_of(args: argparse.Namespace) -> dict[str, Any]:
    """Parts of an earlier run, each with that run's provenance."""
    if not args.keep or args.out is None or not args.out.is_file():
        return {}
    before = json.loads(args.out.read_text())
    return {name: {"provenance": before["provenance"], **part} for name, part in before["parts"].items()}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    made = parser()
    args = made.parse_args(argv)
    try:
        args = completed(args)
    except (SpecBridgeError, ValueError) as error:
        made.error(str(error))
    head = head_of(args, argv)
    print(f"# {' and '.join(map(str, args.tp))} ranks on {head['device']['device']}", flush=True)
    budget = Budget(args.budget_s)
    with tempfile.TemporaryDirectory(prefix="sb-tp-") as folder:
        found, failed = gpu_round.run_parts(
            parts_of(args, budget, Path(folder)),
            budget,
            torch.device(args.device),
            partial(gpu_round.write, args.out, head, kept=kept_of(args)),
        )
    wrong = sum(part.figures.get(equality.FAILURES, 0) for part in found.values())
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    # A time limit from outside must not leave stacks behind: as Ctrl-C, it goes through all that ends them.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
