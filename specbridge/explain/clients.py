"""What the processes say of themselves: GetInfo of target and draft, /metrics of all, the budget's state.

Owns the requests and the samples read from /metrics. Does not own where the processes are (find) nor what the
numbers mean (answers).
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from protos import common_pb2, draft_pb2_grpc, target_pb2_grpc
from specbridge import wire
from specbridge.errors import Unavailable
from specbridge.rounds import DraftInfo, TargetInfo
from specbridge.server import channel_options

TIMEOUT_S = 10.0
_NO_SUCH_ROUTE = (404, 405, 501)


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one /metrics page, or the difference of two; buckets of histograms left out.

    values: (name, sorted label pairs) -> value.
    """

    values: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]

    @staticmethod
    def parse(text: str) -> Samples:
        # Most lines are buckets, and parsing them all would take the CPU from what is measured next.
        lines = [line for line in text.splitlines() if "_bucket{" not in line]
        return Samples(
            {
                (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
                for family in text_string_to_metric_families("\n".join(lines) + "\n")
                for sample in family.samples
            }
        )

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name whose labels include the given ones; 0 if there are none."""
        wanted = set(labels.items())
        return sum(value for (n, has), value in self.values.items() if n == name and wanted.issubset(has))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Values of this name by the value of a label."""
        found: dict[str, float] = {}
        for (n, has), value in self.values.items():
            if n == name and label in (pairs := dict(has)):
                found[pairs[label]] = found.get(pairs[label], 0.0) + value
        return found

    def since(self, before: Samples) -> Samples:
        """What was added; a series that was not there before began at 0."""
        return Samples({key: value - before.values.get(key, 0.0) for key, value in self.values.items()})

    def plus(self, other: Samples) -> Samples:
        keys = {**self.values, **other.values}
        return Samples({k: self.values.get(k, 0.0) + other.values.get(k, 0.0) for k in keys})


NOTHING = Samples({})


async def target_info(address: str) -> TargetInfo:
    """Raises Unavailable if the target at `address` does not answer."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub: Any = target_pb2_grpc.TargetStub(channel)
        return wire.target_info_from_pb(await _answer(stub.GetInfo, "target", address))


async def draft_info(address: str) -> DraftInfo:
    """Raises Unavailable if the draft at `address` does not answer."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub: Any = draft_pb2_grpc.DraftStub(channel)
        return wire.draft_info_from_pb(await _answer(stub.GetInfo, "draft", address))


async def _answer(call: Any, service: str, address: str) -> Any:
    try:
        return await call(common_pb2.InfoRequest(), timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise Unavailable(f"the {service} at {address!r} answered {error.code().name}") from error


async def samples(url: str) -> Samples:
    """What a /metrics address shows; nothing for an empty address. Raises Unavailable."""
    return Samples.parse(await asyncio.to_thread(_get, url, "")) if url else NOTHING


async def budget_state(rest: str, api_key: str = "") -> dict[str, Any] | None:
    """The gateway's /v1/specbridge/budget; None if this gateway has none, or wants another key."""
    try:
        text = await asyncio.to_thread(_get, f"{rest}/v1/specbridge/budget", api_key)
    except Unavailable as error:
        cause = error.__cause__
        if isinstance(cause, urllib.error.HTTPError) and cause.code in (401, 403, *_NO_SUCH_ROUTE):
            return None
        raise
    found = json.loads(text)
    return found if isinstance(found, dict) else None


def _get(url: str, api_key: str) -> str:
    request = urllib.request.Request(url)
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    # Addresses of a machine's own services: no proxy stands between.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return bytes(answer.read()).decode()
    except (OSError, ValueError) as error:
        raise Unavailable(f"{url} can't be read: {error}") from error
