"""The parts of the cost budget: calibration, cost curves, the pooled cut, forecast, steering. All pure."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from budget_sim import grow
from hypothesis import given
from hypothesis import strategies as st

from gateway.calibration import Calibration, Mode
from gateway.forecast import Forecast
from gateway.pool import best_cut, extended, gain_curve
from gateway.steering import Load, Steering, SteeringRules
from specbridge.tree import DraftTree

# ---- pool -----------------------------------------------------------------------------------

falling = st.lists(st.floats(0.0, 1.0), max_size=4).map(lambda values: sorted(values, reverse=True))
pools = st.lists(falling, min_size=1, max_size=4)


def exhaustive(values: Sequence[Sequence[float]], tokens: float, seconds: Sequence[float]) -> float:
    """The best rate of all choices of a prefix of each list."""
    return max(
        (tokens + sum(sum(line[:n]) for line, n in zip(values, counts, strict=True))) / seconds[sum(counts)]
        for counts in itertools.product(*(range(len(line) + 1) for line in values))
    )


@given(pools, st.floats(0.5, 8.0), st.lists(st.floats(0.01, 1.0), min_size=17, max_size=17))
def test_the_cut_is_the_best_of_all_prefixes(
    values: list[list[float]], tokens: float, steps: list[float]
) -> None:
    """Any stairs: costs rise by any steps, so the rate has any number of dips."""
    seconds = list(itertools.accumulate(steps))
    cut = best_cut(values, tokens=tokens, seconds=seconds)
    assert cut.rate == pytest.approx(exhaustive(values, tokens, seconds), rel=1e-12)
    chosen = sum(sum(line[:n]) for line, n in zip(values, cut.counts, strict=True))
    assert cut.tokens == pytest.approx(tokens + chosen)
    assert cut.seconds == seconds[cut.nodes]
    assert all(0 <= n <= len(line) for line, n in zip(values, cut.counts, strict=True))


@given(pools, st.integers(0, 16), st.integers(0, 16))
def test_limits_of_the_cut(values: list[list[float]], least: int, most: int) -> None:
    """Rows that cost nothing: as many as allowed; rows that cost all: as few."""
    size = sum(map(len, values))
    free = best_cut(values, tokens=1.0, seconds=[1.0] * 17, most=most)
    positive = sum(1 for line in values for value in line if value > 0)
    # What is lost in rounding beside the others' sum brings nothing.
    total = 1.0 + sum(value for line in values for value in line)
    assert min(positive, most) == free.nodes or any(total + v == total for line in values for v in line)
    dear = best_cut(values, tokens=1.0, seconds=[float(10**n) for n in range(17)], least=least)
    assert dear.nodes == min(least, size)


@given(pools, st.integers(0, 16), st.booleans())
def test_of_equal_values_the_first_lists_come_first(values: list[list[float]], nodes: int, few: bool) -> None:
    """The same nodes as of a stable sort of all of them."""
    if few:  # of few different values, so that many are equal
        values = [[round(2 * value) / 2 for value in line] for line in values]
    order = sorted(((-v, i) for i, line in enumerate(values) for v in line), key=lambda one: one[0])
    owners = [i for _, i in order[:nodes]]
    cut = best_cut(values, tokens=1.0, seconds=[1.0] * 17, most=nodes, least=nodes)
    assert cut.counts == tuple(owners.count(i) for i in range(len(values)))


def test_a_dip_is_no_end() -> None:
    """Two rows a block: one more row costs a block and loses, five more win again."""
    seconds = [1.0, 1.6, 1.6, 1.6, 1.6, 1.6]
    cut = best_cut([[0.5, 0.5, 0.5, 0.5, 0.5]], tokens=1.0, seconds=seconds)
    assert cut.counts == (5,)
    assert [round(t / s, 3) for _, t, s in gain_curve([[0.5] * 5], tokens=1.0, seconds=seconds)][:3] == [
        1.0,
        0.938,
        1.25,
    ]


@given(pools, st.integers(0, 6))
def test_an_extended_cut_is_of_prefixes_too(values: list[list[float]], extra: int) -> None:
    cut = best_cut(values, tokens=1.0, seconds=list(itertools.accumulate([1.0] * 17)))
    counts = extended(values, cut, extra)
    assert sum(counts) == min(cut.nodes + extra, sum(map(len, values)))
    assert all(before <= now <= len(v) for before, now, v in zip(cut.counts, counts, values, strict=True))
    # What was added is the best of what was left.
    left = sorted((v for line, n in zip(values, cut.counts, strict=True) for v in line[n:]), reverse=True)
    added = [v for line, a, b in zip(values, cut.counts, counts, strict=True) for v in line[a:b]]
    assert sorted(added, reverse=True) == left[: len(added)]


# ---- calibration ----------------------------------------------------------------------------


def chain(*probabilities: float) -> DraftTree:
    """A chain whose nodes have these path probabilities."""
    size = len(probabilities)
    return DraftTree(
        tuple(range(size)), tuple(range(-1, size - 1)), tuple(math.log(p) for p in probabilities)
    )


def test_with_nothing_seen_a_node_is_worth_what_the_drafter_says() -> None:
    assert Calibration().values(chain(0.9, 0.5, 0.1), Mode.GREEDY) == pytest.approx([0.9, 0.5, 0.1])


@pytest.mark.parametrize(("claimed", "real"), [(0.85, 0.4), (0.3, 0.6), (0.05, 0.05), (0.015, 0.2)])
def test_calibration_converges_to_the_real_rate(claimed: float, real: float) -> None:
    calibration, rng = Calibration(), random.Random(1)
    for _ in range(4000):
        calibration.observe(chain(claimed), (0,) if rng.random() < real else (), Mode.COUPLED)
    # 1000 to 2000 nodes count: five standard errors of the fewest.
    error = 5 * math.sqrt(real * (1 - real) / 1000) + 4 * (1 - real) / 1000
    assert calibration.values(chain(claimed), Mode.COUPLED)[0] == pytest.approx(real, abs=error)
    assert calibration.values(chain(claimed), Mode.GREEDY) == pytest.approx([claimed])
    assert 1000 <= calibration.seen(Mode.COUPLED, 1, math.log(claimed)) <= 2048
    row = next(row for row in calibration.rows() if row.mode is Mode.COUPLED)
    assert row.depth == 1 and row.low <= math.log(claimed) < row.high
    assert row.value == pytest.approx(real, abs=error)


def test_calibration_forgets() -> None:
    calibration = Calibration()
    for right in (True, False):
        for _ in range(6000):
            calibration.observe(chain(0.5), (0,) if right else (), Mode.GREEDY)
    assert calibration.values(chain(0.5), Mode.GREEDY)[0] < 0.05


def test_depths_are_told_apart_and_unseen_scores_follow_their_depth() -> None:
    calibration = Calibration()
    for _ in range(500):
        calibration.observe(chain(0.8, 0.64), (0,), Mode.GREEDY)  # the second is never right
    first, second = calibration.values(chain(0.8, 0.64), Mode.GREEDY)
    assert first > 0.9 and second < 0.05
    unseen = calibration.values(chain(0.2), Mode.GREEDY)[0]
    assert 0.2 < unseen < 0.3  # the depth does better than promised
    assert (
        calibration.values(DraftTree((1, 2), (-1, 0), (math.log(0.2), math.log(0.1))), Mode.GREEDY)[1] < 0.02
    )


@given(st.integers(0, 1000), st.integers(0, 1000), st.floats(0.3, 1.6))
def test_values_fall_along_the_list_and_from_parent_to_child(seed: int, truth: int, factor: float) -> None:
    """Whatever was observed, so that every cut is a prefix and a tree."""
    calibration, rng = Calibration(weight=0.5, group_weight=0.5), random.Random(truth)
    for _ in range(20):
        tree = grow(rng, sure=rng.random(), honest=1.0, nodes=24).tree
        picked = tuple(i for i in range(len(tree)) if rng.random() < 0.3)
        calibration.observe(tree, picked, Mode.GREEDY)
    tree = grow(random.Random(seed), sure=0.5, honest=1.0, nodes=24).tree
    values = calibration.values(tree, Mode.GREEDY, factor)
    assert len(values) == len(tree)
    assert all(0.0 <= b <= a <= 1.0 for a, b in itertools.pairwise(values))
    for value, parent in zip(values, tree.parents, strict=True):
        assert parent < 0 or value <= values[parent]


# ---- forecast -------------------------------------------------------------------------------


def test_a_forecast_is_made_of_whole_trees() -> None:
    forecast = Forecast()
    assert len(forecast.tree(Mode.GREEDY, 5)) == 5
    forecast.drafted(Mode.GREEDY, [0.9, 0.8, 0.7])
    forecast.drafted(Mode.GREEDY, [0.45, 0.05, 0.0], factor=0.5)
    seen = sorted(tuple(round(v, 3) for v in forecast.tree(Mode.GREEDY, 3)) for _ in range(2))
    assert seen == [(0.9, 0.1, 0.0), (0.9, 0.8, 0.7)]
    assert forecast.known(Mode.GREEDY) == 2 and forecast.known(Mode.COUPLED) == 0
    longer = forecast.tree(Mode.GREEDY, 64, 1.5)
    assert len(longer) == 5 and longer[0] == 1.0 and longer == sorted(longer, reverse=True)


def test_sessions_are_told_apart_and_take_turns() -> None:
    forecast = Forecast()
    for _ in range(50):
        forecast.verified(1, 2.0, 3)
        forecast.verified(2, 2.0, 1)
    assert forecast.factor(2) < 0.7 and forecast.factor(1) > 1.3
    assert forecast.factor(99) == 1.0
    assert forecast.order([2, 99, 1]) == [2, 1, 0]
    # Two alike: the one that is preferred stays so for a while, then it is the other's turn.
    first = []
    for _ in range(4 * Forecast.STINT):
        numbers = [10, 11]
        place = forecast.order(numbers)[0]
        first.append(place)
        forecast.preferred([numbers[place]], [numbers[1 - place]])
    changes = sum(a != b for a, b in itertools.pairwise(first))
    assert 2 <= changes <= 4 and 0.3 < sum(first) / len(first) < 0.7


# ---- steering -------------------------------------------------------------------------------

LOAD = Load(4)


def test_a_load_begins_as_the_model_says_and_changes_at_its_thresholds() -> None:
    steering = Steering()
    assert steering.decide(LOAD, 1.5).drafting
    assert not Steering().decide(LOAD, 0.9).drafting
    rules = steering.rules
    for _ in range(rules.dwell):
        steering.decide(LOAD, 0.9)
    assert steering.drafting(LOAD) is False
    for _ in range(8 * rules.dwell):
        steering.decide(LOAD, 1.0)  # between the thresholds
    assert steering.drafting(LOAD) is False
    for _ in range(8 * rules.dwell):
        steering.decide(LOAD, 1.1)
    assert steering.drafting(LOAD) is True and steering.changes(LOAD) == 2
    assert steering.drafting(Load(4, 2)) is None


@pytest.mark.parametrize("gain", [0.97, 1.0, 1.03])
def test_no_flapping_under_noise(gain: float) -> None:
    """The gain is as good as 1 and its estimate moves by 10%: a handful of changes in 20,000 rounds."""
    steering, rng = Steering(), random.Random(3)
    for _ in range(20_000):
        steering.decide(LOAD, gain * math.exp(rng.gauss(0.0, 0.1)))
    assert steering.changes(LOAD) <= 40


@pytest.mark.parametrize("gain", [0.3, 0.8, 0.95, 1.05, 1.5, 4.0])
def test_probes_go_both_ways_and_cost_little(gain: float) -> None:
    steering = Steering()
    rounds = 50_000
    against = 0
    for _ in range(rounds):
        verdict = steering.decide(LOAD, gain)
        if verdict.drafting != (gain > 1.0):
            against += 1
            assert verdict.probe == ("plain" if gain > 1.0 else "draft")
        else:
            assert not verdict.probe
    assert steering.changes(LOAD) == 0
    assert against >= 3
    # A round the wrong way wastes this share of a round's time.
    waste = 1.0 - 1.0 / gain if gain > 1.0 else 1.0 / gain - 1.0
    assert against * waste / rounds < 2.5 * steering.rules.loss


def test_a_probe_that_shows_a_gain_changes_the_state() -> None:
    """Plain, and the model is wrong about it: rounds drafted for show that it pays."""
    steering = Steering()
    gain = 0.9
    rounds = 0
    while not steering.drafting(LOAD) and rounds < 2000:
        rounds += 1
        if steering.decide(LOAD, gain).drafting:
            gain += 0.1  # observation corrects the model
    assert steering.drafting(LOAD) and rounds < 1000


def test_an_unknown_drafter_is_tried_at_once() -> None:
    steering = Steering()
    begun = [steering.decide(LOAD, 0.8, known=False) for _ in range(20)]
    burst = steering.rules.burst
    assert all(v.drafting and v.probe == "draft" for v in begun[:burst])
    assert not any(v.drafting for v in begun[burst:])


def test_a_gap_in_the_load_is_no_reason_to_catch_up() -> None:
    steering = Steering(SteeringRules(patience=4))
    low, high = Load(1), Load(4)
    for _ in range(50):
        steering.decide(high, 0.5, behind=True)
    # One stream for three rounds, then four again, many times: never worth it.
    for _ in range(20):
        assert not any(steering.decide(low, 2.0, behind=True).drafting for _ in range(3))
        steering.decide(high, 0.5, behind=True)
    # One stream to stay: after a few rounds it catches up; who is not behind need not wait.
    assert [steering.decide(low, 2.0, behind=True).drafting for _ in range(5)] == [False] * 3 + [True] * 2
    assert steering.decide(low, 2.0, behind=False).drafting


@pytest.mark.parametrize("drafting", [True, False])
def test_a_load_never_met_does_as_its_neighbour_where_the_gain_decides_nothing(drafting: bool) -> None:
    steering = Steering()
    steering.decide(Load(4), 1.3 if drafting else 0.7)
    assert steering.decide(Load(5), 1.0).drafting is drafting
    assert steering.decide(Load(6), 0.9 if drafting else 1.1).drafting is not drafting  # the gain is clear
    assert not steering.decide(Load(60), 1.0).drafting  # no neighbour, and no gain


def test_what_plain_rounds_take_is_asked_once_of_loads_that_are_alike() -> None:
    """A few plain rounds soon after the start, in pairs; the next load trusts them."""
    steering = Steering()
    soon = 5 * steering.rules.first
    first = [steering.decide(Load(7), 1.2) for _ in range(soon)]
    assert sum(v.probe == "plain" for v in first) >= 3
    probes = [v.probe for v in first]
    assert all(
        probes[i + 1] == "plain" for i, p in enumerate(probes[:-1]) if p == "plain" and not probes[i - 1]
    )
    assert not any(steering.decide(Load(8), 1.2).probe for _ in range(soon))
