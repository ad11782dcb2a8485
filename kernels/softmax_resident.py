"""softmax and log_softmax of long rows, read once: the arithmetic of `softmax_parts`, with the row resident on the
chip.

    n rows, V columns, C chunks a row.

A row of a whole vocabulary (600 kB of float32) fits in no SM, and read a second time it comes from memory again: that
took 1.5 times as long as it need. Here each chunk stays in the shared memory of the program that summed it until the
whole row's normaliser is known; the programs of a row tell each other their chunks' maxima and sums. Each program has
two chunks: while one waits for the other programs, the next is loaded and summed.

A program waits for others of its row, so all programs must run at once: the launch is cooperative, which makes the
driver guarantee it, and there are at least as many programs as chunks in a row. No program waits for a row after its
own, so the waiting ends.

The kernel is written in Gluon, because Triton's pipeliner does not load ahead in a loop that waits. On an H200,
float32, 8192 rows of 151,936 columns take 2.56 ms, where a copy takes 2.33 ms and two readings 3.48 ms.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from evalengine.kernels import device_math, row_sum, softmax_parts
from evalengine.kernels.launching.launch import launch

thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.6; 3.7
CHUNK = gl.constexpr(softmax_parts.CHUNK)
WARPS = 4
# Programs of an SM. With 4, or 8 warps each, or fewer programs and a longer ring, the kernel took 1 % to 100 % longer.
PER_SM = 6
REGISTERS = 80  # registers per thread, so that PER_SM programs fit on an SM (which has 65,536 on every GPU)
MAX_CHUNKS = 256
# No chunk publishes this pair: it means a maximum of -0 and a sum of 0, and a sum is at least 1.
ABSENT = gl.constexpr(-(1 << 63))


@gluon.jit
def _pair(high, low):
    """Packs two float32 into one int64, which is written and read as a whole."""
    low_bits = low.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    return (high.to(gl.int32, bitcast=True).to(gl.int64) << 32) | low_bits


@gluon.jit
def _high(pair):
    return (pair >> 32).to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def _low(pair):
    return pair.to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def _maxima(before_1, top_1, before_2, top_2):
    """Combines two elements of a scan: the maximum of all elements before, and the maximum with this one."""
    return device_math.max_or_nan(top_1, before_2), device_math.max_or_nan(top_1, top_2)


@gluon.jit
def _fetch(ring, slot, x_ptr, unit, units, stride, columns, offset, CHUNKS: gl.constexpr, ASYNC: gl.constexpr):
    """Starts loading unit `unit`, a chunk of a row, into a slot of the ring."""
    column = unit % CHUNKS * CHUNK + offset
    place = x_ptr + (unit // CHUNKS).to(gl.int64) * stride + column
    mask = (column < columns) & (unit < units)
    if ASYNC:
        async_copy.async_copy_global_to_shared(ring.index(slot), place, mask=mask)
        async_copy.commit_group()
    else:
        ring.index(slot).store(gl.load(place, mask=mask, other=0.0))


@gluon.jit
def _chunk(ring, slot, unit, columns, offset, CHUNKS: gl.constexpr):
    """The unit in a slot, float32; -inf past the row's end. Each thread reads what it fetched itself."""
    z = ring.index(slot).load(offset.type.layout).to(gl.float32)
    return gl.where(unit % CHUNKS * CHUNK + offset < columns, z, float("-inf"))


@gluon.jit
def _publish(z, pairs_ptr, unit, units, CHUNKS: gl.constexpr, WIDTH: gl.constexpr):
    m = device_math.row_max(z, 0)
    norm = row_sum.from_fixed(gl.sum(softmax_parts.fixed_terms(z, m), 0))
    if unit < units:
        place = pairs_ptr + (unit // CHUNKS).to(gl.int64) * WIDTH + unit % CHUNKS
        gl.atomic_xchg(place, _pair(m, norm), sem="relaxed")


@gluon.jit
def _normaliser(pairs_ptr, factors, row, LOG: gl.constexpr, CHUNKS: gl.constexpr, WIDTH: gl.constexpr):
    """Waits for the row's chunks and merges them left to right -> M, the norm's term.

    Each warp computes all maxima and factors at once, for itself; only the chain of fma is sequential.
    """
    PER_THREAD: gl.constexpr = WIDTH // 32
    layout: gl.constexpr = gl.BlockedLayout([PER_THREAD], [32], [gl.num_warps()], [0])
    single: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    chunk = gl.arange(0, WIDTH, layout=layout)
    pairs = gl.full([WIDTH], ABSENT, gl.int64, layout=layout)
    while gl.min(pairs, 0) == ABSENT:
        pairs = gl.load(pairs_ptr + row * WIDTH + chunk, mask=chunk < CHUNKS, other=0, volatile=True)
    m = gl.where(chunk < CHUNKS, _high(pairs), float("-inf"))
    nothing = gl.full([WIDTH], float("-inf"), gl.float32, layout=layout)
    before, top = gl.associative_scan((nothing, m), 0, _maxima)
    a, b = softmax_parts.merge_factors(before, top, m, _low(pairs))
    factors.store(_pair(a, b))
    thread_barrier()
    norm = _low(gl.max(factors.slice(0, 1).load(single), 0))  # the maximum of one number is that number
    for c in gl.static_range(1, CHUNKS):
        factor = gl.max(factors.slice(c, 1).load(single), 0)
        norm = gl.fma(norm, _high(factor), _low(factor))
    thread_barrier()
    row_m = device_math.row_max(m, 0)
    return row_m, softmax_parts.norm_term(row_m, norm, LOG)


@gluon.jit
def resident_kernel(
    x_ptr,
    out_ptr,
    pairs_ptr,  # int64 [n, WIDTH], ABSENT: a chunk's maximum and sum
    units,  # n * CHUNKS
    stride,
    columns,
    LOG: gl.constexpr,
    CHUNKS: gl.constexpr,
    WIDTH: gl.constexpr,
    ASYNC: gl.constexpr,
):
    """Program p of P does the units p, p + P, p + 2P, ...: it sums the next unit, then finishes the current one."""
    wide: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [2, CHUNK], plain)
    factors = gl.allocate_shared_memory(gl.int64, [WIDTH], plain)
    offset = gl.arange(0, CHUNK, layout=wide)
    slot = 0
    ahead = gl.program_id(0)
    _fetch(ring, slot, x_ptr, ahead, units, stride, columns, offset, CHUNKS, ASYNC)
    async_copy.wait_group(0)
    _publish(_chunk(ring, slot, ahead, columns, offset, CHUNKS), pairs_ptr, ahead, units, CHUNKS, WIDTH)
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        ahead = unit + gl.num_programs(0)
        _fetch(ring, 1 - slot, x_ptr, ahead, units, stride, columns, offset, CHUNKS, ASYNC)
        async_copy.wait_group(0)
        _publish(_chunk(ring, 1 - slot, ahead, columns, offset, CHUNKS), pairs_ptr, ahead, units, CHUNKS, WIDTH)
        row = (unit // CHUNKS).to(gl.int64)
        m, term = _normaliser(pairs_ptr, factors, row, LOG, CHUNKS, WIDTH)
        value = softmax_parts.finish(_chunk(ring, slot, unit, columns, offset, CHUNKS), m, term, LOG)
        column = unit % CHUNKS * CHUNK + offset
        place = out_ptr + row * columns + column
        gl.store(place, value.to(out_ptr.dtype.element_ty), mask=column < columns, eviction_policy="evict_first")
        slot = 1 - slot


def covers(x: Tensor) -> bool:
    """Whether this module takes [n, V]: not rows of a million columns, nor on a slice of a GPU with few SMs."""
    return triton.cdiv(x.shape[1], softmax_parts.CHUNK) <= min(MAX_CHUNKS, _programs(x.device, x.element_size()))


def normalize_rows(x: Tensor, out: Tensor, *, log: bool) -> None:
    """[n, V] of any row stride, contiguous [n, V] -> softmax or log_softmax of each row, written to `out`."""
    assert covers(x), "its programs would wait for ever for those that cannot run concurrently"
    n, columns = x.shape
    chunks = triton.cdiv(columns, softmax_parts.CHUNK)
    width = max(32, triton.next_power_of_2(chunks))
    pairs = torch.full((n, width), ABSENT.value, dtype=torch.int64, device=x.device)
    # An asynchronous copy moves at least 4 bytes, so numbers of half precision must lie aligned, in whole groups.
    # Unaligned float32 is copied number by number (8192 x 50,257: 0.62 of a copy's speed; read twice 0.54, torch 0.52).
    can_copy = x.element_size() == 4 or (x.stride(0) | columns | x.data_ptr()) % 16 == 0
    launch(
        resident_kernel,
        (min(_programs(x.device, x.element_size()), n * chunks), 1, 1),
        (x, out, pairs, n * chunks, x.stride(0), columns),
        (log, chunks, width, can_copy),
        num_warps=WARPS,
        num_stages=1,
        launch_cooperative_grid=True,
        maxnreg=REGISTERS,
    )


def most_shared_bytes(element_size: int) -> int:
    """The most shared memory of one program: the ring, the factors, and what the reductions and the driver may take."""
    return 2 * softmax_parts.CHUNK * element_size + 8 * MAX_CHUNKS + 2048


@cache
def _programs(device: torch.device, element_size: int) -> int:
    """The number of this module's programs that run at once, whatever their arguments."""
    sm = torch.cuda.get_device_properties(device)
    per_sm = min(
        PER_SM,
        sm.shared_memory_per_multiprocessor // most_shared_bytes(element_size),
        sm.max_threads_per_multi_processor // (32 * WARPS),
    )
    return int(sm.multi_processor_count * per_sm)
