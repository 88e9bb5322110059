"""Checks that the services share: session keys, stop parameters, token ids."""

from __future__ import annotations

from typing import Any

import pytest

from specbridge.errors import InvalidRequest
from specbridge.rounds import MAX_STOP_TOKEN_IDS, SessionKey, StopParams, check_token_ids


@pytest.mark.parametrize("gateway", [b"", b"g", b"g" * 15, b"g" * 5_000_000])
def test_a_gateway_id_is_sixteen_bytes(gateway: bytes) -> None:
    SessionKey(b"g" * 16, 0).validate()
    with pytest.raises(InvalidRequest, match=f"has {len(gateway)} bytes; draw 16") as caught:
        SessionKey(gateway, 0).validate()
    assert caught.value.param == "session"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be at least 1"),
        ({"min_tokens": 9}, "min_tokens", r"min_tokens is 9; it must be in \[0, 8\]"),
        ({"min_tokens": -1}, "min_tokens", "min_tokens is -1"),
        ({"stop_token_ids": (1, 100)}, "stop_token_ids", r"token id 100; ids must be in \[0, 100\)"),
        ({"stop_token_ids": (-1, 3)}, "stop_token_ids", "token id -1"),
        ({"stop_token_ids": (1,) * (MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids", "257 stop_token_ids"),
    ],
)
def test_stop_parameters_are_named(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        StopParams(**{"max_tokens": 8, **fields}).validate(vocab_size=100)
    assert caught.value.param == param


def test_legal_ones_pass() -> None:
    StopParams(8, (0, 99) * (MAX_STOP_TOKEN_IDS // 2), 8, ignore_eos=True).validate(vocab_size=100)
    check_token_ids((), 1, name="tokens")
    check_token_ids((0, 99), 100, name="tokens")
