"""Compiles the row kernels' variants, which needs no GPU: `python -m tests.kernels.compile_rows [norms ...]`.

Prints a JSON object: for each name given (of `CASES`; by default all) a list with counts of instructions in the PTX,
one object per case. Triton's compiler is stricter than the interpreter in which the other tests run: it compiles what
follows a `return` under a compile-time condition.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

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
    **dict.fromkeys(("beta_scale", "dt_least", "dt_most"), "fp32"),
    **dict.fromkeys(("a_log_ptr", "dt_bias_ptr", "d_ptr"), "*fp32"),
    **dict.fromkeys(("cu_seqlens", "seqlens", "state_slots"), "*i32"),
    **dict.fromkeys(("ids_ptr", "order_ptr", "tiles_ptr"), "*i32"),
}


def _counted(kernel: Any, dtype: str, constants: dict[str, Any], table: str | None = None) -> dict[str, Any]:
    """Compiles the kernel for operands of `dtype`, and cos and sin of `table`: how often the PTX has an instruction."""

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        operand = f"*{table or dtype}" if name in ("cos_ptr", "sin_ptr") else f"*{dtype}"
        return KINDS.get(name, operand if name.endswith("_ptr") else "i32")

    signature = {name: kind(name) for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    ptx = triton.compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32), options=options).asm[
        "ptx"
    ]
    words = {"fma": "fma.rn.f32", "tanh": "tanh.approx", "branches": " bra"}
    about = {"kernel": kernel.__name__, "dtype": dtype, "table": table or dtype, **constants}
    return {**about, **{name: ptx.count(word) for name, word in words.items()}}


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

    names = {torch.uint8: "u8", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
    for form in FORMS:
        KINDS.update(codes_ptr="*u8", scales_ptr=f"*{names[form.scale]}", zeros_ptr="*i16")
        whole = {"KIND": form.kind, "GROUP": form.group, **({} if form.zeros else {"zeros_ptr": None})}
        tile = {"BLOCK_N": 16, "BLOCK_K": 256, "EVEN_K": True}
        yield _counted(packed_matmul._unpack_kernel, "bf16", {**tile, **whole})
        for rows in (16, 128):
            s = packed_matmul.choose(rows)
            tile = {"BLOCK_M": s.block_m, "BLOCK_N": packed_matmul.WEIGHT_ROWS, "BLOCK_K": s.block_k, "EVEN_K": True}
            dense = {"bias_ptr": None, "order_ptr": None, "tiles_ptr": None, "SHARED": 1}
            yield _counted(packed_matmul._packed_kernel, "bf16", {**tile, **whole, **dense})
        tile["BLOCK_M"] = packed_matmul.TALLEST
        yield _counted(packed_matmul._packed_kernel, "bf16", {**tile, **whole, "SHARED": 8})


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
        yield _counted(expert_rows._gate_kernel, dtype, {"BLOCK": 1024})
        yield _counted(expert_rows._swiglu_kernel, dtype, {"BLOCK": 1024})


def recurrences() -> Iterator[dict[str, Any]]:
    from evalengine.kernels import causal_conv, gated_delta, mamba2, rms_norm

    for dtype in ("bf16", "fp32"):
        for tokens, bias in ((causal_conv.TOKENS, {}), (1, {"bias_ptr": None})):
            tile = {"K": 4, "CHANNELS": causal_conv.CHANNELS, "SILU": not bias, "TOKENS": tokens, **bias}
            yield _counted(causal_conv._conv_kernel, dtype, tile)
        for gate_first in (True, False):
            norm = {"GROUP": 96, "BLOCK": 128, "GATE_FIRST": gate_first, "REPEATED": not gate_first, "ONCE": gate_first}
            yield _counted(rms_norm._gated_norm_kernel, dtype, norm)
        KINDS["state_ptr"] = "*fp32"
        delta = {"HK": 16, "HV": 32, "K": 128, "KP": 128, "V": 128, "ROWS": gated_delta.ROWS}
        yield _counted(gated_delta._gated_delta_kernel, dtype, delta)
        scan = {"H": 64, "P": 64, "G": 8, "N": 128, "NP": 128, "ROWS": mamba2.ROWS}
        yield _counted(mamba2._mamba2_kernel, dtype, scan)
        del KINDS["state_ptr"]


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
