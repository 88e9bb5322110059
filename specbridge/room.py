"""How much of a GPU a draft service takes, estimated from configuration files before anything runs.

`specbridge serve` promises that much to the draft when it shares a GPU with the target, which takes the rest
for K/V pages. Owns the estimate, rounded up. Does not own what a drafter is (draft_service) nor the target's
plan (target_service.memory_plan).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbridge import models
from specbridge.checkpoint import config_files
from specbridge.errors import ConfigError

GIB = 1 << 30
PROCESS_GIB = 2.0
"""A CUDA context with its libraries, and what passes and their graphs take."""
UNKNOWN_GIB = 8.0
"""For a drafter whose configuration can't be read yet."""
CONTEXT_TOKENS = 65536
ITEM_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def reserve_for_draft(draft: Mapping[str, Any], target: Mapping[str, Any]) -> float:
    """GiB that a target of these settings has to leave to a draft of those; 0 where they can't meet on one
    GPU."""
    if not shares_gpu(target["device"], target["tp"], draft["device"]):
        return 0.0
    try:
        base = _target_place(draft)
        return draft_gib(
            config_files(_drafter_place(draft, base)).model,
            config_files(base).model,
            dtype=draft["dtype"],
            kv_tokens=draft["kv_tokens"],
            max_length=draft["max_length"],
        )
    except ConfigError:  # not on this machine, or wrong: the services will say so
        return UNKNOWN_GIB


def draft_gib(
    drafter: Mapping[str, Any],
    target: Mapping[str, Any],
    *,
    dtype: str = "auto",
    kv_tokens: int = 0,
    max_length: int = 0,
) -> float:
    """GiB, rounded up to a half: layers, fc, the embedding and head borrowed from the target, context pages
    of all layers, and the process itself. The configurations are config.json's contents; a field that is
    missing is taken from the target's.
    """
    own = drafter.get("transformer_layer_config") or drafter

    def field(key: str, default: int = 0) -> int:
        return int(own.get(key) or target.get(key) or default)

    stored = next(
        (c.get(k) for c in (drafter, own) for k in ("dtype", "torch_dtype") if c.get(k)), "bfloat16"
    )
    item = ITEM_SIZES.get(str(stored if dtype == "auto" else dtype).removeprefix("torch."), 4)
    hidden, layers, heads = (
        field("hidden_size"),
        int(own.get("num_hidden_layers") or 5),
        field("num_attention_heads", 1),
    )
    d = field("head_dim", hidden // max(heads, 1))
    kv = field("num_key_value_heads", heads) * d
    layer = hidden * (2 * heads * d + 2 * kv) + 3 * hidden * field("intermediate_size")
    taps = len(_taps(drafter)) or layers
    weights = layers * layer + taps * hidden * hidden + 2 * field("vocab_size") * hidden
    length = max_length or int(target.get("max_position_embeddings") or 0)
    tokens = kv_tokens or max(length, min(4 * length, CONTEXT_TOKENS) or CONTEXT_TOKENS)
    size = (weights + 2 * layers * kv * tokens) * item
    return -(-(size / GIB + PROCESS_GIB) // 0.5) * 0.5


def shares_gpu(target: str, ranks: int, draft: str) -> bool:
    """Whether services on these devices (as flags name them) can meet on one GPU. auto: taken to be CUDA."""
    first, other = _gpu(target), _gpu(draft)
    return first is not None and other is not None and first <= other < first + ranks


def _gpu(device: str) -> int | None:
    if device == "cpu":
        return None
    _, _, index = device.partition(":")
    return int(index) if index.isdecimal() else 0


def _taps(drafter: Mapping[str, Any]) -> list[Any]:
    places = (drafter, drafter.get("dflash_config") or {}, drafter.get("eagle_config") or {})
    keys = ("target_layer_ids", "aux_hidden_state_layer_ids")
    return next((list(p[k]) for p in places for k in keys if isinstance(p.get(k), list)), [])


def _target_place(draft: Mapping[str, Any]) -> Path:
    if draft["load_format"] == "dummy":
        return models.resolve_config(draft["config"] or draft["target"], "--target")
    return models.find(draft["target"])


def _drafter_place(draft: Mapping[str, Any], target: Path) -> Path:
    if draft["drafter_config"]:
        return models.resolve_config(draft["drafter_config"], "--drafter-config")
    if draft["load_format"] == "dummy" and draft["draft"] == models.AUTO:
        return (target.parent if target.is_file() else target) / "dflash"
    if draft["draft"] == models.AUTO:
        return models.resolve_draft(models.AUTO, draft["target"])
    return models.packaged_drafter(draft["draft"]) or models.find(draft["draft"])
