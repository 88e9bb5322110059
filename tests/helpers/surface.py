"""The gateway's surfaces under test: toy tokenizers, a scripted scheduler, live servers on free ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import tokenizers
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from gateway.admission import check_request
from gateway.completion import CompletionService, Phase
from gateway.generation import GenerationRequest, SpecStats, TokenEvent
from gateway.http import HttpServer
from gateway.metrics import GatewayMetrics
from gateway.report import BudgetReport, CohortReport, GatewayReport
from gateway.rest import create_app
from gateway.text import Tokenizer
from specbridge.rounds import FinishReason, TargetInfo

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS_TEXT = "<|im_end|>"


def byte_backend(extra: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """Byte-level: ids 0..255 are the bytes (in the alphabet's order), then `extra` tokens, then specials."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(spelling(text) for text in extra)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken(EOS_TEXT, special=True)])
    return backend


def spelling(text: str) -> str:
    """`text` as a byte-level vocabulary spells it."""
    [(spelled, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return str(spelled)


def fallback_backend() -> tokenizers.Tokenizer:
    """A sentencepiece-like vocabulary with byte fallback (Llama 2, Mistral)."""
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁the",
        "▁fox",
        "o",
        "wn",
        "▁",
        "a",
        "日",
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return backend


def byte_tokenizer(extra: Sequence[str] = ()) -> Tokenizer:
    backend = byte_backend(extra)
    eos = backend.token_to_id(EOS_TEXT)
    return Tokenizer(backend, chat_template=CHAT_TEMPLATE, eos_token_ids=[eos])


def ids_of(tokenizer: Tokenizer, *pieces: str) -> tuple[int, ...]:
    """Ids of whole tokens, by their text."""
    found = [tokenizer._backend.token_to_id(p if p.startswith("<|") else spelling(p)) for p in pieces]
    assert None not in found, pieces
    return tuple(found)


def target_info(vocab_size: int = 300, max_length: int = 512, eos: Sequence[int] = ()) -> TargetInfo:
    return TargetInfo(
        model_id="toy", fingerprint="abcdef0123456789ff", vocab_size=vocab_size, eos_token_ids=tuple(eos),
        hidden_size=8, num_layers=1, page_size=16, max_length=max_length, tp_size=1, max_sessions=64,
        max_tree_nodes=64, total_pages=64, dtype="float32", device="cpu", instance=b"i" * 16,
    )  # fmt: skip


@dataclass
class Script:
    """What one generation does: a list of blocks of ids, pauses (seconds; None: for ever) and errors."""

    steps: Sequence[Any]
    finish: FinishReason = FinishReason.STOP
    cached_tokens: int = 0
    stats: SpecStats = field(default_factory=lambda: SpecStats((0, 1, 2), 2, 3, 5, 6, 4))


class FakeGeneration:
    def __init__(self, owner: FakeScheduler, request: GenerationRequest, script: Script) -> None:
        self._owner = owner
        self._script = script
        self._steps = list(script.steps)
        self.request = request
        self.seed = request.seed or 0
        self.request_id = request.request_id
        self.delivered = 0
        self.ended = ""
        self.handed = 0
        owner.live += 1

    def __aiter__(self) -> FakeGeneration:
        return self

    async def __anext__(self) -> TokenEvent:
        if self.ended:
            raise StopAsyncIteration
        while self._steps:
            step = self._steps.pop(0)
            try:
                if step is None:
                    await asyncio.Event().wait()
                if isinstance(step, float):
                    await asyncio.sleep(step)
                    continue
                await asyncio.sleep(0)
            except BaseException:
                self._end("abort")
                raise
            if isinstance(step, BaseException):
                self._end("error")
                raise step
            last = not self._steps and self._script.finish is not FinishReason.RUNNING
            self.handed += len(step)
            event = TokenEvent(
                tuple(step),
                self._script.finish if last else FinishReason.RUNNING,
                cached_tokens=self._script.cached_tokens,
                seed=self.seed,
                stats=self._script.stats if last else None,
            )
            if last:
                self._end("finish")
            return event
        self._end("finish")
        raise StopAsyncIteration

    def deliver(self, output_tokens: int) -> None:
        assert output_tokens >= self.delivered
        self.delivered = output_tokens

    def stop(self, *, output_tokens: int, finish_reason: FinishReason = FinishReason.STOP) -> SpecStats:
        assert output_tokens <= self.handed
        self.delivered = output_tokens
        self._end("stop")
        return self._script.stats

    async def aclose(self) -> None:
        self._end("abort")

    async def __aenter__(self) -> FakeGeneration:
        return self

    async def __aexit__(self, *args: Any) -> None:
        self._end("abort")

    def _end(self, how: str) -> None:
        if not self.ended:
            self.ended = how
            self._owner.live -= 1
            self._owner.ends.append(how)


class FakeScheduler:
    """Every request runs `script` (or the next of `scripts`); counts how generations ended."""

    def __init__(self, script: Script | None = None, *, info: TargetInfo | None = None) -> None:
        self.script = script or Script([])
        self.refuse: BaseException | None = None
        self.info = info
        self.generations: list[FakeGeneration] = []
        self.ends: list[str] = []
        self.live = 0
        self.target_connected = True
        self.draft_info = None
        self.queue_length = 0

    @property
    def target_info(self) -> TargetInfo | None:
        return self.info

    @property
    def running(self) -> int:
        return self.live

    def generate(self, request: GenerationRequest) -> FakeGeneration:
        if self.refuse is not None:
            raise self.refuse
        if self.info is not None:
            check_request(request, self.info)
        self.generations.append(FakeGeneration(self, request, self.script))
        return self.generations[-1]

    def report(self) -> GatewayReport:
        return GatewayReport(BudgetReport("fixed"), CohortReport("1", 1, "setting"), self.live)

    @property
    def request(self) -> GenerationRequest:
        """The last one."""
        return self.generations[-1].request


@dataclass
class Surface:
    """One gateway surface over a scripted scheduler."""

    tokenizer: Tokenizer
    scheduler: FakeScheduler
    service: CompletionService
    metrics: GatewayMetrics
    app: Any

    def plays(self, *steps: Any, finish: FinishReason = FinishReason.STOP, **more: Any) -> None:
        """Script the coming requests; strings are encoded to ids."""
        blocks = [self.tokenizer.encode(s) if isinstance(s, str) else s for s in steps]
        self.scheduler.script = Script(blocks, finish, **more)

    def client(self, **headers: str) -> httpx.AsyncClient:
        """In process, without sockets: streams are read at once, disconnects need `live_server`."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://surface", headers=headers)


def make_surface(*, extra: Sequence[str] = (), api_key: str = "", max_body: int = 1 << 20) -> Surface:
    tokenizer = byte_tokenizer(extra)
    info = target_info(vocab_size=tokenizer.vocab_size, eos=tokenizer.eos_token_ids)
    scheduler = FakeScheduler(info=info)
    service = CompletionService(scheduler, tokenizer, names=["toy", "path/to/toy"], tree_budget=lambda: 16)
    service.phase = Phase.SERVING
    metrics = GatewayMetrics(CollectorRegistry())
    app = create_app(service, metrics, api_key=api_key, max_body=max_body)
    return Surface(tokenizer, scheduler, service, metrics, app)


@contextlib.asynccontextmanager
async def live_server(app: Any) -> AsyncIterator[str]:
    """The app behind the real HTTP server; yields its URL."""
    server = HttpServer(app, host="127.0.0.1", port=0)
    await server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.stop()


def sse_events(body: str) -> Iterator[Any]:
    """Events of an SSE body, strictly: `data: …` lines, each followed by one empty line; [DONE] as is."""
    assert body.endswith("\n\n")
    for block in body[:-2].split("\n\n"):
        assert block.startswith("data: ") and "\n" not in block, block
        data = block.removeprefix("data: ")
        yield data if data == "[DONE]" else json.loads(data)


async def until(condition: Any, seconds: float = 30.0) -> None:
    """Wait for `condition()` to hold; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
