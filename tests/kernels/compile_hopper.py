"""Compiles the Hopper prefill kernel for sm_90, which needs no GPU: `python -m tests.kernels.compile_hopper`.

Prints JSON: a case each, with its barriers and registers. A process of its own, as the tests' own Triton interprets.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from evalengine.kernels.attention_hopper import STAGES
from evalengine.kernels.attention_hopper_kernel import prefill_kernel

CASES = ((3, 64), (1, 64), (4, 128), (7, 128))  # query heads a KV head, head_dim


def compile_case(group: int, head_dim: int) -> Any:
    """The compiled kernel, with strides and pointers aligned to 16."""
    by_tma = 64 % group == 0
    constants = {"G": group, "D": head_dim, "PAGE": 64, "CHUNK": 1024, "TILE_M": 128, "ST": STAGES[head_dim]}
    constants |= {"Q_TMA": by_tma} | ({} if by_tma else {"q_desc": None})
    blocks = {"k_desc": [64, head_dim], "v_desc": [64, head_dim], "q_desc": [64 // group, group, head_dim]}
    signature, aligned = {}, {}
    for i, name in enumerate(prefill_kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in blocks:
            layout = gl.NVMMASharedLayout.get_default_for(blocks[name], gl.bfloat16)
            signature[name] = f"tensordesc<bf16{blocks[name]},{layout!r}>"
        elif name in ("q_ptr", "v_ptr", "o_ptr"):
            signature[name] = "*bf16"
        elif name in ("block_table", "table"):
            signature[name] = "*i32"
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
        if signature[name].startswith("*") or name.startswith("stride"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(prefill_kernel, signature, constants, aligned)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> None:
    results = []
    for group, head_dim in CASES:
        compiled = compile_case(group, head_dim)
        ptx = compiled.asm["ptx"]
        results.append(
            {
                "group": group,
                "head_dim": head_dim,
                "initialised": len(re.findall(r"mbarrier\.init", ptx)),
                "shared_bytes": compiled.metadata.shared,
            }
        )
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
