"""Compiles Triton kernels of small ops, attention, conditional trees and token losses for an NVIDIA GPU on a
machine without one. A script, run by a test.

Triton's compiler needs no device, only its launcher does: a driver that names the target stands in for the
real one, and every launch stops after compiling. Tensors are on the CPU and keep what they hold. Prints a
line for each kernel: its op, its name, the bytes of its machine code. Run without TRITON_INTERPRET.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.kernels_small import Shape, cases
from kernels import cuda
from kernels.conditional_tree import PairTable, Weights, pack_conditional_trees, step_scores
from kernels.marginals import Candidates
from kernels.ragged import TREE, RaggedSegment, pack_ragged
from kernels.ragged_attention import make_workspace, ragged_attention
from kernels.token_loss import Logits, LossTerms, row_losses, write_gradient

CAPABILITY = 90


class NoDriver:
    """What a compilation asks of a driver."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)


def main() -> None:
    driver.set_active(NoDriver())
    launch, names = JITFunction.run, []

    def compile_only(self: JITFunction, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, warmup=True, **kwargs)
        names.append((self.__name__, len(kernel.asm["cubin"])))
        return kernel

    JITFunction.run = compile_only
    cuda.takes = lambda x: x.dtype in cuda.DTYPES
    # Head and hidden sizes that are no power of two compile to the most code.
    shape = Shape("odd", 576, 5, 3, 80, 1536, 2, qk_norm=True, drafter_layers=2, taps=2)
    for make in cases(shape, 4, torch.bfloat16, "cpu"):
        case = make()
        names.clear()
        case.run()
        for name, size in names:
            print(case.op, name, size)
    for terms in (LossTerms(), LossTerms(ce=0.1, kl=0.5, l1=0.5, coupled=0.5, temperature=0.9)):
        names.clear()
        token_loss(terms)
        for name, size in names:
            print("token_loss", name, size)
    for rows in (1, 65):
        names.clear()
        attention(rows)
        for name, size in names:
            print("ragged_attention", name, size)
    names.clear()
    conditional_tree()
    for name, size in names:
        print("conditional_tree", name, size)


def attention(rows: int) -> None:
    """With the table's tiling for a session of so many rows."""
    heads, kv_heads, head_dim, page = 32, 8, 128, 16
    batch = pack_ragged([RaggedSegment(rows, 2 * page, (0, 1), TREE, range(-1, rows - 1))])
    workspace = make_workspace(
        rows=rows,
        sessions=1,
        most_rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page,
        dtype=torch.bfloat16,
        device="cpu",
        processors=132,
    )
    workspace.plan(batch)
    q, k, v = (torch.zeros(rows, n, head_dim, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads))
    pages = torch.zeros(2, page, kv_heads, head_dim, dtype=torch.bfloat16)
    ragged_attention(q, k, v, pages, pages.clone(), batch, scale=1.0, workspace=workspace)


def conditional_tree() -> None:
    vocab, pairs, depths = 300, 9, 3
    table = PairTable(torch.arange(pairs), *(torch.ones(n) for n in (pairs, vocab, vocab)), prior=60.0)
    candidates = Candidates(torch.zeros(2, depths, 32), torch.zeros(2, depths, 32, dtype=torch.int32))
    logits = torch.zeros(2, depths, vocab, dtype=torch.bfloat16)
    weights = Weights(torch.ones(depths), torch.ones(depths))
    steps = step_scores(candidates, logits, torch.zeros(2), table, weights)
    pack_conditional_trees(steps, *[torch.ones(2, dtype=torch.int32)] * 2, nodes=64)


def token_loss(terms: LossTerms) -> None:
    rows = torch.zeros(2, 100, dtype=torch.bfloat16)
    teacher = rows.clone() if terms.distils else None
    logits = Logits(rows, teacher, torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    write_gradient(logits, terms, row_losses(logits, terms), torch.ones(2))


if __name__ == "__main__":
    main()
