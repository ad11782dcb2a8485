"""The workload of test_exact_isa: prints a SHA-256 for every exact op, and one for every plain torch op (`stock`).

The test runs it under other instruction sets, libraries and thread counts: `python exact_workload.py [--no-mkldnn]`.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from evalengine.invariant import set_batch_invariant_mode
from evalengine.verification.exact_kernels import PRODUCTS, digests, seeded, workload


def exact_results() -> dict[str, list[Tensor]]:
    """Returns the exact kernels' results, and under "aten" those of torch code in batch-invariant mode."""
    overridden = []
    for m, n, k in PRODUCTS:
        with set_batch_invariant_mode():
            overridden.append((seeded(m, m, k) @ seeded(n, n, k).bfloat16().float().t()).softmax(-1))
    return {**workload(), "aten": overridden}


def stock_results() -> dict[str, list[Tensor]]:
    """Returns the results of torch's own ops, outside the mode."""
    x, weight = seeded(1, 37, 577), seeded(2, 300, 577)
    return {
        "mm": [x @ weight.t()],
        "log_softmax": [x.log_softmax(-1)],
        "silu": [torch.nn.functional.silu(x)],
        "rms_norm": [torch.nn.functional.rms_norm(x, (577,))],
    }


if __name__ == "__main__":
    torch.backends.mkldnn.enabled = "--no-mkldnn" not in sys.argv  # type: ignore[assignment]
    print(json.dumps({"exact": digests(exact_results()), "stock": digests(stock_results())}))
