"""The offline generator's passes on a GPU: everything that a decode step reads or changes is on the device.

Tokens, lengths and rules of the slots are tensors that a step reads and writes in place, so that it is a CUDA
graph without input, and many steps run before the host looks. Prompts run eagerly, many in a pass. On a CPU
the same code runs over the kernels' torch references: slow, for tests.

Owns the slots' memory and the order of a pass. The forward is the decoder's, each operation is in kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from kernels.choice import choose_rows
from kernels.commit import commit_rows
from kernels.linear import activation_dtype
from kernels.philox import signed_seed
from kernels.ragged import CHAIN, RaggedBatch
from kernels.ragged_attention import AttentionWorkspace, Window, make_workspace
from target_service.model.attention import RaggedAttention
from target_service.model.batch import StepInputs
from target_service.model.config import ModelConfig
from target_service.model.decoder import Decoder, Taps
from target_service.model.memory import allocate
from target_service.offline_passes import PAGE, PREFILL_SESSIONS, Start, chunks
from target_service.parallel import SingleRank
from target_service.step import NO_SLOT
from target_service.weight_sources import open_weights
from target_service.weights import Placement, load_weights

PREFILL_ROWS = 8192
"""Prompt tokens of one pass, unless one prompt alone has more."""
_ROWS_STEP = 512  # passes over prompts are padded to multiples, so that freed memory fits the next


class DeviceSlots:
    """A model on one GPU. Texts may have `length` tokens and `span` more before the host sees their end.

    Loads on construction: raises ConfigError for a checkpoint that can't be used or memory that does not
    suffice.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        slots: int,
        length: int,
        span: int = 16,
        graphs: bool = True,
    ) -> None:
        self.config, self.slots, self.span = config, slots, span
        self._device = device
        self._dtype = activation_dtype(dtype, device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graphs = graphs and device.type == "cuda"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        pages = -(-(length + span) // PAGE)
        rows = -(-slots // 8) * 8
        self._prompt_rows = -(-max(PREFILL_ROWS, length) // _ROWS_STEP) * _ROWS_STEP
        with torch.inference_mode(), open_weights(folder, "auto", dtype=dtype, device=device) as source:
            weights = load_weights(source, config, Placement(0, 1, dtype, device))
            self._heads = weights.heads
            self._decoder = Decoder(config, weights, SingleRank(), self._dtype)
            self._memory = allocate(
                config,
                weights.heads,
                num_pages=pages * slots,
                page_size=PAGE,
                max_rows=max(rows, self._prompt_rows),
                dtype=self._dtype,
                device=device,
            )

            def ints(count: int, value: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
                return torch.full((count,), value, dtype=dtype, device=device)

            self._table = torch.arange(pages * slots, dtype=torch.int32, device=device).view(slots, pages)
            # A slot's rows: its pages lie side by side. Rows past the slots are padding.
            self._room = torch.arange(slots, dtype=torch.int32, device=device) * (pages * PAGE)
            self._tokens, self._positions, self._live = ints(rows), ints(rows), ints(rows)
            self._seeds, self._choice = ints(rows, 0, torch.int64), ints(rows)
            self._temperature = torch.zeros(rows, device=device)
            self._first = ints(rows)
            self._out = torch.zeros(span, rows, dtype=torch.int32, device=device)
            self._step = ints(1, 0, torch.int64)
            self._slots_out = ints(rows, NO_SLOT)
            self._none = torch.zeros(rows, 1, dtype=torch.int32, device=device)
            self._batch = RaggedBatch(
                row_start=torch.arange(slots + 1, dtype=torch.int32, device=device),
                lengths=self._positions[:slots],
                page_table=self._table,
                positions=self._positions,
                kinds=ints(slots, CHAIN),
                ancestors=self._none,
                most_rows=1,
            )
            self._workspace = self._make_workspace(rows, slots, 1)

    # ---- decode steps ------------------------------------------------------------------------

    @torch.inference_mode()
    def decode(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        steps = min(steps, self.span)
        if self._graphs and self._graph is None:
            self._capture()
        self._step.zero_()
        for _ in range(steps):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._decode_step()
        found = torch.cat((self._first.unsqueeze(0), self._out[:steps])).cpu().numpy()
        return found[0, : self.slots], found[1:, : self.slots]

    def _capture(self) -> None:
        live = self._live.clone()
        self._live.zero_()
        self._step.zero_()
        self._decode_step()  # compiles; without a live slot it only rewrites tokens that are not committed
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        self._step.zero_()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._decode_step()
        self._live.copy_(live)
        self._graph = graph

    def _decode_step(self) -> None:
        memory, count = self._memory, self.slots
        self._workspace.plan(self._batch)
        cos, sin = memory.rotary.rows(self._positions)
        inputs = StepInputs(
            rows=len(self._tokens),
            tokens=self._tokens,
            cos=cos,
            sin=sin,
            attention=RaggedAttention(self._batch, self._workspace),
            logit_rows=None,
        )
        logits, _ = self._decoder.forward(inputs, memory.staging, memory.pages, Taps(), want_logits=True)
        assert logits is not None
        chosen = choose_rows(logits, self._temperature, self._seeds, self._positions + 1, self._choice).ids
        torch.add(self._room, self._positions[:count], out=self._slots_out[:count])
        commit_rows(memory.page_rows, memory.staged_rows, self._slots_out)
        self._out.index_copy_(0, self._step, chosen.unsqueeze(0))
        self._tokens.copy_(torch.where(self._live > 0, chosen.clamp(min=0), self._tokens))
        self._positions.add_(self._live)
        self._step.add_(1)

    # ---- prompts -----------------------------------------------------------------------------

    @torch.inference_mode()
    def fill(self, starts: Sequence[Start]) -> None:
        for part in chunks([len(start.tokens) for start in starts], self._prompt_rows):
            self._fill(starts[part])

    def _fill(self, starts: Sequence[Start]) -> None:
        memory = self._memory
        who = torch.tensor([start.slot for start in starts]).to(self._device)
        ends = torch.tensor([len(start.tokens) for start in starts], dtype=torch.int32).to(self._device)
        seeds = torch.tensor([signed_seed(start.seed) for start in starts]).to(self._device)
        heat = torch.tensor([start.temperature for start in starts], dtype=torch.float32).to(self._device)
        logits, _, at = self._chains(
            [start.tokens for start in starts], Taps(), [start.slot for start in starts]
        )
        assert logits is not None and at is not None
        chosen = choose_rows(logits, heat, seeds, ends, torch.zeros_like(ends)).ids
        commit_rows(memory.page_rows, memory.staged_rows, at)
        self._seeds.index_copy_(0, who, seeds)
        self._temperature.index_copy_(0, who, heat)
        self._positions.index_copy_(0, who, ends)
        self._first.index_copy_(0, who, chosen)
        self._tokens.index_copy_(0, who, chosen.clamp(min=0))
        self._live.index_fill_(0, who, 1)

    @torch.inference_mode()
    def free(self, slots: Sequence[int]) -> None:
        if len(slots):
            who = torch.tensor(list(slots)).to(self._device)
            for state in (self._live, self._positions, self._tokens, self._temperature):
                state.index_fill_(0, who, 0)

    def taps(self, texts: Sequence[Sequence[int]], taps: Taps) -> Iterator[torch.Tensor]:
        for part in chunks([len(text) for text in texts], self._prompt_rows):
            with torch.inference_mode():
                _, captured, _ = self._chains(texts[part], taps, None)
            assert captured is not None
            yield from captured.split(
                [len(text) for text in texts[part]] + [len(captured) - sum(len(text) for text in texts[part])]
            )[:-1]

    def _chains(
        self, texts: Sequence[Sequence[int]], taps: Taps, slots: Sequence[int] | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """A pass over whole texts from position 0. Returns logits after each, taps, and where each row's K/V
        belongs (with `slots`; without, no logits are computed).
        """
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        total = int(lengths.sum())
        rows = -(-total // _ROWS_STEP) * _ROWS_STEP
        starts = np.concatenate(([0], lengths.cumsum(), [total] * (PREFILL_SESSIONS - len(texts))))
        owner = np.repeat(np.arange(len(texts)), lengths)
        packed = np.zeros((3, rows), dtype=np.int32)  # tokens, positions, slots
        packed[0, :total] = np.concatenate([np.asarray(text) for text in texts])
        packed[1, :total] = np.arange(total) - starts[owner]
        packed[2] = NO_SLOT
        if slots is not None:
            span = self._table.shape[1] * PAGE
            packed[2, :total] = np.asarray(slots)[owner] * span + packed[1, :total]
        tokens, positions, at = torch.from_numpy(packed).to(self._device).unbind(0)
        nothing = torch.zeros(PREFILL_SESSIONS, dtype=torch.int32, device=self._device)
        batch = RaggedBatch(
            row_start=torch.from_numpy(starts.astype(np.int32)).to(self._device),
            lengths=nothing,
            page_table=self._table[:1].expand(PREFILL_SESSIONS, -1).contiguous(),
            positions=positions,
            kinds=torch.full_like(nothing, CHAIN),
            ancestors=torch.zeros(rows, 1, dtype=torch.int32, device=self._device),
            most_rows=self._prompt_rows,
            chains=True,
        )
        workspace = self._make_workspace(rows, PREFILL_SESSIONS, self._prompt_rows)
        workspace.plan(batch)
        cos, sin = self._memory.rotary.rows(positions)
        inputs = StepInputs(
            rows=rows,
            tokens=tokens,
            cos=cos,
            sin=sin,
            attention=RaggedAttention(batch, workspace),
            logit_rows=torch.from_numpy(starts[1 : len(texts) + 1].astype(np.int64) - 1).to(self._device),
        )
        logits, captured = self._decoder.forward(
            inputs, self._memory.staging, self._memory.pages, taps, want_logits=slots is not None
        )
        return logits, captured, at if slots is not None else None

    def _make_workspace(self, rows: int, sessions: int, most_rows: int) -> AttentionWorkspace:
        return make_workspace(
            rows=rows,
            sessions=sessions,
            most_rows=most_rows,
            heads=self._heads.query,
            kv_heads=self._heads.key_value,
            head_dim=self._heads.dim,
            page_size=PAGE,
            dtype=self._dtype,
            device=self._device,
            windows=tuple(Window(rows=w) for w in dict.fromkeys(self.config.windows)),
        )
