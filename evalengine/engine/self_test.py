"""The self-test of a batch-invariant engine, at the first use of a kind of model on a kind of GPU, before any request.

Schedules are compared kernel by kernel (`verification`), but a fault can lie between kernels: a graph's warm-up that
advances a state, a launch that is repeated for other operands. So a cut of the model, with one layer of each kind and
the model's own weights, answers a few requests

* one at a time, launched kernel by kernel: the reference;
* under each of `schedules`, whose tokens and logprobs must have the reference's bytes;
* by plain PyTorch ops, in the run's dtype and in float32: the RMS error of our logprobs against float32 may be at most
  `MOST` times that of the run's dtype. With experts, float32 takes the choices of the computation that it is compared
  with, and the choices that it would make otherwise are compared likewise.

A failure ends the start with the axis, the first difference, its size and what the user can do. A pass is cached under
the GPU, the driver, torch, Triton, the sources and the layers' kinds and sizes.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from evalengine.config.schema import EngineConfig
from evalengine.engine.kv_layout import kv_layout
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, SamplingParams, ScoreRequest
from evalengine.engine.settings import RECURRENT, Settings
from evalengine.engine.stats import EngineStats
from evalengine.errors import EvalEngineError
from evalengine.models.spec import ModelSpec
from evalengine.version import CONTRACT_VERSION

if TYPE_CHECKING:
    from evalengine.engine.execute.rank_runner import Errors

MOST = 3.0  # times the RMS error of plain PyTorch ops
LEAST = 2e-4  # nats that count as no error: the reference of a float32 run is such a run itself
LEAST_CHOICES = 0.05  # share of choices of experts that may differ in any case, since some are nearly equal
MANY = 1024  # tokens of the longest prompt: products of many rows have other kernels than those of few
COMPARED = 256  # of its tokens that plain ops compute
NEW_TOKENS = 8  # of a generation: enough for its graph to be captured in its middle
LONGEST_WINDOW = 1024  # tokens; a wider window is not filled
LONGEST = 4  # the place of the longest prompt
SOURCES = tuple(Path(__file__).parents[1] / name for name in ("engine", "layers", "models"))


class Trial(Protocol):
    """An engine over the cut, with the ranks of the one that is tested and schedule settings of its own."""

    stats: EngineStats

    def run(self, requests: Iterable[Request]) -> Iterator[RequestOutput]: ...

    def learn_answers(self, answers: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None: ...


OpenTrial = Callable[[dict[str, Any]], AbstractContextManager[Trial]]  # takes some of `EngineConfig`'s fields


@dataclass(frozen=True)
class Schedule:
    """One way to run the requests, which must not change a byte."""

    axis: str
    settings: dict[str, Any]
    happened: Callable[[EngineStats], bool]  # whether the run exercised the axis
    advice: str  # a setting that avoids it
    passes: int = 1
    learn: bool = False  # whether the reference's answers are guessed, every other one with a wrong token


@dataclass
class Verdict:
    """What the self-test found, as the manifest has it."""

    status: str  # passed | off
    cached: bool = False
    axes: list[str] = field(default_factory=list)  # that were exercised
    errors: dict[str, dict[str, float]] | None = None  # against float32: `Errors` of ours and of plain PyTorch ops
    seconds: float = 0.0


def requests(spec: ModelSpec, settings: Settings) -> list[Request]:
    """Prompts that end before, at and behind a page's border, two of which share a page and one of which fills a
    window, and a score.

    Two generations have so many tokens that both need a new page while the pool of `schedules` is full.
    """
    page, rng = settings.block_size, random.Random(0)
    room = settings.max_model_len - NEW_TOKENS - 1
    windows = [block.window for block in spec.blocks if block.window is not None and block.window <= LONGEST_WINDOW]
    lengths = [page - 3, 2 * page - 3, 5, page + 1, max([MANY, *windows]) + 9]
    prompts = [[rng.randrange(spec.vocab_size) for _ in range(max(1, min(n, room)))] for n in lengths]
    prompts[3][:-1] = prompts[1][: len(prompts[3]) - 1]  # a page in common
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    generations: list[Request] = [GenerateRequest(i, prompt, params) for i, prompt in enumerate(prompts)]
    return [*generations, ScoreRequest(len(prompts), prompts[1][: room // 2 + 1], prompts[2])]


def schedules(spec: ModelSpec, settings: Settings, has_graphs: bool) -> Iterator[Schedule]:
    """The schedules that are compared with each request alone."""
    batch_invariance = "batch_invariant=false"
    eager = {"enforce_eager": True}
    yield Schedule("batch", eager, lambda s: s.largest_batch > 1, batch_invariance)
    yield Schedule("chunks", {**eager, "max_num_batched_tokens": 19}, lambda s: s.largest_step <= 19, batch_invariance)
    if has_graphs:
        yield Schedule("graphs", {}, lambda s: s.num_graph_steps > 0, "engine.enforce_eager=true", passes=2)
    prefix = {**eager, "enable_prefix_caching": True, "max_num_seqs": 2}
    yield Schedule("prefix", prefix, lambda s: s.num_cached_tokens > 0, "engine.enable_prefix_caching=false", passes=2)
    least = _blocks(spec, settings, 2 * settings.block_size - 3 + NEW_TOKENS)
    preemption = {**eager, "num_kv_blocks": least, "max_num_seqs": 2}
    yield Schedule("preemption", preemption, lambda s: s.num_preemptions > 0, "engine.max_num_seqs=1")
    if settings.speculation != RECURRENT:
        guesses = {**eager, "speculation": "always"}
        yield Schedule(
            "guesses", guesses, lambda s: 0 < s.num_right_guesses < s.num_guesses, "engine.speculation=off", learn=True
        )


def run(
    open_trial: OpenTrial,
    errors: Callable[[list[int]], tuple[Errors, Errors] | None],
    spec: ModelSpec,
    settings: Settings,
    *,
    has_graphs: bool,
) -> Verdict:
    """Run the self-test of a cut with this spec; raise EvalEngineError if it fails.

    errors: token ids -> the errors of our ops and of plain PyTorch ops; None where there are no plain ops for the
    level's weights.
    """
    started, asked, axes = time.perf_counter(), requests(spec, settings), []
    roomy = sum(_blocks(spec, settings, _length(request)) + 1 for request in asked)
    common = {
        "num_kv_blocks": roomy, "max_num_seqs": len(asked), "max_num_batched_tokens": 2 * MANY,
        "speculation": "off", "enable_prefix_caching": False,
    }  # fmt: skip
    with open_trial({**common, "max_num_seqs": 1, "enforce_eager": True}) as trial:
        reference = {request.request_id: next(iter(trial.run([request]))) for request in asked}
    for schedule in schedules(spec, settings, has_graphs):
        wanted = [request for request in asked if schedule.axis != "preemption" or request.request_id < 2]
        with open_trial({**common, **schedule.settings}) as trial:
            if schedule.learn:
                trial.learn_answers(_guesses(asked, reference))
            for _ in range(schedule.passes):
                outputs = {output.request_id: output for output in trial.run(wanted)}
                if difference := first_difference(outputs, reference):
                    raise EvalEngineError(_failure(schedule.axis, difference, schedule.advice))
            if schedule.happened(trial.stats):
                axes.append(schedule.axis)
    found = errors(asked[LONGEST].prompt_ids[:COMPARED])
    if found is not None and (what := _too_far(*found)):
        raise EvalEngineError(_failure("plain PyTorch", what, "batch_invariant=false"))
    both = None if found is None else {"ours": asdict(found[0]), "plain": asdict(found[1])}
    return Verdict("passed", False, axes, both, round(time.perf_counter() - started, 2))


def first_difference(outputs: dict[int, RequestOutput], reference: dict[int, RequestOutput]) -> str:
    """The first token or logprob that is not the reference's, and by how much; "" if all bytes are equal."""
    for number, output in sorted(outputs.items()):
        expected = reference[number]
        if (output.error is None) != (expected.error is None):
            return f"request {number}: {output.error or expected.error}"
        pairs = zip(output.token_ids, output.logprobs, expected.token_ids, expected.logprobs, strict=False)
        for place, (token, logprob, own, alone) in enumerate(pairs):
            if token != own or np.float32(logprob).tobytes() != np.float32(alone).tobytes():
                where = f"request {number}, token {place}: logprob {logprob:.9g} of id {token}"
                return f"{where}, alone {alone:.9g} of id {own} (by {abs(float(logprob) - float(alone)):.2g} nats)"
        if len(output.token_ids) != len(expected.token_ids):
            return f"request {number}: {len(output.token_ids)} tokens, alone {len(expected.token_ids)}"
    return ""


class CachedVerdict:
    """The place of a verdict in the cache of schedule verdicts, under everything that it may depend on."""

    def __init__(self, spec: ModelSpec, products: tuple[object, ...], settings: Settings) -> None:
        """spec: the cut's. products: the kinds of its products (packed forms, quantised inputs)."""
        from evalengine.verification import verdict_cache  # it needs Triton, which a CPU machine may lack

        sources = hashlib.sha256()
        for folder in SOURCES:
            for file in sorted(folder.rglob("*.py")):
                sources.update(file.read_bytes())
        self._cache = verdict_cache
        self._key = {
            **verdict_cache.environment(settings.device, CONTRACT_VERSION),
            "part": "self-test",
            "model": repr(spec),
            "products": repr(products),
            "numerics": settings.numerics,
            "dtype": str(settings.dtype),
            "block_size": settings.block_size,
            "ranks": settings.tensor_parallel_size,
            "engine": sources.hexdigest(),
        }
        self.known = verdict_cache.load(self._key)

    def save(self, verdict: dict[str, Any]) -> None:
        self._cache.save(self._key, verdict)


def _blocks(spec: ModelSpec, settings: Settings, tokens: int) -> int:
    """The room in the pool that a sequence of so many tokens needs."""
    return kv_layout(spec, settings).blocks_for(tokens, settings.block_size, EngineConfig.max_num_batched_tokens)


def _length(request: Request) -> int:
    more = NEW_TOKENS if isinstance(request, GenerateRequest) else len(request.continuation_ids)
    return len(request.prompt_ids) + more


def _too_far(ours: Errors, plain: Errors) -> str:
    """Why our error is too large; "" if it is not. A NaN is."""
    if not ours.rms <= max(MOST * plain.rms, LEAST):
        return f"the RMS error against float32 is {ours.rms:.2g} nats, that of plain PyTorch ops {plain.rms:.2g}"
    if not ours.choices <= MOST * plain.choices + LEAST_CHOICES:
        return (
            f"{ours.choices:.1%} of the tokens have other experts than in float32, with plain PyTorch ops "
            f"{plain.choices:.1%}"
        )
    return ""


def _guesses(asked: Sequence[Request], reference: dict[int, RequestOutput]) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, answer) pairs; the answers of odd requests go wrong in their middle."""
    for request in asked:
        if isinstance(request, GenerateRequest):
            answer = list(reference[request.request_id].token_ids)
            if request.request_id % 2:
                answer[NEW_TOKENS // 2] ^= 1
            yield list(request.prompt_ids), answer


def _failure(axis: str, difference: str, advice: str) -> str:
    return (
        f"the engine's self-test failed on this machine ({axis}): {difference}. No request was answered. {advice} "
        "avoids it. engine.self_test=off skips the test, and results may then depend on how the work is batched. "
        "Please report it"
    )
