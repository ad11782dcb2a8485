"""Compiles the row kernels' variants, which needs no GPU: `python -m tests.kernels.compile_rows [norms ...]`.

Prints a JSON object: for each name given (of `CASES`; by default all) a list with counts of instructions in the PTX,
one object per case. Triton's compiler is stricter than the interpreter in which the other tests run: it compiles what
follows a `return` under a compile-time condition.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from evalengine.kernels.launching.launch import observed_launches

LAYOUT = {"H": 2304, "BLOCK": 4096, "INNER": 1, "ROWS": 1, "ADD": True}
HEADS = {"Q_HEADS": 8, "KV_HEADS": 4, "HALF": 128, "PAGE": 16, "NORM": True, "ROWS": 4, "COLUMNS": 128}
# The kinds of arguments; of others, by their names.
KINDS = {
    "eps": "fp32",
    "cap": "fp32",
    "scale": "fp32",
    "reciprocal": "fp32",
    "slot_ptr": "*i64",
    "weights_ptr": "*fp32",
    **dict.fromkeys(("alpha_p", "alpha_n", "beta"), "fp32"),
    **dict.fromkeys(("ids_ptr", "order_ptr", "tiles_ptr"), "*i32"),
}
NAMES = {
    torch.uint8: "u8", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32",
}  # fmt: skip
INSTRUCTIONS = {
    "fma": "fma.rn.f32", "tanh": "tanh.approx", "branches": " bra", "wgmma": "wgmma.mma_async", "mma": "mma.sync",
}  # fmt: skip


def _counted(kernel: Any, dtype: str, constants: dict[str, Any], table: str | None = None) -> dict[str, Any]:
    """Compiles the kernel for operands of `dtype`, and cos and sin of `table`: how often the PTX has an instruction."""

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        operand = f"*{table or dtype}" if name in ("cos_ptr", "sin_ptr") else f"*{dtype}"
        return KINDS.get(name, operand if name.endswith("_ptr") else "i32")

    signature = {name: kind(name) for name in kernel.arg_names}
    about = {"dtype": dtype, "table": table or dtype, **constants}
    return {**about, **_counts(kernel, signature, constants, {}, {"num_warps": 4, "enable_fp_fusion": False})}


def _counts(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], attributes: dict, options: dict[str, Any]
) -> dict[str, Any]:
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places, attributes)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return {"kernel": kernel.__name__, **{name: ptx.count(word) for name, word in INSTRUCTIONS.items()}}


def _launched(what: str, run: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """Compiles every kernel that `run` launches, for these operands."""
    launches = []
    with observed_launches(lambda kernel, _grid, *launch: launches.append((kernel, *launch))):
        run()
    for kernel, args, constants, options in launches:
        signature, attributes = dict.fromkeys(kernel.arg_names, "constexpr"), {}
        constant = dict(zip(kernel.arg_names[len(args) :], constants, strict=True))
        for i, (name, arg) in enumerate(zip(kernel.arg_names, args, strict=False)):
            if arg is None:
                constant[name] = None
                continue
            tensor = isinstance(arg, torch.Tensor)
            signature[name] = f"*{NAMES[arg.dtype]}" if tensor else "fp32" if isinstance(arg, float) else "i32"
            if tensor or (isinstance(arg, int) and arg % 16 == 0):
                attributes[i,] = [["tt.divisibility", 16]]
        yield {"what": what, **_counts(kernel, signature, constant, attributes, options)}


def norms() -> Iterator[dict[str, Any]]:
    from evalengine.kernels import layer_norm, rms_norm

    for dtype in ("bf16", "fp32"):
        for offset, cast_first in ((0.0, True), (0.0, False), (1.0, False)):
            variant = {"OFFSET": offset, "CAST_FIRST": cast_first}
            yield _counted(rms_norm._rms_norm_kernel, dtype, {**LAYOUT, **variant})
        for bias, heads in ((True, 1), (False, 1), (False, 12)):
            yield _counted(layer_norm._layer_norm_kernel, dtype, {**LAYOUT, "BIAS": bias, "HEADS": heads})


def heads() -> Iterator[dict[str, Any]]:
    from evalengine.kernels import qkv, rope

    for table in ("bf16", "fp32"):
        shape = {"HEADS": 8, "HALF": 128, "ROWS": 4, "COLUMNS": 128}
        yield _counted(rope._rope_kernel, "bf16", shape, table)
        yield _counted(qkv._qkv_kernel, "bf16", {**HEADS, "OFFSET": 1.0, "CAST_FIRST": False}, table)


def elements() -> Iterator[dict[str, Any]]:
    from evalengine.kernels import activation, softcap

    for dtype in ("bf16", "fp32"):
        for act in activation.ACTIVATIONS:
            yield _counted(activation._gated_kernel, dtype, {"WIDTH": 1536, "BLOCK": 1024, "ACT": act})
            yield _counted(activation._activation_kernel, dtype, {"BLOCK": 1024, "ACT": act})
        yield _counted(activation._xielu_kernel, dtype, {"BLOCK": 1024})
    yield _counted(softcap._softcap_kernel, "fp32", {"BLOCK": 1024})


def fp8() -> Iterator[dict[str, Any]]:
    from evalengine.kernels import fp8_rows

    for block in (128, 2048):
        for static in (False, True):
            rows = {"BLOCK": block, "ROWS": 2048 // block, "STATIC": static, "POWER": not static}
            yield _counted(fp8_rows._fp8_rows_kernel, "bf16", rows)


def packed() -> Iterator[dict[str, Any]]:
    from evalengine.kernels import packed_matmul
    from tests.kernels.packed_weights import FORMS

    KINDS.update(words_ptr="*i32", scales_ptr="*i32")
    names = ("KIND", "SCALE", "GROUP", "UNIT", "SCALE_WORDS")
    for form in FORMS:
        constants = dict(zip(names, packed_matmul.form_constants(form), strict=True))
        yield _counted(packed_matmul._unpack_kernel, "bf16", {"COLUMNS": packed_matmul.UNPACK_COLUMNS, **constants})


def mixtures() -> Iterator[dict[str, Any]]:
    import triton.language as tl

    from evalengine.kernels import expert_groups, expert_matmul, expert_rows, routing
    from tests.kernels.routers import ROUTERS

    for name, router in ROUTERS.items():
        bias = {} if router.choice_bias else {"bias_ptr": None}
        rule = {
            "E": router.experts,
            "K": router.chosen,
            "SCORES": router.scores,
            "GROUPS": router.groups,
            "KEPT": router.kept_groups,
            "BEST": router.group_best,
            "NORMED": router.normed,
            "OFFSET": router.sum_offset,
            "LEAST": router.least_sum,
            "SCALING": router.scaling,
            "DTYPE": tl.bfloat16,
            "SCORE_DTYPE": tl.bfloat16 if router.rounded_scores else tl.float32,
            **bias,
        }
        KINDS["bias_ptr"] = "*fp32"
        yield {**_counted(routing._routing_kernel, "bf16", rule), "DTYPE": "bf16", "SCORE_DTYPE": "", "rule": name}
    del KINDS["bias_ptr"]
    yield _counted(expert_groups._alone_kernel, "bf16", {"BLOCK": 64})
    yield _counted(expert_groups._group_kernel, "bf16", {"BLOCK_M": 16, "BLOCK": 4096})
    for dtype, bias in (("bf16", {"bias_ptr": None}), ("bf16", {}), ("fp32", {})):
        for rows in expert_matmul.heights(torch.float32 if dtype == "fp32" else torch.bfloat16):
            s = expert_matmul.preferred(torch.float32 if dtype == "fp32" else torch.bfloat16, rows, 1536)
            tile = {"BLOCK_M": s.block_m, "BLOCK_N": s.block_n, "BLOCK_K": s.block_k, "SWAP": s.swap}
            yield _counted(expert_matmul._expert_kernel, dtype, {**tile, "EVEN_K": True, "SHARED": 8, **bias})
    for dtype in ("bf16", "fp32"):
        yield _counted(expert_rows._combine_kernel, dtype, {"K": 8, "BLOCK": 1024})
        for of_row in (True, False):
            yield _counted(expert_rows._gate_kernel, dtype, {"OF_ROW": of_row, "BLOCK": 1024})
        yield _counted(expert_rows._swiglu_kernel, dtype, {"BLOCK": 1024})


def recurrences() -> Iterator[dict[str, Any]]:
    """Those of Qwen3.5-4B and Granite 4.0 H Tiny in bfloat16, for a decode and a prefill; convolutions and norms."""
    from evalengine.kernels import rms_norm
    from evalengine.kernels.recurrent_variant import GatedDelta, Mamba2
    from tests.kernels.test_causal_conv import conv
    from tests.kernels.test_recurrent import QWEN, case, pools, recurrence

    kinds: dict[str, GatedDelta | Mamba2] = {
        "delta": QWEN,
        "scan": Mamba2(48, 64, 1, 128, 4, True, False, (0.0, None)),
    }
    step = [1, 200], [9, 207], [0, 1]
    for what, variant in kinds.items():
        operands, heads = case(variant, torch.bfloat16, 201)
        state = pools("native", variant, torch.bfloat16, 2)
        yield from _launched(what, partial(recurrence("native", variant, heads), operands, state, *step))
    for dtype in (torch.bfloat16, torch.float32):
        x, weight, inputs = (torch.empty(shape, dtype=dtype) for shape in ((201, 96), (4, 96), (2, 16, 96)))
        weight = weight.t()  # as loaded models have it (`CausalConv.finalize`)
        yield from _launched("conv", partial(conv("native", weight, weight[:, 0], True), [x], (inputs,), *step))
        decodes = [x[:2]], (inputs,), [1, 1], [9, 9], [0, 1]
        yield from _launched("conv", partial(conv("native", weight, None, False), *decodes))
        for first in (True, False):
            norm = partial(rms_norm.gated_norm, x, x, x[0, :48] if first else x[0], 1e-5, 48, rounded_once=first)
            yield from _launched("norm", partial(norm, gate_first=first))


CASES = {
    "recurrences": recurrences,
    "mixtures": mixtures,
    "norms": norms,
    "heads": heads,
    "elements": elements,
    "fp8": fp8,
    "packed": packed,
}


if __name__ == "__main__":
    json.dump({name: list(CASES[name]()) for name in sys.argv[1:] or CASES}, sys.stdout)
