"""The seeded workload of test_exact_isa: prints one SHA-256 per op (exact), and per plain torch op (stock).

Run as a program under other instruction sets, libraries and thread counts: `python exact_workload.py [--no-mkldnn]`.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np
import torch
from torch import Tensor

from evalengine.invariant import set_batch_invariant_mode
from evalengine.kernels import exact, exact_attention


def numbers(seed: int, *shape: int) -> Tensor:
    """Float32 normal numbers from NumPy, whose generator does not change with the instruction set (torch's does)."""
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).random(shape, dtype=np.float32) * 8 - 4)


def exact_results() -> dict[str, list[Tensor]]:
    results: dict[str, list[Tensor]] = {}
    for m, n, k in [(1, 1, 1), (3, 65, 31), (37, 300, 577), (5, 33, 8193)]:
        x, weight = numbers(m, m, k), numbers(n, n, k).bfloat16()
        results.setdefault("linear", []).append(exact.linear(x, exact.quantize_weight(weight), numbers(0, n)))
        results.setdefault("bmm", []).append(exact.bmm(x[None], weight.t()[None]))
        results.setdefault("rms_norm", []).append(exact.rms_norm(x, numbers(k, k), 1e-5))
        results.setdefault("log_softmax", []).append(exact.log_softmax(x))
        results.setdefault("softmax", []).append(exact.softmax(x))
        results.setdefault("mean", []).append(exact.mean(x, -1))
        results.setdefault("silu", []).append(exact.silu(x))
        results.setdefault("silu_and_mul", []).append(exact.silu_and_mul(torch.cat((x, x), -1)))
        with set_batch_invariant_mode():
            results.setdefault("aten", []).append((x @ weight.float().t()).softmax(-1))
    results["log_softmax"].append(exact.log_softmax(numbers(9, 3, 70_001)))
    cos, sin = exact.rope_table(numbers(4, 24).abs() / 4, 2001, 1.0)
    results["rope"] = [cos, sin, exact.apply_rope(numbers(5, 2001, 3, 48), cos, sin)]
    k, v = (numbers(seed, 40, 64, 2, 48).bfloat16() for seed in (6, 7))
    table, q = torch.arange(40, dtype=torch.int32).view(2, 20), numbers(8, 102, 6, 48)
    results["attention"] = [exact_attention.paged_attention(q, k, v, table, [101, 1], [101, 1234], 48**-0.5)]
    return results


def stock_results() -> dict[str, list[Tensor]]:
    x, weight = numbers(1, 37, 577), numbers(2, 300, 577)
    return {
        "mm": [x @ weight.t()],
        "log_softmax": [x.log_softmax(-1)],
        "silu": [torch.nn.functional.silu(x)],
        "rms_norm": [torch.nn.functional.rms_norm(x, (577,))],
    }


def digests(results: dict[str, list[Tensor]]) -> dict[str, str]:
    return {
        name: hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()
        for name, tensors in results.items()
    }


if __name__ == "__main__":
    torch.backends.mkldnn.enabled = "--no-mkldnn" not in sys.argv  # type: ignore[assignment]
    print(json.dumps({"exact": digests(exact_results()), "stock": digests(stock_results())}))
