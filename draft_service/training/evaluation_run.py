"""Several drafters over the same held-out texts.

Owns the order of work: drafters that tap the same layers share the target's hidden states. Does not own the
replay of a text (evaluation) nor the sums (evaluation_report).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from draft_service.training.evaluation import HeldOut, Replay
from draft_service.training.evaluation_report import Report
from draft_service.training.scoring import PLAIN, ScoringRule
from specbridge.rounds import GREEDY_BELOW

Taps = Callable[..., Iterator[Any]]
"""taps(texts, layer_ids, normed_last_layer=…): hidden states of each text, [tokens, layers * hidden]."""


def compare(
    replays: Mapping[str, Replay],
    texts: Sequence[HeldOut],
    taps: Taps,
    *,
    rules: Sequence[ScoringRule],
    nodes: Sequence[int],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Replay all texts with all drafters, by name. For greedy texts there are the plain rule and those that
    condition on tokens.

    report(done, total): of texts x drafters.
    """
    made = Report(tuple(nodes))
    kinds: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name, replay in replays.items():
        config = replay.drafter.config
        kinds.setdefault((config.target_layer_ids, config.normed_last_layer), []).append(name)
    done, total = 0, len(texts) * len(replays)
    # Texts without a second token have no round.
    long = [text for text in texts if len(text.response) > 1]
    done += (len(texts) - len(long)) * len(replays)
    for (layer_ids, normed), names in kinds.items():
        states = taps([text.tokens for text in long], layer_ids, normed_last_layer=normed)
        for text, features in zip(long, states, strict=True):
            for name in names:
                greedy = text.temperature < GREEDY_BELOW
                own = [PLAIN, *(r for r in rules if r.conditioning and r.noisy)] if greedy else rules
                found = replays[name].rounds(text, features, own, nodes)
                for rule in own:
                    made.add(
                        name,
                        setting(text.temperature, rule),
                        text.group,
                        {n: found[rule.name, n] for n in nodes},
                    )
                done += 1
                report(done, total)
    return made


def setting(temperature: float, rule: ScoringRule) -> str:
    """Its name in tables."""
    return "T=0" if temperature < GREEDY_BELOW and rule is PLAIN else f"T={temperature:g} {rule.name}"
