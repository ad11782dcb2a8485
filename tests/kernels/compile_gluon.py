"""Compiles the Gluon kernels, which needs no GPU: `python -m tests.kernels.compile_gluon prefill` (or `resident`,
`packed`).

Prints a JSON list with the compiled code's figures, one object per case. This is a process of its own because Triton
runs as an interpreter in the tests' process.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

PREFILLS = ((3, 64), (1, 64), (4, 128), (7, 128))  # (query heads per KV head, head_dim)
RESIDENTS = (  # (compute capability, dtype, whether rows are aligned to 16 bytes, chunks per row)
    *((90, "fp32", True, 256), (90, "bf16", True, 38), (90, "fp32", False, 38), (90, "bf16", False, 13)),
    (80, "fp32", True, 38),
)
PACKED = [*itertools.product(range(8), (False, True))]  # of `packed_weights.FORMS`; whether of experts, by wgmma


def compiled_elsewhere(*arguments: str, program: str = "compile_gluon") -> Any:
    """Return the JSON that this program (or its neighbour) prints in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.kernels.{program}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def _compile(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], aligned: set[str], arch: int, **options: Any
) -> Any:
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in aligned}
    source = GluonASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": 4, "enable_fp_fusion": False, **options}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def prefill(group: int, head_dim: int) -> dict[str, Any]:
    """Compiles the Hopper prefill kernel; pointers and strides, except the block table's stride, are aligned to 16."""
    from evalengine.kernels.attention_hopper import STAGES
    from evalengine.kernels.attention_hopper_kernel import prefill_kernel

    by_tma = 64 % group == 0
    constants = {"G": group, "D": head_dim, "PAGE": 64, "CHUNK": 1024, "TILE_M": 128, "ST": STAGES[head_dim]}
    constants |= {"Q_TMA": by_tma} | ({} if by_tma else {"q_desc": None})
    blocks = {"k_desc": [64, head_dim], "v_desc": [64, head_dim], "q_desc": [64 // group, group, head_dim]}
    signature = {}
    for name in prefill_kernel.arg_names:
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
    strides = {name for name in signature if name.startswith("stride") and name != "stride_bt"}
    aligned = {name for name, kind in signature.items() if kind.startswith("*")} | strides
    compiled = _compile(prefill_kernel, signature, constants, aligned, 90)
    initialised = len(re.findall(r"mbarrier\.init", compiled.asm["ptx"]))
    case = {"group": group, "head_dim": head_dim, "initialised": initialised}
    return {**case, "shared_bytes": compiled.metadata.shared}


def resident(arch: int, dtype: str, is_aligned: bool, chunks: int) -> dict[str, Any]:
    """Compiles the softmax kernel that keeps whole rows on the chip."""
    from evalengine.kernels.softmax_resident import REGISTERS, resident_kernel

    constants = {
        "LOG": True,
        "CHUNKS": chunks,
        "WIDTH": max(32, triton.next_power_of_2(chunks)),
        "ASYNC": is_aligned or dtype == "fp32",
    }
    pointers = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "pairs_ptr": "*i64"}
    kinds = pointers | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in resident_kernel.arg_names}
    aligned = {*pointers, "stride", "columns"} if is_aligned else set(pointers)
    compiled = _compile(resident_kernel, signature, constants, aligned, arch, maxnreg=REGISTERS)
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (0x\w+|\d+)", compiled.asm["ptx"])
    (copy_bytes,) = {int(size, 0) for size in sizes} or {None}
    case = {"arch": arch, "dtype": dtype, "aligned": is_aligned, "copy_bytes": copy_bytes}
    return {**case, "shared_bytes": compiled.metadata.shared}


def packed(place: int, is_expert: bool) -> dict[str, Any]:
    """Compiles the product with packed weights of a form, of a layer or of experts."""
    from evalengine.kernels import packed_matmul
    from evalengine.kernels.packed_matmul_kernel import packed_kernel
    from tests.kernels.packed_weights import FORMS

    form = FORMS[place]
    s = packed_matmul.choose_for_experts(64) if is_expert else packed_matmul.choose(16, 4096)
    values = (s.block_m, s.tiles, s.block_k, s.num_stages, 1, *packed_matmul.form_constants(form))
    constants = dict(zip(packed_kernel.arg_names[-len(values) :], values, strict=True))
    pointers = dict.fromkeys(("words_ptr", "scales_ptr", "order_ptr", "tiles_ptr"), "*i32")
    pointers |= dict.fromkeys(("x_ptr", "bias_ptr", "y_ptr"), "*bf16")
    if not is_expert:
        constants |= {"order_ptr": None, "tiles_ptr": None}
    kinds = pointers | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in packed_kernel.arg_names}
    aligned = {*pointers, "stride_x", "N", "K"} - constants.keys()
    compiled = _compile(packed_kernel, signature, constants, aligned, 90, num_warps=s.num_warps)
    ptx = compiled.asm["ptx"]
    counts = {name: ptx.count(name) for name in ("wgmma.mma_async", "mma.sync.aligned", "fma.rn.f32")}
    expected = {"wgmma.mma_async": s.tiles // 2 * s.block_k // 16, "mma.sync.aligned": s.tiles % 2 * s.block_k // 16}
    case = {"form": str(form), "counts": counts, "expected": {**expected, "fma.rn.f32": 0}}
    return {**case, "shared_bytes": compiled.metadata.shared}


def main() -> None:
    cases = {
        "prefill": lambda: [prefill(*case) for case in PREFILLS],
        "resident": lambda: [resident(*case) for case in RESIDENTS],
        "packed": lambda: [packed(*case) for case in PACKED],
    }
    json.dump(cases[sys.argv[1]](), sys.stdout)


if __name__ == "__main__":
    main()
