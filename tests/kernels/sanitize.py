"""NVIDIA's compute-sanitizer over our kernels: `make sanitize`, on a machine with CUDA and its tools.

Every workload is a process of its own under `memcheck`, `racecheck` (shared memory) and `synccheck`. The report lists
the findings by kernel and by pair of source lines, as Markdown in the file that `-o` names. Beside our kernels runs one
of a few lines that only splits its warps by `gl.warp_specialize` and has no shared memory of its own: all that is
reported for it is the compiler's own code, and every kernel that splits its warps has the same pairs of accesses.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from evalengine.kernels import attention_hopper_kernel
from evalengine.kernels.attention_hopper_kernel import thread_barrier

TOOLS = ("memcheck", "racecheck", "synccheck")
TIMEOUT = 280  # seconds per process


@gluon.jit
def _writer(out, rounds, WHICH: gl.constexpr, WARPS: gl.constexpr):
    at = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    for i in range(rounds):
        gl.store(out + WHICH * 128 + at, at + i)
        thread_barrier()


@gluon.jit
def split_in_two(out, rounds):
    gl.warp_specialize([(_writer, (out, rounds, 0, 4)), (_writer, (out, rounds, 1, 4))], [4], [24])


@gluon.jit
def split_in_three(out, rounds):
    """Splits its warps as our prefill does: three warps of the single warp's group stay idle."""
    gl.warp_specialize(
        [(_writer, (out, rounds, 0, 4)), (_writer, (out, rounds, 1, 4)), (_writer, (out, rounds, 2, 1))],
        [4, 1],
        [240, 24],
    )


def split(kernel: Any) -> None:
    kernel[(132,)](torch.empty(384, dtype=torch.int32, device="cuda"), 3, num_warps=4)


def prefill(heads: int, kv_heads: int, head_dim: int) -> None:
    from tests.kernels.paged_batch import PagedBatch

    lens = [(1, 65), (130, 130), (3, 1090), (64, 1025)]
    PagedBatch.random(lens, heads, kv_heads, head_dim, 64, torch.bfloat16).run()


def softmax() -> None:
    from evalengine.kernels import log_softmax

    log_softmax.log_softmax(torch.randn(3, 20_000, device="cuda"))
    log_softmax.log_softmax(torch.randn(2, 151_936, device="cuda", dtype=torch.bfloat16))


def decode() -> None:
    """Runs decode in its three forms: in chunks that are merged, block by block, and in one chunk."""
    from tests.kernels.paged_batch import PagedBatch

    for lens in ([(1, 1300)] * 40, [(1, 1300)], [(1, 70)] * 40):
        PagedBatch.random(lens, 16, 8, 128, 64, torch.bfloat16).run()


def attention_variants() -> None:
    """Runs prefill and decode, in chunks and block by block, with windows, softcaps and sinks."""
    from tests.kernels.paged_batch import PagedBatch

    for lens in ([(1, 1300)] * 40, [(1, 2300)], [(3, 1090), (64, 1025), (130, 130)]):
        for window in (100, 1025):
            variant = {"window": window, "softcap": 30.0, "sinks": True}
            PagedBatch.random(lens, 16, 8, 128, 64, torch.bfloat16, **variant).run()


def elementwise() -> None:
    from evalengine.kernels import activation, qkv, softcap

    tokens = 67
    x, tables = (torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16) for n in (6144, 64))
    for act in activation.ACTIVATIONS:
        activation.gated(x, act)
        activation.activation(x, act)
    softcap.softcap(x.float(), 30.0)
    q, k, v = torch.randn(tokens, 32, 128, device="cuda", dtype=torch.bfloat16).split([16, 8, 8], dim=1)
    pools = torch.zeros(2, 8, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    slots, norm = torch.arange(tokens, device="cuda"), torch.ones(128, device="cuda", dtype=torch.bfloat16)
    qkv.qk_norm_rope_store(q, k, v, norm, norm, 1e-6, tables, tables, pools[0], pools[1], slots)
    wide = tables.float()
    qkv.qk_norm_rope_store(q, k, v, norm, norm, 1e-6, wide, wide, pools[0], pools[1], slots, offset=1, cast_first=False)


def read_out() -> None:
    from evalengine.kernels import log_softmax

    columns = torch.zeros(5, device="cuda", dtype=torch.int64)
    log_softmax.read_out(torch.randn(5, 151_936, device="cuda"), None, columns)
    log_softmax.read_out(torch.randn(5, 1_024, device="cuda"), torch.arange(5, device="cuda"), columns)


def matmul() -> None:
    from evalengine.kernels.matmul import linear

    for count in (1, 64, 300):
        linear(*(torch.randn(n, 1024, device="cuda", dtype=torch.bfloat16) for n in (count, 2048)))


def mixtures() -> None:
    """Runs the choice, the sort and both products of a decode step and of a prefill, with experts that have no rows."""
    from evalengine.kernels import expert_rows, routing
    from evalengine.kernels.expert_groups import group
    from evalengine.kernels.expert_matmul import expert_linear, height
    from tests.kernels.routers import ROUTERS, operands

    for router in ROUTERS.values():
        logits, bias = operands(router)
        routing.route(logits.cuda(), None if bias is None else bias.cuda(), router, torch.bfloat16)
    weight = torch.randn(9, 200, 136, device="cuda", dtype=torch.bfloat16)
    for tokens in (1, 67, 1100):
        ids = torch.stack([torch.randperm(8)[:4] for _ in range(tokens)]).int().cuda()
        groups = group(ids, 9, height(torch.bfloat16, ids.numel(), 9))
        x = torch.randn(tokens, 136, device="cuda", dtype=torch.bfloat16)
        rows = expert_rows.clamped_swiglu(expert_linear(x, weight, weight[:, :, 0].contiguous(), groups).flatten(0, 1))
        rows = expert_linear(rows.unflatten(0, (tokens, 4)), weight[:, :72, :100].contiguous(), None, groups)
        expert_rows.gate(expert_rows.combine(rows, torch.rand(tokens, 4, device="cuda")), x[:, :1].contiguous())


def rows() -> None:
    from evalengine.kernels import layer_norm, rms_norm

    x, weight = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((67, 1000), (1000,)))
    rms_norm.rms_norm(x, weight, 1e-6)
    rms_norm.add_rms_norm(x, x, weight, 1e-6, offset=1.0, cast_first=False)
    layer_norm.add_layer_norm(x, x, weight, weight, 1e-6)
    layer_norm.layer_norm(x.unflatten(1, (8, 125)), weight.view(8, 125), None, 1e-6)


def packed() -> None:
    """Runs the unpacking of every form and the products that read packed bytes, of layers and of experts."""
    from evalengine.kernels import fp8_rows, packed_matmul
    from evalengine.kernels.expert_groups import group
    from evalengine.kernels.packed_rows import fragments_of
    from tests.kernels.packed_weights import FORMS
    from tests.kernels.packed_weights import packed as weight_of
    from tests.kernels.test_packed_matmul import DEVICE, columns_of, ids_of, numbers

    groups = group(ids_of(23, 6, 3), 6, 16)
    for form in FORMS:
        k = columns_of(form)
        x = numbers(67, k, dtype=torch.float16, seed=0)
        fp8_rows.fp8_rows(x, 128, None, False)
        weight, experts = (fragments_of(weight_of(form, *shape, k, device=DEVICE)[0]) for shape in ((45,), (6, 37)))
        packed_matmul.unpack(weight, torch.empty(45, k, dtype=x.dtype, device=DEVICE))
        packed_matmul.fused(x, weight, None, None)
        packed_matmul.fused(x[:16].contiguous(), weight, None, None)
        packed_matmul.fused(x[:23].contiguous(), experts, None, groups)


def recurrences() -> None:
    """Runs convolutions, recurrences and gated norms over five sequences, whose slots are in another order: first all
    their tokens, then one more of each, which begins a chunk of one of them."""
    from evalengine.kernels import rms_norm
    from evalengine.kernels.recurrent_variant import GatedDelta, Mamba2
    from tests.kernels.test_causal_conv import conv
    from tests.kernels.test_recurrent import DELTAS, LENGTHS, MAMBAS, case, pools, randn, recurrence

    step = list(LENGTHS), list(LENGTHS), [3, 0, 5, 1, 2]
    kinds: list[GatedDelta | Mamba2] = [*DELTAS, *MAMBAS]
    for variant in kinds:
        operands, heads = case(variant, torch.float16)
        run, state = recurrence("native", variant, heads), pools("native", variant, torch.float16, 6)
        run(operands, state, *step)
        run([x[: len(LENGTHS)] for x in operands], state, [1] * len(LENGTHS), [n + 1 for n in LENGTHS], step[2])
    x, weight, inputs = (randn(*shape, dtype=torch.float16) for shape in ((sum(LENGTHS), 129), (129, 4), (6, 16, 129)))
    conv("native", weight, None, True)([x], (inputs,), *step)
    for n in (1, 11):  # decodes, and steps whose tokens may be dropped
        totals = [length + n for length in LENGTHS]
        conv("native", weight, None, True)([x[: n * len(LENGTHS)]], (inputs,), [n] * len(LENGTHS), totals, step[2])
    rms_norm.gated_norm(x, x, weight[:, 0].contiguous(), 1e-5, 43, gate_first=True)


def cascade() -> None:
    """Runs decodes that read what they share once, in tiles that are full and that are not, with and without sinks."""
    from tests.kernels.test_attention_cascade import CASCADE, TREES, batch_of

    for variant in ({}, {"sinks": True}):
        for lengths, shares, page in TREES.values():
            batch_of(lengths, shares, page, (4, 2, 64), torch.float16, **variant).run(CASCADE)


WORKLOADS: dict[str, Callable[[], None]] = {
    "split: 4 + 4 warps": lambda: split(split_in_two),
    "split: 4 + 4 + 1 warps": lambda: split(split_in_three),
    "prefill, q by TMA": lambda: prefill(32, 8, 128),
    "prefill, q by pointers": lambda: prefill(9, 3, 64),
    "decode": decode,
    "attention with windows, softcaps and sinks": attention_variants,
    "log_softmax": softmax,
    "read_out": read_out,
    "q/k norm + RoPE + KV write, activations, softcap": elementwise,
    "matmul": matmul,
    "mixtures": mixtures,
    "norms": rows,
    "packed weights": packed,
    "recurrences": recurrences,
    "decodes that share": cascade,
}
EXPLAINED = """\
`split` is a kernel of a few lines that splits its warps by `gl.warp_specialize`, stores to global memory and has no
shared memory of its own. With one group of worker warps nothing is reported. With a second group of a single warp, as
in `prefill`, three warps of that group are idle, and racecheck reports the hazard that it reports for `prefill`: the
worker warps' read of the byte that tells them what to do (`ld.shared.b8` after `barrier.sync 1`, at the kernel's first
line) against the main warps' writes of it (at the first line, and at `warp_specialize`). In the PTX all of them are
ordered by `barrier.sync 1`, which every warp joins: write, barrier, read, barrier, work, barrier, next write. It is
Triton's code, the same in both kernels.

A product of 300 rows is cuBLASLt's (`nvjet_*`), whose source we do not have: racecheck reports a write-after-read
hazard inside it. Products of 1 and 64 rows are ours. The last column says whether a row has nothing but what is named
here; if not, exit code 1.
"""
_FIRST = re.compile(r"Race reported between (\w+) access at (\S+?)\+\S+ in \S*?([\w.]+):(\d+)")
_SECOND = re.compile(r"and (\w+) access at (\S+?)\+\S+ in \S*?([\w.]+):(\d+) \[(\d+) hazards?\]")
_KERNEL = re.compile(r" access at (?:0x\w+ in )?([A-Za-z_]\w*)")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")


@dataclass(frozen=True)
class Result:
    """One tool's run over one workload."""

    tool: str
    workload: str
    text: str  # the tool's output
    ended: bool  # whether the workload ended in time and without an error of its own

    @property
    def as_expected(self) -> bool:
        """Whether the tool reported only hazards inside cuBLASLt or code that the compiler adds (`_is_known`)."""
        races = [line for line in self.text.splitlines() if " access at " in line]
        clean = re.search(r"SUMMARY: 0 (errors|hazards)", self.text) is not None
        return self.ended and (clean or (bool(races) and all(map(_is_known, races))))


def _is_known(line: str) -> bool:
    """Whether the accesses in the tool's line lie in cuBLASLt's kernels, at a kernel's first line, or where the kernel
    splits its warps."""
    kernels = _KERNEL.findall(line)
    if kernels and all(kernel.startswith("nvjet_") for kernel in kernels):
        return True
    match = _FIRST.search(line) or _SECOND.search(line)
    if match is None:
        return False
    sources = {"attention_hopper_kernel.py": Path(attention_hopper_kernel.__file__), "sanitize.py": Path(__file__)}
    if match[3] not in sources:
        return False
    text = sources[match[3]].read_text(encoding="utf-8").splitlines()[int(match[4]) - 1].strip()
    return text.startswith(("def ", "@gluon.jit", "gl.warp_specialize("))


def checked(tool: str, name: str) -> Result:
    command = ["compute-sanitizer", "--tool", tool, "--kernel-name-exclude", "kernel_substring=at::native"]
    command += ["--report-api-errors", "no"]  # our launcher lists parameters until an error ends it
    command += [sys.executable, "-m", "tests.kernels.sanitize", "--run", name]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return Result(tool, name, f"did not end within {TIMEOUT} s", False)
    return Result(tool, name, done.stdout + done.stderr, "Traceback" not in done.stderr)


def findings(text: str) -> list[str]:
    """Returns a line per pair of racing accesses, then the tool's summary (or the output's end, without a summary)."""
    pairs: Counter[str] = Counter()
    before = ""
    for line in text.splitlines():
        if match := _FIRST.search(line):
            before = f"{match[2]}: {match[1]} (line {match[4]})"
        elif match := _SECOND.search(line):
            pairs[f"{before} and {match[1]} (line {match[4]})"] += int(match[5])
    if not pairs:  # in a kernel without lines, such as one of cuBLASLt
        pairs.update(line.strip("= ")[:200] for line in text.splitlines() if " access at " in line)
    summaries = _SUMMARY.findall(text)
    last = summaries[-1] if summaries else " ".join(text.split())[-300:]
    return [f"{pair}: {count} hazards" for pair, count in sorted(pairs.items())] + [last]


def report(results: list[Result]) -> str:
    properties = torch.cuda.get_device_properties(0)
    lines = [
        "# compute-sanitizer over the kernels", "",
        f"`make sanitize` on an {properties.name}, torch {torch.__version__}, Triton {triton.__version__}.", "",
        EXPLAINED,
        "| tool | workload | found | as said above |", "|---|---|---|---|",
    ]  # fmt: skip
    for r in results:
        lines.append(
            f"| {r.tool} | {r.workload} | {'<br>'.join(findings(r.text))} | {'yes' if r.as_expected else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", choices=sorted(WORKLOADS), help="only the workload itself, without the tool")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("-o", type=Path, help="the Markdown file to write")
    parser.add_argument("--logs", type=Path, help="a folder for everything that the tool printed")
    arguments = parser.parse_args()
    if arguments.run:
        WORKLOADS[arguments.run]()
        torch.cuda.synchronize()
        return 0
    if shutil.which("compute-sanitizer") is None or not torch.cuda.is_available():
        parser.error("needs CUDA and its compute-sanitizer on the PATH")
    with ThreadPoolExecutor(max(4, (os.cpu_count() or 1) // 2)) as pool:
        jobs = [(tool, name) for tool in arguments.tools for name in WORKLOADS]
        results = list(pool.map(lambda job: checked(*job), jobs))
    for result in results:
        if arguments.logs:
            arguments.logs.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^a-z0-9]+", "-", f"{result.tool}-{result.workload}")
            (arguments.logs / f"{name}.txt").write_text(result.text)
    print(report(results))
    if arguments.o:
        arguments.o.write_text(report(results))
    return 0 if all(result.as_expected for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
