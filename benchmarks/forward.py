"""A full forward step of Qwen3-0.6B's and 8B's shapes, `native` compared with `fast`, with one set of random weights.

    T tokens in the step, S sequences, n wanted rows (a decode's every row, a prefill's last), V vocabulary.

A step is the part of the engine's step from the batch's tensors to the numbers that the host reads: embedding, layers,
lm_head and `read_out` of the wanted rows. Its GPU time is that of a CUDA graph of it; the eager time is the clock's,
synchronised. `fast` has its quickest attention backend and that backend's page size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.breakdown import breakdown
from benchmarks.measure import WrongResult, capture, guarded, seeded
from benchmarks.report import Failure, Line, Timing
from evalengine.bench.throughput import reason
from evalengine.bench.timing import compare_gpu_seconds, free_memory
from evalengine.engine.settings import DEFAULT_BLOCK_SIZE
from evalengine.layers import create_ops
from evalengine.layers.attention_backends import possible_backends
from evalengine.layers.embedding import rows_per_slice
from evalengine.layers.flash_attention import PAGE_MULTIPLE
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import Ops
from evalengine.models.decoder import DecoderForCausalLM
from evalengine.models.spec import ModelSpec

TARGET = 1.03  # native's time over fast's, at most
WEIGHT_STD = 0.02
LARGEST_ERROR = 0.1  # norm of the difference of the modes' logits over their norm; 1.4 if unrelated
EAGER_STEPS = 11


@dataclass(frozen=True)
class StepShape:
    """Sequences of `tokens` tokens each, whose last `rows` are computed in this step. Tokens fill pages of 256."""

    name: str
    sequences: int
    rows: int
    tokens: int


WORKLOADS = (
    StepShape("decode, batch 1, context 1024", 1, 1, 1024),
    StepShape("decode, batch 64, context 1024", 64, 1, 1024),
    StepShape("decode, batch 256, context 1024", 256, 1, 1024),
    StepShape("prefill of 1 x 8192 tokens", 1, 8192, 8192),
    StepShape("prefill of 8 x 1024 tokens", 8, 1024, 1024),
)


class Mode:
    """A numerics level with its model."""

    def __init__(self, name: str, spec: ModelSpec, ops: Ops, block_size: int) -> None:
        self.name, self.spec, self.ops, self.block_size = name, spec, ops, block_size
        self.model: DecoderForCausalLM = DecoderForCausalLM(spec, ops)

    def kv_caches(self, pool: Tensor, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """The front of a flat pool as this mode's pages; a slot is at the same place in memory for every page
        size."""
        spec = self.spec
        shape = (spec.num_layers, 2, num_tokens // self.block_size, self.block_size, spec.num_kv_heads, spec.head_dim)
        layers = pool[: torch.Size(shape).numel()].view(shape)
        return [(layer[0], layer[1]) for layer in layers]


def make_modes(spec: ModelSpec, device: torch.device, max_model_len: int) -> tuple[dict[str, Mode], str]:
    """`native` and `fast` over the same weights (normal; a norm's are 1), and fast's attention backend."""
    backend = possible_backends(device, spec.dtype, spec.head_dim, None, spec.variants)[0]
    fast_page = PAGE_MULTIPLE if backend == "flash_attn" else DEFAULT_BLOCK_SIZE
    native = Mode("native", spec, create_ops("native", spec.dtype, device), DEFAULT_BLOCK_SIZE)
    fast = Mode("fast", spec, create_ops("fast", spec.dtype, device, backend), fast_page)
    randomize(native.model, seed=0)
    for ours, theirs in zip(native.model.parameters(), fast.model.parameters(), strict=True):
        theirs.data = ours.data
    for mode in (native, fast):
        mode.model.finalize(max_model_len)
        mode.model.eval()
    return {"native": native, "fast": fast}, backend


def randomize(model: DecoderForCausalLM, seed: int) -> None:
    """Fills the weights with normal numbers, a norm's with 1. It must be called before `finalize`."""
    generator = seeded(model.ops.device, seed)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.fill_(1)
        else:
            weight.normal_(0, WEIGHT_STD, generator=generator)


class Step:
    """One mode's forward step on fixed inputs; a call gives (greedy ids int64 [n], logprobs float32 [n])."""

    def __init__(self, mode: Mode, workload: StepShape, pool: Tensor) -> None:
        device, count, rows = mode.ops.device, workload.sequences, workload.rows
        generator = torch.Generator().manual_seed(workload.sequences + workload.rows)

        def random_ids(n: int) -> Tensor:
            return torch.randint(0, mode.spec.vocab_size, (n,), generator=generator).to(device)

        self.mode = mode
        self.ids, self.targets = random_ids(count * rows), random_ids(count)
        self.positions = torch.arange(workload.tokens - rows, workload.tokens, device=device).repeat(count)
        self.last = torch.arange(1, count + 1, device=device) * rows - 1
        self.kv_caches = mode.kv_caches(pool, count * workload.tokens)
        parts = PAGE_MULTIPLE // mode.block_size  # Every mode shuffles by 256 tokens, so the slots are equal.
        order = torch.randperm(count * workload.tokens // PAGE_MULTIPLE, generator=generator).view(count, -1)
        pages = [[page * parts + i for page in row for i in range(parts)] for row in order.tolist()]
        lengths = [workload.tokens] * count
        self.metadata = AttentionMetadata.build([rows] * count, lengths, pages, mode.block_size, device)
        self.rows_per_slice = rows_per_slice(mode.spec.vocab_size, device)

    def hidden(self) -> Tensor:
        """Hidden states [n, H] of the wanted rows."""
        return self.mode.model(self.ids, self.positions, self.kv_caches, self.metadata)[self.last]

    def logits(self) -> Tensor:
        """float32 [n, V]."""
        return self.mode.model.compute_logits(self.hidden())

    def __call__(self) -> tuple[Tensor, Tensor]:
        greedy, logprobs = [], []
        hidden_slices = self.hidden().split(self.rows_per_slice)
        for hidden, targets in zip(hidden_slices, self.targets.split(self.rows_per_slice), strict=True):
            ids, values = self.mode.ops.read_out(self.mode.model.compute_logits(hidden), None, targets)
            greedy.append(ids)
            logprobs.append(values)
        return torch.cat(greedy), torch.cat(logprobs)


@torch.inference_mode()
def measure(device: torch.device, explanations: dict[str, Any], models: Mapping[str, ModelSpec]) -> Iterator[Line]:
    """Yields two lines a model and workload: GPU time, then eager time. `explanations` gets each one's kernels.

    Profiles come last, of models made anew, because a profiler that was used once makes every later launch slower.
    """
    for case, steps, reference in _cases(device, models):
        yield from guarded("forward step", case, partial(_compare, case, steps, reference))
        steps.clear()
    for case, steps, _ in _cases(device, models):
        layers = steps["native"].mode.spec.num_layers
        try:
            explanations[case] = {name: breakdown(step, layers) for name, step in steps.items()}
        except Exception as error:
            explanations[case] = reason(error)
        steps.clear()


def _cases(device: torch.device, models: Mapping[str, ModelSpec]) -> Iterator[tuple[str, dict[str, Step], str]]:
    """(case, a step of each mode, what fast is) by model and workload. The caller clears the steps."""
    longest = max(w.sequences * w.tokens for w in WORKLOADS)
    for model, spec in models.items():
        with torch.inference_mode(False):  # A tensor made in that mode may not take another's data.
            modes, backend = make_modes(spec, device, max(w.tokens for w in WORKLOADS))
        kv_numbers = 2 * spec.num_layers * longest * spec.num_kv_heads * spec.head_dim
        pool = torch.empty(kv_numbers, dtype=spec.dtype, device=device)
        generator = seeded(device, 1)
        for part in pool.split(1 << 30):
            part.normal_(generator=generator)
        for workload in WORKLOADS:
            steps = {name: Step(mode, workload, pool) for name, mode in modes.items()}
            yield f"{model}, {workload.name}", steps, f"fast ({backend})"
            free_memory()
        del modes, pool, part
        free_memory()


def _compare(case: str, steps: Mapping[str, Step], reference: str) -> list[Line]:
    error = check_agree(steps["native"].logits(), steps["fast"].logits())
    graphs = {name: captured(step) for name, step in steps.items()}
    problems = [f"{name} cannot be captured: {graph}" for name, graph in graphs.items() if isinstance(graph, str)]
    lines: list[Line] = []
    if problems:
        lines.append(Failure("forward step, GPU time", case, "; ".join(problems), wrong=False))
    else:
        replays = {name: graph for name, graph in graphs.items() if not isinstance(graph, str)}
        seconds = compare_gpu_seconds(replays, budget_s=0.5, repeats=(5, 20))
        lines.append(_line("forward step, GPU time", case, seconds, reference, error))
        replays.clear()
    graphs.clear()  # This frees the graphs' memory.
    lines.append(_line("forward step, eager", case, wall_seconds(steps), reference, error))
    return lines


def _line(what: str, case: str, seconds: Mapping[str, float], reference: str, error: float) -> Timing:
    details = {"logits, native to fast": error}
    return Timing(what, case, seconds["native"], reference, seconds["fast"], "time", TARGET, details=details)


def check_agree(ours: Tensor, theirs: Tensor) -> float:
    """|ours - theirs| / |theirs|. Raises WrongResult where it is more than two roundings of one model can make it."""
    error = ((ours - theirs).norm() / theirs.norm()).item()
    if not error <= LARGEST_ERROR:
        raise WrongResult(
            f"the two modes' logits differ by {error:.3g} of their norm, at most {LARGEST_ERROR} is rounding"
        )
    return error


def captured(step: Step) -> Callable[[], None] | str:
    """The step as a CUDA graph, or why it cannot be captured.

    Raises WrongResult if a replay of `native` gives other bytes than the eager step, or one of `fast` no numbers.
    """
    outputs: list[tuple[Tensor, Tensor]] = []
    replay = capture(lambda: outputs.append(step()))
    if isinstance(replay, str):
        return replay
    greedy, logprobs = outputs[-1]  # the outputs of the capture, which a replay fills
    logprobs.fill_(torch.nan)
    replay()
    expected = step()
    if step.mode.name == "native" and not (torch.equal(greedy, expected[0]) and torch.equal(logprobs, expected[1])):
        raise WrongResult("a CUDA graph of the native step gives other logprobs than the eager step")
    if not logprobs.isfinite().all():
        raise WrongResult(f"a CUDA graph of the {step.mode.name} step gives logprobs that are not finite")
    return replay


def wall_seconds(functions: Mapping[str, Callable[[], Any]], repeats: int = EAGER_STEPS) -> dict[str, float]:
    """Median seconds of wall-clock time of each function's call, synchronised before and after, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 2):
        for name, function in functions.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            torch.cuda.synchronize()
            if turn >= 2:  # The first two turns warm up.
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}
