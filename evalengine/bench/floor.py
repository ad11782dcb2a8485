"""The least time that a workload can take on a GPU, from two ceilings measured in the same run.

    floor = (2 x N x prompt tokens + 4 x heads x head_dim x pairs + 2 x hidden x vocabulary x prompt rows) / F
          + (decode steps x weight bytes + KV tokens x a layer's KV bytes of one + decode tokens x state bytes) / B

F   FLOP/s of a dense matrix product in the run's dtype; B bytes/s of a copy (read plus written).
N   parameters without the embedding table and lm_head.
prompt tokens   of prompts, contexts and continuations (their last is never fed), equal prefixes once: 20 choices after
    one context compute it once, and so do all rows behind the same exemplars.
pairs           of those tokens with a token that they see, summed over layers: attention's scores and its weighted
    sums. A layer with a window sees that many tokens at most.
prompt rows     that lm_head must see in them: one a generation, and one for every distinct prefix a token is scored
    after.
decode steps    as few as `max_num_seqs` sequences in a step allow. Each reads every weight once, lm_head's included;
    an embedding table that is not lm_head's is not counted.
experts         of a mixture count in N and in the weights if they are used: k of E for a prompt's token; for a
    decode step of n sequences as many as an even choice touches, E (1 - (1 - k / E)^n): a lopsided one touches fewer.
KV tokens       that decode steps read, summed over layers: each sequence its own tokens in each of its steps, as many
    as it sees. Of a prefix that several sequences share, one of them reads it.

state bytes     that a decode step reads of one sequence in all recurrent layers (`engine.states.decode_bytes`).

Sampling, norms, the KV's writing, recurrences over a prompt and the time between kernels count nothing, nor does a
decode's arithmetic: no engine reaches it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from evalengine.bench.timing import compare_gpu_seconds, free_memory
from evalengine.engine.request import GenerateRequest, Request, ScoreRequest
from evalengine.engine.states import decode_bytes
from evalengine.models.decoder import weight_counts
from evalengine.models.spec import ModelSpec

LARGE_COPY_BYTES = 4 << 30  # read plus written, far above any cache
GPU_PRODUCTS = ((8192, 8192, 8192), (8192, 4096, 24576))  # (rows, K, N) of large products; the quicker one counts
CPU_PRODUCT, CPU_COPY_BYTES = (512, 512, 512), 64 << 20
# A GPU's power limit takes some tenths of a second to lower its clocks: an H200 made products at 790 TFLOP/s for the
# first 0.04 s, and at 685 from then on. So the speed that lasts is that of the last of so many seconds.
LASTING_SECONDS, BATCH = 2.0, 16


def copies_of(num_bytes: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Copies on the device, by torch, that read half of `num_bytes` and write half: the driver's, and a kernel's.

    The driver's alone is no yardstick: in a CUDA graph, an H200's reached 2.7 TB/s for some sizes and 4.2 for others.
    """
    source = torch.randint(0, 256, (max(4, num_bytes // 8 * 4),), dtype=torch.uint8, device=device).view(torch.int32)
    target = torch.empty_like(source)
    return {
        "copy by the driver": lambda: target.copy_(source),
        "copy by a kernel": lambda: torch.bitwise_not(source, out=target),
    }


def quickest_copy(seconds: Mapping[str, float]) -> float:
    """The least time of the `copies_of`; `seconds` may hold other functions' times, too."""
    return min(value for name, value in seconds.items() if name.startswith("copy by"))


@dataclass(frozen=True)
class Ceilings:
    """The floor's two ceilings, of short bursts; and what products reach that go on for seconds, as prefills do."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    lasting_flops_per_s: float


@dataclass(frozen=True)
class LeastWork:
    """The least work that a workload needs from any model; the module's docstring defines the counts."""

    prompt_tokens: int
    pairs: int
    prompt_rows: int
    decode_steps: int
    kv_tokens_read: int
    decode_tokens: int = 0  # those that all decode steps together compute
    # `pairs` and `kv_tokens_read` of a layer that sees everything, and, by window, of one that does not.
    of_windows: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    def of_layers(self, spec: ModelSpec) -> tuple[int, int]:
        """`pairs` and `kv_tokens_read`, summed over a model's layers of attention."""
        windows = [block.window for block in map(spec.block, range(spec.num_layers)) if block.attends]
        counts = [(self.pairs, self.kv_tokens_read) if w is None else self.of_windows[w] for w in windows]
        return sum(pairs for pairs, _ in counts), sum(read for _, read in counts)


def work_of(requests: Sequence[Request], max_num_seqs: int, spec: ModelSpec | None = None) -> LeastWork:
    """The counts of this module's formula. spec: the model, if its layers may have windows."""
    spans = _new_tokens([_fed(r) for r in requests])
    new = [end - start for start, end in spans]
    # The decode steps of each request.
    outputs = [r.params.max_tokens - 1 if isinstance(r, GenerateRequest) else 0 for r in requests]
    windows = {block.window for block in spec.blocks if block.window is not None} if spec is not None else set()

    def seen(window: int | None) -> tuple[int, int]:
        pairs = sum(_seen(end, window) - _seen(start, window) for start, end in spans)
        # Step j reads the tokens of the j steps up to its own.
        read = [_seen(own + count, window) - _seen(own, window) for own, count in zip(new, outputs, strict=True)]
        return pairs, sum(read)

    pairs, read = seen(None)
    generations = sum(isinstance(r, GenerateRequest) for r in requests)
    scored = [r for r in requests if isinstance(r, ScoreRequest)]
    steps = max(max(outputs, default=0), -(-sum(outputs) // max_num_seqs))
    rows = generations + _scored_prefixes(scored)
    return LeastWork(sum(new), pairs, rows, steps, read, sum(outputs), {w: seen(w) for w in sorted(windows)})


def _seen(tokens: int, window: int | None) -> int:
    """How many tokens the first so many of a sequence see, each at most `window`."""
    within = tokens if window is None else min(tokens, window)
    return within * (within + 1) // 2 + (tokens - within) * within


def floor_seconds(work: LeastWork, spec: ModelSpec, dtype: torch.dtype, ceilings: Ceilings) -> float:
    """The floor in seconds. dtype: of weights, but for experts in MXFP4, and of the KV cache."""
    itemsize = dtype.itemsize
    table = spec.vocab_size * spec.hidden_size
    total, experts = weight_counts(spec)
    body = total - experts - table * (1 if spec.tie_word_embeddings else 2)
    used, touched = _experts_used(work, spec)
    flops = 2 * (body + experts * used) * work.prompt_tokens
    pairs, kv_tokens = work.of_layers(spec)
    flops += 4 * spec.num_heads * spec.head_dim * pairs
    flops += 2 * table * work.prompt_rows
    kv_token = 2 * spec.num_kv_heads * spec.head_dim * itemsize
    in_mxfp4 = (spec.packing or "").startswith("mxfp4")
    expert = (17 / 32 if in_mxfp4 else itemsize) * experts  # 16 bytes and a scale for 32 numbers
    moved = work.decode_steps * ((body + table) * itemsize + expert * touched) + kv_tokens * kv_token
    moved += work.decode_tokens * decode_bytes(spec, dtype)
    return flops / ceilings.matmul_flops_per_s + moved / ceilings.copy_bytes_per_s


def _experts_used(work: LeastWork, spec: ModelSpec) -> tuple[float, float]:
    """The shares of the experts that a token uses, and that a decode step reads."""
    if spec.mixture is None:
        return 0.0, 0.0
    used = spec.mixture.router.chosen / spec.mixture.router.experts
    return used, 1 - (1 - used) ** (work.decode_tokens / max(1, work.decode_steps))


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measures this machine's ceilings. On a CPU they are rough figures by the clock, and the floor shows little."""
    free_memory()
    cuda = device.type == "cuda"
    copied = LARGE_COPY_BYTES if cuda else CPU_COPY_BYTES
    timer = compare_gpu_seconds if cuda else _quickest
    copy = quickest_copy(timer(copies_of(copied, device)))
    products: dict[tuple[int, int, int], Callable[[], Any]] = {}
    for m, k, n in GPU_PRODUCTS if cuda else (CPU_PRODUCT,):
        product_dtype = dtype if cuda else torch.float32  # A CPU may lack bf16 products and convert.
        a, b = (torch.randn(shape, device=device).to(product_dtype) for shape in ((m, k), (k, n)))
        products[m, k, n] = partial(torch.mm, a, b)
        del a, b
    bursts = [2 * m * k * n / timer({"product": run})["product"] for (m, k, n), run in products.items()]
    lasting = bursts  # what lasts comes after all bursts, which a hot GPU would not reach
    if cuda:
        lasting = [2 * m * k * n / _lasting_seconds(run) for (m, k, n), run in products.items()]
    products.clear()
    free_memory()
    return Ceilings(copied / copy, max(bursts), max(lasting))


def _lasting_seconds(function: Callable[[], Any]) -> float:
    """Seconds of one call of a function that runs on the GPU without a pause, after `LASTING_SECONDS` of it."""
    begin = time.perf_counter()
    while True:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(BATCH):
            function()
        end.record()
        end.synchronize()
        if time.perf_counter() - begin > LASTING_SECONDS:
            return start.elapsed_time(end) / BATCH / 1e3


def _fed(request: Request) -> list[int]:
    """The prompt tokens that go through the model."""
    if isinstance(request, GenerateRequest):
        return request.prompt_ids
    return request.context_ids + request.continuation_ids[:-1]


def _new_tokens(sequences: Sequence[list[int]]) -> list[tuple[int, int]]:
    """For each sequence the place of its tokens beyond the longest prefix that it shares with those sorted before it,
    so that each distinct prefix counts once."""
    new = [(0, 0)] * len(sequences)
    before = np.empty(0, dtype=np.int64)
    for i in sorted(range(len(sequences)), key=lambda i: sequences[i]):
        ids = np.asarray(sequences[i], dtype=np.int64)
        shortest = min(len(ids), len(before))
        differing = np.flatnonzero(ids[:shortest] != before[:shortest])
        shared = int(differing[0]) if len(differing) else shortest
        new[i] = shared, len(ids)
        before = ids
    return new


def _scored_prefixes(requests: Sequence[ScoreRequest]) -> int:
    """Distinct prefixes after which some token is scored."""
    contexts: dict[tuple[int, ...], int] = {}
    prefixes: set[tuple[int, tuple[int, ...]]] = set()
    for request in requests:
        context = contexts.setdefault(tuple(request.context_ids), len(contexts))
        continuation = tuple(request.continuation_ids)
        prefixes.update((context, continuation[:j]) for j in range(len(continuation)))
    return len(prefixes)


def _quickest(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The quickest of three calls of each function, by the clock, after one call to warm up."""
    seconds = {}
    for name, function in functions.items():
        times = []
        for _ in range(4):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        seconds[name] = min(times[1:])
    return seconds
