"""The proof: every axis's schedules against the answers of each request alone, and the negative control."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from evalengine.certify.axes import AXES, MIXED, control
from evalengine.certify.cases import EFFORTS, Case, pool_pages
from evalengine.certify.fault_injection import FEW_ROWS, split_few_rows
from evalengine.certify.schedules import ReferenceWorkload, Skip, Variant
from evalengine.certify.subject import Subject, open_subject
from evalengine.engine.execute.sharing import least_saved
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import RequestOutput
from evalengine.engine.settings import RECURRENT, possible_ranks, resolve_speculation
from evalengine.engine.stats import EngineStats
from evalengine.errors import EvalEngineError
from evalengine.layers.attention_backends import possible_backends
from evalengine.layers.fast import FastOps
from evalengine.models.decoder import num_parameters
from evalengine.plain_text import warn
from evalengine.tasks.base import Task

NEW = get_context("spawn")  # a fresh interpreter: nothing of this process's state, CUDA context or threads
SIZE = {"cuda": 8192, "cpu": 512}  # rows and columns of a matrix, whose product takes a millisecond or two
AT_ONCE = 20  # products between two synchronisations
MOST_CPU_RANKS = 4  # Each rank is a process, which imports and loads for seconds.
NONE_FOUND = "the control found no difference on this device: it cannot show that the comparison would see one"

Answers = list[tuple[Case, RequestOutput]]
BLOCK_SIZE = 64
DEFAULTS = {  # of a schedule that does not set them
    "max_num_seqs": 256,
    "max_num_batched_tokens": 4096,
    "enable_prefix_caching": True,
    "enforce_eager": False,
    "cascade_attention": "auto",
    "speculation": "off",
    "num_threads": None,
}


@dataclass
class Trial:
    """One schedule, run and compared."""

    variant: Variant
    tally: Tally
    stats: EngineStats
    seconds: float  # of a new process: the time spent waiting for it

    @property
    def missed(self) -> str | None:
        """Names the event that this schedule should have caused and did not, so that it proves nothing."""
        return None if self.variant.happened(self.stats) else f"{self.variant.label}: without {self.variant.wanted}"


@dataclass
class AxisResult:
    name: str
    trials: list[Trial] = field(default_factory=list)
    skipped: str | None = None

    @property
    def tally(self) -> Tally:
        """The tallies of all trials, merged."""
        return _merged(trial.tally for trial in self.trials)

    @property
    def missed(self) -> list[str]:
        return [missed for trial in self.trials if (missed := trial.missed)]


@dataclass
class Control(AxisResult):
    """The negative control. How many bytes of it differ depends on the attention that `fast` has here."""

    attention_backend: str = field(kw_only=True)  # flash_attn | triton | sdpa
    fault_injected: bool = False  # whether its products of few rows were split over K (`fault_injection`)


@dataclass
class Proof:
    """The results of `Prover.prove`."""

    facts: dict[str, Any]  # about the engine that ran
    cases: list[Case]
    reference: dict[int, RequestOutput]
    axes: list[AxisResult]
    control: Control
    logprobs_asked: int = 0  # the number of logprobs that the caller wants compared

    @property
    def total(self) -> Tally:
        return _merged(axis.tally for axis in self.axes)

    @property
    def verdict(self) -> str:
        """IDENTICAL, DIFFERENT, or INCOMPLETE: nothing differed, but that proves too little (`incomplete`)."""
        if self.total.differing_logprobs:
            return "DIFFERENT"
        return "INCOMPLETE" if self.incomplete else "IDENTICAL"

    @property
    def incomplete(self) -> list[str]:
        """The reasons why this is no proof, a sentence each."""
        compared = self.total.logprobs
        lacking = [f"{axis.name}: not exercised: {missed}" for axis in self.axes for missed in axis.missed]
        if compared < max(1, self.logprobs_asked):
            lacking.append(f"{compared:,} logprobs compared, {max(1, self.logprobs_asked):,} wanted")
        if not self.control.tally.differing_logprobs:
            lacking.append(NONE_FOUND)
        return lacking


class Prover:
    """Runs axes one after another on weights that are loaded once."""

    def __init__(
        self, subject: Subject, checkpoint: Checkpoint, tasks: Sequence[Task], logprobs: int | None = None
    ) -> None:
        """logprobs: how many to compare at least, by random schedules at the end; None: the effort's number."""
        self.subject, self.checkpoint = subject, checkpoint
        self.effort = EFFORTS[subject.effort]
        self.logprobs_asked = logprobs or 0
        self.logprobs_wanted = self.effort.logprobs if logprobs is None else logprobs
        self.cases = subject.cases(checkpoint, tasks)
        self.results: list[AxisResult] = []
        self._other: LLM | None = None  # an engine with another number of ranks
        self._neighbour: Neighbour | None = None  # of the axis `busy`
        self._answers_of_new_process: Callable[[], Answers] | None = None  # of the axis `restart`

    def prove(self, axes: Collection[str]) -> Proof:
        """Run the named axes (of `AXES`), then the negative control.

        Other processes, which import for seconds, start before the first axis and are ready when theirs comes.

        Raises: ConfigError for settings that the engine refuses, EvalEngineError for a model without finite numbers.
        """
        with self.subject.engine(self.checkpoint, self.cases) as llm, ExitStack() as processes:
            facts = _facts(llm)
            work = self._workload(llm)
            self._start_processes(axes, work, llm, processes)
            for name in AXES:
                if name in axes:
                    self.results.append(self._axis(name, AXES[name](work), work, llm))
        return Proof(facts, self.cases, dict(work.reference), self.results, self._control(), self.logprobs_asked)

    def _start_processes(self, axes: Collection[str], work: ReferenceWorkload, llm: LLM, processes: ExitStack) -> None:
        """Start the processes of the axes `busy` and `restart` in the background; `processes` ends them."""
        planned = [variant for name in ("busy", "restart") if name in axes for variant in AXES[name](work)]
        if any(isinstance(variant, Variant) and variant.busy for variant in planned):
            self._neighbour = Neighbour(str(llm.settings.device))
            processes.callback(self._neighbour.end)
        if any(isinstance(variant, Variant) and variant.new_process for variant in planned):
            self._answers_of_new_process = processes.enter_context(in_a_new_process(self.subject))

    def _control(self) -> Control:
        """Makes the same comparison in the ordinary mode, where it must find differences to show that it can.

        The Triton attention depends on no neighbour in the ordinary mode either, and cuBLAS multiplies a small model's
        rows alike in every batch (the bundled model's on an H200). Then other attentions are tried, until one differs,
        and at last an injected fault.
        """
        control, others = self._control_with("auto")
        for backend in others:
            if not control.tally.differing_logprobs:
                control, _ = self._control_with(backend)
        if not control.tally.differing_logprobs:
            control, _ = self._control_with("auto", fault_injected=True)
        return control

    def _control_with(self, attention_backend: str, fault_injected: bool = False) -> tuple[Control, list[str]]:
        """The control with that attention, and the other attentions that could serve the model here."""
        fault = f", products of up to {FEW_ROWS} rows split over K" if fault_injected else ""
        _log(f"negative control: batch_invariant=false engine.attention_backend={attention_backend}{fault}")
        changed: dict[str, Any] = {"attention_backend": attention_backend, "enforce_eager": fault_injected}
        with self.subject.engine(self.checkpoint, self.cases, False, **changed) as llm:
            if fault_injected:
                assert llm.runner is not None and isinstance(llm.runner.ops, FastOps)
                split_few_rows(llm.runner.ops)
            work = self._workload(llm)
            result = self._axis("control", control(work), work, llm)
            settings, taken = llm.settings, llm.settings.attention_backend
            served = possible_backends(settings.device, settings.dtype, llm.spec.head_dim, None, llm.spec.variants)
            others = [name for name in served if name != taken]
            control_result = Control(
                result.name, result.trials, result.skipped, attention_backend=taken, fault_injected=fault_injected
            )
            return control_result, others

    def _workload(self, llm: LLM) -> ReferenceWorkload:
        started = time.perf_counter()
        reference = alone(llm, self.cases)
        _log(f"{len(self.cases)} requests, each alone: {time.perf_counter() - started:.1f} s")
        settings = llm.settings
        assert llm.runner is not None
        has_graphs = llm.runner.ops.capturable
        has_cascade = least_saved(replace(llm.config, cascade_attention="always"), settings, llm.spec) is not None
        sizes = (settings.max_model_len, llm.spec.vocab_size)
        device, ranks = settings.device, list[int]()  # ranks: other degrees of tensor parallelism on this machine
        if settings.numerics != "fast":
            most = torch.cuda.device_count() - (device.index or 0) if device.type == "cuda" else MOST_CPU_RANKS
            ranks = [n for n in possible_ranks(llm.spec) if n <= most and n != settings.tensor_parallel_size]
        always = replace(llm.config, speculation="always")
        can_guess = resolve_speculation(always, settings.numerics, device, llm.spec) != RECURRENT
        about = *sizes, device.type, has_graphs, has_cascade, bool(llm.spec.recurrences), can_guess, ranks
        return ReferenceWorkload(self.cases, reference, self.effort, *about)

    def _axis(self, name: str, variants: Iterator[Variant | Skip], work: ReferenceWorkload, llm: LLM) -> AxisResult:
        result = AxisResult(name)
        with ExitStack() as others:
            for variant in variants:
                if name == MIXED and len(result.trials) >= self.effort.mixed and self._enough(result):
                    break
                try:
                    if not isinstance(variant, Skip):
                        engine = self._of_ranks(variant.ranks, llm, others)
                        result.trials.append(self._trial(name, variant, work, engine))
                        continue
                    result.skipped = variant.reason
                except NoNeighbour as error:
                    result.skipped = str(error)
                _log(f"{name}: skipped: {result.skipped}")
        return result

    def _of_ranks(self, ranks: int | None, llm: LLM, others: ExitStack) -> LLM:
        """The engine `llm`, or another with that number of ranks. `others` closes it when the next one is made, and
        at the end."""
        if ranks in (None, llm.settings.tensor_parallel_size):
            return llm
        if self._other is None or self._other.settings.tensor_parallel_size != ranks:
            others.close()
            self._other = others.enter_context(self.subject.engine(self.checkpoint, self.cases, ranks=ranks))
            others.callback(setattr, self, "_other", None)
        return self._other

    def _enough(self, last: AxisResult) -> bool:
        return _merged(axis.tally for axis in [*self.results, last]).logprobs >= self.logprobs_wanted

    def _trial(self, name: str, variant: Variant, work: ReferenceWorkload, llm: LLM) -> Trial:
        started = time.perf_counter()
        if variant.new_process:
            assert self._answers_of_new_process is not None
            stats, answers = EngineStats(), self._answers_of_new_process()
        else:
            assert not variant.busy or self._neighbour is not None
            with self._neighbour.busy() if variant.busy and self._neighbour else nullcontext():
                answers = batched(llm, variant)
            stats = llm.stats
        tally = Tally()
        for case, answer in answers:
            assert case.key is not None
            request = f"request {case.key} ({case.what})"
            tally.add(f"{name}, {variant.label}", request, work.reference[case.key], answer)
        trial = Trial(variant, tally, stats, time.perf_counter() - started)
        differ = f"{tally.differing_logprobs:,} of {tally.logprobs:,} logprobs differ"
        _log(f"{name}: {variant.label}: {differ}, {trial.seconds:.1f} s{f' ({trial.missed})' if trial.missed else ''}")
        return trial


def alone(llm: LLM, cases: list[Case]) -> dict[int, RequestOutput]:
    """Makes the reference: every case runs alone, its prompt in one chunk, without a prefix cache, every kernel
    launched.

    Raises `EvalEngineError` if the model gives no finite numbers even so, because there is nothing to compare with.
    """
    longest = max(case.length for case in cases)
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": longest, "enable_prefix_caching": False}
    settings |= {"enforce_eager": True}
    _reconfigure(llm, [max(cases, key=lambda case: case.length)], settings)
    answers = {}
    for case in cases:
        assert case.key is not None
        answers[case.key] = next(iter(llm.run([case.request])))
        if error := answers[case.key].error:
            raise EvalEngineError(f"{case.what}, run alone: {error}; this model cannot be certified")
    return answers


def batched(llm: LLM, variant: Variant) -> Answers:
    """Run every pass over the variant's cases in one engine; the neighbours' answers are left out."""
    _reconfigure(llm, variant.cases, variant.settings, fill=float("nan") if variant.nan_pool else 0.0)
    if variant.learned:
        llm.learn_answers(variant.learned)  # after the reconfiguration, which forgets them
    cases = {case.request.request_id: case for case in variant.cases}
    answers = []
    for _ in range(variant.passes):
        for output in llm.run([case.request for case in variant.cases]):
            if (case := cases[output.request_id]).key is not None:
                answers.append((case, output))
    # Sorted, so that the first difference is always the same.
    return sorted(answers, key=lambda pair: pair[0].key or 0)


def _reconfigure(llm: LLM, cases: list[Case], settings: Mapping[str, Any], fill: float = 0.0) -> None:
    """Gives the engine these settings and a pool for the cases, filled with one number: a slot that is read before it
    is written has the same value in every proof, not what the memory held before."""
    # fast's attention may prescribe a page size, and no schedule of the control sets another.
    default_size = llm.settings.block_size if llm.settings.numerics == "fast" else BLOCK_SIZE
    settings = {**DEFAULTS, "block_size": default_size, **settings}
    llm.reconfigure(**{"num_kv_blocks": pool_pages(cases, settings["block_size"]), **settings})
    assert llm.runner is not None
    llm.runner.fill_pool(fill)


def _facts(llm: LLM) -> dict[str, Any]:
    settings, spec = llm.settings, llm.spec
    return {
        "architecture": spec.architecture,
        "num_layers": spec.num_layers,
        "num_parameters": num_parameters(spec),
        "format": llm.checkpoint.format,
        "numerics": settings.numerics,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "device": str(settings.device),
        "max_model_len": settings.max_model_len,
        "self_test": llm.self_test_verdict,
    }


def _merged(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.merge(tally)
    return total


def _log(line: str) -> None:
    warn(line, "verify: ")


@dataclass(frozen=True)
class Difference:
    """The first logprob that differs."""

    schedule: str
    request: str
    token: int  # the token's number in the answer, from 0
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.schedule}: {self.request}, token {self.token}: {self.found} against {self.expected} alone"


@dataclass
class Tally:
    """How many logprobs were compared, and how they differ."""

    logprobs: int = 0
    differing_logprobs: int = 0
    differing_bytes: int = 0
    largest_difference: float = 0.0  # between two finite logprobs of the same token
    first_difference: Difference | None = None

    def add(self, schedule: str, request: str, expected: RequestOutput, found: RequestOutput) -> None:
        """Compares token by token. A logprob of another token, or one that is missing, differs in all 4 bytes."""
        for token in range(max(len(expected.token_ids), len(found.token_ids))):
            self.logprobs += 1
            if different := self._differing_bytes(expected, found, token):
                self.differing_logprobs += 1
                self.differing_bytes += different
                if self.first_difference is None:
                    left, right = _show(expected, token), _show(found, token)
                    self.first_difference = Difference(schedule, request, token, left, right)

    def _differing_bytes(self, expected: RequestOutput, found: RequestOutput, token: int) -> int:
        if token >= min(len(expected.token_ids), len(found.token_ids)):
            return 4
        if expected.token_ids[token] != found.token_ids[token]:
            return 4
        left, right = expected.logprobs[token : token + 1], found.logprobs[token : token + 1]
        difference = abs(float(left[0]) - float(right[0]))
        if math.isfinite(difference):
            self.largest_difference = max(self.largest_difference, difference)
        return int((left.view(np.uint8) != right.view(np.uint8)).sum())

    def merge(self, other: Tally) -> None:
        self.logprobs += other.logprobs
        self.differing_logprobs += other.differing_logprobs
        self.differing_bytes += other.differing_bytes
        self.largest_difference = max(self.largest_difference, other.largest_difference)
        self.first_difference = self.first_difference or other.first_difference

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _show(answer: RequestOutput, token: int) -> str:
    """`token id: logprob (its bits)`, or why there is none."""
    if token >= len(answer.token_ids):
        return f"nothing ({answer.error})" if answer.error else "nothing"
    logprob = answer.logprobs[token : token + 1]
    return f"{float(logprob[0]):.9g} ({int(logprob.view(np.uint32)[0]):08x}) of id {answer.token_ids[token]}"


class NoNeighbour(EvalEngineError):
    """No second process could use the device: its compute mode is exclusive, or its memory full."""


@contextmanager
def in_a_new_process(subject: Subject) -> Iterator[Callable[[], Answers]]:
    """Start another process that answers all of the subject's cases in the background.

    Yields a function that waits for the answers. It raises `EvalEngineError` if the process fails.
    """
    with ProcessPoolExecutor(1, NEW) as pool:
        running = pool.submit(_answers, replace(subject))

        def answers() -> Answers:
            try:
                return running.result()
            except (EvalEngineError, BrokenProcessPool, OSError) as error:
                raise EvalEngineError(f"the same requests in a new process failed: {error}") from error
            finally:
                pool.shutdown()  # frees its memory on the device

        yield answers


def _answers(subject: Subject) -> Answers:
    checkpoint, tasks = open_subject(subject.config, subject.layers)
    cases = subject.cases(checkpoint, tasks)
    with subject.engine(checkpoint, cases) as llm:
        return batched(llm, Variant("a new process", cases))


class Neighbour:
    """A second process on the same device. It is idle until `busy`, so that it can be started in advance."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._connection, other_end = NEW.Pipe()
        self._process = NEW.Process(target=keep_busy, args=(device, other_end), daemon=True)
        self._process.start()
        other_end.close()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Keep the device busy, so that a GPU switches between two processes in the middle of kernels; then end.

        Raises `NoNeighbour`, with the reason, if the process cannot use the device.
        """
        try:
            try:
                reason = self._connection.recv()
                if not reason:
                    self._connection.send("start")
                    self._connection.recv()
            except (EOFError, OSError):
                reason = "it ended"
            if reason:
                raise NoNeighbour(f"no other process could keep {self._device} busy: {reason}")
            yield
        finally:
            self.end()

    def end(self) -> None:
        """Kill the process. Idempotent."""
        self._process.kill()
        self._process.join()


def keep_busy(device: str, connection: Connection) -> None:
    """Report "", or why the device cannot be used; wait for a message; then multiply matrices until killed."""
    try:
        size = SIZE[torch.device(device).type]
        x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        _multiply(x)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}".strip().splitlines()[-1])
        return
    connection.send("")
    with suppress(EOFError, BrokenPipeError):  # the parent has ended
        connection.recv()
        connection.send("")
        while True:
            _multiply(x)


def _multiply(x: torch.Tensor) -> None:
    for _ in range(AT_ONCE):
        x @ x
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
