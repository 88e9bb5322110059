"""Whose request a log line belongs to: REST, gRPC, and the scheduler's work in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import grpc
import pytest
from fake_services import FakeDraft, FakeTarget, linked, oracle
from scheduler_harness import collect, make_request, run_scheduler
from surface import make_surface

from gateway.limits import SchedulerLimits
from gateway.scheduler import Scheduler
from gateway.server import grpc_server
from protos import gateway_pb2, gateway_pb2_grpc
from specbridge.errors import CapacityError
from specbridge.logs import RequestIdFilter, request_id


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.addFilter(RequestIdFilter())
        self.seen: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.request.strip(" []"), record.getMessage()))  # type: ignore[attr-defined]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    logger = logging.getLogger("gateway")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize("over", ["rest", "grpc"])
async def test_surfaces_set_the_id(over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    surface = make_surface()
    surface.plays("hi")
    seen: list[str] = []
    generate = surface.scheduler.generate

    def spy(request):  # type: ignore[no-untyped-def]
        seen.append(request_id.get())
        return generate(request)

    monkeypatch.setattr(surface.scheduler, "generate", spy)
    if over == "rest":
        async with surface.client(**{"X-Request-Id": "mine"}) as client:
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    else:
        server = grpc_server(surface.service, surface.metrics, "127.0.0.1:0", drain_s=0.2)
        await server.start()
        async with grpc.aio.insecure_channel(server.bound) as channel:
            call = gateway_pb2_grpc.GenerationStub(channel).Generate(
                gateway_pb2.GenerateRequest(text="a", request_id="mine")
            )
            assert [reply async for reply in call]
        await server.stop(0)
    assert seen == ["mine"]


def test_work_in_the_background_carries_its_own_request(lines: Lines) -> None:
    """The second request is opened in the wake of the first one's end, and says its own name all the same."""
    target, draft = FakeTarget(), FakeDraft(oracle)
    linked(target, draft)
    draft.open_script = lambda _open: CapacityError("no room")

    async def body(scheduler: Scheduler) -> None:
        async def ask(i: int) -> None:
            request_id.set(f"surface-{i}")
            request = make_request(i, max_tokens=30, ignore_eos=True, request_id=f"r-{i}")
            await collect(scheduler, request)

        tasks = [asyncio.create_task(ask(i)) for i in range(2)]
        while not target.sessions:
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    run_scheduler(body, target, draft, limits=SchedulerLimits(max_running=1, min_tree=1))
    refused = [name for name, text in lines.seen if "refused the open" in text]
    assert refused == ["r-0", "r-1"]
