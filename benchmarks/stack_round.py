"""What a round costs outside of draft and target, through a whole stack with a tiny model.

    python -m benchmarks.stack_round [--streams 1 32] [--tokens 200] [--flags no-eager]

Target and draft are real processes with made-up weights (3 layers of 128; acceptance simulated, so that trees
are of use), small enough for two cores to be idle most of the time. Columns are medians of the gateway's own
metrics over one burst, ms: the whole round, its part outside of the services' own time (`outside`: what
`benchmarks.gateway_round` calls sum), of that the gateway's and the messages'. Every round drafts, however
many streams run.
"""

from __future__ import annotations

import json
import tempfile
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks import common

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "torch_dtype": "bfloat16",
}
TARGET = SHAPE | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DRAFT = SHAPE | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "num_target_layers": 3,
    "block_size": 8,
    "dflash_config": {"target_layer_ids": [0, 1, 2], "mask_token_id": 16},
}
ACCEPTANCE = Path(__file__).parent / "acceptance" / "gsm8k-like.json"
PARTS = ("", "outside_", "gateway_", "rpc_", "draft_", "verify_")


def buckets(url: str) -> dict[str, list[tuple[float, float]]]:
    """The round histograms of the gateway: (upper edge, rounds up to it)."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:
        text = page.read().decode()
    names = {f"specbridge_gateway_round_{part}seconds": part for part in PARTS}
    return {
        names[family.name]: [
            (float(s.labels["le"]), s.value) for s in family.samples if s.name.endswith("_bucket")
        ]
        for family in text_string_to_metric_families(text)
        if family.name in names
    }


def median(before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]]) -> float:
    """Of what was observed between two readings, evenly spread inside of a bucket; nan: nothing was."""
    counts = [(edge, late - early) for (_, early), (edge, late) in zip(before, after, strict=True)]
    half = counts[-1][1] / 2
    low = passed = 0.0
    for edge, count in counts:
        if half and count >= half:
            return low + (edge - low) * (half - passed) / (count - passed)
        low, passed = edge, count
    return float("nan")


def request(url: str, tokens: int) -> None:
    body = {
        "model": "tiny",
        "prompt": [5 + i % 100 for i in range(64)],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {"content-type": "application/json"}
    call = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(call, timeout=600) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] == tokens


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--flags", nargs="*", default=[], help="of specbridge serve, e.g. tree-budget=8")
    args = parser.parse_args()
    most = max(args.streams)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model, drafter = Path(folder) / "tiny", Path(folder) / "tiny" / "dflash"
        drafter.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(TARGET))
        (drafter / "config.json").write_text(json.dumps(DRAFT))
        with common.serve(
            "--load-format=dummy", f"--config={model}", "--dtype=bfloat16", "--model-name=tiny",
            f"--simulate-acceptance={ACCEPTANCE}", "--max-length=1024", "--tree-budget=5",
            f"--max-verify-rows={6 * most}", f"--max-sessions={most + 8}", f"--max-running={most}",
            f"--draft-kv-tokens={1024 * (most + 8)}",
            *(f"--{flag}" for flag in args.flags),
        ) as stack:  # fmt: skip
            request(stack.url, 100)
            for _ in range(args.repeats):
                for streams in args.streams:
                    before = buckets(stack.url)
                    with ThreadPoolExecutor(streams) as pool:
                        list(pool.map(lambda _: request(stack.url, args.tokens), range(streams)))
                    after = buckets(stack.url)
                    medians = [1e3 * median(before[part], after[part]) for part in PARTS]
                    rows.append((streams, *(round(value, 2) for value in medians)))
    common.report(
        "stack_round",
        ("streams", *(f"{(part or 'round_').rstrip('_')} ms" for part in PARTS)), rows, args.out,
        tokens=args.tokens,
    )  # fmt: skip


if __name__ == "__main__":
    main()
