"""The recipe: from options and a file to every choice made."""

from __future__ import annotations

from pathlib import Path

import pytest

from draft_service.drafter_config import TargetFacts
from draft_service.training.fit_settings import Recipe, default_gamma, load_fit, make_recipe, parse_loss
from specbridge.errors import ConfigError


def recipe(hidden: int = 576, layers: int = 30, **flags: object) -> Recipe:
    facts = TargetFacts(hidden_size=hidden, num_layers=layers, vocab_size=1000, max_length=2048)
    return make_recipe(load_fit(flags), facts, intermediate_size=100, dtype="float32", ranks=2)


def test_defaults_follow_the_target_s_size() -> None:
    small, large = recipe(), recipe(2560, 36)
    assert (small.layers, small.block_size, small.gamma, small.taps) == (3, 8, 4.0, (1, 8, 14, 20, 27))
    assert (large.layers, large.block_size, large.gamma, large.taps) == (5, 16, 7.0, (1, 9, 17, 25, 33))
    assert small.tokens_per_batch == 8192 and small.blocks_per_batch == 1024
    assert large.row_tokens == 2048  # no longer than the target can read
    assert recipe(64, 4).taps == (2,) and recipe(64, 6).taps == (1, 2, 3)
    assert recipe(accumulate=3).batches_per_step == 6
    assert [default_gamma(n) for n in (16, 10, 8)] == [7.0, 5.0, 4.0]


def test_options_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('layers = 5\nloss = "ce:0.1,l1:0.9"\nsteps = 7\n')
    (tmp_path / "r.json").write_text('{"layers": 5, "steps": 7}')
    for name in ("r.toml", "r.json"):
        settings = load_fit({"config": str(tmp_path / name), "layers": 2})
        assert (settings.layers, settings.steps) == (2, 7)
    assert recipe(config=str(tmp_path / "r.toml")).losses == {"ce": 0.1, "l1": 0.9}
    (tmp_path / "r.toml").write_text("layer = 5\n")
    with pytest.raises(ConfigError, match="layer is no option of train fit"):
        load_fit({"config": str(tmp_path / "r.toml")})
    with pytest.raises(ConfigError, match="is missing"):
        load_fit({"config": str(tmp_path / "no.toml")})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"taps": "1,1"}, "different layers of 0..29"),
        ({"taps": "30"}, "different layers of 0..29"),
        ({"taps": "one"}, "must be numbers"),
        ({"block_size": 1}, "at least one proposal"),
        ({"row_tokens": 9}, "too short"),
        ({"loss": "mse"}, "'mse' is not one of ce, kl, l1, coupled"),
        ({"loss": "ce:0"}, "with a weight"),
        ({"loss": "ce,ce"}, "with a weight"),
        ({"rows": -1}, "--rows"),
        ({"loss": "kl", "reach": 1.0}, "needs the term ce"),
    ],
)
def test_what_can_t_be_trained_is_named(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**flags)


def test_losses_are_weighted_terms() -> None:
    assert parse_loss("kl") == {"kl": 1.0} and parse_loss("ce:.5,coupled:2") == {"ce": 0.5, "coupled": 2.0}
