"""Dummy weights and simulated acceptance, whole services in one process: as many tokens a round as the file
says, and the same text with and without speculation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from product import LiveProduct, request_for

from specbridge.acceptance import Acceptance
from specbridge.acceptance_model import resolve
from specbridge.errors import ConfigError
from specbridge.rounds import SamplingParams

BLOCK = 8
VOCAB = 512
GREEDY = SamplingParams()
WARM = SamplingParams(temperature=0.9, top_k=40)


def write_configs(folder: Path, **changes: Any) -> Path:
    """Configurations only: no weights, no tokenizer."""
    (folder / "dflash").mkdir(parents=True)
    target = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    drafter = {
        **target,
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "block_size": BLOCK,
        "dflash_config": {"target_layer_ids": [1, 2], "mask_token_id": 5},
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(target))
    (folder / "dflash" / "config.json").write_text(json.dumps(drafter))
    return folder


@pytest.fixture(scope="module")
def acceptance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Acceptance]]:
    path = tmp_path_factory.mktemp("acceptance") / "file.json"
    path.write_text(resolve("3.1", depths=BLOCK - 1).to_json())
    yield path, resolve(str(path))


@pytest.fixture(scope="module")
def product(
    tmp_path_factory: pytest.TempPathFactory, acceptance: tuple[Path, Acceptance]
) -> Iterator[LiveProduct]:
    folder = write_configs(tmp_path_factory.mktemp("tiny-shape") / "model")
    both = {"load_format": "dummy", "simulate_acceptance": str(acceptance[0])}
    with LiveProduct(folder, folder / "dflash", target=both, draft=both) as running:
        yield running


def rounds_of(
    product: LiveProduct, *, budget: int, chain: bool, sampling: SamplingParams
) -> tuple[float, int]:
    product.trees.limit_top_k(1 if chain else None)
    try:
        requests = [request_for([7, 8, 9 + i], sampling, seed=100 + i, max_tokens=200) for i in range(4)]
        run = product.run(requests, budget=budget)
    finally:
        product.trees.limit_top_k(None)
    return run.tokens_per_round, sum(text.stats.num_rounds for text in run.texts)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("budget", "chain"), [(BLOCK - 1, True), (6, False), (24, False)])
def test_rounds_are_as_long_as_the_file_says(
    product: LiveProduct,
    acceptance: tuple[Path, Acceptance],
    budget: int,
    chain: bool,
    sampling: SamplingParams,
) -> None:
    file = acceptance[1]
    expected = file.chain_length() if chain else file.tree_length(budget)
    mean, rounds = rounds_of(product, budget=budget, chain=chain, sampling=sampling)
    # Lengths lie in [1, 8]; the last round of a text may be cut.
    error = 4 * 2.6 / math.sqrt(rounds)
    assert mean == pytest.approx(expected, abs=error)
    assert rounds > 100


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_the_text_is_the_same_with_and_without_speculation(
    product: LiveProduct, sampling: SamplingParams
) -> None:
    def texts(speculate: bool) -> list[tuple[int, ...]]:
        requests = [
            request_for([3, 4, i], sampling, seed=i, max_tokens=40, speculate=speculate) for i in range(3)
        ]
        return product.run(requests, budget=16).tokens

    on = texts(True)
    assert on == texts(False)
    assert len(set(on)) == 3 and len(set(on[0])) > 10
    product.assert_idle()


def test_a_seed_is_a_text_and_the_prompt_is_none(product: LiveProduct) -> None:
    requests = [request_for(prompt, GREEDY, seed=5, max_tokens=20) for prompt in ([9, 9, 9], [2, 3, 4])]
    first, second = product.run(requests, budget=8).tokens
    assert first == second


def test_both_services_say_what_is_not_real(
    product: LiveProduct, acceptance: tuple[Path, Acceptance]
) -> None:
    info = product._engine.info()
    assert info.dummy_weights and info.simulated_acceptance == acceptance[1].label
    assert info.model_id == "model-dummy"
    assert product._loaded.dummy_weights and product._loaded.simulated_acceptance == acceptance[1].label
    for metrics, prefix in ((product.target_metrics, "target"), (product.draft_metrics, "draft")):
        for name in ("simulated_acceptance", "dummy_weights"):
            assert metrics.registry.get_sample_value(f"specbridge_{prefix}_{name}") == 1


def test_dummy_weights_alone_speculate_without_changing_the_text(tmp_path: Path) -> None:
    """Random target, random drafter, real choice: nothing is accepted but by chance, and nothing is wrong."""
    folder = write_configs(tmp_path / "model")
    both = {"load_format": "dummy"}
    with LiveProduct(folder, folder / "dflash", target=both, draft=both) as running:
        requests = [request_for([3, 4, 5], GREEDY, max_tokens=24)]
        on = running.run(requests, budget=8).tokens
        off = running.run([request_for([3, 4, 5], GREEDY, max_tokens=24, speculate=False)]).tokens
        assert on == off
        assert running._engine.info().simulated_acceptance == ""


def test_a_real_target_under_simulation_keeps_its_forward(tmp_path: Path) -> None:
    """Real weights may be simulated over, too: times are those of the model, the text is made up."""
    target = tiny.make_target(tmp_path / "target", dtype=torch.float32)
    draft = tiny.make_drafter(tmp_path / "draft", dtype=torch.float32)
    both = {"simulate_acceptance": "2.5"}
    with LiveProduct(target, draft, target=both, draft=both) as running:
        run = running.run([request_for([65, 66], GREEDY, seed=s, max_tokens=250) for s in range(3)], budget=7)
    rounds = sum(text.stats.num_rounds for text in run.texts)
    file = resolve("2.5", depths=7)
    assert run.tokens_per_round == pytest.approx(file.tree_length(7), abs=4 * 2.4 / math.sqrt(rounds))


@pytest.mark.parametrize(
    ("changes", "setting", "message"),
    [
        ({"vocab_size": VOCAB + 1}, "", f"vocab_size is {VOCAB + 1}, the target's {VOCAB}"),
        ({"hidden_size": 64}, "", "hidden_size is 64, the target's 32"),
        ({"torch_dtype": "float8_e4m3fn"}, "", "dtype 'float8_e4m3fn' is not supported"),
        ({}, "9.5", "mean acceptance length of 9.5 is not possible with 7 drafts"),
        ({}, "nowhere.json", "acceptance file nowhere.json does not exist"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], setting: str, message: str
) -> None:
    from draft_service.config import DraftSettings
    from draft_service.drafter_files import find_places
    from draft_service.loading import load_engine
    from draft_service.metrics import DraftMetrics

    folder = write_configs(tmp_path / "model", **changes)
    settings = DraftSettings(
        load_format="dummy", config=str(folder), simulate_acceptance=setting, device="cpu"
    )
    places = find_places(settings)
    assert places.draft == folder / "dflash" and places.target == folder
    with pytest.raises(ConfigError, match=message):
        load_engine(settings, places.draft, places.target, DraftMetrics())
