"""DevicePass: a step as one sequence of launches on a GPU, captured in a CUDA graph when it recurs.

    ids in -> plan of attention -> forward -> choice -> walk -> K/V to pages, hidden states to ring -> ids out

Nothing in it waits for the host, and no size depends on what the tensors hold: sizes are a bucket's
(packing). A step is run eagerly the first time its bucket occurs, captured the second time, replayed from
then on; large prompt chunks run eagerly. Filters and masks (top-k, top-p, min-p, min_tokens) have sizes that
depend on the data: such a step's forward and tail are launched around the choice.

Owns the order of a pass and its graphs. Its tensors are pass_buffers', the forward is the decoder's, each
operation is in kernels; target_service.model.host_pass does the same with torch alone.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernels import cuda
from kernels.choice import choose_rows, merge_choices
from kernels.commit import commit_rows
from kernels.ragged import RaggedBatch, ancestor_words
from kernels.ragged_attention import Window
from kernels.simulate import true_tokens
from specbridge.channel import dlpack
from specbridge.channel.base import ChannelLayout
from target_service.model.attention import RaggedAttention
from target_service.model.batch import StepInputs
from target_service.model.config import ModelConfig
from target_service.model.decoder import Decoder, Taps
from target_service.model.layers import Heads
from target_service.model.memory import Memory
from target_service.model.packing import Shape, bucket, choice_rows, cover, exact_shape, fill
from target_service.model.pass_buffers import Buckets, Buffers
from target_service.model.walk import PackedWalk
from target_service.parallel import Group
from target_service.sampling import choose
from target_service.simulation import simulated_choices
from target_service.step import CAPTURE, EAGER, LENT, REPLAY, Step, StepOutput, visible_context

LENT_TIMES = 6
"""Passes of a size that run by a larger one's graph before it gets its own: sizes that hardly recur would
make streams wait for captures that nobody uses again."""


def uses_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether passes of this dtype on this device run on the GPU kernels."""
    return device.type == "cuda" and dtype in cuda.DTYPES and cuda.available()


@dataclass(slots=True)
class _Captured:
    """What the graphs have been captured for: they hold the addresses of its tensors."""

    taps: Taps = field(default_factory=Taps)
    ring: torch.Tensor | None = None

    def same(self, taps: Taps, ring: torch.Tensor | None) -> bool:
        return self.taps == taps and self.ring is ring


class DevicePass:
    """One rank's passes. vocab_rows: ids of this rank, from `first_token` on. lends: passes without a graph
    of their size may run by a larger one's, which rounds otherwise. For one thread at a time.
    """

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        memory: Memory,
        group: Group,
        *,
        heads: Heads,
        first_token: int,
        vocab_rows: int,
        device: torch.device,
        dtype: torch.dtype,
        simulated: bool,
        graphs: bool,
        lends: bool = True,
    ) -> None:
        self._config, self._decoder, self._memory, self._group = config, decoder, memory, group
        self._heads, self._first_token, self._vocab_rows = heads, first_token, vocab_rows
        self._device, self._dtype = device, dtype
        self._simulated = simulated
        self._graphs, self._lends = graphs and device.type == "cuda", lends
        self._layers = Counter(config.windows)
        self._windows = tuple(Window(rows=w) for w in self._layers)
        self._most_pages = -(-memory.max_position // memory.page_size)
        self._kept = Buckets(heads, memory, self._windows, device=device, dtype=dtype, on_gone=self._let_go)
        self._pool: Any = None
        self._captured = _Captured()
        self._ready: set[Shape] = set()
        self._lent: Counter[Shape] = Counter()
        self._examples: dict[Shape, Step] = {}
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        self._thread = 0

    def close(self) -> None:
        """Drop the graphs: a NCCL group can't end while some hold its collectives."""
        self._kept.clear()
        self._ready.clear()

    # ---- rank 0, before a step is sent -----------------------------------------------------------

    def plan(self, step: Step, taps: Taps, ring: torch.Tensor | None) -> Step:
        """`step` with the rules of its choices and whether it is captured or replayed."""
        if not self._captured.same(taps, ring):
            self._captured = _Captured(taps, ring)
            self._ready.clear()
            for buffers in self._kept.values():
                buffers.graph, buffers.replayed = None, (None, None)
            # The pool ends with the last graph in it; naming it again would be an error.
            self._pool = None
        choice = choice_rows(step.groups)
        mode = EAGER
        shape = self._bucket(step)
        if self._graphs and choice is not None and shape is not None and shape.recurs:
            kept = self._kept.get(shape)
            if kept is not None and kept.graph is not None:
                mode = REPLAY
            elif not step.warms and (lender := self._lender(shape)) is not None:
                self._lent[shape] += 1
                mode = LENT
                step = replace(step, lender=(lender.rows, lender.sessions, lender.most_rows))
            else:
                mode = CAPTURE if shape in self._ready else EAGER
                self._ready.add(shape)
                if shape not in self._examples:
                    segments = tuple(replace(segment, ring=None) for segment in step.segments)
                    self._examples[shape] = replace(step, slots=None, segments=segments, warms=True)
        return replace(step, mode=mode, rows_choice=choice)

    def examples(self) -> list[Step]:
        """A step of each bucket that has occurred; running it changes nothing."""
        return list(self._examples.values())

    # ---- every rank ------------------------------------------------------------------------------

    def run(self, step: Step, taps: Taps, ring: torch.Tensor | None) -> StepOutput:
        """One step. Logits and choices are filled on rank 0 only."""
        self._own_device()
        buffers = self._buffers(step)
        if buffers.copied is not None:
            buffers.copied.synchronize()  # the pass itself may go on: the next copy comes behind it
        carried = fill(buffers.host, step, num_slots=0 if ring is None else ring.shape[0])
        if buffers.host is not buffers.device:
            buffers.device.buffer[:carried].copy_(buffers.host.buffer[:carried], non_blocking=True)
            buffers.copied = buffers.copied or torch.cuda.Event()
            buffers.copied.record()
        # A ring in the host's memory can't be written from a graph: its rows follow the readback.
        inside = ring if ring is not None and ring.device.type == self._device.type else None
        whole = step.rows_choice is not None
        if step.mode in (REPLAY, LENT):
            assert buffers.graph is not None
            buffers.graph.replay()
            buffers.logits, buffers.taps = buffers.replayed
        elif step.mode == CAPTURE:
            self._capture(buffers, taps, inside)
        else:
            self._forward(buffers, taps)
            if whole:
                self._finish(buffers, self._choose(buffers), inside)
        logits = self._read_logits(buffers, step, needed=step.read_logits or not whole)
        if not whole:
            self._finish(buffers, self._choose_filtered(buffers, step, logits), inside)
        context = self._context(step, buffers)  # while the device is at work
        choices = self._read_choices(buffers, step)
        # What a ring in the host's memory gets, below, comes after the wait.
        read_back = bool(choices) and self._done is not None and inside is ring
        if ring is not None and inside is None and buffers.taps is not None:
            packed = _walk_of(buffers)
            packed.publish(buffers.taps, ring, packed.walk(self._after(buffers, buffers.answer)))
        captured = None if buffers.taps is None else buffers.taps[: step.tokens.numel()]
        # Buckets are many: what eager passes made, kept with each, would be memory that nobody planned.
        buffers.logits = buffers.taps = None
        cold = self._graphs and step.mode in (EAGER, CAPTURE) and whole and self._recurs(step)
        return StepOutput(logits, captured, choices, *context, read_back=read_back, cold=cold)

    def _own_device(self) -> None:
        """Kernels go to the calling thread's current device; whoever loaded the model was another thread."""
        if self._device.type == "cuda" and self._thread != threading.get_ident():
            torch.cuda.set_device(self._device)
            self._thread = threading.get_ident()

    def _context(self, step: Step, buffers: Buffers) -> tuple[float, float]:
        """StepOutput.context_rows, context_rows_read: each tile of a session's rows x heads reads its context
        (kernels.ragged_attention), the later ones from a cache if they run beside the first.
        """
        held = read = 0.0
        group = self._heads.query // self._heads.key_value
        for segment in step.segments:
            if segment.parents is not None:
                rows = visible_context(segment.context_length, self._layers)
                held += rows
                read += rows * -(-segment.rows * group // buffers.workspace.tiling.block_m)
        return held, read

    # ---- memory ----------------------------------------------------------------------------------

    def _bucket(self, step: Step) -> Shape | None:
        return bucket(step, self._most_pages, self._memory.max_rows)

    def _recurs(self, step: Step) -> bool:
        shape = self._bucket(step)
        return shape is not None and shape.recurs

    def _lender(self, shape: Shape) -> Shape | None:
        """Whose graph is to run a pass of `shape`, which has none. Rank 0 says so: graphs of an earlier ring
        are still there on the others."""
        if not self._lends or self._lent[shape] >= LENT_TIMES:
            return None
        return cover(shape, (other for other, buffers in self._kept.items() if buffers.graph is not None))

    def _buffers(self, step: Step) -> Buffers:
        shape = self._bucket(step)
        if shape is not None and step.mode == LENT:
            rows, sessions, most_rows = step.lender
            shape = replace(shape, rows=rows, sessions=sessions, most_rows=most_rows, logit_rows=rows)
        return self._kept.make(exact_shape(step)) if shape is None else self._kept.of(shape)

    def _let_go(self, shape: Shape) -> None:
        """`shape` is no longer kept."""
        self._ready.discard(shape)
        self._examples.pop(shape, None)
        if all(buffers.graph is None for buffers in self._kept.values()):
            self._pool = None  # it has ended with its last graph

    # ---- the pass --------------------------------------------------------------------------------

    def _forward(self, buffers: Buffers, taps: Taps) -> None:
        packed, shape = buffers.device, buffers.device.shape
        ancestor_words(
            packed.parents,
            packed.row_start,
            packed.kinds,
            words=buffers.ancestors.shape[1],
            out=buffers.ancestors,
        )
        batch = RaggedBatch(
            row_start=packed.row_start,
            lengths=packed.lengths,
            page_table=packed.page_table,
            positions=packed.positions,
            kinds=packed.kinds,
            ancestors=buffers.ancestors,
            most_rows=shape.most_rows,
            chains=not shape.trees,
        )
        buffers.workspace.plan(batch)
        cos, sin = self._memory.rotary.rows(packed.positions)
        inputs = StepInputs(
            rows=shape.rows,
            tokens=packed.tokens,
            cos=cos,
            sin=sin,
            attention=RaggedAttention(batch, buffers.workspace),
            logit_rows=None if shape.trees else packed.logit_rows,
        )
        buffers.logits, buffers.taps = self._decoder.forward(
            inputs, self._memory.staging, self._memory.pages, taps, want_logits=shape.logit_rows > 0
        )

    def _choose(self, buffers: Buffers) -> torch.Tensor:
        """int32 [K]: the choice of every logits row, the same on all ranks; each rank looks through its own
        share of the vocabulary.
        """
        packed = buffers.device
        if buffers.logits is None:
            return packed.choices[:0]
        chosen = choose_rows(
            buffers.logits.narrow(1, 0, self._vocab_rows),
            packed.temperature,
            packed.seeds,
            packed.choice_positions,
            packed.choices,
            first_token=self._first_token,
        )
        if self._group.size > 1:
            pairs = torch.stack((chosen.best.view(torch.int32), chosen.ids))
            every = self._group.gather_all(pairs)
            chosen = merge_choices(every[:, 0].view(torch.float32), every[:, 1])
        if not self._simulated:
            return chosen.ids
        text = true_tokens(
            packed.seeds, packed.choice_positions.long(), packed.choices.long(), self._config.vocab_size
        )
        return torch.where(chosen.ids < 0, chosen.ids, text.to(torch.int32))

    def _choose_filtered(self, buffers: Buffers, step: Step, logits: torch.Tensor) -> torch.Tensor:
        """The same for a step with filters or masks: rank 0 chooses from the whole logits."""
        ids = torch.full((buffers.device.shape.logit_rows,), -1, dtype=torch.int32, device=self._device)
        if not self._group.rank and step.groups:
            count = sum(len(group.positions) for group in step.groups)
            chosen = choose(logits[:count], step.groups)
            if self._simulated:
                chosen = simulated_choices(chosen, step.groups, self._config.vocab_size)
            ids[:count] = chosen.to(torch.int32)
        self._group.broadcast(ids)
        return ids

    def _finish(self, buffers: Buffers, ids: torch.Tensor, ring: torch.Tensor | None) -> None:
        """Walk, commit, capture, and the ids on their way to the host."""
        packed, memory = buffers.device, self._memory
        walk = _walk_of(buffers)
        path = walk.walk(self._after(buffers, ids))
        commit_rows(memory.page_rows, memory.staged_rows, packed.slots, path)
        if ring is not None and buffers.taps is not None:
            walk.publish(buffers.taps, ring, path)
        if ids.numel():
            buffers.answer.copy_(ids, non_blocking=True)

    def _after(self, buffers: Buffers, ids: torch.Tensor) -> torch.Tensor:
        """int32 [R]: the choice after each row, -1 where there is none. ids [K], or [0]."""
        packed, shape = buffers.device, buffers.device.shape
        if shape.trees:
            return ids.to(self._device)
        after = torch.full((shape.rows,), -1, dtype=torch.int32, device=self._device)
        if ids.numel():
            after.index_copy_(0, packed.logit_rows.long(), ids.to(self._device))
        return after

    def _capture(self, buffers: Buffers, taps: Taps, ring: torch.Tensor | None) -> None:
        """Record the pass; then run it, since recording runs nothing."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog and other threads' calls must not spoil a capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._forward(buffers, taps)
            self._finish(buffers, self._choose(buffers), ring)
        if self._pool is None:
            self._pool = graph.pool()
        buffers.graph = graph
        buffers.logits, buffers.taps = buffers.replayed = _on_loan(buffers.logits), _on_loan(buffers.taps)
        graph.replay()

    # ---- what the host reads ---------------------------------------------------------------------

    def _read_logits(self, buffers: Buffers, step: Step, *, needed: bool) -> torch.Tensor:
        """fp32 [k, vocab] on rank 0; [0, vocab] elsewhere and when nobody needs them."""
        wanted = step.logit_rows.numel()
        logits = None
        if needed and wanted and buffers.logits is not None:
            logits = self._group.gather_columns(buffers.logits[:wanted])
        if logits is None:
            return torch.empty(0, self._config.vocab_size, device=self._device)
        return logits.narrow(1, 0, self._config.vocab_size).float()

    def _read_choices(self, buffers: Buffers, step: Step) -> tuple[int, ...]:
        """The one wait of a pass; none at all where nothing was chosen, so that the next chunk's launches
        overlap with it.
        """
        count = sum(len(group.positions) for group in step.groups)
        if self._group.rank or not count:
            return ()
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        return tuple(buffers.answer[:count].tolist())


def _on_loan(x: torch.Tensor | None) -> torch.Tensor | None:
    """The same memory, not kept: what a captured pass leaves is read before the next pass, so all graphs may
    have it in one place."""
    if x is None:
        return x
    layout = ChannelLayout(row_width=x.shape[1], dtype=str(x.dtype).removeprefix("torch."))
    return dlpack.view(x.data_ptr(), x.shape[0], layout, device=str(x.device), owner=None)


def _walk_of(buffers: Buffers) -> PackedWalk:
    packed = buffers.device
    return PackedWalk(
        tokens=packed.tokens,
        parents=packed.parents,
        row_start=packed.row_start,
        kinds=packed.kinds,
        first_slot=packed.first_slot,
        skip=packed.skip,
        most_rows=packed.shape.most_rows,
    )
