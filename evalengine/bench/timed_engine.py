"""One mode's engine as `bench throughput` times it: made, warmed up, and run from an empty prefix cache."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evalengine.bench.workloads import Workload, generation
from evalengine.config.schema import EngineConfig
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import GenerateRequest, Request, RequestOutput
from evalengine.engine.settings import Settings, resolve_settings
from evalengine.errors import EvalEngineError

MODES = ("invariant", "fast")
Row = dict[str, Any]


@dataclass(frozen=True)
class Preset:
    """A model, and the workloads that it is to run."""

    name: str
    checkpoint: Checkpoint
    max_model_len: int
    workloads: list[Workload]
    ranks: int = 1  # the degree of tensor parallelism


def rank_suffix(ranks: int) -> str:
    """The end of the name of a preset on several ranks."""
    return "" if ranks == 1 else f"-tp{ranks}"


@dataclass(frozen=True)
class ThroughputPlan:
    presets: list[Preset]
    modes: Sequence[str] = MODES
    rounds: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    one_by_one: bool = False
    profile: bool = True


class TimedEngine:
    """One mode of one preset, loaded; `held` is the GPU memory that it holds, in bytes."""

    def __init__(self, preset: Preset, mode: str, plan: ThroughputPlan, num_kv_blocks: int | None) -> None:
        before, started = _allocated(), time.perf_counter()
        config = engine_config(preset, plan, num_kv_blocks)
        self.mode = mode
        self.llm = LLM(preset.checkpoint, batch_invariant=mode == "invariant", engine=config)
        list(self.llm.run([generation(0, list(range(1, min(17, preset.max_model_len))), 1)]))
        self.startup_s = time.perf_counter() - started
        self.llm.capture_graphs()  # The warm-up meets most of them, but not always all that a timed run meets.
        self.held = _allocated() - before

    def warm_up(self, workload: Workload) -> None:
        for _ in range(2):
            outputs, _ = _run(self.llm, workload.warm_up)
            _check(outputs, workload.warm_up)

    def timed(self, workload: Workload) -> Row:
        """Makes one run from an empty prefix cache; returns the part of a row that only the run can give."""
        self.llm.reset_prefix_cache()
        gc.collect()  # torch keeps its cached memory, for which a later run would not ask the driver again.
        before, others = _allocated(), _allocated() - self.held
        stats = self.llm.stats
        steps, graph_steps = stats.num_steps, stats.num_graph_steps
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        _synchronize()
        started = time.perf_counter()
        outputs, first = _run(self.llm, workload.requests)
        _synchronize()
        wall = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated() - others if torch.cuda.is_available() else None
        self.held += _allocated() - before
        _check(outputs, workload.requests)
        return {
            "output_tokens": workload.output_tokens,
            "wall_s": wall,
            "requests_per_s": len(outputs) / wall,
            "output_tokens_per_s": workload.output_tokens / wall,
            "time_to_first_result_s": first - started,
            "peak_memory_bytes": peak,
            "gpu_busy_share": None,
            "steps": stats.num_steps - steps,
            "graph_steps": stats.num_graph_steps - graph_steps,
            "startup_s": self.startup_s,
            "digest": digest(outputs),
        }

    def about(self) -> Row:
        llm = self.llm
        return {
            "attention": llm.settings.attention_backend,
            "max_num_seqs": llm.config.max_num_seqs,
            "max_num_batched_tokens": llm.config.max_num_batched_tokens,
            "tensor_parallel_size": llm.config.tensor_parallel_size,
            "num_kv_tokens": llm.limits.num_kv_blocks * llm.settings.block_size,
        }


def engine_config(preset: Preset, plan: ThroughputPlan, num_kv_blocks: int | None) -> EngineConfig:
    """The engine's configuration. num_kv_blocks None: as the engine plans it. Nothing is guessed: what dummy weights
    say repeats itself, so that guesses would be right as often as in no real text."""
    return EngineConfig(
        max_model_len=preset.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        num_kv_blocks=num_kv_blocks,
        tensor_parallel_size=preset.ranks,
        speculation="off",
    )


def digest(outputs: Sequence[RequestOutput]) -> str:
    """SHA-256 (hex) over number, ids (int64) and logprobs (float32) of every output, little-endian, by request id."""
    sha256 = hashlib.sha256()
    for output in sorted(outputs, key=lambda o: o.request_id):
        for number in (len(output.token_ids), *output.token_ids):
            sha256.update(number.to_bytes(8, "little"))
        sha256.update(output.logprobs.astype("<f4").tobytes())
    return sha256.hexdigest()


def preset_settings(preset: Preset, mode: str, plan: ThroughputPlan) -> Settings:
    """The settings with which the mode's engine would run."""
    return resolve_settings(engine_config(preset, plan, None), mode == "invariant", "auto", preset.checkpoint.spec)


def _run(llm: LLM, requests: Sequence[Request]) -> tuple[list[RequestOutput], float]:
    """All outputs, and the clock's time at the first."""
    outputs: list[RequestOutput] = []
    first = 0.0
    for output in llm.run(requests):
        first = first or time.perf_counter()
        outputs.append(output)
    return outputs, first


def _check(outputs: Sequence[RequestOutput], requests: Sequence[Request]) -> None:
    """Raises EvalEngineError if a request failed, or has a different number of tokens than requested."""
    tokens_asked = {r.request_id: r.params.max_tokens for r in requests if isinstance(r, GenerateRequest)}
    if failed := [o for o in outputs if o.error]:
        raise EvalEngineError(f"{len(failed)} of {len(requests)} requests failed; the first: {failed[0].error}")
    short = [o for o in outputs if len(o.token_ids) != tokens_asked.get(o.request_id, len(o.token_ids))]
    if short or len(outputs) != len(requests):
        raise EvalEngineError(f"{len(outputs)} of {len(requests)} requests finished, {len(short)} with too few tokens")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _allocated() -> int:
    """Bytes in torch's tensors on the GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
