"""Which bursts are run on which stacks, in which order.

The stack at hand is asked in four ways, greedy and sampled, with trees and without. Then, with stacks of our
own beside it: trees of many sizes under a fixed budget (the curve), and each part switched off. Owns that
plan; bursts are measure's, stacks are switches'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import specbridge
from specbridge.errors import ConfigError, Unavailable
from specbridge.explain import switches
from specbridge.explain.answers import Curve, Measured
from specbridge.explain.clients import budget_state, draft_info, target_info
from specbridge.explain.comparisons import FEWEST_PAIRS, Comparison
from specbridge.explain.find import Addresses
from specbridge.explain.measure import Arm, Bench, Burst, Load, Side, in_turns
from specbridge.explain.switches import PLAIN, TREES, WARM_PLAIN, WARM_TREES, Switch
from specbridge.rounds import DraftInfo, TargetInfo
from specbridge.serve import StackSettings

CURVE = "curve"
PARTS = (CURVE, *(switch.key for switch in switches.BY_FLAG))
"""What stacks of our own are started for, each by itself."""
MOST_SIZES = 6
LARGEST_TREE = {"cpu": 32, "cuda": 128}
"""Of the curve, by device: beyond, a pass takes so long that nobody would ask."""
Tell = Callable[[str], None]


def parts(only: str | None) -> tuple[str, ...]:
    """The parts that `--only` names, all without it. Raises ConfigError for one that is not known."""
    if only is None:
        return PARTS
    names = tuple(name.strip() for name in only.split(",") if name.strip())
    for name in names:
        if name not in PARTS:
            raise ConfigError(f"--only {name!r} is no part that can be measured; use {', '.join(PARTS)}")
    return names


def sizes(most: int) -> list[int]:
    """Sizes of trees to try: powers of two up to `most`, the largest few of them and 1."""
    powers = [1 << bit for bit in range(12) if 1 << bit <= most]
    return powers if len(powers) <= MOST_SIZES else [1, *powers[1 - MOST_SIZES :]]


class Campaign:
    """One report's measurements on the stack of `bench`. base: the options it was started with, if it is ours
    and others may be started beside it; parts: for what.
    """

    def __init__(
        self,
        bench: Bench,
        load: Load,
        parts: Sequence[str],
        *,
        tell: Tell,
        api_key: str = "",
        base: StackSettings | None = None,
    ) -> None:
        self._bench, self._load, self._parts = bench, load, parts
        self._tell, self._api_key, self._base = tell, api_key, base
        self._notes: list[str] = []

    async def measure(self) -> Measured:
        """Everything, in minutes. Raises what the stack's own requests fail with."""
        begun = time.monotonic()
        at, client = self._bench.addresses, self._bench.client
        model = await client.model()
        if not at.metrics_of("gateway") or not at.metrics_of("target"):
            self._notes.append("Some addresses are not known: what needs their /metrics is left out.")
        drafts = bool(model.drafter_id)
        await self._bench.until_quiet()
        arms = [TREES, PLAIN, WARM_TREES, WARM_PLAIN] if drafts else [PLAIN]
        found = await self._turns([(self._bench, arm) for arm in arms], "requests", self._load)
        bursts = dict(zip((arm.name for arm in arms), found, strict=True))
        # The budget tells of its last decision: that should be one of the shipped way to ask.
        await self._bench.burst(arms[0], self._load.prompts[:1], self._load)
        budget = await self._budget(at)
        target = await target_info(at.target) if at.target else None
        draft = await draft_info(at.draft) if at.draft and drafts else None
        curve = await self._curve(target, draft, model.tree_budget) if drafts else None
        comparisons = []
        if drafts:
            comparisons = [
                Comparison(
                    "speculation", "Speculation", "plain decoding", bursts[TREES.name], bursts[PLAIN.name]
                ),
                Comparison(
                    "speculation_sampled",
                    "Speculation (T = 1)",
                    "plain decoding",
                    bursts[WARM_TREES.name],
                    bursts[WARM_PLAIN.name],
                ),
            ]
            for switch in switches.BY_FLAG:
                comparisons.append(await self._switch(switch, target))
        return Measured(
            model=model,
            load=self._load,
            trees=bursts.get(TREES.name, bursts[PLAIN.name]),
            plain=bursts[PLAIN.name],
            curve=curve,
            comparisons=comparisons,
            target=target,
            draft=draft,
            budget=budget,
            version=specbridge.__version__,
            seconds=time.monotonic() - begun,
            notes=self._notes,
        )

    async def _turns(self, sides: Sequence[Side], what: str, load: Load) -> list[list[Burst]]:
        self._tell(f"{what}: {len(sides)} ways x {len(load.prompts)} prompts x {load.repeats}")
        return await in_turns(sides, load, progress=lambda at: self._tell(f"{what}, turn {at}"))

    async def _budget(self, at: Addresses) -> dict[str, Any] | None:
        if not at.rest:
            return None
        state = await budget_state(at.rest, self._api_key)
        if state is None:
            self._notes.append(
                "The gateway does not tell its budget's state: what was measured is shown alone."
            )
        return state

    async def _curve(self, target: TargetInfo | None, draft: DraftInfo | None, budget: int) -> Curve | None:
        """Trees of many sizes: under a fixed budget if a stack may be started, else within this one's."""
        load = replace(self._load, repeats=max(1, self._load.repeats // 2))
        if self._base is None:
            tried = sizes(budget - 1)
            found = await self._turns(self._sides(self._bench, tried), "smaller trees", load)
            return Curve(dict(zip((0, *tried), found, strict=True)), fixed=False)
        if CURVE not in self._parts or target is None or draft is None:
            return None
        most = min(target.max_tree_nodes, draft.max_nodes, LARGEST_TREE[target.device.split(":")[0]])
        tried = sizes(most)
        self._tell("starting a stack with a fixed budget")
        options = switches.changed(self._base, switches.fixed_budget(most))
        async with switches.another_stack(options) as where, Bench(where) as bench:
            await bench.until_quiet()
            found = await self._turns(self._sides(bench, tried), "trees by size", load)
        return Curve(dict(zip((0, *tried), found, strict=True)), fixed=True)

    def _enough(self, arm: Arm) -> Load:
        """Repeated often enough for pairs that decide something: prompts that run together make one pair."""
        groups = -(-len(self._load.prompts) // arm.streams)
        return replace(self._load, repeats=max(self._load.repeats, -(-FEWEST_PAIRS // groups)))

    def _sides(self, bench: Bench, tried: Sequence[int]) -> list[Side]:
        return [(bench, PLAIN), *((bench, Arm(f"{n} nodes", max_tree_nodes=n)) for n in tried)]

    async def _switch(self, switch: Switch, target: TargetInfo | None) -> Comparison:
        def missing(why: str) -> Comparison:
            return Comparison(switch.key, switch.title, switch.without, missing=why)

        base, device = self._base, target.device if target is not None else ""
        if base is None:
            return missing("needs stacks of its own: run with --local")
        if switch.key not in self._parts:
            return missing("was not asked for")
        if switch.gpu_only and not device.startswith("cuda"):
            return missing(f"none on the device {device!r}" if device else "the device is not known")
        if not switch.on and switches.same(base, switch.off):
            return missing("is switched off in this stack already")
        self._tell(f"{switch.title}: starting what differs")
        try:
            async with switches.sides(self._bench, base, switch) as pair:
                sides = [(side, switch.arm) for side in pair]
                found = await self._turns(sides, switch.title, self._enough(switch.arm))
        except (ConfigError, Unavailable) as error:
            return missing(f"could not be measured: {error}")
        return Comparison(switch.key, switch.title, switch.without, found[0], found[1])
