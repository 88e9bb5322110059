"""Tile sizes of ragged attention: what one program computes, by the shape of a pass.

Owns the table and nothing else; it is looked at once per bucket, never tuned at run time. The figures are for
Hopper; benchmarks/kernels_attention.py --sweep measures a shape's neighbours and prints the best.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tiling:
    """block_m: query rows x heads of a tile. block_n: keys of a block. num_warps: of a program. num_stages: K
    and V blocks in its shared memory, of which one is worked on while the others come in.

    resident: programs that share a multiprocessor, on which the number of parts is based. min_blocks: a part
    has at least so many blocks. part_cost: what starting a part and merging it costs, in blocks.
    merge_rows, merge_parts: rows x heads of a merging program, and how many parts of each it loads at a time.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    resident: int = 1
    min_blocks: int = 2
    part_cost: int = 2
    merge_rows: int = 4
    merge_parts: int = 8

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "num_warps", "merge_rows", "merge_parts"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} is {value}; use a power of two")
        if self.block_m < 16 or self.block_n < 32:
            raise ValueError(
                f"a tile of {self.block_m} x {self.block_n} is too small; use at least 16 rows x heads and "
                "32 keys"
            )
        if self.merge_rows > self.block_m:
            raise ValueError(f"merge_rows {self.merge_rows} is above block_m {self.block_m}")

    def check_pages(self, page_size: int) -> None:
        """Raises ValueError for pages that a block of keys would end within and begin within by turns: the
        kernels take a row to be at the same place of its page in every block (cuda/attention_blocks.py), and
        would read other rows without a word.
        """
        if page_size < 1 or (self.block_n % page_size and page_size % self.block_n):
            raise ValueError(
                f"pages of {page_size} rows do not fit blocks of {self.block_n} keys; use a page_size that "
                "divides the block, or that the block divides"
            )


# Half precision, by padded head size and rows x heads of a tile. K and V blocks of num_stages stages lie in
# shared memory (2 * block_n * head size * 2 bytes a stage, beside the queries), a tile's scores and output in
# registers. Small tiles are bound by memory: long blocks keep many loads in flight, so that one program a
# multiprocessor is enough, and more parts would only be more to merge. Large ones are bound by the tensor
# cores, which want 64 rows for each group of 4 warps. Tiles of 256 rows, 16 rows beside the 128 so that a
# tree's anchor needs no tile of its own, and a block's product with V issued late, to run beside the next
# one's softmax, were measured too and are slower.
_HALF: dict[tuple[int, int], Tiling] = {
    (64, 16): Tiling(16, 128, 4, 3, resident=3),
    (64, 32): Tiling(32, 128, 4, 3, resident=2),
    (64, 64): Tiling(64, 64, 4, 3, resident=2, min_blocks=4),
    (64, 128): Tiling(128, 128, 8, 3),
    (128, 16): Tiling(16, 128, 4, 3),
    (128, 32): Tiling(32, 64, 4, 3, resident=2),
    (128, 64): Tiling(64, 64, 4, 3, resident=2, min_blocks=4),
    (128, 128): Tiling(128, 64, 8, 3, min_blocks=4),
    (256, 16): Tiling(16, 32, 4, 3, resident=2),
    (256, 32): Tiling(32, 32, 4, 3, resident=2),
    (256, 64): Tiling(64, 64, 8, 2),
    (256, 128): Tiling(128, 32, 8, 2),
}

# Two programs a multiprocessor, one at its softmax while the other has the tensor cores. K and V are read
# twice as often as by tiles of 128, which pays as far as measured (516 rows x heads) where fewer rows of the
# last tile are empty.
_HALVES = Tiling(64, 64, 4, 3, resident=2, min_blocks=4)
_HALVES_MOST = 576


def choose_tiling(*, packed_rows: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    """The tiling for sessions of up to packed_rows rows x heads per KV head. Raises ValueError for head sizes
    above 256.

    One tile for a whole session as long as it fits, since every further one reads K and V again (from the
    second-level cache at best); beyond, tiles that leave fewer rows empty.
    """
    width = max(64, 1 << (head_dim - 1).bit_length())
    if width > 256:
        raise ValueError(f"head_dim {head_dim} is not supported; at most 256")
    if dtype == torch.float32:
        # No tensor cores at full precision: plain multiply-adds, whose operands fill the registers.
        block_m = 16 if packed_rows <= 16 or width == 256 else 32
        return Tiling(block_m, 32, 8, 1 if width == 256 else 2, resident=2)
    block_m = min(max(16, 1 << (packed_rows - 1).bit_length()), 128)
    odd = -(-packed_rows // 64) % 2 == 1
    if width == 128 and 128 < packed_rows <= _HALVES_MOST and odd:
        return _HALVES
    return _HALF[width, block_m]
