"""kill -9 of the draft and of the target in the middle of streams: every text is the undisturbed one."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from running_stack import RunningStack, wait_for

pytestmark = pytest.mark.slow
TOKENS = 220


async def stream(client: httpx.AsyncClient, i: int, started: asyncio.Event | None = None) -> str:
    """One greedy stream; sets `started` after a few tokens."""
    body = {
        "model": "target", "prompt": f"stream {i} ", "max_tokens": TOKENS, "temperature": 0, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    text, events = "", 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"] if event["choices"] else ""
                events += 1
                if started is not None and events == 5:
                    started.set()
    return text


@pytest.fixture(scope="module")
def undisturbed(stack: RunningStack) -> list[str]:
    async def run() -> list[str]:
        async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
            return list(await asyncio.gather(*(stream(client, i) for i in range(4))))

    texts = asyncio.run(run())
    assert len(set(texts)) == 4
    return texts


async def run_and_kill(stack: RunningStack, service: str) -> list[str]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
        started = [asyncio.Event() for _ in range(4)]
        tasks = [asyncio.create_task(stream(client, i, started[i])) for i in range(4)]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in started)), 60)
        stack.kill(service)
        return list(await asyncio.gather(*tasks))


async def test_draft_killed_streams_go_on_and_speculation_resumes(
    stack: RunningStack, undisturbed: list[str]
) -> None:
    before = stack.total("gateway", "specbridge_gateway_fallbacks_total")
    assert await run_and_kill(stack, "draft") == undisturbed
    assert stack.total("gateway", "specbridge_gateway_fallbacks_total") > before

    async def drafts_again() -> None:
        drafted = stack.total("gateway", "specbridge_gateway_spec_decode_draft_tokens_total")
        async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
            for _ in range(100):
                assert await stream(client, 0) == undisturbed[0]
                if stack.total("gateway", "specbridge_gateway_spec_decode_draft_tokens_total") > drafted:
                    return
                await asyncio.sleep(0.2)
        raise AssertionError("speculation did not resume")

    await drafts_again()


async def test_target_killed_streams_continue_from_the_tokens_held(
    stack: RunningStack, undisturbed: list[str]
) -> None:
    assert await run_and_kill(stack, "target") == undisturbed
    assert stack.total("gateway", "specbridge_gateway_session_reopens_total") > 0
    wait_for(lambda: stack.total("target", "specbridge_target_sessions") == 0, 20, "zero sessions")
    attached = "specbridge_draft_channel_attached"
    wait_for(lambda: stack.total("draft", attached) == 1, 60, "the draft attached to the new target")
