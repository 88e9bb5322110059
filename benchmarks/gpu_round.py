"""A round on a GPU in one command: its floor, each stage of it, and what the client sees.

    python -m benchmarks.gpu_round --config qwen3-8b --concurrency 1 8 32 --context 1024 --nodes 16 64 128 \\
        --out round.json
    python -m benchmarks.gpu_round --model smollm2-135m --parts loop,stack --out smollm2.json

Parts, each by itself with --parts: floor (what must be read, the products alone), target (plain and verify
steps, with CUDA graphs and without), draft (block pass, tree, appends), channel (the hand-off), loop (rounds
by the models' passes alone, in one process), stack (rounds through the real gateway); and only if it is named
prefill (prompts of --context tokens, by chunks). A part that fails or runs out of time says so; the others go
on, and the file is written after each. Rates are measured in the same run; a floor is bytes that must be
read once, over the copy rate (bytes read + bytes written of a large copy). --config: dummy weights, times are
those of the shape; loop and stack then simulate acceptance.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, arguments, provenance
from benchmarks.gpu import channel, draft, floor, loop, prefill, stack, target
from benchmarks.gpu.clock import Budget, gpu_facts, measure_rates, release
from benchmarks.gpu.setup import Part, Setup, Stage
from draft_service.config import DraftSettings
from draft_service.drafter_config import DrafterConfig, TargetFacts
from draft_service.drafter_files import find_places, open_files
from draft_service.drafter_layouts import parse_config
from kernels.device import parse_dtype, resolve_device
from specbridge.errors import SpecBridgeError
from specbridge.models import resolve_target
from target_service.model.config import ModelConfig

PARTS = ("floor", "target", "draft", "channel", "loop", "stack")
ASKED = ("prefill",)
"""Parts that run only if --parts names them."""
ARMS = ("plain", "chain", "tree")
STAGES = ("stage", "floor ms", "measured ms", "lost ms", "of plain step")


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", default="", help="a folder of benchmarks/configs, or a config.json")
    what.add_argument("--model", default="", help="a real model and its drafter, e.g. smollm2-135m")
    made.add_argument("--draft", default="auto", help="with --model: the drafter")
    made.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    made.add_argument("--context", type=int, nargs="+", default=[1024], metavar="TOKENS")
    made.add_argument("--nodes", type=int, nargs="+", default=[16, 64, 128], metavar="N")
    made.add_argument("--parts", default=",".join(PARTS), help="by comma (default: %(default)s)")
    made.add_argument("--budget-s", type=float, default=420.0, help="seconds for all parts together")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--device", default="cuda", help="cpu is for trying the parts out")
    made.add_argument("--tp", type=int, default=1, help="GPUs of the target")
    made.add_argument("--repeats", type=int, default=30)
    made.add_argument("--no-eager", action="store_true", help="leave out what runs without CUDA graphs")
    made.add_argument("--kv-tokens", type=int, default=1 << 18, help="context tokens of all sessions")
    made.add_argument("--max-rows", type=int, default=4224, help="rows of one step")
    made.add_argument("--chunks", type=int, nargs="+", default=[1024, 2048], help="of prefill, rows")
    made.add_argument("--hand-offs", type=int, default=1000, help="of the channel")
    made.add_argument("--arms", default=",".join(ARMS), help="of the stack, by comma")
    made.add_argument("--max-tokens", type=int, default=256, help="that a stream or the loop generates")
    made.add_argument("--bursts", type=int, default=3, help="of the stack, at each concurrency")
    made.add_argument("--texts", type=int, default=6, help="of the loop")
    made.add_argument(
        "--simulate",
        default="gsm8k-like",
        help="with --config: a file of benchmarks/acceptance, another one, or a mean acceptance length",
    )
    made.add_argument("--flags", nargs="*", default=[], help="more flags of the stack, e.g. cohorts=2")
    made.add_argument("--revision", default="", help="of the code, where there is no git to ask")
    return made


def make_setup(args: argparse.Namespace) -> Setup:
    """Raises SpecBridgeError or ValueError for what can't be measured."""
    device = torch.device(resolve_device(args.device, count=args.tp))
    if args.model:
        place = resolve_target(args.model)
        settings = DraftSettings(target=args.model, draft=args.draft, dtype=args.dtype)
    else:
        own = ROOT / "configs" / args.config
        place = own if own.is_dir() else Path(args.config)
        settings = DraftSettings(load_format="dummy", config=str(place), dtype=args.dtype)
    return Setup(
        place=place,
        load_format="auto" if args.model else "dummy",
        config=ModelConfig.from_folder(place),
        drafter=_drafter(settings, plain_only=set(args.arms.split(",")) == {"plain"}),
        draft_settings=settings,
        dtype=parse_dtype(args.dtype),
        device=device,
        tp=args.tp,
        rates=measure_rates(device),
        concurrency=tuple(sorted(args.concurrency)),
        contexts=tuple(args.context),
        nodes=tuple(sorted(args.nodes)),
        kv_tokens=args.kv_tokens,
        max_rows=args.max_rows,
        eager=not args.no_eager,
        repeats=args.repeats,
        budget=Budget(args.budget_s),
    )


def _drafter(settings: DraftSettings, *, plain_only: bool) -> DrafterConfig | None:
    if plain_only:
        return None
    places = find_places(settings)
    files = open_files(settings, places)
    try:
        facts = TargetFacts.read(files.target_config, places.target)
        return parse_config(files.draft_config, facts, fc_columns=files.fc_columns)
    finally:
        files.close()


def acceptance_of(simulate: str) -> str:
    """--simulate's: a file of benchmarks/acceptance by its name, or what was given."""
    known = ROOT / "acceptance" / f"{simulate}.json"
    return str(known) if known.is_file() else simulate


def parts_of(args: argparse.Namespace) -> dict[str, Callable[[Setup], Part]]:
    """Those that are asked for, in order."""
    simulate = acceptance_of(args.simulate)
    options = stack.Options(
        model=args.model,
        draft=args.draft,
        simulate=simulate,
        arms=tuple(args.arms.split(",")),
        max_tokens=args.max_tokens,
        bursts=args.bursts,
        flags=(*("--" + flag.replace("_", "-", flag.partition("=")[0].count("_")) for flag in args.flags),),
    )
    known: dict[str, Callable[[Setup], Part]] = {
        "floor": floor.measure,
        "target": target.measure,
        "draft": draft.measure,
        "channel": partial(channel.measure, hand_offs=args.hand_offs),
        "loop": partial(
            loop.measure, model=args.model, simulate=simulate, max_tokens=args.max_tokens, texts=args.texts
        ),
        "stack": partial(stack.measure, options=options),
        "prefill": partial(prefill.measure, chunks=tuple(args.chunks)),
    }
    wanted = [name for name in args.parts.split(",") if name]
    unknown = sorted({*wanted} - {*known}) or sorted({*options.arms} - {*ARMS})
    if unknown:
        raise ValueError(
            f"{unknown[0]!r} is unknown: parts are {', '.join((*PARTS, *ASKED))}, arms {', '.join(ARMS)}"
        )
    return {name: known[name] for name in (*PARTS, *ASKED) if name in wanted}


def closing(found: Mapping[str, Part]) -> Part:
    """Stage by stage, for one stream: what it must take, takes, and where the difference is.

    With all parts there, the sum is the round as the gateway has it: its own work, messages, and what each
    service takes, of which the measured stages are parts. Below nothing: what eager drafting had done before.
    """
    part = Part()
    stages = [stage for name in ("draft", "target", "channel", "stack") if name in found
              for stage in found[name].stages]  # fmt: skip
    if not stages:
        return part
    seen = found["stack"].figures if "stack" in found else {}
    for figure, name, own in (
        (stack.TARGET_MS, "target: engine around its pass", ("verify",)),
        (stack.DRAFT_MS, "draft: engine around its passes", ("draft", "channel")),
    ):
        known = [stage.ms for stage in stages if stage.name.startswith(own)]
        if known and figure in seen:
            stages.append(Stage(name, 0.0, seen[figure] - sum(known)))
    steps = found["target"].tables.get("steps", ((), []))[1] if "target" in found else []
    # With graphs, nothing captured: one row a session.
    plain = next((row for row in steps if row[0] == "on" and row[4] == row[1]), None)
    step_ms = plain[7] if plain else math.nan
    rows: list[list[Any]] = [[s.name, s.floor_ms, s.ms, s.lost_ms, s.ms / step_ms] for s in stages]
    floors, times = sum(s.floor_ms for s in stages), sum(s.ms for s in stages)
    rows.append(["sum", floors, times, times - floors, times / step_ms])
    client = seen.get("tree round seen by the client, ms")
    if client is not None:
        rows.append(["round seen by the client", floors, client, client - floors, client / step_ms])
    part.tables["stage by stage, one stream"] = (STAGES, rows)
    if plain:
        part.figures["plain step, device ms"], part.figures["plain step, host ms"] = plain[6], plain[7]
        part.figures["plain step / its floor"] = plain[9]
        part.figures["sum of floors / plain step"] = floors / step_ms
    return part


def command_line(argv: Sequence[str], module: str = "gpu_round") -> str:
    """What was run, without the places of this machine."""
    shown = [Path(word).name if word.startswith(("/", "~")) else word for word in argv]
    return " ".join([f"python -m benchmarks.{module}", *shown])


def clean(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: clean(item) for key, item in value.items()}
    return [clean(item) for item in value] if isinstance(value, list | tuple) else value


def write(
    out: Path | None,
    head: dict[str, Any],
    found: Mapping[str, Part],
    kept: Mapping[str, Any] | None = None,
) -> None:
    """kept: parts of another run, as they were written, for those that are not found."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    parts = {**(kept or {}), **{name: part.to_json() for name, part in found.items()}}
    out.write_text(json.dumps(clean({**head, "parts": parts}), indent=1) + "\n")


def run_parts(
    parts: Mapping[str, Callable[[], Part]],
    budget: Budget,
    device: torch.device,
    save: Callable[[Mapping[str, Part]], None],
) -> tuple[dict[str, Part], bool]:
    """What each found, shown as it comes; and whether one failed. save: called with all so far."""
    found: dict[str, Part] = {}
    failed = False
    for name, measure in parts.items():
        if not budget.fits(1.0):
            found[name] = Part(notes=["left out for want of time"])
        else:
            began = time.monotonic()
            try:
                found[name] = measure()
            except Exception as error:
                # One part's trouble: told here and in the file, and the others go on.
                failed = True
                traceback.print_exc()
                found[name] = Part(notes=[f"failed: {type(error).__name__}: {str(error)[:500]}"])
            found[name].figures["part took s"] = time.monotonic() - began
        gc.collect()
        release(device)
        print(f"\n## {name}\n\n{found[name].text()}", flush=True)
        save(found)
    return found, failed


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    made = parser()
    args = made.parse_args(argv)
    try:
        parts, setup = parts_of(args), make_setup(args)
    except (SpecBridgeError, ValueError) as error:
        made.error(str(error))
    what = (
        args.model or f"{Path(args.config).stem if args.config.endswith('.json') else Path(args.config).name}"
    )
    facts = gpu_facts(setup.device)
    origin = {**provenance(), "argv": command_line(argv)}
    origin["revision"] = args.revision or origin["revision"]
    head = {
        "benchmark": "gpu_round",
        "what": what,
        "dtype": args.dtype,
        "tp": args.tp,
        "provenance": origin,
        "device": facts,
        "rates": {
            "copy_bytes_per_s": setup.rates.bytes_per_s,
            "matmul_flop_per_s": setup.rates.flop_per_s,
            "convention": "bytes read + bytes written of a large copy; a floor is bytes read once over it",
        },
        "synthetic": {} if args.model else {"dummy_weights": True, "simulated_acceptance": args.simulate},
    }
    print(
        f"# {what} on {facts['device']}, {args.dtype}\n\ncopy {setup.rates.bytes_per_s / 1e12:.2f} TB/s, "
        f"bf16 products {setup.rates.flop_per_s / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    if not args.model:
        print(f"\nDUMMY WEIGHTS, SIMULATED ACCEPTANCE ({args.simulate}): only times are real", flush=True)
    steps = {name: partial(measure, setup) for name, measure in parts.items()}
    found, failed = run_parts(steps, setup.budget, setup.device, partial(write, args.out, head))
    found["closing"] = closing(found)
    print(f"\n{found['closing'].text()}", flush=True)
    write(args.out, head, found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
