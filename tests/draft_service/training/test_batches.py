"""Which responses, rows and anchors a step sees, against a plain reading of the rules."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from draft_service.drafter_config import TargetFacts
from draft_service.training.batches import MAX_DOCUMENTS, Batches, Prefetch, pack, split
from draft_service.training.fit_settings import FitSettings, Recipe, make_recipe
from draft_service.training.shards import Manifest, Shards, ShardWriter
from specbridge.errors import ConfigError

FACTS = TargetFacts(hidden_size=32, num_layers=6, vocab_size=1000)


def recipe(**changes: object) -> Recipe:
    settings = FitSettings(rows=3, row_tokens=64, anchors=10, holdout=20)
    made = make_recipe(settings, FACTS, intermediate_size=8, dtype="float32", ranks=1)
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """300 responses to 100 prompts, each of tokens that nobody else has; some are too long for a row."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    with ShardWriter(folder, Manifest("t", "", 1000)) as writer:
        for key in range(300):
            prompt = (1 + key % 100, 7, 7)
            answer = rng.integers(0, 1000, int(rng.integers(1, 90))).tolist()
            writer.add([*prompt, *answer], 3, (0.0, 0.8, 1.0)[key // 100], key, key)
    return Shards(folder)


def test_packing_keeps_every_response_once_and_rows_full() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(2, 120, 9000)
    rows = pack(lengths, 128, np.random.default_rng(2))
    assert sorted(i for row in rows for i in row) == list(range(9000))
    assert all(lengths[row].sum() <= 128 and len(row) <= MAX_DOCUMENTS for row in rows)
    assert lengths.sum() / (128 * len(rows)) > 0.97
    assert pack(lengths, 128, np.random.default_rng(2)) == rows
    assert pack(lengths, 128, np.random.default_rng(3)) != rows


def test_a_batch_is_what_its_responses_say(data: Shards) -> None:
    chosen = recipe()
    batches = Batches(data, split(data, chosen).train, chosen)
    short_rows = 0
    for number in range(batches.per_epoch):
        batch = batches.get(number)
        for r in range(chosen.rows):
            counted = batch.ends[r] > batch.anchors[r] + 1
            assert len(set(batch.anchors[r][counted])) == counted.sum()
            for anchor, start, end, owner in zip(
                *(x[r][counted] for x in (batch.anchors, batch.starts, batch.ends, batch.responses)),
                strict=True,
            ):
                response = data.get(int(owner))
                length = min(len(response.tokens), chosen.row_tokens)
                assert end - start == length
                assert batch.tokens[r, start:end].tolist() == response.tokens[:length].tolist()
                assert batch.positions[r, start:end].tolist() == list(range(length))
                # The anchor and the token after it are the target's own.
                assert response.prompt_length <= anchor - start <= length - 2
                assert len(set(batch.documents[r, start:end].tolist())) == 1
            short_rows += not counted.all()
        _bounds_agree(batch.bounds, batch.documents)
    assert short_rows < chosen.rows * batches.per_epoch / 4


def _bounds_agree(bounds: np.ndarray, documents: np.ndarray) -> None:
    """Flash attention's bounds and the mask's numbers cut the rows at the same places."""
    rows, length = documents.shape
    change = np.ones((rows, length), bool)
    change[:, 1:] = documents[:, 1:] != documents[:, :-1]
    cuts = np.flatnonzero(change.ravel())
    assert bounds[: len(cuts)].tolist() == cuts.tolist()
    assert (bounds[len(cuts) :] == rows * length).all() and len(cuts) < len(bounds)


def test_anchors_are_drawn_anew_and_evenly(data: Shards) -> None:
    """Over many epochs every position that may be an anchor becomes one about equally often."""
    chosen = recipe(rows=1, anchors=5)
    one = np.flatnonzero(data.lengths == data.lengths[(data.lengths < 60) & (data.lengths > 40)][0])[:1]
    batches = Batches(data, one, chosen)
    seen = np.zeros(64)
    for number in range(400):
        seen[batches.get(number).anchors[0]] += 1
    length = int(data.lengths[one[0]])
    assert (seen[: int(data.prompt_lengths[one[0]])] == 0).all() and (seen[length - 1 :] == 0).all()
    inside = seen[3 : length - 1]
    expected = 400 * 5 / len(inside)
    assert abs(inside - expected).max() < 6 * expected**0.5


def test_batches_depend_on_their_number_alone(data: Shards) -> None:
    """So a resumed run, and other numbers of ranks, see the same ones."""
    chosen = recipe()
    train = split(data, chosen).train
    batches = Batches(data, train, chosen)
    wanted = [batches.get(i) for i in range(3 * batches.per_epoch)]
    for number in (len(wanted) - 1, 2, batches.per_epoch):
        fresh = Batches(data, train, chosen).get(number)
        for name in ("tokens", "anchors", "bounds"):
            assert np.array_equal(getattr(fresh, name), getattr(wanted[number], name))
    first, second = ({int(o) for b in wanted[i : i + batches.per_epoch] for o in b.responses.ravel()} for i in
                     (0, batches.per_epoch))  # fmt: skip
    assert first - {-1} <= set(train.tolist()) and len(first ^ second) < 0.2 * len(train)
    assert not np.array_equal(wanted[0].tokens, wanted[batches.per_epoch].tokens)


def test_answers_to_one_prompt_are_held_out_together(data: Shards) -> None:
    chosen = recipe()
    sides = split(data, chosen)
    prompts = [{int(data.get(int(i)).tokens[0]) for i in side} for side in (sides.train, sides.held_out)]
    assert not prompts[0] & prompts[1]
    assert 20 <= len(sides.held_out) <= 30
    assert np.array_equal(split(data, recipe(data_share=0.5, temperatures=(0.0,))).held_out, sides.held_out)
    usable = np.minimum(data.lengths, 64) >= 5
    assert len(sides.train) + len(sides.held_out) == usable.sum() < len(data)


def test_temperatures_mix_and_share_select(data: Shards) -> None:
    everything = split(data, recipe()).train
    cold = split(data, recipe(temperatures=(0.0,))).train
    assert (data.temperatures[cold] == 0).all() and len(cold) == (data.temperatures[everything] == 0).sum()
    half = split(data, recipe(greedy_share=0.5)).train
    assert abs((data.temperatures[half] == 0).mean() - 0.5) < 0.01 and len(half) >= 2 * len(cold) - 2
    assert (data.temperatures[split(data, recipe(greedy_share=1.0)).train] == 0).all()
    assert (data.temperatures[split(data, recipe(greedy_share=0.0)).train] > 0).all()
    assert len(split(data, recipe(data_share=0.25)).train) == round(len(everything) * 0.25)
    with pytest.raises(ConfigError, match=r"temperatures \[0.0"):
        split(data, recipe(temperatures=(0.5,)))
    with pytest.raises(ConfigError, match="raise --row-tokens"):
        split(data, recipe(row_tokens=4))


def test_prefetch_hands_on_in_order_ends_and_raises() -> None:
    def make(number: int) -> int:
        if number == 7:
            raise ConfigError("seven")
        return number * number

    endless = iter(range(10**9))
    source = Prefetch(make, endless)
    with pytest.raises(ConfigError, match="seven"):
        for expected, item in enumerate(source):
            assert item == expected * expected
    source.close()
    before = threading.active_count()
    other = Prefetch(lambda n: n, iter(range(10**9)))
    assert next(iter(other)) == 0
    other.close()
    assert threading.active_count() <= before
