"""`native` attention: decode against the memory's copy bandwidth, prefill against SDPA's quickest kernel.

    S sequences, L KV tokens of each, Hq/Hkv heads, D head_dim.

Pages are shuffled. A decode must read K and V once; a causal prefill of L tokens takes 4 Hq D L (L + 1) / 2 operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import Timer, WrongResult, check_close, guarded, run_poisoned, seeded
from benchmarks.models import shapes_of
from benchmarks.report import Line, Timing
from evalengine.bench.floor import LARGE_COPY_BYTES, copies_of, quickest_copy
from evalengine.bench.throughput import reason
from evalengine.bench.timing import free_memory
from evalengine.kernels.attention import paged_attention
from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.layers import flash_attention
from evalengine.layers.attention_backends import AttentionFunction
from evalengine.layers.metadata import AttentionMetadata
from tests.references import reference

SHAPES = shapes_of("Qwen3-8B")  # Llama-3.1-8B has the same heads: GQA 4
Q_HEADS, KV_HEADS, HEAD_DIM = SHAPES.num_heads, SHAPES.num_kv_heads, SHAPES.head_dim
SCALE = HEAD_DIM**-0.5
PLAIN = AttentionVariant(SCALE)
DTYPE = torch.bfloat16
# (sequences, KV tokens) -> the target, as a share of a large copy's bandwidth
DECODES: dict[tuple[int, int], float | None] = {(256, 1024): 0.88, (1, 32768): 0.55, (64, 1024): None, (16, 8192): None}
DECODE_PAGES = (64, 256)
# (sequences, KV tokens, window): the time compared with that of a context as long as the window; one window begins in a
# block
WINDOWS = ((16, 32768, 4096), (1, 32500, 4096))
WINDOW_TARGET = 1.1
PREFILLS = ((16, 1024), (4, 4096), (1, 16384))
PREFILL_PAGE = 64
PREFILL_TARGET = 0.75  # share of the speed of SDPA's quickest kernel
CHECKED_ROWS = 16  # rows checked at the start and at the end of a sequence
ROUNDING = 2**-6  # the tolerance of measure.check_close for rounding p and the output


@dataclass(frozen=True)
class Batch:
    """One step's queries, paged KV and metadata; every sequence has as many rows and tokens."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttentionMetadata
    variant: AttentionVariant = PLAIN

    @classmethod
    def random(
        cls, sequences: int, rows: int, tokens: int, page: int, device: torch.device, seed: int,
        variant: AttentionVariant = PLAIN,
    ) -> Batch:  # fmt: skip
        generator = seeded(device, seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=DTYPE, device=device)

        per_sequence = -(-tokens // page)
        order = torch.randperm(sequences * per_sequence, generator=torch.Generator().manual_seed(seed))
        pages = order.view(sequences, per_sequence).tolist()
        metadata = AttentionMetadata.build([rows] * sequences, [tokens] * sequences, pages, page, device)
        pool = (sequences * per_sequence, page, KV_HEADS, HEAD_DIM)
        return cls(normal(sequences * rows, Q_HEADS, HEAD_DIM), normal(*pool), normal(*pool), metadata, variant)

    def attend(self, function: AttentionFunction = paged_attention) -> Tensor:
        """[T, Hq, D], by default by our kernels."""
        return function(self.q, (self.k_cache, self.v_cache), self.metadata, self.variant, None)

    def check(self, name: str, output: Tensor) -> None:
        """Raises WrongResult unless the first and last rows of the first and last sequence are close to float64's."""
        count = len(self.metadata.query_lens)
        for s in sorted({0, count - 1}):
            rows = self.metadata.query_lens[s]
            some = min(rows, CHECKED_ROWS)
            for first in sorted({0, rows - some}):
                at = slice(s * rows + first, s * rows + first + some)
                check_close(
                    f"{name}: sequence {s}, rows from {first}", output[at], self._truth(s, first, some), ROUNDING
                )
        if not output.isfinite().all():
            raise WrongResult(f"{name}: an output is not finite")

    def _truth(self, s: int, first: int, count: int) -> Tensor:
        """float64 [count, Hq, D]: rows first ... first + count - 1 of sequence s."""
        rows, tokens = self.metadata.query_lens[s], self.metadata.kv_lens[s]
        q = self.q[s * rows + first : s * rows + first + count]
        visible = tokens - rows + first + count  # KV tokens that the last of these rows sees
        pages = self.metadata.block_table[s : s + 1, : -(-visible // self.k_cache.shape[1])]
        with torch.device(self.q.device):  # The reference makes its masks on this device.
            return reference.paged_attention(q, self.k_cache, self.v_cache, pages, [count], [visible], self.variant)

    def contiguous_kv(self) -> tuple[Tensor, Tensor]:
        """[S * L, Hkv, D] each, without pages; the dense kernels get them ready-made, untimed."""
        tokens = self.metadata.kv_lens[0]
        k, v = (cache[self.metadata.block_table].flatten(1, 2)[:, :tokens] for cache in (self.k_cache, self.v_cache))
        return k.flatten(0, 1), v.flatten(0, 1)


def measure(timer: Timer, device: torch.device) -> Iterator[Line]:
    """Yields decodes, those with a window, then prefills; a prefill has a line per comparison that runs here."""
    for page in DECODE_PAGES:
        for (sequences, tokens), target in DECODES.items():
            case = f"batch {sequences}, context {tokens}, page {page}"
            build = partial(Batch.random, sequences, 1, tokens, page, device, seed=sequences + page)
            yield from guarded("decode attention", case, partial(_decode, case, build, target, timer, device))
            free_memory()
    for sequences, tokens, window in WINDOWS:
        case = f"batch {sequences}, context {tokens}, window {window}"
        run = partial(_windowed_decode, case, sequences, tokens, window, timer, device)
        yield from guarded("decode attention, window", case, run)
        free_memory()
    for sequences, tokens in PREFILLS:
        case = f"{sequences} x {tokens}"
        build = partial(Batch.random, sequences, tokens, tokens, PREFILL_PAGE, device, seed=tokens)
        yield from guarded("causal prefill attention", case, partial(_prefill, case, build, timer))
        free_memory()


def _decode(
    case: str, build: Callable[[], Batch], target: float | None, timer: Timer, device: torch.device
) -> list[Line]:
    batch = build()
    batch.check(case, run_poisoned(lambda: [batch.attend()])[0])
    functions: dict[str, Callable[[], Any]] = {"ours": batch.attend, **copies_of(LARGE_COPY_BYTES, device)}
    absent = flash_attention.installation_problems()
    absent += flash_attention.shape_problems(DTYPE, HEAD_DIM, batch.k_cache.shape[1])
    if not absent:
        functions["flash-attn"] = partial(batch.attend, flash_attention.paged_attention)
    seconds = timer(functions)
    num_bytes = 2 * sum(batch.metadata.kv_lens) * KV_HEADS * HEAD_DIM * DTYPE.itemsize
    bandwidth = LARGE_COPY_BYTES / quickest_copy(seconds)
    line = partial(Timing, "decode attention", case, seconds["ours"], work=num_bytes, unit="TB/s")
    lines: list[Line] = [line("copy bandwidth", num_bytes / bandwidth, target=target)]
    if "flash-attn" in seconds:
        lines.append(line("flash-attn", seconds["flash-attn"]))
    return lines


def _windowed_decode(
    case: str, sequences: int, tokens: int, window: int, timer: Timer, device: torch.device
) -> list[Line]:
    build = partial(Batch.random, sequences, 1, page=DECODE_PAGES[0], device=device, seed=sequences)
    batch, short = build(tokens=tokens, variant=AttentionVariant(SCALE, window)), build(tokens=window)
    batch.check(case, run_poisoned(lambda: [batch.attend()])[0])
    other = f"context {window}"
    seconds = timer({"ours": batch.attend, other: short.attend})
    work = 2 * sequences * window * KV_HEADS * HEAD_DIM * DTYPE.itemsize
    return [
        Timing("decode attention, window", case, seconds["ours"], other, seconds[other], "time", WINDOW_TARGET, work,
               "TB/s")
    ]  # fmt: skip


def _prefill(case: str, build: Callable[[], Batch], timer: Timer) -> list[Line]:
    batch = build()
    batch.check(case, run_poisoned(lambda: [batch.attend()])[0])
    others, not_run = {}, {}
    for name, function in _dense_kernels(batch).items():
        try:
            batch.check(name, function().reshape(batch.q.shape))
            others[name] = function
        except Exception as error:
            not_run[name] = reason(error)
    seconds = timer({"ours": batch.attend, **others})
    sdpa = [name for name in others if name.startswith("SDPA")]
    if not sdpa:
        raise RuntimeError(f"SDPA's fused kernels, the comparison, do not run here: {not_run}")
    judge = min(sdpa, key=lambda name: seconds[name])  # On an H200 cuDNN's is the quickest.
    work = sum(4 * Q_HEADS * HEAD_DIM * tokens * (tokens + 1) / 2 for tokens in batch.metadata.kv_lens)
    line = partial(Timing, "causal prefill attention", case, seconds["ours"], work=work, unit="TFLOP/s")
    first = line(judge, seconds[judge], target=PREFILL_TARGET, details={"not run": not_run})
    return [first, *(line(name, seconds[name]) for name in others if name != judge)]


def _dense_kernels(batch: Batch) -> dict[str, Callable[[], Tensor]]:
    """Other libraries' kernels on the same numbers, without pages; each returns T * Hq * D numbers in our order."""
    k, v = batch.contiguous_kv()
    kernels: dict[str, Callable[[], Tensor]] = {}
    if not flash_attention.installation_problems():
        kernels["flash-attn"] = _flash_attn(batch, k, v)
    q, k, v = (x.unflatten(0, (len(batch.metadata.kv_lens), -1)).transpose(1, 2) for x in (batch.q, k, v))
    repeated = [x.repeat_interleave(Q_HEADS // KV_HEADS, dim=1) for x in (k, v)]
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        kernels[f"SDPA {name}"] = partial(_sdpa, backend, q, k, v)
        kernels[f"SDPA {name}, heads repeated"] = partial(_sdpa, backend, q, *repeated)
    return kernels


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[S, heads, L, D] each, views of [S, L, heads, D], the kernels' own layout -> [S, L, Hq, D]."""
    with sdpa_kernel(backend):
        gqa = k.shape[1] != q.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=gqa)
    return out.transpose(1, 2)


def _flash_attn(batch: Batch, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    m = batch.metadata
    longest = max(m.kv_lens)
    function = flash_attention.package().flash_attn_varlen_func
    return partial(
        function, batch.q, k, v, m.cu_seqlens_q, m.cu_seqlens_q, longest, longest, softmax_scale=SCALE, causal=True
    )
