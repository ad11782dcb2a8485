"""The product with a packed weight, in Gluon: `packed_rows` has the weight's layout, `packed_matmul` launches it.

    M rows, N columns, K the reduced dimension; a tile of 8 rows of the weight is a fragment's height.

A warp has one or more tiles of the weight, and with them all rows of x of its program. Fragments and x come to shared
memory by asynchronous copies, some steps ahead; each lane reads its own words and makes the MMA's operand of them in
registers, so no barrier is between the two. The accumulator is one float32 chain over K, ascending from +0. A warp with
one tile multiplies by mma.sync, of which a tile is the right operand. With more tiles, four warps have 64 rows of the
weight or more and multiply by wgmma: two tiles are a warp's part of the left operand, x is read from shared memory once
for all of them, and the product is transposed. Programs of 64 columns are too few where N is small, so both stay.

A block of K is unpacked by inline PTX, two numbers at once, where a form's arithmetic allows it:

- int4 with a scale of 16 bits: 128 + code is a bfloat16, from which 128 + zero is subtracted exactly. A scale, of at
  most 11 significant bits, is the sum of two bfloat16; c * low is exact, so fma(c, high, c * low) is rounded once.
- e2m1 with a power of two: the code's bits, as a bfloat16's, are 2^-126 times the number, and 2^126 times the scale,
  of which `fragments_of` knows that it is at most `LARGEST`, is a bfloat16. So the product is exact.
- e4m3: exact in float16, then in float32; the product with the scale is rounded once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from evalengine.kernels import device_math, packed_numbers

# Each makes four registers of two bfloat16 of a lane's word of fragments (of 8 bits: of two words): e = 0 and 1 of
# (b, h) = (0, 0), (0, 1), (1, 0), (1, 1) in the terms of `packed_rows`. Operands 4 and 5 are the words; zeros and
# scales follow, of b = 0 and b = 1.
_INT4 = gl.constexpr("""{
    .reg .b32 w, c0, c1, c2, c3, l0, l1, l2, l3;
    lop3.b32 c0, $4, 0x000F000F, 0x43004300, 0xEA;
    shr.b32 w, $4, 4;
    lop3.b32 c1, w, 0x000F000F, 0x43004300, 0xEA;
    shr.b32 w, $4, 8;
    lop3.b32 c2, w, 0x000F000F, 0x43004300, 0xEA;
    shr.b32 w, $4, 12;
    lop3.b32 c3, w, 0x000F000F, 0x43004300, 0xEA;
    sub.rn.bf16x2 c0, c0, $6;
    sub.rn.bf16x2 c1, c1, $6;
    sub.rn.bf16x2 c2, c2, $7;
    sub.rn.bf16x2 c3, c3, $7;
    mul.rn.bf16x2 l0, c0, $10;
    mul.rn.bf16x2 l1, c1, $10;
    mul.rn.bf16x2 l2, c2, $11;
    mul.rn.bf16x2 l3, c3, $11;
    fma.rn.bf16x2 $0, c0, $8, l0;
    fma.rn.bf16x2 $1, c1, $8, l1;
    fma.rn.bf16x2 $2, c2, $9, l2;
    fma.rn.bf16x2 $3, c3, $9, l3;
}""")
_E2M1 = gl.constexpr("""{
    .reg .b32 w, c0, c1, c2, c3;
    and.b32 c0, $4, 0x81C081C0;
    shl.b32 w, $4, 3;
    and.b32 c1, w, 0x81C081C0;
    shl.b32 w, $4, 6;
    and.b32 c2, w, 0x81C081C0;
    shr.b32 w, $4, 4;
    and.b32 c3, w, 0x00C000C0;
    shr.b32 w, $4, 5;
    lop3.b32 c3, w, 0x01000100, c3, 0xEA;
    shl.b32 w, $4, 1;
    lop3.b32 c3, w, 0x80008000, c3, 0xEA;
    mul.rn.bf16x2 $0, c0, $6;
    mul.rn.bf16x2 $1, c1, $6;
    mul.rn.bf16x2 $2, c2, $7;
    mul.rn.bf16x2 $3, c3, $7;
}""")
_E4M3_PAIR = """
    cvt.rn.f16x2.e4m3x2 w, p{0};
    mov.b32 {{low, high}}, w;
    cvt.f32.f16 f, low;
    cvt.f32.f16 g, high;
    mul.rn.f32 f, f, ${1};
    mul.rn.f32 g, g, ${1};
    cvt.rn.bf16x2.f32 ${0}, g, f;"""
_E4M3 = gl.constexpr(
    """{
    .reg .b16 p0, p1, p2, p3, low, high;
    .reg .b32 w;
    .reg .f32 f, g;
    mov.b32 {p0, p1}, $4;
    mov.b32 {p2, p3}, $5;"""
    + "".join(_E4M3_PAIR.format(pair, 6 if pair < 2 else 8) for pair in range(4))
    + "\n}"
)


@gluon.jit
def _range3(A: gl.constexpr, B: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """The indices of a tensor [A, B, C], each along its dimension."""
    a = gl.arange(0, A, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    b = gl.arange(0, B, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    c = gl.arange(0, C, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return (
        gl.expand_dims(gl.expand_dims(a, 1), 2),
        gl.expand_dims(gl.expand_dims(b, 0), 2),
        gl.expand_dims(gl.expand_dims(c, 0), 1),
    )


@gluon.jit
def _of_place(place, TILES: gl.constexpr):
    """The tile at a place in shared memory, where a warp's tiles lie WARPS apart. wgmma's warps have 16 rows each."""
    WARPS: gl.constexpr = gl.num_warps()
    if TILES > 1:
        place = place // (2 * WARPS) * (2 * WARPS) + place % WARPS * 2 + place // WARPS % 2
    return place


@gluon.jit
def _copy_weight(
    words_ptr, scales_ptr, words, scales, step, stage, left, units, groups,
    BLOCK_K: gl.constexpr, GROUP: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """Starts copying a step's fragments and scales; zeros past the last tile, fragment or group."""
    tiles: gl.constexpr = words.shape[1]
    own: gl.constexpr = words.shape[2]
    tile, unit, word = _range3(tiles, own, words.shape[3], LANES)
    tile = _of_place(tile, tiles // gl.num_warps())
    unit += step * own
    mask = (tile < left) & (unit < units) & (word >= 0)
    async_copy.async_copy_global_to_shared(
        words.index(stage), words_ptr + (tile * units + unit) * words.shape[3] + word, mask=mask
    )
    size: gl.constexpr = scales.shape[3]
    spread: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 32 // size, size], [gl.num_warps(), 1, 1], [2, 1, 0])
    tile, group, word = _range3(tiles, scales.shape[2], size, spread)
    tile = _of_place(tile, tiles // gl.num_warps())
    group += step * BLOCK_K // GROUP
    mask = (tile < left) & (group < groups) & (word >= 0)
    async_copy.async_copy_global_to_shared(
        scales.index(stage), scales_ptr + (tile * groups + group) * size + word, mask=mask
    )


@gluon.jit
def _pairs(order_ptr, first, place, rows):
    """The rows of y that a program's rows are: those in order from `first`, or of pairs in their tile's order."""
    pair = first + place
    if order_ptr is not None:
        pair = gl.load(order_ptr + pair, mask=place < rows, other=0)
    return pair


@gluon.jit
def _copy_x(x_ptr, starts, inside, x, step, stage, K, COLUMNS: gl.constexpr):
    """Starts copying a step's columns of x, and closes the step's group of copies. starts: of x's rows, int32."""
    BLOCK_K: gl.constexpr = x.shape[2]
    column = gl.expand_dims(step * BLOCK_K + gl.arange(0, BLOCK_K, layout=COLUMNS), 0)
    async_copy.async_copy_global_to_shared(x.index(stage), x_ptr + starts + column, mask=inside & (column < K))
    async_copy.commit_group()


@gluon.jit
def _read_scales(scales, SHAPE: gl.constexpr, SCALE: gl.constexpr, OF_ROWS: gl.constexpr):
    """A step's scales as int32 [tiles, warps, outer, 8, inner, both, parts]; SHAPE: as they lie, rows last."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [6, 5, 4, 3, 2, 1, 0])
    view = scales._reinterpret(gl.uint8 if SCALE == "uint8" else gl.int32, SHAPE, PLAIN)
    return view.permute([0, 1, 2, 6, 3, 4, 5]).load(OF_ROWS).to(gl.int32)


@gluon.jit
def _operand(words, scales, KIND: gl.constexpr, SCALE: gl.constexpr, dtype: gl.constexpr, P: gl.constexpr):
    """A step's fragments as four tensors [.., 2 (e)] of `dtype`, by (b, h); P: the layout of words by groups.

    words: int32 [tiles, warps, fragments, 8, 4, 4]. scales: int32 [tiles, warps, outer groups, 8, inner groups, 1 or 2
    (b), 1 or 2 (scale, zero)], of which each inner group is of one fragment.
    """
    HALVES: gl.constexpr = KIND == "e2m1" or KIND == "int4"
    ZEROS: gl.constexpr = KIND == "int4" or KIND == "int8"
    T: gl.constexpr = words.shape[0]
    W: gl.constexpr = words.shape[1]
    A: gl.constexpr = scales.shape[2]
    B: gl.constexpr = scales.shape[4]
    SPREAD: gl.constexpr = [T, W, A, words.shape[2] // A, 8, 4, B, (8 if HALVES else 4) // B]
    zeros = scales
    if scales.shape[6] == 2:
        scales, zeros = gl.split(scales)
    else:
        scales = gl.reshape(scales, scales.shape[:6])
        if ZEROS:
            zeros = scales >> 16
    s0, s1 = _of_both(scales, P)
    z0, z1 = s0, s1
    if ZEROS:
        z0, z1 = _of_both(zeros, P)
    if KIND == "int4" and SCALE != "float32" and dtype == gl.bfloat16:
        high0, low0 = _bfloat16s(packed_numbers.factor(s0, SCALE))
        high1, low1 = _bfloat16s(packed_numbers.factor(s1, SCALE))
        z0 = (z0 + 0x4300).to(gl.int16).to(gl.bfloat16, bitcast=True)
        z1 = (z1 + 0x4300).to(gl.int16).to(gl.bfloat16, bitcast=True)
        twice = _spread(gl.join(words, words), SPREAD, P)
        a, b, c, d = gl.inline_asm_elementwise(
            _INT4, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r", [twice, z0, z1, high0, high1, low0, low1],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif KIND == "e2m1" and SCALE == "uint8" and dtype == gl.bfloat16:
        scale0 = (s0 + 126 << 7).to(gl.int16).to(gl.bfloat16, bitcast=True)  # times 2^126
        scale1 = (s1 + 126 << 7).to(gl.int16).to(gl.bfloat16, bitcast=True)
        a, b, c, d = gl.inline_asm_elementwise(
            _E2M1, "=&r,=&r,=&r,=&r,r,r,r,r", [_spread(gl.join(words, words), SPREAD, P), scale0, scale1],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif KIND == "e4m3" and dtype == gl.bfloat16:
        f0, f1 = packed_numbers.factor(s0, SCALE), packed_numbers.factor(s1, SCALE)
        a, b, c, d = gl.inline_asm_elementwise(
            _E4M3, "=&r,=&r,=&r,=&r,r,r,r,r,r,r", [_spread(words, SPREAD, P), f0, f1],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        f0, f1 = packed_numbers.factor(s0, SCALE), packed_numbers.factor(s1, SCALE)
        if HALVES:
            a, b, c, d = packed_numbers.halves_codes(gl.join(words, words >> 16), KIND)
        else:
            first, second = gl.split(gl.reshape(words, [T, W, words.shape[2], 8, 4, 2, 2]))
            first, second = gl.join(first, first >> 8), gl.join(second, second >> 8)
            a, b, c, d = first & 255, first >> 16 & 255, second & 255, second >> 16 & 255
        a = (packed_numbers.number(_spread(a, SPREAD, P), z0, KIND) * f0).to(dtype)
        b = (packed_numbers.number(_spread(b, SPREAD, P), z0, KIND) * f0).to(dtype)
        c = (packed_numbers.number(_spread(c, SPREAD, P), z1, KIND) * f1).to(dtype)
        d = (packed_numbers.number(_spread(d, SPREAD, P), z1, KIND) * f1).to(dtype)
    return a, b, c, d


@gluon.jit
def _spread(x, SHAPE: gl.constexpr, P: gl.constexpr):
    return gl.convert_layout(gl.reshape(x, SHAPE), P, assert_trivial=True)


@gluon.jit
def _of_both(x, P: gl.constexpr):
    """Values [tiles, warps, outer, 8, inner, 1 or 2 (b)] of groups -> for each b, to be spread over layout P."""
    if x.shape[5] == 2:
        first, second = gl.split(x)
    else:
        first = gl.reshape(x, x.shape[:5])
        second = first
    return _for(first, P), _for(second, P)


@gluon.jit
def _for(x, P: gl.constexpr):
    layout: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(5, gl.SliceLayout(7, P)))
    x = gl.convert_layout(x, layout, assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 3), 5), 7)


@gluon.jit
def _bfloat16s(x):
    """A float32 of at most 16 significant bits as the sum of two bfloat16."""
    high = x.to(gl.bfloat16)
    return high, (x - high.to(gl.float32)).to(gl.bfloat16)


@gluon.jit(do_not_specialize=["M"])
def packed_kernel(
    x_ptr, words_ptr, scales_ptr, bias_ptr, y_ptr, order_ptr, tiles_ptr, M, N, K, stride_x, units, groups,
    BLOCK_M: gl.constexpr, TILES: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    SHARED: gl.constexpr, KIND: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr,
    UNIT: gl.constexpr, SCALE_WORDS: gl.constexpr,
):  # fmt: skip
    """Program: TILES tiles a warp and BLOCK_M rows of x. Without `tiles` one weight has all rows in order; else see
    `expert_matmul`. BLOCK_K: whole fragments, and whole groups or a part of one."""
    WARPS: gl.constexpr = gl.num_warps()
    COLUMNS: gl.constexpr = 8 * TILES * WARPS
    OUT: gl.constexpr = x_ptr.dtype.element_ty
    column_blocks = gl.cdiv(N, COLUMNS)
    tile, column_block = gl.program_id(0) // column_blocks, gl.program_id(0) % column_blocks
    if tiles_ptr is None:
        first, rows = tile * BLOCK_M, gl.minimum(M - tile * BLOCK_M, BLOCK_M)
    else:
        device_math.after_previous_kernel()
        expert = gl.load(tiles_ptr + tile * 3)
        first, rows = gl.load(tiles_ptr + tile * 3 + 1), gl.load(tiles_ptr + tile * 3 + 2)
        before = expert.to(gl.int64) * gl.cdiv(N, 8)
        words_ptr += before * units * 128
        scales_ptr += before * groups * SCALE_WORDS
        if bias_ptr is not None:
            bias_ptr += expert.to(gl.int64) * N
    if rows > 0:
        own_tile = column_block * (TILES * WARPS)
        left = gl.cdiv(N, 8) - own_tile
        words_ptr += own_tile.to(gl.int64) * units * 128
        scales_ptr += own_tile.to(gl.int64) * groups * SCALE_WORDS

        OWN: gl.constexpr = BLOCK_K // UNIT  # fragments of a step
        GROUPS: gl.constexpr = BLOCK_K // GROUP if GROUP < BLOCK_K else 1  # of a step
        BOTH: gl.constexpr = 2 if GROUP == 16 else 1  # groups of 32 columns
        INNER: gl.constexpr = UNIT // GROUP // BOTH if GROUP < UNIT else 1  # of a fragment, in 32 columns or more
        OUTER: gl.constexpr = GROUPS // BOTH // INNER
        PARTS: gl.constexpr = SCALE_WORDS // 8 if SCALE_WORDS > 8 else 1
        PLAIN3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        X_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], OUT)
        xs = gl.allocate_shared_memory(OUT, [STAGES, BLOCK_M, BLOCK_K], X_LAYOUT)
        words = gl.allocate_shared_memory(gl.int32, [STAGES, TILES * WARPS, OWN, 128], PLAIN3)
        scales = gl.allocate_shared_memory(gl.int32, [STAGES, TILES * WARPS, GROUPS, SCALE_WORDS], PLAIN3)

        SYNC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8])
        WGMMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_M, 16])
        LANES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
        PER_LANE: gl.constexpr = UNIT // 16 // INNER
        P: gl.constexpr = gl.BlockedLayout(
            [TILES, 1, OUTER, OWN // OUTER, 1, 1, INNER, PER_LANE],
            [1, 1, 1, 1, 8, 4, 1, 1], [1, WARPS, 1, 1, 1, 1, 1, 1], [7, 6, 5, 4, 3, 2, 1, 0],
        )  # fmt: skip
        OF_ROWS: gl.constexpr = gl.SliceLayout(7, gl.BlockedLayout(
            [TILES, 1, OUTER, 1, INNER, BOTH, PARTS, 1],
            [1, 1, 1, 8, 1, 1, 1, 4], [1, WARPS, 1, 1, 1, 1, 1, 1], [7, 6, 5, 4, 3, 2, 1, 0],
        ))  # fmt: skip

        ALONG: gl.constexpr = BLOCK_K // 8 if BLOCK_K < 256 else 32  # lanes along K
        COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ALONG, ALONG], [WARPS, 1], [1, 0])
        place = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, COPY))
        steps = gl.cdiv(K, BLOCK_K)
        for i in range(STAGES - 1):
            _copy_weight(words_ptr, scales_ptr, words, scales, i, i, left, units, groups, BLOCK_K, GROUP, LANES)
        if tiles_ptr is None:
            device_math.after_previous_kernel()
        inside = gl.expand_dims(place < rows, 1)
        starts = gl.expand_dims(_pairs(order_ptr, first, place, rows) // SHARED * stride_x, 1)
        for i in range(STAGES - 1):
            _copy_x(x_ptr, starts, inside, xs, i, i, K, gl.SliceLayout(0, COPY))

        if TILES == 1:
            acc = gl.zeros([BLOCK_M, COLUMNS], gl.float32, layout=SYNC)
        else:
            acc = gl.zeros([COLUMNS, BLOCK_M], gl.float32, layout=WGMMA)
        async_copy.wait_group(STAGES - 2)
        own_words = words.index(0).load(LANES)
        own_scales = _read_scales(scales.index(0), [TILES, WARPS, OUTER, INNER, BOTH, PARTS, 8], SCALE, OF_ROWS)
        stage, following, free = 0, 1, STAGES - 1
        for step in range(steps):
            ahead = step + STAGES - 1
            _copy_weight(words_ptr, scales_ptr, words, scales, ahead, free, left, units, groups, BLOCK_K, GROUP, LANES)
            _copy_x(x_ptr, starts, inside, xs, ahead, free, K, gl.SliceLayout(0, COPY))
            async_copy.wait_group(STAGES - 2)
            # The next step's words are read before this one's are used, which hides the way to shared memory.
            next_words = words.index(following).load(LANES)
            next_scales = _read_scales(
                scales.index(following), [TILES, WARPS, OUTER, INNER, BOTH, PARTS, 8], SCALE, OF_ROWS
            )
            a, b, c, d = _operand(gl.reshape(own_words, [TILES, WARPS, OWN, 8, 4, 4]), own_scales, KIND, SCALE, OUT, P)
            w = gl.reshape(gl.join(gl.join(a, b), gl.join(c, d)), [TILES, WARPS, OWN, 8, 4, UNIT // 32, 2, 2, 2])
            if TILES == 1:
                # [1, warps, fragments, g, t, c, e, h, b] -> [fragments, c, b, h, t, e, 1, warps, g]
                w = gl.reshape(gl.permute(w, [2, 5, 8, 7, 4, 6, 0, 1, 3]), [BLOCK_K, COLUMNS])
                w = gl.convert_layout(w, gl.DotOperandLayout(1, SYNC, 2), assert_trivial=True)
                acc = mma_v2(xs.index(stage).load(gl.DotOperandLayout(0, SYNC, 2)), w, acc)
            else:
                # [64 rows, half, warps, fragments, g, t, c, e, h, b]
                # -> [64 rows, warps, half, g, fragments, c, b, h, t, e]
                w = gl.reshape(w, [TILES // 2, 2, WARPS, OWN, 8, 4, UNIT // 32, 2, 2, 2])
                w = gl.reshape(gl.permute(w, [0, 2, 1, 4, 3, 6, 9, 8, 5, 7]), [COLUMNS, BLOCK_K])
                w = gl.convert_layout(w, gl.DotOperandLayout(0, WGMMA, 2), assert_trivial=True)
                fence_async_shared()
                acc = warpgroup_mma(w, xs.index(stage).permute([1, 0]), acc)
            own_words, own_scales = next_words, next_scales
            free, stage, following = stage, following, (following + 1 if following + 1 < STAGES else 0)
        async_copy.wait_group(0)

        if TILES == 1:
            acc = gl.permute(acc, [1, 0])
        LAST: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
        acc = gl.convert_layout(acc, LAST)
        column = column_block * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, LAST))
        row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, LAST))
        if bias_ptr is not None:
            bias = gl.load(bias_ptr + column, mask=column < N, other=0.0).to(gl.float32)
            acc = acc + gl.expand_dims(bias, 1)
        mask = gl.expand_dims(row < rows, 0) & gl.expand_dims(column < N, 1)
        pair = _pairs(order_ptr, first, row, rows).to(gl.int64)
        place = gl.expand_dims(pair * N, 0) + gl.expand_dims(column, 1)
        gl.store(y_ptr + place, acc.to(OUT), mask=mask)
