"""Compares `exact`'s kernels on this machine with the bits that they give on every machine.

The workload is seeded, with shapes on both sides of the kernels' block borders; each kernel has one SHA-256. The
kernels have no schedule to choose: only the machine's float64, its BLAS, or a library that changes either could differ.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evalengine.kernels import exact, exact_attention, exact_mixture, exact_rows
from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.kernels.mixture_variant import Router
from evalengine.kernels.row_variants import Xielu

# The first 16 hex digits of each kernel's SHA-256, for contract version 3. Only a change of arithmetic, which raises
# the contract's version, may replace them.
GOLDEN = {
    "linear": "9d80d345dc882922",
    "bmm": "8561a8f43cb87636",
    "rms_norm": "e676428e32e71db2",
    "rms_norm with an offset": "980669edf7fe1150",
    "layer_norm": "0ba00686c597f392",
    "log_softmax": "347f843a4035854d",
    "softmax": "e586461ead0831e2",
    "mean": "ea6f59f4c6cb535d",
    "silu": "f8a48ec0dc2a1ab7",
    "silu_and_mul": "5e1479b5fa0fa758",
    "gelu": "7d0e864bffeba538",
    "gelu_tanh": "966a7289371215d9",
    "xielu": "88dd2c55e6b97139",
    "scale": "a6ddbd3b59075ab4",
    "softcap": "721844353e9507c2",
    "fp8_rows": "7e1ef8dd001ba5a3",
    "rope": "f2c149a979b4d5ef",
    "attention": "7959649c61e64468",
    "wide_linear": "37261a5e71d00dc5",
    "wide_attention": "fd2c60bae5a85f2d",
    "router": "d733546fe99d22c6",
    "experts": "6e85652a82dcdfb5",
}
ROUTERS = (
    Router(40, 6, normed=True),
    Router(40, 4, "logit"),
    Router(40, 6, "sigmoid", choice_bias=True, groups=8, kept_groups=3, normed=True, sum_offset=1e-20, scaling=2.5),
)
PRODUCTS = [(1, 1, 1), (3, 65, 31), (37, 300, 577), (5, 33, 8193)]  # M, N, K


def exact_kernels_verdict(device: torch.device) -> dict[str, Any]:
    """{"kernels": n, "failed": [a sentence each], "seconds": s}, plain JSON values."""
    started = time.perf_counter()
    failed = []
    try:
        exact.self_test(device)
    except RuntimeError as error:
        failed.append(str(error))
    actual = digests(workload(device))
    failed += [
        f"{name}: its bits hash to {actual[name][:16]}, on every other machine to {golden}"
        for name, golden in GOLDEN.items()
        if actual[name][:16] != golden
    ]
    return {"kernels": len(GOLDEN), "failed": failed, "seconds": time.perf_counter() - started}


def workload(device: torch.device | str = "cpu") -> dict[str, list[Tensor]]:
    """Kernel -> its results, float32."""

    def numbers(seed: int, *shape: int) -> Tensor:
        return seeded(seed, *shape).to(device)

    results: dict[str, list[Tensor]] = {name: [] for name in GOLDEN}
    for m, n, k in PRODUCTS:
        x, weight = numbers(m, m, k), numbers(n, n, k).bfloat16()
        results["linear"].append(exact.linear(x, exact.quantize_weight(weight), numbers(0, n)))
        up, down = (_powers(k, sign).to(device) for sign in (1, -1))
        results["wide_linear"].append(exact.linear(x * up, exact.quantize_weight(numbers(n, n, k) * down)))
        results["bmm"].append(exact.bmm(x[None], weight.t()[None]))
        results["rms_norm"].append(exact.rms_norm(x, numbers(k, k), 1e-5))
        results["rms_norm with an offset"].append(exact.rms_norm(x, weight[0], 1e-5, 1.0))
        results["layer_norm"] += [exact_rows.layer_norm(x, weight[0], bias, 1e-5) for bias in (weight[-1], None)]
        results["log_softmax"].append(exact.log_softmax(x))
        results["softmax"].append(exact.softmax(x))
        results["mean"].append(exact.mean(x, -1))
        results["silu"].append(exact.silu(x))
        results["silu_and_mul"].append(exact.silu_and_mul(torch.cat((x, x), -1)))
        for kind in ("gelu", "gelu_tanh"):
            results[kind].append(exact_rows.activation(x, kind, gated=False))
            results[kind].append(exact_rows.activation(torch.cat((x, x.flip(1)), -1), kind, gated=True))
        results["xielu"].append(exact_rows.xielu(x, Xielu(0.75, 0.8125, 0.5, -(2.0**-20))))
        results["scale"].append(exact_rows.scale(x, 0.22))
        results["softcap"].append(exact_rows.softcap(x * 8, 30.0))
        results["fp8_rows"] += [exact_rows.fp8_rows(x, *rule) for rule in ((None,), (128,), (None, 0.0078125))]
    results["log_softmax"].append(exact.log_softmax(numbers(9, 3, 70_001)))
    cos, sin = (table.to(device) for table in exact.rope_table(seeded(4, 24).abs() / 4, 2001, 1.0))
    results["rope"] = [cos, sin, exact.apply_rope(numbers(5, 2001, 3, 48), cos, sin)]
    keys, values = (numbers(seed, 40, 64, 2, 48).bfloat16() for seed in (6, 7))
    pages, q = torch.arange(40, dtype=torch.int32, device=device).view(2, 20), numbers(8, 102, 6, 48)
    batch = pages, [101, 1], [101, 1234], AttentionVariant(48**-0.5)
    results["attention"] = [exact_attention.paged_attention(q, keys, values, *batch)]
    up, down = (_powers(48, sign).to(device) for sign in (1, -1))
    results["wide_attention"] = [exact_attention.paged_attention(q * up, keys * down, values * down, *batch)]
    for router in ROUTERS:
        logits, bias = numbers(10, 57, 40), numbers(11, 40) if router.choice_bias else None
        results["router"] += exact_mixture.route(logits, bias, router)
    ids, weights = results["router"][:2]
    experts = [exact.quantize_weight(weight) for weight in numbers(12, 40, 30, 33)]
    rows = exact_mixture.expert_linear(numbers(13, 57, 33), experts, numbers(14, 40, 30), ids)
    results["experts"] = [rows, exact_mixture.combine(rows, weights), exact_mixture.clamped_swiglu(rows.flatten(0, 1))]
    results["experts"].append(exact_mixture.gate(rows[:, 0], rows[:, 1, :1]))
    return results


def _powers(columns: int, sign: int) -> Tensor:
    """2^0 to 2^(16 sign), in turn: numbers times these are a row that spreads too widely for one limb."""
    return torch.tensor([2.0 ** (sign * (column % 17)) for column in range(columns)])


def seeded(seed: int, *shape: int) -> Tensor:
    """Float32 numbers of -4 ... 4 from NumPy, whose generator does not change with the instruction set (torch's
    does)."""
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).random(shape, dtype=np.float32) * 8 - 4)


def digests(results: Mapping[str, Sequence[Tensor]]) -> dict[str, str]:
    """Kernel -> SHA-256 (hex) over its results' bytes."""
    return {
        name: hashlib.sha256(b"".join(t.cpu().contiguous().numpy().tobytes() for t in tensors)).hexdigest()
        for name, tensors in results.items()
    }
