"""The self-test of a batch-invariant engine, at the first use of a kind of model on a kind of GPU, before any request.

`verification` compares the schedules of single kernels, but a fault can lie between kernels: a graph's warm-up that
advances a state, a launch that is repeated for different operands. So a reduced model, with one layer of each kind and
the model's own weights, answers a few requests

* one at a time, launched kernel by kernel: the reference;
* under each of `schedules`, whose tokens and logprobs must have the reference's bytes;
* by plain PyTorch ops, in the run's dtype and in float32: the RMS error of our logprobs against float32 may be at most
  `MOST` times that of the run's dtype. With experts, float32 takes the choices of the computation that it is compared
  with, and the choices that it would make differently are compared in the same way.

On failure, the engine raises EvalEngineError with the axis, the first difference, its size and a workaround. A pass is
cached under the GPU, the driver, torch, Triton, the sources, and the layers' kinds and sizes.
"""

from __future__ import annotations

import hashlib
import math
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
from evalengine.util.libraries import installed_libraries
from evalengine.version import CONTRACT_VERSION

if TYPE_CHECKING:
    from evalengine.engine.execute.rank_runner import Errors

MOST = 3.0  # times the RMS error of plain PyTorch ops
LEAST = 2e-4  # nats that count as no error: the reference of a float32 run is such a run itself
LEAST_CHOICES = 0.05  # share of choices of experts that may differ in any case, since some are nearly equal
NEW_TOKENS = 8  # of a generation: enough for its graph to be captured in its middle
MANY = 1024  # tokens of the longest prompt: products of many rows have other kernels than those of few
COMPARED = 256  # of its tokens that plain ops compute
LONGEST_WINDOW = 1024  # tokens; a wider window is not filled
LONGEST = 4  # the place of the longest prompt among the requests
SOURCES = tuple(Path(__file__).parents[1] / name for name in ("engine", "invariant", "layers", "models"))


class Trial(Protocol):
    """An engine over the reduced model, with the tested engine's ranks and its own KV pool."""

    stats: EngineStats

    def run(self, requests: Iterable[Request]) -> Iterator[RequestOutput]: ...

    def learn_answers(self, answers: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None: ...


OpenTrial = Callable[[dict[str, Any]], AbstractContextManager[Trial]]  # takes overrides of `EngineConfig`


@dataclass(frozen=True)
class Schedule:
    """One way to run the requests, which must not change a byte."""

    axis: str
    settings: dict[str, Any]  # overrides of `EngineConfig`
    workaround: str  # a setting without which the axis does not exist
    happened: Callable[[EngineStats], bool] = lambda _: True  # whether the run exercised the axis
    passes: int = 1
    learn: bool = False  # whether the reference's answers are guessed, every other one with a wrong token
    most: int | None = None  # of the requests, the first so many; None: all


@dataclass
class Verdict:
    """The result of the self-test, as recorded in the manifest."""

    status: str  # passed | off | not tested: why
    cached: bool = False
    axes: list[str] = field(default_factory=list)  # that were exercised
    errors: dict[str, dict[str, float]] | None = None  # against float32: `Errors` of ours and of plain PyTorch ops
    seconds: float = 0.0


def requests(spec: ModelSpec, settings: Settings) -> list[Request]:
    """Prompts that end before, at and behind a page's border, two of which share a page and one of which fills a
    window, and scores of two choices after one context, which may continue its state (`sequence.ParentState`).

    The first two generations each need a new page while the pool of the axis `preemption` is full.
    """
    page, rng = settings.block_size, random.Random(0)
    new = min(NEW_TOKENS, settings.max_model_len - 1)
    room = settings.max_model_len - new
    windows = [block.window for block in spec.blocks if block.window is not None and block.window <= LONGEST_WINDOW]
    lengths = [page - 3, 2 * page - 3, 5, page + 1, max([MANY, *windows]) + 9]
    # One whose second decode, which captures a graph if all requests run at once, brings its state behind a chunk.
    if spec.recurrences:
        lengths.append(63)
    prompts = [[rng.randrange(spec.vocab_size) for _ in range(max(1, min(n, room)))] for n in lengths]
    prompts[3][:-1] = prompts[1][: len(prompts[3]) - 1]  # a page in common
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    generations: list[Request] = [GenerateRequest(i, prompt, params) for i, prompt in enumerate(prompts)]
    context = prompts[1][: max(1, room // 2)]
    choice = prompts[2][: max(1, room - len(context))]
    scores = [ScoreRequest(len(prompts) + i, context, tokens) for i, tokens in enumerate((choice, choice[::-1]))]
    return [*generations, *scores]


def schedules(spec: ModelSpec, config: EngineConfig, settings: Settings, *, has_graphs: bool) -> list[Schedule]:
    """The schedules that are compared with each request alone: those that the engine's settings allow."""
    ordinary, eager = "batch_invariant=false", {"enforce_eager": True}
    found = [Schedule("chunks", {**eager, "max_num_batched_tokens": 19}, ordinary)]
    if config.max_num_seqs > 1:
        found.insert(0, Schedule("batch", eager, "engine.max_num_seqs=1", lambda s: s.largest_batch > 1))
    if has_graphs:
        found.append(Schedule("graphs", {}, "engine.enforce_eager=true", lambda s: s.num_graph_steps > 0, passes=2))
    if config.enable_prefix_caching:
        cached = {**eager, "enable_prefix_caching": True, "max_num_seqs": 2}
        workaround = "engine.enable_prefix_caching=false"
        found.append(Schedule("prefix", cached, workaround, lambda s: s.num_cached_tokens > 0, passes=2))
    if config.max_num_seqs > 1:
        least = _blocks(spec, settings, min(2 * settings.block_size - 3 + NEW_TOKENS, settings.max_model_len))
        small = {**eager, "num_kv_blocks": least, "max_num_seqs": 2}
        found.append(Schedule("preemption", small, "engine.max_num_seqs=1", lambda s: s.num_preemptions > 0, most=2))
    if settings.speculation not in ("off", RECURRENT):
        guessed = {**eager, "speculation": "always"}
        right_and_wrong = lambda s: 0 < s.num_right_guesses < s.num_guesses  # noqa: E731
        found.append(Schedule("guesses", guessed, "engine.speculation=off", right_and_wrong, learn=True))
    return found


def run(
    open_trial: OpenTrial,
    errors: Callable[[list[int]], tuple[Errors, Errors] | None],
    spec: ModelSpec,
    config: EngineConfig,
    settings: Settings,
    *,
    has_graphs: bool,
) -> Verdict:
    """Run the self-test; raise EvalEngineError if it fails.

    spec: the reduced model's. errors: token ids -> the errors of our ops and of plain PyTorch ops; None where they
    cannot be compared.
    """
    started, batch, axes = time.perf_counter(), requests(spec, settings), []
    common = {
        "num_kv_blocks": sum(_blocks(spec, settings, _length(request)) + 1 for request in batch),
        "max_num_seqs": min(len(batch), config.max_num_seqs),
        "max_num_batched_tokens": min(2 * MANY, config.max_num_batched_tokens),
        "speculation": "off",
        "enable_prefix_caching": False,
    }
    with open_trial({**common, "max_num_seqs": 1, "enforce_eager": True}) as trial:
        reference = {request.request_id: next(iter(trial.run([request]))) for request in batch}
    found = errors(batch[LONGEST].prompt_ids[:COMPARED])
    if broken := next((output.error for output in reference.values() if output.error is not None), None):
        if found is None or not math.isfinite(found[1].rms):  # the model's fault, which its requests will report
            return Verdict(f"not tested: {broken}")
        raise EvalEngineError(_failure("plain PyTorch", f"{broken}, plain ops have", "batch_invariant=false"))
    for schedule in schedules(spec, config, settings, has_graphs=has_graphs):
        wanted = batch[: schedule.most]
        with open_trial({**common, **schedule.settings}) as trial:
            if schedule.learn:
                trial.learn_answers(_guesses(batch, reference, spec.vocab_size))
            for _ in range(schedule.passes):
                outputs = {output.request_id: output for output in trial.run(wanted)}
                if difference := first_difference(outputs, {r.request_id: reference[r.request_id] for r in wanted}):
                    raise EvalEngineError(_failure(schedule.axis, difference, schedule.workaround))
            if schedule.happened(trial.stats):
                axes.append(schedule.axis)
    if found is not None and (difference := _too_far(*found)):
        raise EvalEngineError(_failure("plain PyTorch", difference, "batch_invariant=false"))
    both = None if found is None else {"ours": asdict(found[0]), "plain": asdict(found[1])}
    return Verdict("passed", False, axes, both, round(time.perf_counter() - started, 2))


def first_difference(outputs: dict[int, RequestOutput], reference: dict[int, RequestOutput]) -> str:
    """The first token or logprob that is not the reference's, and by how much; "" if all bytes are equal."""
    for number, expected in reference.items():
        output = outputs.get(number)
        if output is None or output.error is not None:
            return f"request {number}: {'no answer' if output is None else output.error}"
        pairs = zip(output.token_ids, output.logprobs, expected.token_ids, expected.logprobs, strict=False)
        for place, (token, logprob, own, alone) in enumerate(pairs):
            if token != own or np.float32(logprob).tobytes() != np.float32(alone).tobytes():
                where = f"request {number}, token {place}: logprob {logprob:.9g} of id {token}"
                return f"{where}, run alone {alone:.9g} of id {own} (by {abs(float(logprob) - float(alone)):.2g} nats)"
        if len(output.token_ids) != len(expected.token_ids):
            return f"request {number}: {len(output.token_ids)} tokens, run alone {len(expected.token_ids)}"
    return ""


class CachedVerdict:
    """The place of a verdict in the cache of schedule verdicts, under everything that it may depend on."""

    def __init__(
        self,
        spec: ModelSpec,
        products: tuple[object, ...],
        config: EngineConfig,
        settings: Settings,
        *,
        has_graphs: bool,
    ) -> None:
        """spec: the reduced model's. products: the kinds of its products (packed forms, quantised inputs).

        Raises ImportError without Triton.
        """
        from evalengine.verification import verdict_cache

        sources = hashlib.sha256()
        for folder in SOURCES:
            for file in sorted(folder.rglob("*.py")):
                sources.update(file.relative_to(folder.parent).as_posix().encode() + b"\0" + file.read_bytes())
        planned = schedules(spec, config, settings, has_graphs=has_graphs)
        self._cache = verdict_cache
        self._key = {
            **verdict_cache.environment(settings.device, CONTRACT_VERSION),
            "part": "self-test",
            "model": [repr(spec), spec.module],
            "transformers": installed_libraries().get("transformers") if spec.module is not None else None,
            "products": repr(products),
            "numerics": settings.numerics,
            "dtype": str(settings.dtype),
            "block_size": settings.block_size,
            "ranks": settings.tensor_parallel_size,
            "lengths": [_length(request) for request in requests(spec, settings)],
            "axes": [schedule.axis for schedule in planned],
            "engine": sources.hexdigest(),
        }
        self.known = verdict_cache.load(self._key)

    def save(self, verdict: Verdict) -> None:
        """Keep a pass."""
        if verdict.status == "passed":
            self._cache.save(self._key, asdict(verdict))


def _blocks(spec: ModelSpec, settings: Settings, tokens: int) -> int:
    """The room in the pool that a sequence of so many tokens needs."""
    return kv_layout(spec, settings).blocks_for(tokens, settings.block_size, EngineConfig.max_num_batched_tokens)


def _length(request: Request) -> int:
    """The most tokens that the request can have."""
    if isinstance(request, GenerateRequest):
        return len(request.prompt_ids) + request.params.max_tokens
    return len(request.context_ids) + len(request.continuation_ids)


def _too_far(ours: Errors, plain: Errors) -> str:
    """Why our error is too large; "" if it is not, or if plain ops give no finite numbers either. A NaN of ours is."""
    if not math.isfinite(plain.rms):
        return ""
    if not ours.rms <= max(MOST * plain.rms, LEAST):
        return f"the RMS error against float32 is {ours.rms:.2g} nats, that of plain PyTorch ops {plain.rms:.2g}"
    if not ours.choices <= MOST * plain.choices + LEAST_CHOICES:
        share = f"{ours.choices:.1%} of the tokens have different experts from float32"
        return f"{share}, with plain PyTorch ops {plain.choices:.1%}"
    return ""


def _guesses(
    batch: Sequence[Request], reference: dict[int, RequestOutput], vocab_size: int
) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, answer) pairs; the answers of odd requests are wrong from their middle on."""
    for request in batch:
        if isinstance(request, GenerateRequest):
            answer = list(reference[request.request_id].token_ids)
            if request.request_id % 2:
                middle = len(answer) // 2
                answer[middle] = (answer[middle] + 1) % vocab_size
            yield list(request.prompt_ids), answer


def _failure(axis: str, difference: str, workaround: str) -> str:
    return (
        f"the engine's self-test failed on this machine ({axis}): {difference}. No request was answered. {workaround} "
        "avoids it. engine.self_test=off skips the test, and results may then depend on how the work is batched. "
        "Please report it with the output of `python -m evalengine verify engine --quick engine.self_test=off`"
    )
