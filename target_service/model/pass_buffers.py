"""The tensors of a pass on a GPU, by bucket: what the host fills, what the device reads, what comes back.

A bucket (packing) keeps its own, since a captured graph holds their addresses; the attention's scratch is one
for all. Owns how many buckets are kept. Does not own what is done with them (device_pass).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.ragged_attention import AttentionWorkspace, Window, make_workspace, workspace_floats
from target_service.model.layers import Heads
from target_service.model.memory import Memory
from target_service.model.packing import Packed, Shape, views

MOST_BUCKETS = 512
"""A bucket keeps its tensors and its graph, some megabytes in all; of more the one longest unused goes."""


@dataclass(slots=True)
class Buffers:
    """A bucket's memory and, once captured, its graph and the logits and taps that a replay fills; those of
    the pass under way. copied: behind the last copy from `host` to `device`."""

    host: Packed
    device: Packed
    workspace: AttentionWorkspace
    ancestors: torch.Tensor
    answer: torch.Tensor
    copied: torch.cuda.Event | None = None
    graph: torch.cuda.CUDAGraph | None = None
    replayed: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    logits: torch.Tensor | None = None
    taps: torch.Tensor | None = None


class Buckets(dict[Shape, Buffers]):
    """See the module; in the order of their last use. on_gone(shape): of one that is no longer kept."""

    def __init__(
        self,
        heads: Heads,
        memory: Memory,
        windows: Sequence[Window],
        *,
        device: torch.device,
        dtype: torch.dtype,
        on_gone: Callable[[Shape], None],
    ) -> None:
        super().__init__()
        self._heads, self._memory, self._windows = heads, memory, tuple(windows)
        self._device, self._dtype = device, dtype
        self._on_gone = on_gone
        self._scratch = torch.empty(0, dtype=torch.float32, device=device)

    def of(self, shape: Shape) -> Buffers:
        """Those of this bucket, from now on the one used last."""
        found = self.pop(shape, None)
        if found is None:
            # All ranks see the same passes, so all let go of the same one.
            while len(self) >= MOST_BUCKETS:
                oldest = next(iter(self))
                del self[oldest]
                self._on_gone(oldest)
            found = self.make(shape)
        self[shape] = found
        return found

    def make(self, shape: Shape) -> Buffers:
        """Tensors for passes of this shape, not kept."""
        on_gpu = self._device.type == "cuda"
        host = views(torch.zeros(shape.words, dtype=torch.int32, pin_memory=on_gpu), shape)
        device = host
        if on_gpu:
            device = views(torch.zeros(shape.words, dtype=torch.int32, device=self._device), shape)
        heads, memory = self._heads, self._memory
        sizes: dict[str, Any] = {
            "rows": shape.rows,
            "sessions": shape.sessions,
            "most_rows": shape.most_rows,
            "heads": heads.query,
            "kv_heads": heads.key_value,
            "head_dim": heads.dim,
            "dtype": self._dtype,
            "device": self._device,
        }
        needed = workspace_floats(**sizes)
        if needed > self._scratch.numel():
            # Graphs captured so far keep the smaller one alive.
            self._scratch = torch.empty(needed, dtype=torch.float32, device=self._device)
        workspace = make_workspace(
            **sizes,
            page_size=memory.page_size,
            windows=self._windows,
            scratch=self._scratch,
        )
        ancestors = torch.zeros(shape.rows, -(-shape.most_rows // 32), dtype=torch.int32, device=self._device)
        answer = torch.zeros(shape.logit_rows, dtype=torch.int32, pin_memory=on_gpu)
        return Buffers(host, device, workspace, ancestors, answer)
