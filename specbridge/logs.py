"""Logging of a process: one format for all, with the id of the request a line belongs to.

Owns the format and the context variable that carries the id. Does not own who sets it: the gRPC interceptor
(specbridge.server), the gateway's REST middleware, and the gateway for work that it does for a request.
"""

from __future__ import annotations

import contextvars
import logging
import sys

NO_REQUEST = "-"

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default=NO_REQUEST)
"""Id of the request being served."""

_FORMAT = "%(asctime)s %(levelname)s {service} %(name)s%(request)s: %(message)s"


class RequestIdFilter(logging.Filter):
    """Sets `record.request`: " [id]" on lines that were logged on behalf of a request, else ""."""

    def filter(self, record: logging.LogRecord) -> bool:
        current = request_id.get()
        record.request = "" if current == NO_REQUEST else f" [{current}]"
        return True


def configure_logging(level: str, service: str) -> None:
    """Log to stderr from `level` ("info") up. Does nothing if the process logs already.

    service: target, draft, gateway or the command; names the process where several write to one place.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT.format(service=service)))
    handler.addFilter(RequestIdFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
