"""The error tree, and the one table that maps it to the wire.

    SpecBridgeError
    ├── ConfigError          start-up only: a flag, file or combination that can't work (exit code 2)
    ├── InvalidRequest       the caller's input is wrong
    │   └── Unsupported      a known field whose feature is not built
    ├── Stale                unknown session, old incarnation, or base behind: re-open
    ├── NotReady             the draft has not caught up: decode without a tree
    ├── CapacityError        pages, sessions, slots or queue places ran out
    ├── Unavailable          a service is starting, going down or gone
    │   └── DeadlineExceeded the caller's own time is up
    └── InternalError        a defect on our side

A message names what was wrong, the value and the fix.
"""

from __future__ import annotations

from dataclasses import dataclass


class SpecBridgeError(Exception):
    """Anything SpecBridge raises on purpose."""


class ConfigError(SpecBridgeError):
    """A setting, file or combination of settings that can't work; raised before serving."""


class InvalidRequest(SpecBridgeError):
    """The caller's input is wrong. `param` is the offending field's name, if one field is to blame."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Unsupported(InvalidRequest):
    """A field SpecBridge knows and does not implement."""


class Stale(SpecBridgeError):
    """The session, incarnation or base is not the current one here; the sender must re-open."""


class NotReady(SpecBridgeError):
    """The draft context is behind the base asked for."""


class CapacityError(SpecBridgeError):
    """A bounded resource is used up. `retry_after` is a hint in seconds."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(SpecBridgeError):
    """The service can't answer now; the caller may try again."""


class DeadlineExceeded(Unavailable):
    """The time that the caller allowed is up."""


class InternalError(SpecBridgeError):
    """A defect on our side."""


@dataclass(frozen=True, slots=True)
class ErrorMapping:
    """How one class of errors leaves the process: grpc.StatusCode name, wire ErrorCode name, HTTP status,
    OpenAI error type."""

    grpc_status: str
    code: str
    http_status: int
    openai_type: str


# Most derived first: the first isinstance match wins.
TABLE: tuple[tuple[type[SpecBridgeError], ErrorMapping], ...] = (
    (ConfigError, ErrorMapping("FAILED_PRECONDITION", "ERROR_CODE_INVALID_ARGUMENT", 500, "server_error")),
    (Unsupported, ErrorMapping("UNIMPLEMENTED", "ERROR_CODE_UNIMPLEMENTED", 400, "invalid_request_error")),
    (
        InvalidRequest,
        ErrorMapping("INVALID_ARGUMENT", "ERROR_CODE_INVALID_ARGUMENT", 400, "invalid_request_error"),
    ),
    (Stale, ErrorMapping("FAILED_PRECONDITION", "ERROR_CODE_STALE", 409, "server_error")),
    (NotReady, ErrorMapping("UNAVAILABLE", "ERROR_CODE_NOT_READY", 503, "server_error")),
    (
        CapacityError,
        ErrorMapping("RESOURCE_EXHAUSTED", "ERROR_CODE_RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
    ),
    (DeadlineExceeded, ErrorMapping("DEADLINE_EXCEEDED", "ERROR_CODE_UNAVAILABLE", 504, "server_error")),
    (Unavailable, ErrorMapping("UNAVAILABLE", "ERROR_CODE_UNAVAILABLE", 503, "server_error")),
    (InternalError, ErrorMapping("INTERNAL", "ERROR_CODE_INTERNAL", 500, "server_error")),
)

MAX_MESSAGE = 1000

_INTERNAL = ErrorMapping("INTERNAL", "ERROR_CODE_INTERNAL", 500, "server_error")


def mapping(error: BaseException) -> ErrorMapping:
    """The wire mapping of `error`; anything that is not a SpecBridgeError is INTERNAL."""
    return next((m for kind, m in TABLE if isinstance(error, kind)), _INTERNAL)


def message_of(error: BaseException) -> str:
    """What a peer is told, at most MAX_MESSAGE characters: gRPC drops calls whose status is too long, and a
    message may quote what the peer sent.
    """
    text = str(error) or type(error).__name__
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + " ... (cut)"


def from_code(code: str, message: str) -> SpecBridgeError:
    """The error a wire ErrorCode name stands for; an unknown code becomes InternalError."""
    general = (item for item in TABLE if item[0] not in (ConfigError, DeadlineExceeded))
    kind = next((k for k, m in general if m.code == code), InternalError)
    return kind(message)
