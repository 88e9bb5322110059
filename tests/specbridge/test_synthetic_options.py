"""`specbridge serve` without weights, or with simulated acceptance: who is told what, and what can't work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbridge import serve
from specbridge.errors import ConfigError
from specbridge.settings import load

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
QWEN = str(CONFIGS / "qwen3-8b")


def plan(tmp_path: Path, **values: Any) -> serve.Plan:
    return serve.plan(load(serve.serve_settings(), **values), tmp_path)


def flags(made: serve.Plan) -> dict[str, list[str]]:
    return {service.name: list(service.command) for service in made.services}


def test_a_shape_is_served_without_its_weights(tmp_path: Path) -> None:
    made = plan(tmp_path, load_format="dummy", config=QWEN, simulate_acceptance="4.5")
    found = flags(made)
    for name in ("target", "draft"):
        assert "--load-format=dummy" in found[name] and "--simulate-acceptance=4.5" in found[name]
        assert f"--config={QWEN}" in found[name]
    assert {f"--target={QWEN}", "--tokenizer=bytes", "--model-name=qwen3-8b-dummy"} <= set(found["gateway"])
    said = serve.announcement(made)
    assert "DUMMY WEIGHTS in the target service" in said and "DUMMY WEIGHTS in the draft service" in said
    assert "SIMULATED ACCEPTANCE in the draft service: 4.5" in said and "smollm2" not in said


def test_target_alone_may_name_the_shape(tmp_path: Path) -> None:
    made = plan(tmp_path, load_format="dummy", target=QWEN)
    assert made.model == QWEN
    assert all(f"--target={QWEN}" in words for words in flags(made).values())


def test_a_given_tokenizer_and_name_win(tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    made = plan(
        tmp_path, load_format="dummy", config=QWEN, tokenizer=str(tmp_path / "tok"), model_name="mine"
    )
    words = flags(made)["gateway"]
    assert f"--tokenizer={tmp_path / 'tok'}" in words and "--model-name=mine" in words


def test_nothing_is_said_of_real_models(tmp_path: Path) -> None:
    made = plan(tmp_path)
    assert made.synthetic == ()
    assert not any("dummy" in word or "simulate" in word for words in flags(made).values() for word in words)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target_simulate_acceptance": "3"}, "the target simulates acceptance '3', the draft 'nothing'"),
        ({"target_simulate_acceptance": "3", "draft_simulate_acceptance": "4"}, "the draft '4': no draft"),
        ({"simulate_acceptance": "nowhere.json"}, "acceptance file nowhere.json does not exist"),
        ({"simulate_acceptance": "0.9"}, "--simulate-acceptance 0.9: a mean acceptance length lies above 1"),
        ({"load_format": "dummy"}, "--target 'smollm2-135m' is no file or folder here"),
        ({"load_format": "dummy", "config": "/no/shape"}, "--config '/no/shape' is no file or folder here"),
        ({"config": QWEN}, "is read with load_format dummy only"),
        ({"drafter_config": QWEN}, "is read with load_format dummy only"),
        ({"load_format": "random"}, "Input should be 'auto' or 'dummy'"),
        (
            {"no_draft": True, "load_format": "dummy", "config": QWEN, "drafter_config": QWEN},
            "--no-draft and --drafter-config exclude each other",
        ),
    ],
)
def test_what_can_not_work_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, **values)
