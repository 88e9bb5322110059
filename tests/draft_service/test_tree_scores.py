"""--tree-scores: which rule a draft service grows its trees by, and tables that it refuses."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from tiny import VOCAB_SIZE, make_drafter, make_target

from draft_service.bigrams import FILE, TENSORS, Pairs, read_bigrams, write_bigrams
from draft_service.config import DraftSettings
from draft_service.drafter_files import Places
from draft_service.loading import load_engine
from draft_service.metrics import DraftMetrics
from specbridge.errors import ConfigError

SHIPPED = Path(__file__).parents[2] / "draft_service" / "checkpoints" / "smollm2-135m"
MARGINALS, BIGRAMS = "trees are scored by marginals", "trees are scored by marginals and 2 bigrams"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    root = tmp_path_factory.mktemp("scores")
    return Places(make_drafter(root / "draft"), make_target(root / "target"))


def a_table(folder: Path, vocab: int = VOCAB_SIZE) -> None:
    pair = np.array([3, 5]), np.array([4, 1]), np.array([7, 2])
    write_bigrams(folder, Pairs(*pair, np.bincount(pair[0], minlength=vocab) + 1), {})


def load(places: Places, caplog: pytest.LogCaptureFixture, scores: str, **more: str) -> str:
    """What the service says of its trees."""
    caplog.clear()
    settings = DraftSettings.model_validate(
        {"device": "cpu", "selfcheck": False, "warmup_repeats": 0, "tree_scores": scores, **more}
    )
    with caplog.at_level(logging.INFO, logger="draft_service.loading"):
        load_engine(settings, places.draft, places.target, DraftMetrics(CollectorRegistry()))
    [said] = [line for line in caplog.messages if line.startswith("trees")]
    return said


def test_the_table_decides_unless_told(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    (places.draft / FILE).unlink(missing_ok=True)
    assert load(places, caplog, "auto") == MARGINALS
    with pytest.raises(ConfigError, match="specbridge train bigrams"):
        load(places, caplog, "bigrams")
    a_table(places.draft)
    assert load(places, caplog, "auto") == load(places, caplog, "bigrams") == BIGRAMS
    assert load(places, caplog, "marginals") == MARGINALS


def test_what_is_not_the_drafter_s_own_has_no_neighbours(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    a_table(places.draft)
    for told in ({"simulate_acceptance": "2.5"}, {"load_format": "dummy"}):
        assert load(places, caplog, "auto", **told) == MARGINALS
        with pytest.raises(ValidationError, match="tree_scores bigrams needs"):
            load(places, caplog, "bigrams", **told)


def test_damaged_tables_are_refused_at_the_start(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.numpy import load_file, save_file

    a_table(places.draft)
    path = places.draft / FILE
    whole = load_file(path)
    rows = np.zeros_like(whole["bigram_rows"])
    rows[3] = 2
    for damage, message in (
        (path.read_bytes()[:-3], f"{FILE} can't be read"),
        (path.read_bytes()[:20], f"{FILE} can't be read"),
        (b"\x04" + bytes(7) + b"nope", f"{FILE} can't be read"),
        (b"", f"{FILE} can't be read"),
        ({name: whole[name] for name in TENSORS[:3]}, "can't be read"),
        ({**whole, "bigram_counts": whole["bigram_counts"][:1]}, "contradicts itself"),
        ({**whole, "bigram_after": whole["bigram_after"] + 9999}, "of another model"),
        ({**whole, "bigram_rows": rows, "bigram_after": np.array([4, 4], np.uint16)}, "not in order"),
        ({**whole, "bigram_rows": rows, "bigram_after": np.array([4, 1], np.uint16)}, "not in order"),
    ):
        if isinstance(damage, bytes):
            path.write_bytes(damage)
        else:
            save_file(damage, path)
        with pytest.raises(ConfigError, match=message):
            load(places, caplog, "auto")
        # Who does not use the table need not have it whole.
        assert load(places, caplog, "marginals") == MARGINALS
    a_table(places.draft, vocab=VOCAB_SIZE + 1)
    with pytest.raises(ConfigError, match="of another model"):
        load(places, caplog, "auto")


def test_the_shipped_drafter_has_a_table_and_stays_small() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 40_000_000
    found = read_bigrams(SHIPPED, vocab_size=49152, device="cpu")
    assert found is not None and len(found) == 300_000
