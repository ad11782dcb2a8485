"""The engine: drives a loaded model step by step until every request is answered. It takes token ids; `LLM` takes text.

A step is schedule, launch, postprocess, and the results that are postprocessed may be those of the step before.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from evalengine.config.schema import EngineConfig, ModelConfig
from evalengine.engine import self_test
from evalengine.engine.execute.batch import NextToken, ScoredTokens
from evalengine.engine.execute.model_runner import Launched
from evalengine.engine.execute.rank_runner import Errors, errors
from evalengine.engine.kv_layout import kv_layout
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.loaded_model import LoadedModel
from evalengine.engine.prompts import items
from evalengine.engine.request import Request, RequestOutput
from evalengine.engine.schedule.drafts import Drafter
from evalengine.engine.schedule.scheduler import SchedulerOutput, in_prefix_order
from evalengine.engine.schedule.sequence import Status
from evalengine.engine.settings import KNOWN_ANSWERS, engine_config, resolve_speculation
from evalengine.engine.stats import EngineStats
from evalengine.engine.submission import check_requests, generating_sequence, to_sequences
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.layers.base import product_kinds
from evalengine.layers.ops import Ops
from evalengine.models.causal_lm import CausalLM
from evalengine.util.phases import phase
from evalengine.util.validation import shown

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from typing_extensions import Self


class Engine(LoadedModel):
    """A model, its paged KV pool and a scheduler.

    Args:
        model: a name of `conf/model/`, a directory, a Hub id, a .gguf file, a `ModelConfig`, or a `Checkpoint`.
        batch_invariant: equal bits whatever the schedule (the default), or the ordinary fast mode.
        numerics: auto | native | exact | fast (see `resolve_numerics`).
        engine: an `EngineConfig`; or its fields as keyword arguments (`max_num_seqs=8`, ...).
        load: whether to load the weights now; False: with the first request. What only loading shows
            (memory) is raised then.

    Raises:
        ConfigError: a model that is not found or not supported and settings that cannot be honoured, all at once.
    """

    def __init__(
        self,
        model: str | ModelConfig | Checkpoint,
        *,
        batch_invariant: bool = True,
        numerics: str = "auto",
        engine: EngineConfig | None = None,
        load: bool = True,
        **settings: Any,
    ) -> None:
        self._in_flight: Launched | None = None  # the step whose results are not taken yet
        self._failure: Exception | None = None  # a launch's error, raised once the finished outputs are handed out
        self._lock = threading.Lock()  # held while an iterator of run() is alive
        self._stepping = threading.RLock()  # held during a step: close() waits for its end
        self._closed = self._released = False  # closing is requested first; the memory is freed after the step
        self._known: list[tuple[SequenceOf[int], SequenceOf[int]]] = []  # `learn_answers` before the weights are loaded
        super().__init__(model, engine_config(engine, settings), batch_invariant, numerics, load)

    def _make(self) -> None:
        super()._make()
        known, self._known = self._known, []
        if known:
            self.learn_answers(known)

    # -- requests -----------------------------------------------------------------------------------------------------

    def run(
        self,
        requests: Iterable[Request],
        on_step: Callable[[EngineStats], None] | None = None,
        more: Callable[[], list[Request]] | None = None,
    ) -> Iterator[RequestOutput]:
        """Runs any mix of requests together and yields each output as it finishes.

        `on_step` is called after every step, once its outputs have been taken (progress; what it raises ends the run),
        and then `more`: requests that it returns join those that run. Leaving the iterator early takes back what is
        unfinished. Until it is exhausted, closed or forgotten, no other thread, callback or iterator can run requests
        here.
        """
        batch = items(requests, "requests")
        if on_step is not None and not callable(on_step):
            raise ConfigError(f"on_step={shown(on_step)}: must be a function of EngineStats, or None")
        with self._alone("run requests"):
            check_requests(batch, self.limits)
            try:
                self._admit(batch)
                while self.scheduler.has_work:  # without work, no sequence wants the results of the step in flight
                    yield from self._step()
                    if on_step is not None:
                        on_step(self.stats)
                    if self._failure is not None:
                        raise self._failure
                    if more is not None and (further := more()):
                        check_requests(further, self.limits)
                        self._admit(further)
            finally:
                self._in_flight = self._failure = None
                self.scheduler.abort()

    def _admit(self, batch: list[Request]) -> None:
        """Hands the requests' sequences to the scheduler. It alone holds them, so finished ones are forgotten."""
        max_len = self.settings.max_model_len
        sequences = to_sequences(
            batch,
            self.config.enable_prefix_caching,
            lambda request: generating_sequence(request, self.spec, self.tokenizer, max_len),
            self.spec.short_positions(max_len),
        )
        for seq in in_prefix_order(sequences, self.block_manager):
            self.scheduler.add(seq)

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """A context in which nothing else uses the engine. Raises EvalEngineError for an engine in use or closed."""
        if not self._lock.acquire(blocking=False):
            raise EvalEngineError(
                f"this LLM is running other requests: it cannot {what} now; finish or close their iterator first, and "
                "let other threads wait for it, or give each its own LLM"
            )
        try:
            if not self._closed:
                self._make()
            if self.runner is None:
                raise EvalEngineError(f"this LLM is closed: it cannot {what}; make a new one")
            yield
        finally:
            self._lock.release()

    def _test(self, model: CausalLM, ops: Ops) -> None:
        """Run the self-test at the first use of this kind of model here. Raises EvalEngineError if it fails."""
        choice = self.config.self_test
        if self.settings.numerics == "fast" or (choice == "auto" and self.settings.device.type != "cuda"):
            return
        if choice == "off":
            self.self_test_verdict = asdict(self_test.Verdict("off"))
            return
        layers = model.sample_layers()
        part = model if layers is None else model.of_layers(layers)
        mode: Any = {"has_graphs": ops.capturable and part.capturable and not self.config.enforce_eager}
        about, cache = (self.config, self.settings), None
        if choice == "auto":
            with suppress(ImportError):  # without Triton there is no cache of verdicts
                cache = self_test.CachedVerdict(part.spec, product_kinds(part), *about, **mode)
        if cache is not None and cache.known is not None:
            self.self_test_verdict = {**cache.known, "cached": True}
            return
        layout, size = kv_layout(part.spec, self.settings), self.settings.block_size

        def errors_of(ids: list[int]) -> tuple[Errors, Errors] | None:
            if layers is None:
                return None
            every = self._ranks.on_all_ranks(
                "errors", (layers, layout, size, ids), lambda: errors(part, ops, layout, size, ids)
            )
            return every[0]

        with phase("self-test"):
            open_trial = partial(self._trial, part, ops, layers)
            verdict = self_test.run(open_trial, errors_of, part.spec, *about, **mode)
        self.self_test_verdict = asdict(verdict)
        if cache is not None:
            cache.save(verdict)

    @contextmanager
    def _trial(
        self, part: CausalLM, ops: Ops, layers: tuple[int, ...] | None, config: dict[str, Any]
    ) -> Iterator[Engine]:
        """Build an engine over the reduced model with a separate KV pool; it shares ranks and kernel verdicts.

        config: overrides of `EngineConfig`.
        """
        trial, settings = copy.copy(self), self.settings
        trial.config, trial.spec, trial.tokenizer = replace(self.config, **config), part.spec, None
        speculation = resolve_speculation(trial.config, settings.numerics, settings.device, part.spec)
        trial.settings, trial.stats = replace(settings, speculation=speculation), EngineStats()
        trial._layers, trial._lock, trial._stepping = layers, threading.Lock(), threading.RLock()
        try:
            trial._build(part, ops, trial.config.num_kv_blocks)
            yield trial
        finally:
            trial.runner = None
            self._ranks.broadcast("drop")

    def learn_answers(self, answers: Iterable[tuple[SequenceOf[int], SequenceOf[int]]]) -> None:
        """Use (prompt, output) token ids of an earlier run as guesses of the same prompts' answers.

        They change no answer, only the time: a guess is accepted only if it is the token that is chosen. Where nothing
        may be guessed (`Settings.speculation`), they are ignored with a warning. `reconfigure` forgets them.
        """
        if not self.loaded:
            self._known += answers
            return
        if self.scheduler.drafter is None and self.settings.speculation == KNOWN_ANSWERS:
            self.scheduler.drafter = Drafter(known_only=True)
        drafter = self.scheduler.drafter
        if drafter is None:
            logger.warning("earlier answers are not used as guesses: speculation is %s", self.settings.speculation)
            return
        for prompt_ids, token_ids in answers:
            drafter.learn_answer(prompt_ids, token_ids)

    def reconfigure(self, **schedule: Any) -> None:
        """Applies other schedule settings (`RECONFIGURABLE`) to the same weights: a new KV pool, an empty prefix cache,
        counters at zero. Raises ConfigError for any other setting, and for values that cannot be honoured: then the
        settings and the pool's size are what they were."""
        with self._alone("be reconfigured"), self._stepping:
            self._reconfigure(schedule)

    def reset_prefix_cache(self) -> None:
        """Forgets every prefix whose KV is in the pool: the next run computes all its tokens, as the first did.

        Weights, pool, CUDA graphs, settings and counters stay. Raises EvalEngineError while requests run.
        """
        if not self.loaded:
            return
        with self._alone("empty its prefix cache"):
            self.block_manager = self._new_block_manager()
            self.scheduler.block_manager = self.block_manager

    def close(self) -> None:
        """Gives back the weights, the KV pool and the thread setting; a step that another thread schedules or launches
        is launched first, and is its run's last. Idempotent."""
        self._closed = True  # set before the wait: a run that goes on may take the lock again before this thread does
        with self._stepping:
            if not self._released:  # not `runner is not None`: an engine that could not be rebuilt has no runner
                self._released = True
                if self.loaded:
                    self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one step ----------------------------------------------------------------------------------------------------

    def _step(self) -> list[RequestOutput]:
        """Schedule and launch a step, postprocess the one before it; returns the requests that finished.

        Where the device computes asynchronously, a step is launched before the last one's tokens are known: the new
        step takes them on the device, and a sequence that they end has one speculative token after its end. The host
        waits where a sequence might be preempted, and for the tokens that logits processors must see.
        """
        with self._stepping:
            if self.runner is None or self._closed:
                raise EvalEngineError("this LLM was closed while it ran requests; make a new one")
            started, outputs = time.perf_counter(), []
            schedule = self._schedule_ahead()
            self.stats.num_steps_ahead += schedule is not None
            if schedule is None:
                outputs = self._postprocess()
                schedule = self.scheduler.schedule()
            try:
                launched = self._launch(schedule) if schedule.chunks else None
            except BaseException as error:
                return self._after_failure(schedule, error, outputs)
            outputs += self._postprocess()
            self._in_flight = launched
            if launched is not None and not self.runner.can_launch_ahead:
                outputs += self._postprocess()
            self._count(schedule, time.perf_counter() - started)
            return outputs

    def _schedule_ahead(self) -> SchedulerOutput | None:
        """The step after the one in flight, or None if it cannot be scheduled without the results of that one."""
        if self._in_flight is None or self._in_flight.needs_the_host:
            return None
        return self.scheduler.schedule_ahead()

    def _launch(self, schedule: SchedulerOutput) -> Launched:
        assert self.runner is not None
        launched = self.runner.launch(schedule)
        for chunk in schedule.chunks:
            self.scheduler.launched(chunk)
        return launched

    def _postprocess(self) -> list[RequestOutput]:
        """Takes the results of the step in flight, if there is one."""
        launched, self._in_flight = self._in_flight, None
        outputs: list[RequestOutput] = []
        if launched is not None and self.runner is not None:
            before = {chunk.seq.seq_id: chunk.seq.num_tokens for chunk in launched.chunks if chunk.guesses}
            for result in self.runner.results(launched):
                outputs += self._take_token(result) if isinstance(result, NextToken) else self._take_scores(result)
            if before:
                self._count_guesses(launched, before)
        return outputs

    def _count_guesses(self, launched: Launched, before: dict[int, int]) -> None:
        """Notes how many guesses of a step were right. before: every such sequence's tokens before the step."""
        assert self.scheduler.drafter is not None
        for seq, _, _, guesses in launched.chunks:
            if guesses:
                accepted = max(0, seq.num_tokens - before[seq.seq_id] - 1)
                self.stats.num_guesses += len(guesses)
                self.stats.num_right_guesses += accepted
                self.scheduler.drafter.take(seq, accepted)

    def _take_token(self, result: NextToken) -> list[RequestOutput]:
        """Appends a generating sequence's next token; returns the output if that token was its last."""
        seq = result.seq
        if result.guess is not None:
            if seq.status is Status.FINISHED or seq.num_tokens - 1 != result.position:
                return []  # a guess before it was wrong, or the sequence has ended
            if seq.token_ids[-1] != result.guess:
                return []
            seq.num_in_flight += 1
        if result.error is None:
            seq.append(result.token, result.logprob, result.token == result.greedy_id, result.top)
            self.stats.num_generated_tokens += 1
        else:
            seq.error, seq.all_greedy = result.error, False
        # Of the tokens that a step with guesses has computed, those before the newest are the sequence's.
        seq.num_computed_tokens = min(seq.num_computed_tokens, seq.num_tokens - 1 + seq.num_in_flight)
        if not (seq.error or seq.is_complete()):
            return []
        self.scheduler.finish(seq)
        return [seq.output()]

    def _take_scores(self, result: ScoredTokens) -> list[RequestOutput]:
        """Notes some positions' target logprobs; returns the outputs of the requests that they complete."""
        seq = result.seq
        complete = seq.take(result.positions, result.greedy_ids, result.logprobs, result.top, result.error)
        if seq.is_complete():
            self.scheduler.finish(seq)
        return complete

    def _count(self, schedule: SchedulerOutput, seconds: float) -> None:
        self.stats.num_steps += bool(schedule.chunks)  # a schedule without chunks only takes the last step's results
        if self.runner is not None:
            self.stats.num_graph_steps = self.runner.num_graph_steps
            self.stats.num_cascade_steps = self.runner.num_cascade_steps
        self.stats.largest_batch = max(self.stats.largest_batch, len(schedule.chunks))
        self.stats.largest_step = max(self.stats.largest_step, schedule.num_tokens)
        self.stats.num_computed_tokens += schedule.num_tokens
        self.stats.num_cached_tokens = self.scheduler.num_cached_tokens
        self.stats.num_preemptions = self.scheduler.num_preemptions
        self.stats.seconds += seconds

    # -- a step that failed --------------------------------------------------------------------------------------------

    def _after_failure(
        self, schedule: SchedulerOutput, error: BaseException, outputs: list[RequestOutput]
    ) -> list[RequestOutput]:
        """Handles a launch that failed; returns the outputs that had finished before it.

        A step without memory is scheduled anew, at half the tokens. With several ranks it is not known how far the
        others have come, so all are ended. An error that ends the run is raised here or, where outputs are yet to be
        handed out, after them (`_failure`).
        """
        is_full = isinstance(error, torch.OutOfMemoryError)
        if self.block_manager.snapshots is not None:
            self.block_manager.snapshots.clear()
        if is_full and (schedule.num_tokens == 1 or self._ranks.size > 1):
            advice = EvalEngineError(
                *str(error).split("\n"),
                f"That was a step of {schedule.num_tokens} tokens: lower engine.max_num_batched_tokens, "
                "engine.kv_cache_memory_fraction or engine.num_kv_blocks; the same command then goes on",
            )
            advice.__cause__, error = error, advice
        self._ranks.end_after(error)
        if not isinstance(error, Exception):
            raise error
        outputs += self._postprocess()
        if is_full and not isinstance(error, EvalEngineError):
            traceback.clear_frames(error.__traceback__)  # the frames hold the tensors of the step
            self._shrink(schedule)
        elif not outputs:
            raise error
        else:
            self._failure = error
        return outputs

    def _shrink(self, schedule: SchedulerOutput) -> None:
        """Halves the largest step after one that did not fit the memory. The tokens of that step are scheduled anew:
        nothing is known of what it has done. No bit of a batch-invariant level changes."""
        self.scheduler.preempt_after_failure()
        if self.settings.device.type == "cuda":
            torch.cuda.empty_cache()
        most = self.scheduler.max_num_batched_tokens = schedule.num_tokens // 2
        if not self.stats.num_shrunk_steps:
            logger.warning(
                "out of memory in a step of %d tokens: the run goes on with steps of %d at most; lower "
                "engine.max_num_batched_tokens, or what the KV pool takes, to have it so from the start",
                schedule.num_tokens,
                most,
            )
        self.stats.num_shrunk_steps += 1
