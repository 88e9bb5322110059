"""The simulated drafter: trees grown by the service from its marginals accept what the files promise."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from draft_service.simulation import load_simulation, tables_of
from draft_service.tree import build_trees
from kernels.simulate import pack_rows, simulated_marginals, true_tokens
from specbridge.acceptance import read
from specbridge.errors import ConfigError
from specbridge.rounds import SamplingParams

SHIPPED = Path(__file__).parents[2] / "benchmarks" / "acceptance"
VOCAB = 2048
ROUNDS = 1200


@pytest.mark.parametrize("name", ["gsm8k-like", "alpaca-like", "smollm2-135m"])
def test_chains_and_trees_accept_what_the_file_promises(name: str) -> None:
    file = read(SHIPPED / f"{name}.json")
    tables = tables_of(file, vocab_size=VOCAB)
    lengths: dict[int, list[int]] = {0: [], 16: [], 64: []}
    for first in range(0, ROUNDS, 100):
        rows = pack_rows([(7919 * i, 31 * i, i % 2) for i in range(first, first + 100)], "cpu")
        logits = torch.empty(100, file.depths, VOCAB)
        scores = simulated_marginals(logits, tables, *rows).log_softmax(-1)
        text = torch.stack(
            [true_tokens(rows[0], rows[1] + depth + 1, rows[2], VOCAB) for depth in range(file.depths)], dim=1
        ).tolist()
        for nodes, found in lengths.items():
            trees = build_trees(
                scores,
                [nodes or file.depths] * 100,
                max_depths=[file.depths] * 100,
                top_k=None if nodes else 1,
            )
            for tree, tokens in zip(trees, text, strict=True):
                children = {(p, t): i for i, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
                node, depth = -1, 0
                while depth < len(tokens) and (node, tokens[depth]) in children:
                    node, depth = children[node, tokens[depth]], depth + 1
                found.append(1 + depth)
    for nodes, found in lengths.items():
        values = torch.tensor(found, dtype=torch.float64)
        expected = file.tree_length(nodes) if nodes else file.chain_length()
        error = float(values.std()) / math.sqrt(ROUNDS)
        assert float(values.mean()) == pytest.approx(expected, abs=4 * error), f"{nodes} nodes"


def test_a_batch_is_its_sessions_one_by_one() -> None:
    simulation = load_simulation("3.0", horizon=7, vocab_size=300, device="cpu")
    assert simulation is not None and simulation.label == "mean 3"
    samplings = [SamplingParams(seed=2**64 - 3), SamplingParams(seed=5, choice=1), SamplingParams(seed=5)]
    whole = simulation.marginals(torch.zeros(3, 7, 300), samplings, [9, 9, 9])
    for i, sampling in enumerate(samplings):
        assert torch.equal(simulation.marginals(torch.zeros(1, 7, 300), [sampling], [9])[0], whole[i])
    assert not torch.equal(whole[1], whole[2])


def test_nothing_is_simulated_unless_asked() -> None:
    assert load_simulation("", horizon=7, vocab_size=300, device="cpu") is None


def test_a_vocabulary_smaller_than_the_candidates_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 32 candidates .* vocabulary 32 ids; it needs 33"):
        load_simulation("3.0", horizon=7, vocab_size=32, device="cpu")


def test_a_small_vocabulary_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [[0.3, 0.2]]
    body = {"format": "specbridge-acceptance-1", "name": "x", "depths": 1, "ranks": 2,
            "classes": [{"weight": 1, "true": rows}]}  # fmt: skip
    (tmp_path / "x.json").write_text(json.dumps(body))
    load_simulation(str(tmp_path / "x.json"), horizon=1, vocab_size=4, device="cpu")
    assert "the vocabulary of 4 is small for acceptance x" in caplog.text
