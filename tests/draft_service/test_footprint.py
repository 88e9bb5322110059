"""What the drafter's passes read, against the checkpoints' own tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny import make_drafter, make_target

from draft_service.config import DraftSettings
from draft_service.loading import load_engine
from draft_service.metrics import DraftMetrics


def test_bytes_are_the_checkpoints(tmp_path: Path) -> None:
    layers, kv_heads, width = 2, 2, 12
    target = make_target(tmp_path / "target", dtype=torch.float32)
    draft = make_drafter(
        tmp_path / "draft", dtype=torch.float32, layers=layers, kv_heads=kv_heads, heads=4, hidden=48
    )
    settings = DraftSettings(draft=str(draft), target=str(target), device="cpu", warmup_repeats=0)
    found = load_engine(settings, draft, target, DraftMetrics()).footprint
    own = load_file(draft / "model.safetensors")
    matrices = {name: t.numel() for name, t in own.items() if t.dim() == 2}
    head = load_file(target / "model.safetensors")["model.embed_tokens.weight"].numel()
    block = head + sum(n for name, n in matrices.items() if name.startswith("layers."))
    append = matrices["fc.weight"] + sum(
        n for name, n in matrices.items() if "k_proj" in name or "v_proj" in name
    )
    assert found.weight_bytes == 4 * block and found.products_per_row == block
    assert found.append_weight_bytes == 4 * append
    assert found.kv_bytes_per_token == 2 * layers * kv_heads * width * 4
    assert found.copy_bytes_per_s == 0  # nothing is measured where warm-up is off
