"""Settings of the target: flags, combinations that can't work, and what zero resolves to."""

from __future__ import annotations

import pytest

from specbridge.errors import ConfigError
from specbridge.settings import load
from target_service.config import TargetSettings, resolve_limits


def test_defaults_are_legal_and_every_field_is_documented() -> None:
    settings = load(TargetSettings)
    assert settings.target == "smollm2-135m"
    assert all(field.description for field in TargetSettings.model_fields.values())


def test_environment_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRIDGE_MAX_SESSIONS", "7")
    monkeypatch.setenv("SPECBRIDGE_LOG_LEVEL", "DEBUG")
    settings = load(TargetSettings, max_tree_nodes=5)
    assert (settings.max_sessions, settings.max_tree_nodes, settings.log_level) == (7, 5, "debug")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tp": 0}, "--tp"),
        ({"max_sessions": 0}, "--max-sessions"),
        ({"dtype": "int8"}, "--dtype"),
        ({"session_lease": 0}, "--session-lease"),
        ({"max_length": 100, "kv_tokens": 50}, "kv_tokens 50"),
        ({"kv_tokens": 5}, "one page"),
        ({"max_length": 1}, "max_length 1"),
        ({"max_verify_rows": 10, "max_tree_nodes": 16}, "max_verify_rows 10"),
        ({"channel_slots": 64, "max_tree_nodes": 64}, "channel_slots 64"),
        ({"device": "cpu", "dtype": "float16"}, "float16"),
        ({"tp": 2, "deterministic": True}, "deterministic"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_what_can_not_work_is_refused_by_name(values: dict[str, object], words: str) -> None:
    """cases.md 34."""
    with pytest.raises(ConfigError, match=words):
        load(TargetSettings, **values)


def test_zeros_resolve_against_the_model_and_the_device() -> None:
    limits = resolve_limits(load(TargetSettings), model_length=8192, device="cpu")
    assert limits.max_length == 8192
    assert limits.num_pages * limits.page_size == 4 * 8192
    assert limits.prefill_chunk == 128
    assert limits.max_verify_rows == 8 * 65
    assert limits.max_rows >= limits.max_verify_rows + limits.prefill_chunk
    assert resolve_limits(load(TargetSettings), model_length=8192, device="cuda:1").prefill_chunk == 1024


def test_a_long_model_gets_room_for_one_session_at_least() -> None:
    limits = resolve_limits(load(TargetSettings), model_length=131072, device="cpu")
    assert limits.num_pages * limits.page_size >= limits.max_length == 131072


def test_fewer_pages_than_the_model_s_length_shorten_the_sessions() -> None:
    limits = resolve_limits(load(TargetSettings, kv_tokens=2000), model_length=8192, device="cpu")
    assert limits.num_pages == 125 and limits.max_length == 2000


def test_a_length_beyond_the_model_s_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-length 9000 .* 8192"):
        resolve_limits(load(TargetSettings, max_length=9000), model_length=8192, device="cpu")
