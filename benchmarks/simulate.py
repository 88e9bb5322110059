"""The gateway's scheduler, the real one, in virtual time on services that only cost time: policies and plans.

    python -m benchmarks.simulate                                     the built-in model on two cores
    python -m benchmarks.simulate --costs benchmarks/simulation/recorded/h200-qwen3-8b.json \\
        --acceptance benchmarks/acceptance/gsm8k-like.json            an H200, from its published figures
    python -m benchmarks.simulate --plan benchmarks/configs/llama-3-70b --tp 8      computed, not measured
    python -m benchmarks.simulate --record RUN_DIR --out costs.json   of a running stack (serve --run-dir)
    python -m benchmarks.simulate --validate [RECORD.json]            real bursts beside simulated ones

Every policy gets the same requests. `best fixed` is the best of plain and the fixed trees at that load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.simulation import costs as costs_file
from benchmarks.simulation.arms import Policy, simulate, summary
from benchmarks.simulation.costs import Costs
from benchmarks.simulation.load import Lengths, Load
from benchmarks.simulation.planning import Hardware, plan
from benchmarks.simulation.real import Plan, measure
from benchmarks.simulation.record import costs_of, say
from benchmarks.simulation.texts import Drafter
from benchmarks.simulation.validate import HEADER, compare, table_rows
from specbridge.errors import ConfigError

BUILT_IN = common.ROOT / "simulation" / "recorded" / "cpu-smollm2-135m.json"
STREAMS = [1, 2, 4, 8, 16, 32, 64, 128]
TREES = [2, 4, 5, 8, 16, 32, 64]
COLUMNS = (
    "streams", "policy", "tok/s", "of plain", "of best fixed", "tokens/round", "nodes", "drafting",
    "TTFT p50", "ITL p95", "TPOT p50", "round", "draft", "verify", "queue",
)  # fmt: skip
ADAPTIVE_PLAIN, ADAPTIVE_FIXED = 0.98, 0.97
"""What an adaptive policy has to keep of plain decoding, and of the best fixed setting, at every load."""
FLAGS = ("--budget", "fixed", "--tree-budget", "8", "--max-verify-rows", "128", "--min-tree", "1")
"""Of the stack that --validate starts: fixed trees at every load."""


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments().parse_args(argv)
    try:
        if args.record is not None:
            _record(args)
        elif args.validate is not None:
            _validate(args)
        else:
            _sweep(args)
    except ConfigError as error:
        raise SystemExit(str(error)) from None


def _arguments() -> argparse.ArgumentParser:
    parser = common.arguments(__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--costs", type=Path, default=BUILT_IN, help="a file that --record wrote, or like it")
    what.add_argument("--plan", type=Path, help="a folder with config.json and dflash/config.json")
    what.add_argument("--record", type=Path, help="run folder of a running stack; its costs go to --out")
    what.add_argument(
        "--validate", nargs="?", const="", help="a record of real bursts; without, one is made (--keep)"
    )
    parser.add_argument("--keep", type=Path, help="where --validate and --record keep what they measured")
    parser.add_argument("--tp", type=int, default=1, help="with --plan: devices of the target")
    parser.add_argument("--shared", action="store_true", help="with --plan: the drafter on the first of them")
    parser.add_argument(
        "--hardware", nargs="*", default=[], metavar="NAME=VALUE",
        help=f"with --plan: {', '.join(item.name for item in fields(Hardware))}",
    )  # fmt: skip
    parser.add_argument("--acceptance", default="", help="file or mean, as for --simulate-acceptance")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second (Poisson), not --streams")
    parser.add_argument(
        "--policies", nargs="+", default=["plain", *(f"tree {n}" for n in TREES), "fixed", "cost"],
        help="plain, fixed (the gateway's default), cost, and 'tree N'",
    )  # fmt: skip
    parser.add_argument("--cohorts", type=int, nargs="+", default=[1], choices=[0, 1, 2], help="0: auto")
    parser.add_argument("--prompt", type=Lengths.parse, default=Lengths.parse("64-256"))
    parser.add_argument("--output", type=Lengths.parse, default=Lengths.parse("64-192"))
    parser.add_argument("--requests", type=int, default=8, help="of each stream; with --rate, in all")
    parser.add_argument("--no-eager", action="store_true", help="a block pass only when asked for")
    parser.add_argument("--seed", type=int, default=0)
    return parser


# ---- policies at loads ------------------------------------------------------------------------


def _sweep(args: argparse.Namespace) -> None:
    costs = _costs(args)
    setting = args.acceptance or _default_acceptance(costs)
    drafter = Drafter.of(setting, block_size=costs.block_size)
    print(_heading(costs, drafter), flush=True)
    runs: list[dict[str, Any]] = []
    rows: list[list[object]] = []
    for streams in [0] if args.rate else args.streams:
        found = _at(args, costs, drafter, streams)
        runs += found
        rows += [_row(run) for run in found]
        print(common.table(COLUMNS, [_row(run) for run in found]), flush=True)
    verdicts = _verdicts(runs)
    print(verdicts[1], flush=True)
    if args.out is not None:
        body = {
            "simulated": True,
            "costs": json.loads(costs.to_json()),
            "acceptance": drafter.acceptance.label,
            "load": _load_of(args),
            "runs": runs,
            "adaptive": verdicts[0],
        }
        _write(args.out, COLUMNS, rows, body)


def _at(args: argparse.Namespace, costs: Costs, drafter: Drafter, streams: int) -> list[dict[str, Any]]:
    """All policies at one load, with their shares of plain and of the best fixed one."""
    runs: list[dict[str, Any]] = []
    count = args.requests if args.rate else max(args.requests, 4) * streams
    load = Load(streams, count, args.prompt, args.output, args.rate)
    for name in args.policies:
        for cohorts in args.cohorts if name != "plain" else [1]:
            policy = Policy.parse(name, cohorts)
            outcome = simulate(costs, drafter, policy, load, seed=args.seed, eager=not args.no_eager)
            runs.append(
                {
                    "streams": streams,
                    "policy": policy.label,
                    "adaptive": name == "cost",
                    "fixed": name != "cost" and cohorts == 1,
                    **summary(outcome),
                    "loads": [_plain(load) for load in outcome.report.budget.loads],
                    "decisions": [_decision(d) for d in outcome.decisions[-16:]],
                }
            )
    plain = [run for run in runs if run["policy"] == "plain"]
    fixed = [run for run in runs if run["fixed"]]
    best = max(fixed, key=lambda run: run["tokens_per_s"], default=None)
    for run in runs:
        run["of_plain"] = run["tokens_per_s"] / plain[0]["tokens_per_s"] if plain else None
        run["of_best_fixed"] = run["tokens_per_s"] / best["tokens_per_s"] if best else None
        run["best_fixed"] = best["policy"] if best else None
    return runs


def _row(run: dict[str, Any]) -> list[object]:
    stages = run["stages"]
    return [
        run["streams"] or "Poisson", run["policy"], run["tokens_per_s"], _share(run["of_plain"]),
        _share(run["of_best_fixed"]), run["tokens_per_round"], run["nodes_per_session"],
        run["drafting_share"], run["ttft"].get("p50", 0.0), run["itl"].get("p95", 0.0),
        run["tpot"].get("p50", 0.0), stages["round"], stages["draft"], stages["verify"],
        stages["target_queue"],
    ]  # fmt: skip


def _share(value: float | None) -> object:
    return "" if value is None else value


def _verdicts(runs: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Of each adaptive run: whether it keeps what it has to of plain and of the best fixed setting."""
    found = [
        {
            "streams": run["streams"],
            "policy": run["policy"],
            "of_plain": run["of_plain"],
            "of_best_fixed": run["of_best_fixed"],
            "best_fixed": run["best_fixed"],
            "keeps": (run["of_plain"] or 1.0) >= ADAPTIVE_PLAIN
            and (run["of_best_fixed"] or 1.0) >= ADAPTIVE_FIXED,
        }
        for run in runs
        if run["adaptive"]
    ]
    header = ("streams", "policy", f"of plain (>= {ADAPTIVE_PLAIN})", f"of best fixed (>= {ADAPTIVE_FIXED})",
              "best fixed", "kept")  # fmt: skip
    lines = [
        [v["streams"] or "Poisson", v["policy"], _share(v["of_plain"]), _share(v["of_best_fixed"]),
         v["best_fixed"], "yes" if v["keeps"] else "NO"]
        for v in found
    ]  # fmt: skip
    return found, common.table(header, lines) if lines else ""


def _plain(load: Any) -> dict[str, Any]:
    return {item.name: getattr(load, item.name) for item in fields(load)}


def _decision(decision: Any) -> dict[str, Any]:
    # Its time is the wall clock's: the one thing of a run that would not be the same again.
    return {name: value for name, value in _plain(decision).items() if name != "time"}


# ---- costs ------------------------------------------------------------------------------------


def _costs(args: argparse.Namespace) -> Costs:
    if args.plan is None:
        return costs_file.read(args.costs)
    hardware = Hardware()
    known = {item.name for item in fields(Hardware)}
    for item in args.hardware:
        name, _, value = item.partition("=")
        if name not in known or not value:
            raise ConfigError(f"--hardware {item!r}: write NAME=VALUE with one of {', '.join(sorted(known))}")
        hardware = replace(hardware, **{name: float(value)})
    return plan(args.plan, tp=args.tp, hardware=hardware, shared=args.shared)


def _default_acceptance(costs: Costs) -> str:
    name = "gsm8k-like.json" if costs.block_size > 8 else "smollm2-135m.json"
    return str(common.ROOT / "acceptance" / name)


def _heading(costs: Costs, drafter: Drafter) -> str:
    kind = "SIMULATED on measured costs" if costs.source.get("measured") else "PLANNED, NOT MEASURED"
    lines = [f"{kind}: {costs.name}; acceptance {drafter.acceptance.label}; times in ms"]
    if "hardware" in costs.source:
        lines.append("assumed: " + ", ".join(f"{k} {v:g}" for k, v in costs.source["hardware"].items()))
    return "\n".join([*lines, say(costs)])


def _load_of(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "prompt": args.prompt.text, "output": args.output.text, "rate": args.rate, "seed": args.seed,
        "requests": args.requests,
    }  # fmt: skip


def _write(out: Path, header: Sequence[str], rows: Sequence[Sequence[object]], body: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    head = {"benchmark": "simulate", "provenance": common.provenance(), "header": list(header)}
    out.write_text(json.dumps({**head, "rows": [list(row) for row in rows], **body}, indent=1) + "\n")


# ---- real stacks ------------------------------------------------------------------------------


def _record(args: argparse.Namespace) -> None:
    if args.out is None:
        raise ConfigError("--record needs --out: where the costs go")
    arms = Plan(arms=("plain", "trees"), streams=(1, 4))
    record = asyncio.run(measure(args.record, arms, say=_say()))
    if args.keep is not None:
        args.keep.write_text(json.dumps(record, indent=1) + "\n")
    costs = costs_of(record)
    args.out.write_text(costs.to_json())
    print(say(costs), flush=True)


def _validate(args: argparse.Namespace) -> None:
    if args.validate:
        record = json.loads(Path(args.validate).read_text(encoding="utf-8"))
    else:
        with (
            tempfile.TemporaryDirectory(prefix="specbridge-simulate-") as folder,
            common.serve("--run-dir", folder, *FLAGS),
        ):
            arms = Plan(arms=("plain", "tree 5"), streams=(1, 2, 4, 8))
            record = asyncio.run(measure(Path(folder), arms, say=_say()))
        record["flags"] = list(FLAGS)
        if args.keep is not None:
            args.keep.write_text(json.dumps(record, indent=1) + "\n")
    costs = costs_of(record)
    rows, how = compare(record, costs)
    lines = table_rows(rows)
    print(f"{say(costs)}\nacceptance: {how}\n{common.table(HEADER, lines)}", flush=True)
    if args.out is not None:
        _write(args.out, HEADER, lines, {"costs": json.loads(costs.to_json()), "acceptance": how})


def _say() -> Any:
    begun = time.monotonic()
    return lambda line: print(f"{time.monotonic() - begun:4.0f} s  {line}", flush=True)


if __name__ == "__main__":
    main()
