"""Whole runs of the engine at the token level, both modes in one process. `python -m evalengine bench throughput`.

Before the timed runs of a workload an engine warms up, twice, with up to 256 other requests; each timed run starts from
an empty prefix cache. The GPU is synchronised before the clock starts and before it stops. Where memory holds both
modes' engines at once they take turns, round by round, each first in every other round, so that a drifting clock and
memory taken for the first time affect both alike; else one mode comes after the other. Short runs have more rounds than
evaluated.

The JSON has `environment` (`bench.environment`), `settings`, `ceilings` (`floor.Ceilings`), `arrangement` (by
preset: how the modes shared the GPU), `failures` (what could not be measured) and `rows`, one a timed run:

    engine, mode          evalengine; invariant or fast
    preset, workload      the model's name, the workload's (`workloads`)
    round                 from 0
    requests              number of them; cut_requests: of those, shortened to fit the model
    prompt_tokens         of prompts, contexts and continuations, shared ones counted each time
    output_tokens         generated; 0 for scores
    wall_s                seconds from the call to the last result, synchronised
    requests_per_s, output_tokens_per_s
    time_to_first_result_s  until the first request is finished (not its first token)
    peak_memory_bytes     of torch's allocator in the run, less what the other mode's engine holds; null without CUDA
    gpu_busy_share        kernels' time over the clock's in steady decode, measured apart; null elsewhere
    kernels_us            where it is not null: microseconds of each step of steady decode by kernel, the longest first
    steps, graph_steps    of the run; those replayed as CUDA graphs
    startup_s             from the call that makes the engine to its first token; imports and CUDA's context apart
    floor_s               the least time possible (`floor`), of the run's requests, shared evenly by the ranks; `work`
                          is what it was computed from
    digest                SHA-256 (hex) over every output's ids and logprobs, in the requests' order
    attention, max_num_seqs, max_num_batched_tokens, num_kv_tokens, tensor_parallel_size    of the
                          engine

`--compare` takes such a file, or one of another engine whose `rows` have engine, mode, preset, workload, requests and
wall_s (`throughput_compare`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from evalengine.bench.floor import Ceilings, LeastWork, floor_seconds, measure_ceilings, work_of
from evalengine.bench.timed_engine import Preset, Row, ThroughputPlan, TimedEngine, preset_settings
from evalengine.bench.timing import free_memory
from evalengine.bench.workloads import Workload
from evalengine.engine.llm import LLM
from evalengine.engine.request import Request
from evalengine.engine.stats import EngineStats
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.models.decoder import num_parameters

STEADY_STEPS = 10  # consecutive steps of decodes alone before the profile begins
PROFILED_STEPS = 60
LONGEST = 20  # kernels of `kernels_us`
HEAD = 0.1  # first part of the profile's time, left out because the profiler's own start holds the host up

BY_TURNS, ONE_BY_ONE = "by turns, both engines in memory", "one mode after the other"
# Runs shorter than SHORT_RUN_S have at least SHORT_ROUNDS rounds, because a part of their time is the host's.
SHORT_RUN_S, SHORT_ROUNDS = 3.0, 3
RESERVE = 5 << 30  # bytes of an engine beyond weights and KV: activations, CUDA graphs, the temporaries of loading


@dataclass
class Measured:
    """The results of one run of the command."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    ceilings: dict[str, float] = field(default_factory=dict)
    arrangement: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)


def measure(plan: ThroughputPlan, measured: Measured, on_row: Callable[[Row | None], None]) -> None:
    """Fills `measured`; on_row is called after each row, and with None after anything else that changed it.

    A run that fails is written down, and the others go on.
    """
    settings = preset_settings(plan.presets[0], "invariant", plan)
    ceilings = measure_ceilings(settings.device, settings.dtype)
    measured.ceilings = asdict(ceilings)
    for preset in plan.presets:
        for row in _preset_rows(preset, plan, ceilings, measured):
            measured.rows.append(row)
            on_row(row)
    if plan.profile and settings.device.type == "cuda":  # A used profiler slows every later launch.
        _profile(plan, measured)
        on_row(None)


# -- both modes of a preset ------------------------------------------------------------------------------------------


def _preset_rows(preset: Preset, plan: ThroughputPlan, ceilings: Ceilings, measured: Measured) -> Iterator[Row]:
    works = {w.name: work_of(w.requests, plan.max_num_seqs, preset.checkpoint.spec) for w in preset.workloads}
    pools = _pools(preset, plan)
    queue: list[Sequence[str]] = [plan.modes] if pools else [(mode,) for mode in plan.modes]
    while queue:
        modes = queue.pop(0)
        measured.arrangement[preset.name] = BY_TURNS if len(modes) > 1 else ONE_BY_ONE
        with ExitStack() as stack:
            engines: list[TimedEngine] = []
            try:
                for mode in modes:
                    engines.append(stack.enter_context(_started(preset, mode, plan, pools.get(mode))))
            except Exception as error:
                if len(modes) > 1:  # Both fit by the estimate, but not in fact.
                    print(f"bench: {preset.name}: {reason(error)}; {ONE_BY_ONE}", file=sys.stderr, flush=True)
                    queue, pools = [(mode,) for mode in modes], {}
                else:
                    _write_down(error, measured, preset.name, "start", modes[0])
                continue
            for workload in preset.workloads:
                yield from _workload_rows(preset, workload, works[workload.name], plan, engines, ceilings, measured)


def _workload_rows(
    preset: Preset,
    workload: Workload,
    work: LeastWork,
    plan: ThroughputPlan,
    engines: Sequence[TimedEngine],
    ceilings: Ceilings,
    measured: Measured,
) -> Iterator[Row]:
    ready: list[TimedEngine] = []
    for engine in engines:
        with _written_down(measured, preset.name, workload.name, engine.mode):
            engine.warm_up(workload)
            ready.append(engine)
    seconds: list[float] = []
    for number in count():
        if number >= plan.rounds and (number >= SHORT_ROUNDS or sum(seconds) >= number * len(ready) * SHORT_RUN_S):
            return
        for engine in ready if number % 2 == 0 else reversed(ready):
            with _written_down(measured, preset.name, workload.name, engine.mode):
                timed = engine.timed(workload)
                seconds.append(timed["wall_s"])
                dtype = engine.llm.settings.dtype
                yield {
                    "engine": "evalengine",
                    "mode": engine.mode,
                    "preset": preset.name,
                    "workload": workload.name,
                    "round": number,
                    "requests": len(workload.requests),
                    "cut_requests": workload.num_cut,
                    "prompt_tokens": workload.prompt_tokens,
                    **timed,
                    "floor_s": floor_seconds(work, preset.checkpoint.spec, dtype, ceilings) / preset.ranks,
                    "work": asdict(work),
                    **engine.about(),
                }


def _pools(preset: Preset, plan: ThroughputPlan) -> dict[str, int]:
    """KV pages of each mode, as many as the workloads can use at once; empty if the modes come one after the other,
    which they do where such engines do not fit together."""
    if plan.one_by_one or len(plan.modes) == 1:
        return {}
    settings = {mode: preset_settings(preset, mode, plan) for mode in plan.modes}
    pools, spec, needed = {}, preset.checkpoint.spec, 0
    for mode, resolved in settings.items():
        needs = (w.blocks(resolved.block_size, plan.max_num_seqs) for w in preset.workloads)
        pools[mode] = max(-(-preset.max_model_len // resolved.block_size), *needs)
        numbers = 2 * spec.num_layers * resolved.block_size * spec.num_kv_heads * spec.head_dim * pools[mode]
        needed += (numbers + num_parameters(spec)) * resolved.dtype.itemsize // preset.ranks + RESERVE
    device = settings[plan.modes[0]].device
    if device.type == "cuda":
        free_memory()
        if needed > torch.cuda.mem_get_info(device)[0]:
            return {}
    return pools


@contextmanager
def _started(preset: Preset, mode: str, plan: ThroughputPlan, num_kv_blocks: int | None) -> Iterator[TimedEngine]:
    print(f"bench: starting {preset.name}, {mode}", file=sys.stderr, flush=True)
    free_memory()  # An engine that could not be started may have left some.
    engine = TimedEngine(preset, mode, plan, num_kv_blocks)
    try:
        yield engine
    finally:
        engine.llm.close()
        free_memory()


@contextmanager
def _written_down(measured: Measured, preset: str, workload: str, mode: str) -> Iterator[None]:
    """Writes an error down as a failure, so that it costs this measurement only."""
    try:
        yield
    except Exception as error:
        _write_down(error, measured, preset, workload, mode)


def _write_down(error: Exception, measured: Measured, preset: str, workload: str, mode: str) -> None:
    message = str(error) if isinstance(error, EvalEngineError) else reason(error)
    measured.failures.append({"preset": preset, "workload": workload, "mode": mode, "error": message})
    print(f"bench: {preset}, {workload}, {mode}: {message}", file=sys.stderr, flush=True)


def _profile(plan: ThroughputPlan, measured: Measured) -> None:
    """Add `gpu_busy_share` and `kernels_us` to the rows of the first preset's `random`, or of its first workload that
    generates in a batch."""
    preset = plan.presets[0]
    candidates = [w for w in preset.workloads if w.generates and len(w.requests) > 1]
    workload = min(candidates, key=lambda w: w.name != "random", default=None)
    for mode in plan.modes if workload is not None else ():
        assert workload is not None
        with _written_down(measured, preset.name, f"profile of {workload.name}", mode), ExitStack() as stack:
            engine = stack.enter_context(_started(preset, mode, plan, None))
            engine.warm_up(workload)
            engine.llm.reset_prefix_cache()
            found = profile_decodes(engine.llm, workload.requests)
            for row in measured.rows:
                if (row["preset"], row["workload"], row["mode"]) == (preset.name, workload.name, mode):
                    row |= found


def check_plan(preset: Preset, plan: ThroughputPlan) -> None:
    """Raises ConfigError now for settings that would be refused only after minutes of other presets."""
    problems: list[str] = []
    for mode in plan.modes:
        try:
            preset_settings(preset, mode, plan)
        except ConfigError as error:
            problems += [f"{preset.name}, {mode}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)


def reason(error: Exception) -> str:
    """The error in one line, for a cell of a table."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:300]


class _Enough(Exception):
    """The profile is complete; the rest of the run is not wanted."""


class _Window:
    """A callback for every step, which profiles `PROFILED_STEPS` of steady decode and then ends the run."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.profiler = profile(activities=[ProfilerActivity.CUDA])
        self.computed = llm.stats.num_computed_tokens
        self.steady = 0
        self.profiled: int | None = None  # steps profiled so far; None before the profile begins

    def __call__(self, stats: EngineStats) -> None:
        tokens, self.computed = stats.num_computed_tokens - self.computed, stats.num_computed_tokens
        if self.profiled is None:
            decodes = not self.llm.scheduler.waiting and tokens <= len(self.llm.scheduler.running)
            self.steady = self.steady + 1 if decodes else 0
            if self.steady == STEADY_STEPS:
                self.profiler.start()
                self.profiled = 0
            return
        self.profiled += 1
        if self.profiled == PROFILED_STEPS:
            raise _Enough


def profile_decodes(llm: LLM, requests: Sequence[Request]) -> dict[str, Any]:
    """`gpu_busy_share` and `kernels_us` of `PROFILED_STEPS` decode steps amid a run of the requests; nothing without
    CUDA or enough steps."""
    if llm.settings.device.type != "cuda":
        return {}
    window = _Window(llm)
    with suppress(_Enough):
        for _ in llm.run(requests, window):
            pass
    if window.profiled is None:
        return {}
    torch.cuda.synchronize()
    window.profiler.stop()
    events = [event for event in window.profiler.events() or [] if event.device_type == DeviceType.CUDA]
    kernels = [e for e in events if not e.name.startswith(("Memcpy", "Memset"))]
    share = busy_share((e.time_range.start, e.time_range.end) for e in kernels)
    return {"gpu_busy_share": share, "kernels_us": kernel_times(kernels, window.profiled)}


def kernel_times(events: Iterable[Any], steps: int) -> dict[str, float]:
    """Microseconds of each of so many steps by kernel, the `LONGEST` that take most of it, longest first.

    A kernel counts from the end of those that ended before it: it may be on the GPU earlier, waiting for them.
    """
    total: Counter[str] = Counter()
    reached = float("-inf")
    for event in sorted(events, key=lambda event: event.time_range.end):
        total[event.name] += event.time_range.end - max(event.time_range.start, reached)
        reached = event.time_range.end
    return {name: round(us / steps, 1) for name, us in total.most_common(LONGEST)}


def busy_share(intervals: Iterable[tuple[float, float]]) -> float | None:
    """The length of the intervals' union over the time from the first start to the last end, without the first
    `HEAD` of that time; None without intervals."""
    ordered = sorted(intervals)
    if not ordered:
        return None
    first, last = ordered[0][0], max(end for _, end in ordered)
    start = first + HEAD * (last - first)
    busy, reached = 0.0, start
    for begin, end in ordered:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy / (last - start) if last > start else None
