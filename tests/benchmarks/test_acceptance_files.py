"""benchmarks.acceptance: recorded rounds become the tables they were drawn from; fits hit what is asked."""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import pytest

from benchmarks import common
from benchmarks.acceptance import RecordedRound, _tree, _walked, fit, minimise, promises, tabulate
from specbridge.acceptance import Acceptance, parse
from specbridge.acceptance_model import Curves
from specbridge.errors import ConfigError

DEPTHS, RANKS = 5, 8


def draw(law: Acceptance, count: int) -> list[RecordedRound]:
    """Rounds as a recording of a drafter with this law would note them."""
    rng = random.Random(7)
    rounds = []
    for _ in range(count):
        kind = rng.choices(law.classes, [c.weight for c in law.classes])[0]
        ranks, on_path = [], True
        for depth in range(law.depths):
            row = (kind.true if on_path else kind.after_miss)[depth]
            rank = rng.choices(range(law.ranks + 1), [*row, max(1 - sum(row), 0)])[0]
            ranks.append(rank)
            on_path = on_path and rank == 0
        rounds.append(RecordedRound(tuple(ranks), kind.draft, {}))
    return rounds


def test_tables_recover_the_law_that_rounds_were_drawn_from() -> None:
    curves = Curves(spread=1.5, jitter=0.5).with_chain(2.6, depths=DEPTHS, classes=3)
    law = curves.acceptance("law", depths=DEPTHS, ranks=RANKS, classes=3)
    found = tabulate(draw(law, 6000), classes=3, name="found")
    assert found.chain_length() == pytest.approx(law.chain_length(), rel=0.03)
    for nodes in (4, 16, 40):
        assert found.tree_length(nodes) == pytest.approx(law.tree_length(nodes), rel=0.04)
    heads = [[c.true[0][0] for c in file.classes] for file in (found, law)]
    assert heads[0] == pytest.approx(heads[1], abs=0.05)
    parse(json.loads(found.to_json()), where="written")


def test_few_rounds_are_refused() -> None:
    law = Curves().with_chain(2.0, depths=DEPTHS).acceptance("law", depths=DEPTHS, ranks=RANKS)
    with pytest.raises(ConfigError, match="25 rounds are too few for 3 classes"):
        tabulate(draw(law, 25), classes=3, name="x")


def arguments(**changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = {"chain": 3.0, "tree": [(16, 3.75)], "block": 8, "ranks": 16, "classes": 4,
                              "steps": 30, "name": "", "source": "here"}  # fmt: skip
    return argparse.Namespace(**{**values, **changes})


def test_a_fit_keeps_the_chain_and_nears_the_trees() -> None:
    made = fit(arguments())
    assert made.chain_length() == pytest.approx(3.0, abs=1e-6)
    assert made.tree_length(16) == pytest.approx(3.75, rel=0.02)
    assert made.provenance["asked"] == {"chain": 3.0, "tree of 16": 3.75}
    assert made.provenance["file"] == promises(made)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tree": [(64, 9.0)]}, "--tree 64:9.0 is not possible with a block of 8"),
        ({"chain": 8.5, "tree": []}, "mean acceptance length of 8.5 is not possible with 7 drafts"),
    ],
)
def test_impossible_figures_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(arguments(**changes))


def test_the_minimiser_finds_a_minimum() -> None:
    found = minimise(lambda p: (p[0] - 2) ** 2 + 3 * (p[1] + 1) ** 2, [0.0, 0.0], steps=80)
    assert found == pytest.approx([2.0, -1.0], abs=0.01)


def test_a_text_walks_down_a_tree() -> None:
    nodes = [(-1, 1, 5), (0, 2, 6), (-1, 1, 7), (2, 2, 6), (3, 3, 9)]
    assert [_walked(nodes, text) for text in ([5, 6, 9], [7, 6, 9], [6], [7, 6])] == [2, 3, 0, 2]


def test_a_tree_argument_is_nodes_and_length() -> None:
    assert _tree("64:8.9") == (64, 8.9)
    with pytest.raises(argparse.ArgumentTypeError, match="'64' is not NODES:LENGTH"):
        _tree("64")


def test_what_is_not_real_is_said_with_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    common.report(
        "x", ["a"], [[1]], None, synthetic={"dummy_weights": True, "simulated_acceptance": "gsm8k-like (1)"}
    )
    said = capsys.readouterr().out
    assert "DUMMY WEIGHTS" in said and "SIMULATED ACCEPTANCE: gsm8k-like (1)" in said
