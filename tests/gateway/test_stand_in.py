"""Models without weights or tokenizer behind the gateway: the stand-in, and what must agree."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_services import FakeDraft, FakeTarget
from scheduler_harness import Recorder

from gateway.config import GatewaySettings
from gateway.drafting import Drafting
from gateway.limits import SchedulerLimits
from gateway.policies import policy_for
from gateway.server import load_tokenizer
from gateway.text import Tokenizer
from specbridge.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 600, "eos_token_id": [3, 4]}))
    return tmp_path


def test_every_id_has_a_text_and_any_text_has_ids(model: Path) -> None:
    tokenizer = Tokenizer.stand_in(model)
    assert tokenizer.vocab_size == 600
    text = "naïve <300> \n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text.encode())
    assert tokenizer.decode([300, 599]) == "<300><599>"
    stream = tokenizer.decoder()
    assert "".join(stream.push(token) for token in [300, *tokenizer.encode("é"), 599]) == "<300>é<599>"
    chat = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert chat == "user: hi\nassistant: "


def test_it_fits_its_model_and_no_smaller_one(model: Path) -> None:
    tokenizer = Tokenizer.stand_in(model)
    assert tokenizer.misfit(600, (3, 4)) == ""
    assert "knows 600 ids, the target's model only 599" in tokenizer.misfit(599, (3, 4))
    assert Tokenizer.stand_in(None).vocab_size == 256


def test_the_setting_chooses(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_tokenizer(GatewaySettings(target=str(model), tokenizer="bytes")).vocab_size == 600
    assert "STAND-IN TOKENIZER" in caplog.text
    assert load_tokenizer(GatewaySettings(target="no/such", tokenizer="bytes")).vocab_size == 256
    with pytest.raises(ConfigError, match="has no tokenizer.json"):
        load_tokenizer(GatewaySettings(target=str(model), tokenizer=str(model)))


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        ("", "", ""),
        ("mean 3", "mean 3", ""),
        ("mean 3", "", "the draft simulates acceptance 'nothing', the target 'mean 3'"),
        ("", "mean 3", "the draft simulates acceptance 'mean 3', the target 'nothing'"),
    ],
)
def test_a_draft_that_simulates_something_else_is_not_asked(ours: str, theirs: str, reason: str) -> None:
    """Its proposals would never be right, and nothing else would show why."""
    target = dataclasses.replace(FakeTarget().make_info(), simulated_acceptance=ours)
    draft = dataclasses.replace(FakeDraft(lambda *_: 0).make_info(), simulated_acceptance=theirs)
    link: Any = SimpleNamespace(info=draft, up=True)
    limits = SchedulerLimits()
    drafting = Drafting(
        link,
        policy_for(limits),
        limits=limits,
        observer=Recorder(),
        running=lambda: 0,
        expected=lambda: 0,
        flush=lambda: None,
    )
    drafting.check(dataclasses.replace(target, vocab_size=draft.vocab_size))
    assert drafting.mismatch.startswith(reason) and bool(drafting.mismatch) == bool(reason)
