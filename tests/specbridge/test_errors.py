"""The error tree and its one table."""

from __future__ import annotations

import grpc
import pytest

from protos import common_pb2
from specbridge import errors


def every_kind() -> list[type[errors.SpecBridgeError]]:
    found, queue = [], [errors.SpecBridgeError]
    while queue:
        kind = queue.pop()
        queue += kind.__subclasses__()
        if kind is not errors.SpecBridgeError and kind.__module__ == "specbridge.errors":
            found.append(kind)
    return found


@pytest.mark.parametrize("kind", every_kind(), ids=lambda kind: kind.__name__)
def test_each_error_has_its_own_row(kind: type[errors.SpecBridgeError]) -> None:
    mapping = errors.mapping(kind("no"))
    assert dict(errors.TABLE)[kind] is mapping
    assert mapping.grpc_status in grpc.StatusCode.__members__
    assert mapping.code in common_pb2.ErrorCode.keys()  # noqa: SIM118 (an enum wrapper is no mapping)
    assert 400 <= mapping.http_status < 600
    assert kind.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize(
    # Neither crosses between services: settings are a process's own, deadlines the gateway's clients'.
    "kind",
    [k for k in every_kind() if k not in (errors.ConfigError, errors.DeadlineExceeded)],
    ids=lambda k: k.__name__,
)
def test_the_wire_keeps_class_and_words(kind: type[errors.SpecBridgeError]) -> None:
    again = errors.from_code(errors.mapping(kind("page 7 is gone")).code, "page 7 is gone")
    assert type(again) is kind and str(again) == "page 7 is gone"


def test_every_code_of_the_wire_means_something() -> None:
    known = {mapping.code for _, mapping in errors.TABLE}
    assert known == set(common_pb2.ErrorCode.keys()) - {"ERROR_CODE_UNSPECIFIED"}
    assert type(errors.from_code("ERROR_CODE_UNSPECIFIED", "?")) is errors.InternalError


def test_the_most_derived_class_wins() -> None:
    for i, (kind, _) in enumerate(errors.TABLE):
        assert not any(issubclass(kind, earlier) for earlier, _ in errors.TABLE[:i])
    assert errors.mapping(errors.Unsupported("n is 2")).grpc_status == "UNIMPLEMENTED"
    assert errors.mapping(errors.InvalidRequest("n is -1")).grpc_status == "INVALID_ARGUMENT"


def test_anything_else_is_a_defect_of_ours() -> None:
    for error in (ValueError("x"), KeyError("x"), errors.SpecBridgeError("x")):
        assert errors.mapping(error).code == "ERROR_CODE_INTERNAL"


def test_the_offending_field_and_the_hint_are_kept() -> None:
    assert errors.Unsupported("no tools yet", param="tools").param == "tools"
    assert errors.CapacityError("queue full", retry_after=0.5).retry_after == 0.5


def test_a_message_that_quotes_a_peer_is_cut() -> None:
    assert errors.message_of(errors.InvalidRequest("short")) == "short"
    assert errors.message_of(TimeoutError()) == "TimeoutError"
    cut = errors.message_of(errors.InvalidRequest("the value is " + "x" * 100_000))
    assert cut.startswith("the value is xxx") and cut.endswith("(cut)") and len(cut) < errors.MAX_MESSAGE + 20
