"""What can be switched off, and how: by a request's own fields, or by a flag of a stack started for it.

Owns the list and the stacks that `--local` starts beside the first one. Does not own the measuring (measure).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specbridge import stack
from specbridge.explain.find import Addresses, of_endpoints
from specbridge.explain.measure import Arm, Bench
from specbridge.serve import SERVICES, Plan, StackSettings, plan, serve_settings, settings_class
from specbridge.settings import load

PLAIN = Arm("plain", speculate=False)
TREES = Arm("trees")
WARM_PLAIN = Arm("plain, T = 1", speculate=False, temperature=1.0)
WARM_TREES = Arm("trees, T = 1", temperature=1.0)
STREAMS = 4
"""Requests at a time where one alone would show nothing."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A part of the system, with it and without: the flags of `serve` that differ, None if only requests do.

    on, off: as serve's settings name them; nothing: as the stack was started.
    """

    key: str
    title: str
    without: str
    arm: Arm
    off: Mapping[str, Any]
    on: Mapping[str, Any]
    gpu_only: bool = False


BY_FLAG = (
    Switch("tree", "The tree", "chains of the best token a position", TREES, {"top_k": "1"}, {}),
    Switch(
        "shared_noise",
        "The shared noise (T = 1)",
        "trees from the drafter's marginals alone",
        WARM_TREES,
        {"shared_noise": False},
        {},
    ),
    Switch(
        "eager",
        "Drafting ahead, in a process of its own",
        "a block pass only when asked",
        TREES,
        {"eager": False},
        {},
    ),
    Switch(
        "cohorts",
        f"Two cohorts ({STREAMS} streams)",
        "one cohort",
        Arm("trees", streams=STREAMS),
        {"cohorts": "1"},
        {"cohorts": "2"},
    ),
    Switch(
        "cuda_graphs",
        "CUDA graphs",
        "passes launch by launch",
        TREES,
        {"cuda_graphs": False},
        {},
        gpu_only=True,
    ),
)


def fixed_budget(nodes: int) -> dict[str, Any]:
    """Options under which a request's own cap on nodes is what its trees have, up to `nodes`."""
    return {
        "budget": "fixed",
        "tree_budget": str(nodes),
        "max_verify_rows": str(nodes + 1),
        "min_tree": "1",
        "cohorts": "1",
    }


def changed(base: StackSettings, values: Mapping[str, Any]) -> StackSettings:
    """The options of a stack like `base` but for some, with ports and a folder of its own. Raises
    ConfigError.
    """
    given = {name: getattr(base, name) for name in base.model_fields_set}
    own = {"http_port": "0", "grpc_port": "0", "run_dir": ""}
    return load(serve_settings(), **{**given, **own, **values})


def same(base: StackSettings, values: Mapping[str, Any]) -> bool:
    """Whether a stack started with `base` has these options already, by choice or by default."""
    return all(_value(base, name) == str(value).lower() for name, value in values.items())


def _value(base: StackSettings, name: str) -> str:
    chosen = getattr(base, name)
    if chosen is None:
        fields = (settings_class(service).model_fields for service in SERVICES)
        chosen = next(found[name].default for found in fields if name in found)
    return str(chosen).lower()


@contextlib.asynccontextmanager
async def sides(bench: Bench, base: StackSettings, switch: Switch) -> AsyncIterator[tuple[Bench, Bench]]:
    """The stack with the part and the one without; `bench`, started with `base`, is the one or the other if
    its options are those. Raises ConfigError, Unavailable.
    """
    async with contextlib.AsyncExitStack() as started:
        pair = []
        for values in (switch.on, switch.off):
            if same(base, values):
                pair.append(bench)
                continue
            where = await started.enter_async_context(another_stack(changed(base, values)))
            other = await started.enter_async_context(Bench(where))
            await other.until_quiet()
            pair.append(other)
        yield pair[0], pair[1]


@contextlib.asynccontextmanager
async def another_stack(options: StackSettings) -> AsyncIterator[Addresses]:
    """A stack beside the one that runs, while the block lasts. Its models are on this machine already.

    Raises ConfigError, or stack.ServiceFailed if it does not start.
    """
    async with stack.run_folder() as folder:
        made = plan(options, folder)
        running = stack.Stack(made.services, made.limits, write=lambda line: None)
        try:
            await running.start()
            yield addresses(made)
        finally:
            await running.stop()


def addresses(made: Plan) -> Addresses:
    """Where the processes of a planned stack listen."""
    at = {service.name: service.address for service in made.services}
    return replace(of_endpoints(made.endpoints), target=at.get("target", ""), draft=at.get("draft", ""))
