"""split_attention: the rows of one pass over their session's paged context and over each other.

Every row of a session sees the whole committed context (bounded below by a window, if the layer has one) and
those rows of the pass which the mask allows. The context part needs no tree mask, so its cost does not grow
with the tree's shape, and all rows and all query heads of a key/value head share one read of it: queries are
packed as [rows x heads per KV head]. The two parts are merged by log-sum-exp; an empty context weighs
nothing.

What is the same in every layer of a pass (which pages to read, masks) is worked out once: `plan_attention`.
Three ways to compute it, chosen there:

    small   CPU, float32 or float64, few rows: batched products into one score table per tile of sessions, and
            a single softmax over [context | rows], which is the log-sum-exp merge carried out in place
    flash   CPU, half precision or many rows: torch's CPU flash kernel per session and part, merged by
            `merge_states`
    joint   any other device: gathered context and rows under one masked scaled_dot_product_attention

Pages of a session that lie next to each other are read where they are; only scattered ones are copied, once
per layer. An allocator that hands out neighbouring pages therefore makes attention cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.attention_plan import AttentionPlan, Part, Tile, causal_mask, plan_attention
from kernels.paged import gather_context

__all__ = [
    "AttentionPlan",
    "PagedContext",
    "causal_mask",
    "merge_states",
    "plan_attention",
    "split_attention",
    "split_attention_reference",
]


@dataclass(frozen=True, slots=True)
class PagedContext:
    """k_pages, v_pages [pages, page_size, kv_heads, d]; page_table int64 [S, P]; lengths int64 [S].

    page_table and lengths are best on the CPU. Entries of page_table past a session's length are ignored.
    """

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor


def split_attention(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    context: PagedContext,
    mask: torch.Tensor | None,
    *,
    scale: float,
    window_start: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Attention of S sessions with R rows each; returns [S, R, H, d] like q.

    q [S, R, H, d]; k_new, v_new [S, R, Kv, d], this pass's rows; mask bool [S, R, R], True = row i sees row j
    of this pass (every row sees itself, pad rows too), or None for a causal chain; window_start int64 [S, R]
    or None: a row sees context positions >= window_start. H is a multiple of Kv. With `plan` (from
    plan_attention with the same arguments) the page table, lengths, mask and window given here are not looked
    at again.
    """
    sessions, rows = q.shape[0], q.shape[1]
    if plan is None:
        plan = plan_attention(
            context.page_table,
            context.lengths,
            mask,
            rows=rows,
            page_size=context.k_pages.shape[1],
            dtype=q.dtype,
            device=q.device,
            window_start=window_start,
        )
    if plan.mode == "joint":
        return _joint(q, k_new, v_new, context.k_pages, context.v_pages, plan, scale)
    run = _small if plan.mode == "small" else _flash
    if len(plan.tiles) == 1:
        return run(q, k_new, v_new, context.k_pages, context.v_pages, plan, plan.tiles[0], 0, scale)
    out = torch.empty(sessions, rows, *q.shape[2:], dtype=q.dtype, device=q.device)
    for number, tile in enumerate(plan.tiles):
        index = tile.sessions
        assert index is not None
        part = run(
            q[index], k_new[index], v_new[index], context.k_pages, context.v_pages, plan, tile, number, scale
        )
        out.index_copy_(0, index, part)
    return out


def split_attention_reference(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    context: PagedContext,
    mask: torch.Tensor,
    *,
    scale: float,
    window_start: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same by one masked softmax over [context | rows], session by session. Shapes as in
    split_attention."""
    group = q.shape[2] // k_new.shape[2]
    outs = []
    for s in range(q.shape[0]):
        length = int(context.lengths[s])
        keys = torch.cat((gather_context(context.k_pages, context.page_table[s])[:length], k_new[s]))
        values = torch.cat((gather_context(context.v_pages, context.page_table[s])[:length], v_new[s]))
        visible = torch.ones(q.shape[1], length, dtype=torch.bool, device=q.device)
        if window_start is not None:
            visible = torch.arange(length, device=q.device)[None] >= window_start[s, :, None]
        visible = torch.cat((visible, mask[s]), -1)
        scores = torch.einsum("rhd,nhd->hrn", q[s], keys.repeat_interleave(group, 1)) * scale
        scores = scores.masked_fill(~visible, float("-inf"))
        outs.append(torch.einsum("hrn,nhd->rhd", scores.softmax(-1), values.repeat_interleave(group, 1)))
    return torch.stack(outs)


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join two attention parts: out [..., d] with natural log-sum-exp [...]; returns (out, lse).

    A part without keys has lse -inf and weighs nothing, whatever its out holds. At least one part has keys.
    """
    weight = torch.sigmoid(lse_a.to(out_a.dtype) - lse_b.to(out_a.dtype)).unsqueeze(-1)
    out_a = torch.where(weight > 0, out_a, out_b)
    return torch.lerp(out_b, out_a, weight), torch.logaddexp(lse_a, lse_b)


def _bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where mask is True, else -inf."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))


def _slab(pages: torch.Tensor, part: Part) -> torch.Tensor:
    """[count, Kv, d]: the part's rows, in place where they are neighbours."""
    if part.pages is None:
        return pages.view(-1, *pages.shape[2:]).narrow(0, part.start, part.count)
    return gather_context(pages, part.pages).narrow(0, part.start, part.count)


@dataclass(frozen=True, slots=True)
class _Table:
    """The work space of a tile: made in the first layer, written anew in every one.

    queries [s, Kv, R * G, d], also seen as packed [s, Kv, R, G, d]; columns, weights: for each context part
    of each session the score columns to write and the softmax columns to read; own, own_weights: the same for
    the pass's rows; by_session: the queries of each session.
    """

    packed: torch.Tensor
    queries: torch.Tensor
    scores: torch.Tensor
    softmax: torch.Tensor
    columns: tuple[tuple[torch.Tensor, ...], ...]
    weights: tuple[tuple[torch.Tensor, ...], ...]
    own: torch.Tensor
    own_weights: torch.Tensor
    by_session: tuple[torch.Tensor, ...]


def _make_table(tile: Tile, like: torch.Tensor, kv: int) -> _Table:
    sessions, rows, heads, d = like.shape
    size = rows * (heads // kv)
    packed = like.new_empty(sessions, kv, rows, heads // kv, d)
    queries = packed.view(sessions, kv, size, d)
    # Columns past a session's own context are never written: they stay -inf for the whole pass.
    scores = like.new_full((sessions, kv, size, tile.width + rows), float("-inf"))
    softmax = torch.empty_like(scores)

    def columns(table: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], ...]:
        return tuple(
            tuple(table[s].narrow(-1, part.column, part.count) for part in parts)
            for s, parts in enumerate(tile.parts)
        )

    own_weights = softmax.view(sessions * kv, size, -1).narrow(-1, tile.width, rows)
    own = scores.view(sessions * kv, size, -1).narrow(-1, tile.width, rows)
    return _Table(
        packed=packed,
        queries=queries,
        scores=scores,
        softmax=softmax,
        columns=columns(scores),
        weights=columns(softmax),
        own=own,
        own_weights=own_weights,
        by_session=queries.unbind(0),
    )


def _small(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    plan: AttentionPlan,
    tile: Tile,
    number: int,
    scale: float,
) -> torch.Tensor:
    sessions, rows, heads, d = q.shape
    kv = k_new.shape[2]
    group, size = heads // kv, rows * heads // kv
    table = plan.once(("t", number), lambda: _make_table(tile, q, kv))
    # Row of a packed query = row * group + head within the group. A factor of q's dtype spares a conversion.
    factor = plan.once(("f", scale), lambda: q.new_tensor(scale))
    torch.mul(q.view(sessions, rows, kv, group, d).transpose(1, 2), factor, out=table.packed)
    for query, parts, columns in zip(table.by_session, tile.parts, table.columns, strict=True):
        for part, column in zip(parts, columns, strict=True):
            # A product straight into the columns would take the slow, strided way; the copy is cheap.
            column.copy_(torch.bmm(query, _slab(k_pages, part).permute(1, 2, 0)))
    if tile.context_bias is not None:
        by_row = table.scores.view(sessions, kv, rows, group, -1).narrow(-1, 0, tile.width)
        by_row.add_(tile.context_bias[:, None, :, None])
    if sessions == 1:
        k_rows, v_rows = k_new[0].permute(1, 2, 0), v_new[0].transpose(0, 1)
    else:
        k_rows = k_new.transpose(1, 2).reshape(sessions * kv, rows, d).transpose(1, 2)
        v_rows = v_new.transpose(1, 2).reshape(sessions * kv, rows, d)
    own = torch.bmm(table.queries.view(sessions * kv, size, d), k_rows)
    mask = tile.new_mask
    if mask is None:
        table.own.copy_(own)
    else:
        bias = plan.once(("m", number), lambda: _packed_bias(mask, kv, group, q.dtype))
        torch.add(own, bias, out=table.own)
    torch.softmax(table.scores, -1, out=table.softmax)
    out = torch.empty_like(table.queries)
    for result, parts, weights in zip(out.unbind(0), tile.parts, table.weights, strict=True):
        if not parts:
            result.zero_()
        for part, weight in zip(parts, weights, strict=True):
            values = _slab(v_pages, part).transpose(0, 1)
            if part.column == 0:
                torch.bmm(weight, values, out=result)
            else:
                result.baddbmm_(weight, values)
    # Adding is the slow way for long operands, so it is left to the short one.
    out.view(sessions * kv, size, d).baddbmm_(table.own_weights, v_rows)
    return out.view(sessions, kv, rows, group, d).transpose(1, 2).reshape(sessions, rows, heads, d)


def _packed_bias(mask: torch.Tensor, kv: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    """[s * Kv, R * G, R] for packed queries, from mask [s, R, R]."""
    bias = _bias(mask, dtype).repeat_interleave(group, 1)
    return bias.unsqueeze(1).expand(-1, kv, -1, -1).reshape(-1, *bias.shape[1:])


def _flash_part(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    causal: bool,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [Kv, G, n, d], k, v [m, Kv, d] -> out [Kv, G, n, d], natural lse [Kv, G, n]. The G heads share k's
    memory."""
    shape = (q.shape[0], q.shape[1], k.shape[0], k.shape[2])
    keys = k.transpose(0, 1).unsqueeze(1).expand(shape)
    values = v.transpose(0, 1).unsqueeze(1).expand(shape)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, 0.0, causal, attn_mask=bias, scale=scale
    )
    return out, lse


def _flash(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    plan: AttentionPlan,
    tile: Tile,
    number: int,
    scale: float,
) -> torch.Tensor:
    """One session (tiles hold one here)."""
    _, rows, heads, d = q.shape
    kv = k_new.shape[2]
    queries = q[0].view(rows, kv, heads // kv, d).permute(1, 2, 0, 3)
    mask = tile.new_mask
    bias = None if mask is None else plan.once(("m", number), lambda: _bias(mask[0], q.dtype))
    out, lse = _flash_part(queries, k_new[0], v_new[0], scale, causal=plan.causal and bias is None, bias=bias)
    for part in tile.parts[0]:
        window = None
        if tile.context_bias is not None:
            window = tile.context_bias[0].narrow(-1, part.column, part.count).contiguous()
        keys, values = _slab(k_pages, part), _slab(v_pages, part)
        context_out, context_lse = _flash_part(queries, keys, values, scale, causal=False, bias=window)
        if window is not None:
            # A row whose window has left this part has no key in it; the kernel leaves such rows undefined.
            empty = ~torch.isfinite(window).any(-1)
            context_lse = context_lse.masked_fill(empty, float("-inf"))
        out, lse = merge_states(context_out, context_lse, out, lse)
    return out.permute(2, 0, 1, 3).reshape(1, rows, heads, d)


def _joint(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
) -> torch.Tensor:
    assert plan.table is not None
    group = q.shape[2] // k_new.shape[2]
    keys = torch.cat((gather_context(k_pages, plan.table), k_new), 1).transpose(1, 2)
    values = torch.cat((gather_context(v_pages, plan.table), v_new), 1).transpose(1, 2)
    if group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    # Unused page-table entries point at some page whose rows are masked; what lies there must still be
    # finite.
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=plan.joint_mask, scale=scale
    )
    return out.transpose(1, 2)
