"""The exact ops have equal hashes under other instruction sets, BLAS paths and thread counts, a process for each."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evalengine.verification.exact_kernels import GOLDEN

WORKLOAD = Path(__file__).with_name("exact_workload.py")
ROOT = WORKLOAD.parents[2]
VARIATIONS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "scalar aten": ({"ATEN_CPU_CAPABILITY": "default"}, ()),
    "avx2 aten, 2 threads": ({"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "2"}, ()),
    "SSE4.2 MKL": ({"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}, ()),
    "SSE4.1 oneDNN": ({"ONEDNN_MAX_CPU_ISA": "SSE41"}, ()),
    "no oneDNN, 2 threads": ({"OMP_NUM_THREADS": "2"}, ("--no-mkldnn",)),
    "everything down": (
        {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
        ("--no-mkldnn",),
    ),
}

AN_OVERRIDE = {"aten": "f2c0cfdefd6117fc"}  # as it has been since contract 2


# Each variation is a process of five seconds. The last one combines the others but for a second thread; it stays quick.
OTHERS = [
    pytest.param(name, marks=() if name == "everything down" else pytest.mark.slow)
    for name in VARIATIONS
    if name != "plain"
]


@functools.cache
def hashes(variation: str) -> dict[str, dict[str, str]]:
    """The workload's output under a variation: "exact" or "stock" -> op -> SHA-256."""
    variables, arguments = VARIATIONS[variation]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, str(WORKLOAD), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{variation}: {done.stderr}"
    output: dict[str, dict[str, str]] = json.loads(done.stdout)
    return output


@pytest.mark.parametrize("variation", OTHERS)
def test_exact_bits_are_the_same(variation: str) -> None:
    plain, other = hashes("plain")["exact"], hashes(variation)["exact"]
    assert plain == other, f"ops that differ: {[op for op in plain if plain[op] != other[op]]}"


def test_exact_bits_are_those_of_every_other_machine() -> None:
    assert {op: digest[:16] for op, digest in hashes("plain")["exact"].items()} == GOLDEN | AN_OVERRIDE


def test_stock_bits_are_not_the_same() -> None:
    """torch's own ops do differ between the variations, so the variations reach the arithmetic."""
    assert hashes("plain")["stock"] != hashes("everything down")["stock"]
