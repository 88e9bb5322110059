"""Tokens per second with speculation against plain decoding, at several concurrencies, interleaved.

Two stacks run at once, one as shipped and one with --no-draft; each measurement loads one of them while the
other idles, in turn, so that a drift of the machine's speed hits both. Greedy, real prompts, REST streaming.

    python -m benchmarks.speedup --streams 1 4 8 --repeats 3
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass

import httpx

from benchmarks import common


@dataclass(frozen=True, slots=True)
class Load:
    """One burst: tokens delivered over the decoding time (first token of each stream excluded)."""

    tokens_per_second: float
    acceptance_length: float


async def one_stream(client: httpx.AsyncClient, model: str, prompt: str, max_tokens: int) -> dict[str, float]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first = last = 0.0
    tokens = rounds = 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if event.get("choices") and event["choices"][0]["delta"].get("content"):
                last = time.perf_counter()
                first = first or last
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
                stats = (event.get("metrics") or {}).get("speculative_decoding") or {}
                rounds = stats.get("num_rounds", 0)
    return {"first": first, "last": last, "tokens": tokens, "rounds": rounds}


async def burst(url: str, prompts: list[str], streams: int, max_tokens: int) -> Load:
    """`streams` workers go through the prompts; throughput from the first token of all to the last."""
    queue = list(reversed(prompts))
    done: list[dict[str, float]] = []
    async with httpx.AsyncClient(base_url=url, timeout=600.0) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def worker() -> None:
            while queue:
                done.append(await one_stream(client, model, queue.pop(), max_tokens))

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(streams)))
        elapsed = time.perf_counter() - started
    tokens = sum(item["tokens"] for item in done)
    if streams == 1:  # decoding speed: prefill is the same work in both arms
        elapsed = sum(item["last"] - item["first"] for item in done)
        tokens -= len(done)
    rounds = sum(item["rounds"] for item in done)
    return Load(tokens / elapsed, (tokens / rounds) if rounds else 1.0)


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=12, help="prompts per burst (at least the streams)")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument(
        "--flags", nargs="*", default=[], help="extra flags of the speculating stack, e.g. tree_budget=8"
    )
    parser.add_argument(
        "--both", nargs="*", default=[], help="extra flags of both stacks, e.g. dtype=bfloat16"
    )
    args = parser.parse_args()

    def flags(items: list[str]) -> list[str]:
        pairs = (item.partition("=") for item in items)
        return [part for name, _, value in pairs for part in ("--" + name.replace("_", "-"), value) if part]

    rows = []
    with (
        common.serve(*flags(args.both), *flags(args.flags)) as spec,
        common.serve("--no-draft", *flags(args.both)) as plain,
    ):
        for streams in args.streams:
            prompts = common.load_prompts(common.SETS, max(args.prompts, streams))
            pairs = []
            for repeat in range(args.repeats + 1):
                a = asyncio.run(burst(spec.url, prompts, streams, args.max_tokens))
                b = asyncio.run(burst(plain.url, prompts, streams, args.max_tokens))
                if repeat:  # the first pair warms caches and code paths up
                    pairs.append((a, b))
            rows.append(
                (
                    streams,
                    statistics.median(b.tokens_per_second for _, b in pairs),
                    statistics.median(a.tokens_per_second for a, _ in pairs),
                    statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in pairs),
                    min(a.tokens_per_second / b.tokens_per_second for a, b in pairs),
                    statistics.median(a.acceptance_length for a, _ in pairs),
                )
            )
            print(
                common.table(("streams", "plain", "spec", "ratio", "min", "tokens/round"), rows[-1:]),
                flush=True,
            )
        what = common.synthetic(spec.url)
    header = ("streams", "plain tok/s", "speculative tok/s", "ratio", "lowest ratio", "tokens per round")
    common.report("speedup", header, rows, args.out, synthetic=what)


if __name__ == "__main__":
    main()
