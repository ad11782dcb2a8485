"""Attention of the `exact` numerics level: a row's bits depend only on its own query and the keys and values it sees.

    T tokens, S sequences, Hq/Hkv query/KV heads, G = Hq // Hkv, D head_dim, B pages of `block` tokens, P pages a
    sequence; inside: n sequences of one query length Lq, L KV positions, R = Lq * G rows per KV head.

Arithmetic, per query row and head, over the positions j it sees (j ascending, from the sequence's first):

    s_j = q.k_j in float64, q in two limbs, k_j in one (`exact_product`), each scaled by its own magnitude over D;
          in three and two if k_j is wide (`exact_wide`)
    z_j = s_j * float32(scale), with a softcap c then c * tanh(z_j * (1 / c)); with a sink its logit t is one more z
    m = max z_j, p_j = exp(z_j - m), l = sum of rint(p_j * 2^44) as int64
    w_j = p_j * 2^(e_j), e_j the exponent of v_j's magnitude over D; in two limbs on the grid of the largest w_j
    o = float32((sum_j hi_j v_j + sum_j lo_j v_j) / l), v_j in one limb; plus, before the division, that of the second
        limbs of those v_j that are wide, if the row sees any

Each of the inner sums is exact and rounded once: chunks of 1024 KV positions are schedule. Positions a row does not see
enter as exact zeros, so neither padding nor the page size, the query tile or prefill against decode changes a bit. The
sink has no w. Pages before a window are left out, and positions counted from the first one left (`attention_window`).

Measured on one Zen 3 core at 2.4 GHz (9 query and 3 KV heads of 64, bf16 cache, best of 12): prefill of 1024 tokens
199 ms (float32 SDPA 25 ms), of 100 tokens 4.4 ms; decode of 16 sequences at context 1200 33 ms, two fifths of it `bmm`
and a quarter bringing K and V to their grids.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from evalengine.kernels import exact_math as em
from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.kernels.attention_window import Reached
from evalengine.kernels.exact_product import (
    RIGHT_BITS,
    SEGMENT,
    exact_sum,
    left_limbs,
    product,
    product_part,
    sum_limbs,
)
from evalengine.kernels.exact_wide import LOWER_UNIT, lower_limb, pick_rows, wide_product, wide_rows

CHUNK = SEGMENT  # schedule: KV positions of one product
_TILE = 131072  # scores of one chunk of a query tile: 1 MB of float64
_GROUP_ELEMENTS = 1 << 20  # padded K elements of one group of sequences: 8 MB of float64


@dataclass(frozen=True)
class _WideRows:
    """The wide rows of a chunk of keys or values (`exact_wide`), up to P a head: row i is `slot[i]` of its head's."""

    head: Tensor  # int64 [W]
    position: Tensor  # int64 [W], ascending, counted from the chunk's start
    slot: Tensor  # int64 [W]
    lower: Tensor  # float64 [n * Hkv, P, D]: second limbs, multiples of 2^(e-53), and zeros
    positions: list[int]  # `position`, and
    most: list[int]  # how many slots the first i + 1 rows take, on the host

    def before(self, width: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """head, position and slot of the rows among the chunk's first `width`, and the slots that they take."""
        rows = bisect_left(self.positions, width)
        return self.head[:rows], self.position[:rows], self.slot[:rows], self.most[rows - 1] if rows else 0


def _wide_chunks(x: Tensor, upper: Tensor, size: Tensor, absmax: Tensor) -> list[_WideRows | None]:
    """x [n, Hkv, L, D], its limb of 26 bits, its magnitudes and its rows' largest -> its wide rows, chunk by chunk; []
    if it has none."""
    rows = wide_rows(x, size, absmax)
    if not len(rows):
        return []
    picked, above, magnitudes = (pick_rows(of, rows) for of in (x, upper, absmax))
    limb = lower_limb(em.widen(picked), above, magnitudes)
    heads, length = x.shape[0] * x.shape[1], x.shape[2]
    head, position = rows.div(length, rounding_mode="floor"), rows % length
    order = position.sort(stable=True).indices
    chunks: list[_WideRows | None] = []
    for start in range(0, length, CHUNK):
        here = order[(position[order] >= start) & (position[order] < start + CHUNK)]
        chunks.append(_chunk_of(head[here], position[here] - start, limb[here], heads) if len(here) else None)
    return chunks


def _chunk_of(head: Tensor, position: Tensor, limb: Tensor, heads: int) -> _WideRows:
    earlier = (head.unsqueeze(1) == torch.arange(heads, device=head.device)).cumsum(0)
    slot = earlier.gather(1, head.unsqueeze(1)).squeeze(1) - 1
    lower = torch.zeros(heads, int(slot.max()) + 1, limb.shape[1], dtype=torch.float64, device=head.device)
    lower[head, slot] = limb
    return _WideRows(head, position, slot, lower, position.tolist(), (slot.cummax(0).values + 1).tolist())


@dataclass(frozen=True)
class _KeyValues:
    """One group's keys and values on their grids, zeros past each sequence's length."""

    keys: Tensor  # float64 [n * Hkv, L, D], multiples of 2^(e-26)
    key_unit: Tensor  # float64 [n * Hkv, 1, L]: 2^(e-26)
    wide_keys: list[_WideRows | None]
    values: Tensor  # float64 [n * Hkv, L, D], as the keys
    wide_values: list[_WideRows | None]
    fold: Tensor  # float64 [n * Hkv, 1, L]: 2^(e_j), NaN where v_j is not finite
    unfold: Tensor  # float64 [n * Hkv, 1, L]: 2^(-e_j)


def _groups(query_lens: list[int], kv_lens: list[int], elements_per_token: int) -> Iterator[list[int]]:
    """Groups sequences of equal query length and similar KV lengths, padded to at most `_GROUP_ELEMENTS` in all."""
    group: list[int] = []
    for s in sorted(range(len(query_lens)), key=lambda s: (query_lens[s], kv_lens[s])):
        if query_lens[s] == 0:
            continue
        padded = (len(group) + 1) * kv_lens[s] * elements_per_token
        if group and (query_lens[s] != query_lens[group[0]] or padded > _GROUP_ELEMENTS):
            yield group
            group = []
        group.append(s)
    if group:
        yield group


def _gather(cache: Tensor, pages: Tensor, firsts: list[int], lens: list[int]) -> Tensor:
    """[B, block, Hkv, D] pool, [n, P] pages -> [n, L, Hkv, D], zeros before each sequence's first position and past its
    length (the pool may hold NaN there)."""
    longest, block = max(lens), cache.shape[1]
    pages = pages[:, : -(-longest // block)]
    picked = cache.index_select(0, pages.flatten())  # 0.06 ms where cache[pages] took 0.35 (76 pages of 64)
    gathered = picked.view(pages.shape[0], -1, *cache.shape[2:])[:, :longest]
    for begin, end in ((0, max(firsts)), (min(lens), longest)):
        if begin < end:
            positions = torch.arange(begin, end)
            unused = (positions < torch.tensor(firsts)[:, None]) | (positions >= torch.tensor(lens)[:, None])
            gathered[:, begin:end].masked_fill_(unused.to(cache.device)[:, :, None, None], 0)
    return gathered


def _on_grid(x: Tensor) -> tuple[Tensor, Tensor, list[_WideRows | None]]:
    """[n, L, Hkv, D] -> float64 [n * Hkv, L, D] on each (token, head)'s grid, their magnitudes [n * Hkv, 1, L], and
    `_wide_chunks`.

    Caches are written from flushed float32 numbers, so there are no float32 subnormals to flush here.
    """
    n, length, heads, _ = x.shape
    x = x.transpose(1, 2)
    out = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    size = em.magnitude(x)
    absmax = em.largest(size)
    c = em.grid(absmax, RIGHT_BITS)
    out.copy_(x).add_(c).sub_(c)
    return out.flatten(0, 1), absmax.reshape(n * heads, 1, length), _wide_chunks(x, out, size, absmax)


def _key_values(k: Tensor, v: Tensor) -> _KeyValues:
    """Gathered [n, L, Hkv, D] keys and values -> their grids.

    A value that is not finite becomes 0, and its `fold` NaN.
    """
    keys, key_absmax, wide_keys = _on_grid(k)
    key_unit = em.pow2(em.exponent(key_absmax) - RIGHT_BITS)
    values, absmax, wide_values = _on_grid(v)
    exponent = em.exponent(absmax)
    fold, unfold = em.pow2(exponent), em.pow2(-exponent)
    bad = ~(absmax < torch.inf)
    if bool(bad.any()):  # 0 * NaN would reach rows that do not see this position
        values.masked_fill_(bad.transpose(1, 2), 0.0)
        fold.masked_fill_(bad, torch.nan)
    return _KeyValues(keys, key_unit, wide_keys, values, wide_values, fold, unfold)


@dataclass(frozen=True)
class _Seen:
    """The keys that the rows of a query tile attend to: positions below `end`, with a window the last `window` of
    them."""

    end: Tensor  # int64 [n * Hkv, R, 1]
    least: int  # the least of `end`
    most: int  # the largest
    window: int | None

    def chunks(self) -> list[slice]:
        """Those that hold a position that some row sees."""
        begin = 0 if self.window is None else max(0, self.least - self.window) // CHUNK * CHUNK
        return [slice(start, min(start + CHUNK, self.most)) for start in range(begin, self.most, CHUNK)]

    def hide(self, x: Tensor, first: int, value: float) -> None:
        """Fills x [n * Hkv, R, columns], over the positions from `first` on, where a row does not see the position."""
        begin, columns = max(self.least - first, 0), x.shape[-1]
        if begin < columns:
            positions = torch.arange(first + begin, first + columns, device=x.device)
            x[..., begin:].masked_fill_(positions >= self.end, value)
        if self.window is not None and (before := min(self.most - self.window - first, columns)) > 0:
            positions = torch.arange(first, first + before, device=x.device)
            x[..., :before].masked_fill_(positions < self.end - self.window, value)


def _scores(q: Tensor, kv: _KeyValues, seen: _Seen, chunks: list[slice], variant: AttentionVariant) -> list[Tensor]:
    """q [n * Hkv, R, D] -> float64 [n * Hkv, R, <= 1024] a chunk, -inf where not seen."""
    scale = torch.tensor(variant.scale, dtype=torch.float32).item()
    absmax = em.row_absmax(q)
    all_limbs = left_limbs(em.widen(q), absmax, 3 if kv.wide_keys else 2)
    limbs = all_limbs[:, :2].contiguous()
    scores = []
    for cut in chunks:
        z = product(limbs, absmax, kv.keys[:, cut].transpose(1, 2), kv.key_unit[..., cut])
        if kv.wide_keys and (wide := kv.wide_keys[cut.start // CHUNK]) is not None:
            _take_wide_keys(z, all_limbs, absmax, kv, cut, wide)
        z.mul_(scale)
        if variant.softcap is not None:
            z = em.tanh(z.mul_(1.0 / variant.softcap)).mul_(variant.softcap)
        seen.hide(z, cut.start, -torch.inf)
        scores.append(z)
    return scores


def _take_wide_keys(z: Tensor, limbs: Tensor, absmax: Tensor, kv: _KeyValues, cut: slice, wide: _WideRows) -> None:
    """Takes the products of z [n * Hkv, R, columns] with wide keys again, in place, in all their limbs."""
    head, position, slot, most = wide.before(z.shape[-1])
    if most == 0:
        return
    pair = torch.zeros(len(z), 2, most, limbs.shape[-1], dtype=torch.float64, device=z.device)
    pair[head, 0, slot] = kv.keys[:, cut][head, position]
    pair[:, 1] = wide.lower[:, :most]
    unit = torch.ones(len(z), 1, most, dtype=torch.float64, device=z.device)
    unit[head, 0, slot] = kv.key_unit[..., cut][head, 0, position]
    better = wide_product(limbs, absmax, pair, unit)
    z[head, :, position] = better[head, :, slot]


def _largest(parts: list[Tensor]) -> Tensor:
    """The largest number of each row over all parts [..., n] -> [..., 1]."""
    first, *others = [part.amax(-1, keepdim=True) for part in parts]
    return torch.cat([first, *others], -1).amax(-1, keepdim=True) if others else first


def _weights(scores: list[Tensor], kv: _KeyValues, seen: _Seen, chunks: list[slice], sinks: Tensor | None) -> Tensor:
    """Turns the scores into weights w, in place, chunk by chunk; returns their row sums l, float64 [n * Hkv, R, 1].

    sinks: float64 [n * Hkv, R, 1], logits without a weight that join the sums.
    """
    more = [] if sinks is None else [sinks]
    top = _largest([*scores, *more])
    top.masked_fill_(~(top.abs() < torch.inf), torch.nan)
    total = em.UnitSum()
    for at, cut in enumerate(chunks):
        w = em.exp(scores[at].sub_(top))
        seen.hide(w, cut.start, 0.0)  # exp clamps its argument, so hidden positions are not zero yet.
        total.add(w)
        w.mul_(kv.fold[..., cut])
        seen.hide(w, cut.start, 0.0)  # A later token's fold may be NaN.
        scores[at] = w
    if sinks is not None:
        total.add(em.exp(sinks - top))
    return total.total().unsqueeze(-1)


def _attend(q: Tensor, kv: _KeyValues, seen: _Seen, variant: AttentionVariant, sinks: Tensor | None) -> Tensor:
    """One query tile: q [n * Hkv, R, D] over the positions that its rows see -> float32 [n * Hkv, R, D]."""
    chunks = seen.chunks()
    weights = _scores(q, kv, seen, chunks, variant)
    total = _weights(weights, kv, seen, chunks, sinks)
    largest = _largest(weights)
    out = exact_sum(largest, 2.0**-RIGHT_BITS)
    lower_out: em.ExactSum | None = None
    for cut, w in zip(chunks, weights, strict=True):
        limbs = left_limbs(w, largest).mul_(kv.unfold[:, None, :, cut])
        out.add(product_part(limbs, kv.values[:, cut]))
        wide = kv.wide_values[cut.start // CHUNK] if kv.wide_values else None
        if wide is not None and (rows := wide.before(w.shape[-1]))[-1]:
            head, position, slot, most = rows
            weighed = torch.zeros(*limbs.shape[:-1], most, dtype=torch.float64, device=w.device)
            weighed[head, :, :, slot] = limbs[head, :, :, position]
            lower_out = lower_out or exact_sum(largest, 2.0**-RIGHT_BITS * LOWER_UNIT)
            lower_out.add(product_part(weighed, wide.lower[:, :most]))
    o = sum_limbs(out.total())
    if lower_out is not None:
        o.add_(sum_limbs(lower_out.total()))
    return em.round_float32(o.mul_(em.reciprocal(total)))


def attention(
    q: Tensor, k: Tensor, v: Tensor, kv_lens: list[int], variant: AttentionVariant, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention: q [n, Lq, Hq, D], k and v [n, L, Hkv, D], zeros from kv_lens[i] on -> float32 [n, Lq, Hq, D].

    Sequence i's queries are the last Lq of its kv_lens[i] tokens. sinks: [Hq] if the variant has them.
    """
    assert variant.sinks == (sinks is not None)
    n, queries, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    kv = _key_values(k, v)
    ends = torch.tensor(kv_lens, device=q.device)[:, None] - torch.arange(queries - 1, -1, -1, device=q.device)
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    step = max(1, _TILE // (n * heads * min(k.shape[1], CHUNK)))
    for start in range(0, queries, step):
        end = min(start + step, queries)
        tile = q[:, start:end].unflatten(2, (kv_heads, group)).transpose(1, 2).reshape(n * kv_heads, -1, dim)
        own = ends[:, start:end].repeat_interleave(group, 1).repeat_interleave(kv_heads, 0).unsqueeze(-1)
        least, most = min(kv_lens) - queries + start + 1, max(kv_lens) - queries + end
        logits = None
        if sinks is not None:  # a tile's rows are (token, head of the group)
            logits = em.widen(sinks).view(kv_heads, group).repeat(n, end - start).unsqueeze(-1)
        o = _attend(tile, kv, _Seen(own, least, most, variant.window), variant, logits)
        out[:, start:end] = o.view(n, kv_heads, end - start, group, dim).transpose(1, 2).flatten(2, 3)
    return out


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_lens: list[int],
    kv_lens: list[int],
    variant: AttentionVariant,
    sinks: Tensor | None = None,
) -> Tensor:
    """[T, Hq, D] against [B, block, Hkv, D] pools -> float32 [T, Hq, D], causal, GQA by Hq // Hkv.

    Sequence s owns the next `query_lens[s]` rows of q, the last of its `kv_lens[s]` tokens; its pages are
    block_table[s] (int32 [S, P]). Slots past a sequence's length, and before the windows of all its rows, are never
    read into arithmetic. sinks: [Hq] if the variant has them.
    """
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    first_row = torch.tensor([0, *query_lens]).cumsum(0)
    kv_heads, dim = k_cache.shape[2:]
    reached = Reached.of(block_table, query_lens, kv_lens, k_cache.shape[1], variant.window)
    for group in _groups(query_lens, reached.kv_lens, kv_heads * dim):
        queries = query_lens[group[0]]
        firsts, lens = ([of[s] for s in group] for of in (reached.firsts, reached.kv_lens))
        rows = (first_row[group][:, None] + torch.arange(queries)).flatten().to(q.device)
        k, v = (_gather(cache, reached.block_table[group], firsts, lens) for cache in (k_cache, v_cache))
        o = attention(q[rows].view(len(group), queries, *q.shape[1:]), k, v, lens, variant, sinks)
        out[rows] = o.flatten(0, 1)
    return out
