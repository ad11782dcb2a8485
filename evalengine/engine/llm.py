"""The engine's public face: `LLM.generate`, `LLM.score`, `LLM.score_rolling`, and `LLM.run` beneath them.

A step is schedule, run, postprocess.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

import torch

from evalengine.config import SCHEDULE_FIELDS, EngineConfig, ModelConfig
from evalengine.engine.block_manager import BlockManager
from evalengine.engine.detokenizer import Detokenizer
from evalengine.engine.loader import Checkpoint, load_model, resolve_checkpoint
from evalengine.engine.memory import plan_num_kv_blocks
from evalengine.engine.model_runner import ModelRunner, PositionResult
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, SamplingParams, ScoreRequest
from evalengine.engine.rolling import rolling_windows
from evalengine.engine.scheduler import Schedule, Scheduler
from evalengine.engine.sequence import Sequence
from evalengine.engine.settings import Settings, resolve_settings, settings_problems
from evalengine.engine.submission import check_requests, to_sequences
from evalengine.engine.text import encode, encode_pair, prefix_token_id
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.layers import create_ops
from evalengine.layers.ops import Ops
from evalengine.models.config import kernel_shapes
from evalengine.models.decoder import DecoderForCausalLM

Prompt = str | list[int]
RECONFIGURABLE = tuple(name for name in SCHEDULE_FIELDS if name != "device")  # what `LLM.reconfigure` takes


@dataclass
class EngineStats:
    """Counters since the engine was made."""

    num_steps: int = 0
    num_computed_tokens: int = 0  # through the model, prompts and generated
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0  # not computed thanks to the prefix cache
    num_preemptions: int = 0
    largest_batch: int = 0  # sequences in one step
    largest_step: int = 0  # tokens in one step
    seconds: float = 0.0  # in steps


class LLM:
    """A model, its paged KV pool and a scheduler.

    Args:
        model: a directory, a Hub id, a .gguf file, `asset:tinymath`, a `ModelConfig`, or a resolved `Checkpoint`.
        batch_invariant: equal bits whatever the schedule (the default), or the ordinary fast mode.
        numerics: auto | native | exact | fast (see `resolve_numerics`).
        engine: an `EngineConfig`; or its fields as keyword arguments (`max_num_seqs=8`, ...).

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
        **settings: Any,
    ) -> None:
        self.config = _engine_config(engine, settings)
        try:
            self.checkpoint = _checkpoint(model)
        except ConfigError as error:
            others = settings_problems(self.config, batch_invariant, numerics, None)
            raise ConfigError([*error.problems, *others]) from error
        self.spec = self.checkpoint.spec
        self.tokenizer = self.checkpoint.tokenizer
        self.settings = resolve_settings(self.config, batch_invariant, numerics, self.spec)
        self.runner: ModelRunner | None = None
        self.stats = EngineStats()
        self._running = False  # an iterator of run() is alive
        self._closed = False
        self._kernels_verdicts: dict[int, dict[str, Any] | None] = {}  # by block size
        self._num_threads_before = torch.get_num_threads()
        torch.set_num_threads(self.settings.num_threads)
        try:
            self._load()
        except BaseException:
            torch.set_num_threads(self._num_threads_before)
            raise

    def _load(self) -> None:
        """Weights, then a KV pool in what memory they leave."""
        settings = self.settings
        ops = create_ops(settings.numerics, settings.dtype, settings.device, settings.attention_backend)
        self._build(load_model(self.checkpoint, ops, settings.max_model_len), ops)

    def _build(self, model: DecoderForCausalLM, ops: Ops, num_kv_blocks: int | None = None) -> None:
        """num_kv_blocks None: planned."""
        settings = self.settings
        if settings.block_size not in self._kernels_verdicts:
            verdict = ops.verify_kernels(**kernel_shapes(self.spec), block_size=settings.block_size)
            self._kernels_verdicts[settings.block_size] = verdict
        self.num_kv_blocks = num_kv_blocks or plan_num_kv_blocks(self.config, self.spec, settings)
        self.block_manager = BlockManager(self.num_kv_blocks, settings.block_size, self.config.enable_prefix_caching)
        self.scheduler = Scheduler(self.block_manager, self.config.max_num_seqs, self.config.max_num_batched_tokens)
        self.runner = ModelRunner(model, self.spec, ops, self.num_kv_blocks, settings.block_size)

    @property
    def kernels_verdict(self) -> dict[str, Any] | None:
        """Of `Ops.verify_kernels` for the current block size."""
        return self._kernels_verdicts[self.settings.block_size]

    # -- what users call ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt (text or token ids); outputs in the prompts' order.

        Raises: ConfigError for requests that do not fit; EvalEngineError if one failed (non-finite activations).
        """
        batch = _prompt_list(prompts)
        params = SamplingParams() if sampling_params is None else sampling_params
        each = [params] * len(batch) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(batch):
            raise ConfigError(f"sampling_params: {len(each)} given for {len(batch)} prompts; give one, or one each")
        return self._collect(
            [GenerateRequest(i, self._ids(p), s) for i, (p, s) in enumerate(zip(batch, each, strict=True))]
        )

    def score(self, pairs: SequenceOf[tuple[Prompt, Prompt]], logprobs: int = 0) -> list[RequestOutput]:
        """Log-likelihood of each continuation after its context, given as text pairs or token-id pairs.

        Text is split into tokens as lm-eval does (`encode_pair`). Equal contexts are computed once.
        """
        requests = []
        for i, (context, continuation) in enumerate(pairs):
            if isinstance(context, str) and isinstance(continuation, str):
                context, continuation = encode_pair(self._text_tokenizer(), context, continuation)
            if isinstance(context, str) or isinstance(continuation, str):
                raise ConfigError(f"pair {i}: give both sides as text, or both as token ids")
            requests.append(ScoreRequest(i, list(context), list(continuation), logprobs))
        return self._collect(requests)

    def score_rolling(self, texts: SequenceOf[Prompt]) -> list[list[RequestOutput]]:
        """Log-likelihood of whole texts, each token once, in windows of `max_model_len`: a list of windows per text."""
        prefix = prefix_token_id(self._text_tokenizer())
        requests: list[ScoreRequest] = []
        owners: list[int] = []
        for i, text in enumerate(texts):
            for context, continuation in rolling_windows(self._ids(text), prefix, self.settings.max_model_len):
                requests.append(ScoreRequest(len(requests), context, continuation))
                owners.append(i)
        outputs: list[list[RequestOutput]] = [[] for _ in texts]
        for owner, output in zip(owners, self._collect(requests), strict=True):
            outputs[owner].append(output)
        return outputs

    def run(
        self, requests: Iterable[Request], on_step: Callable[[EngineStats], None] | None = None
    ) -> Iterator[RequestOutput]:
        """Runs any mix of requests together and yields each output as it finishes.

        `on_step` is called after every step (progress). Leaving the iterator early takes back what is unfinished.
        """
        if self._running:
            raise EvalEngineError("this LLM is running other requests: finish or close their iterator first")
        batch = list(requests)
        check_requests(batch, self)
        self._running = True
        try:
            for seq in to_sequences(batch, share_contexts=self.config.enable_prefix_caching):
                if seq.request is not None and self.tokenizer is not None:
                    seq.detokenizer = Detokenizer(self.tokenizer, seq.request.params)
                self.scheduler.add(seq)
            while self.scheduler.has_work:
                outputs = self.step()
                if on_step is not None:
                    on_step(self.stats)
                yield from outputs
        finally:
            self.scheduler.abort()
            self._running = False

    def reconfigure(self, **schedule: Any) -> None:
        """Other schedule settings (`RECONFIGURABLE`) on the same weights: a new KV pool, an empty prefix cache,
        counters at zero. Raises ConfigError for any other setting, and for values that cannot be honoured: then the
        settings and the pool's size are what they were."""
        if self.runner is None or self._running:
            raise EvalEngineError("this LLM is closed or running requests: it cannot be reconfigured now")
        if fixed := sorted(set(schedule) - set(RECONFIGURABLE)):
            raise ConfigError(f"engine.{fixed[0]} is fixed once weights are loaded: make a new LLM")
        config = replace(self.config, **schedule)
        level = self.settings.numerics
        settings = resolve_settings(config, level != "fast", level, self.spec)
        if config.num_threads is None:
            settings = replace(settings, num_threads=self._num_threads_before)
        if settings.attention_backend != self.settings.attention_backend:
            raise ConfigError(
                f"engine.block_size={settings.block_size}: needs attention_backend={settings.attention_backend}, and "
                f"this LLM was made with {self.settings.attention_backend}: make a new one, or name the backend"
            )
        before = self.config, self.settings, self.num_kv_blocks
        model, ops = self.runner.model, self.runner.ops
        self.runner = None  # the old pool goes before the new one is made
        try:
            self._restart(model, ops, config, settings)
        except BaseException:  # only now is it known that no such pool fits, or that no kernel serves such pages
            self._restart(model, ops, *before)
            raise

    def _restart(
        self,
        model: DecoderForCausalLM,
        ops: Ops,
        config: EngineConfig,
        settings: Settings,
        num_kv_blocks: int | None = None,
    ) -> None:
        self.config, self.settings, self.stats = config, settings, EngineStats()
        torch.set_num_threads(settings.num_threads)
        self._build(model, ops, num_kv_blocks)

    def close(self) -> None:
        """Gives back the weights, the KV pool and the thread setting. Idempotent."""
        if not self._closed:
            self._closed = True
            self.runner = None
            torch.set_num_threads(self._num_threads_before)
            if self.settings.device.type == "cuda":
                torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Schedule, run, postprocess; returns the requests that finished."""
        if self.runner is None:
            raise EvalEngineError("this LLM is closed; make a new one")
        started = time.perf_counter()
        schedule = self.scheduler.schedule()
        results = self.runner.execute(schedule)
        outputs = self._postprocess(schedule, results)
        self._count(schedule, time.perf_counter() - started)
        return outputs

    def _postprocess(self, schedule: Schedule, results: list[PositionResult]) -> list[RequestOutput]:
        for chunk in schedule.chunks:
            self.block_manager.mark_computed(chunk.seq, chunk.start, chunk.end)
        outputs: list[RequestOutput] = []
        for result in results:
            outputs.extend(self._take_token(result) if result.seq.request else self._take_scores(result))
        return outputs

    def _take_token(self, result: PositionResult) -> list[RequestOutput]:
        """A generating sequence's next token; the output if that was its last."""
        seq = result.seq
        if result.error is None:
            token, logprob = result.tokens[0]
            seq.append(token, logprob, is_greedy=token == result.greedy_id, top=result.top)
            self.stats.num_generated_tokens += 1
        else:
            seq.error, seq.all_greedy = result.error, False
        if not (seq.error or self._is_complete(seq)):
            return []
        self.scheduler.finish(seq)
        return [seq.output()]

    def _take_scores(self, result: PositionResult) -> list[RequestOutput]:
        """A position's target logprobs; the outputs of the requests that they complete."""
        seq = result.seq
        complete = []
        for target, (token, logprob) in zip(seq.targets.pop(result.position), result.tokens, strict=True):
            target.pending.take(target.index, logprob, token == result.greedy_id, result.top, result.error)
            if target.pending.missing == 0:
                complete.append(target.pending.output())
        if not seq.targets:
            self.scheduler.finish(seq)
        return complete

    def _is_complete(self, seq: Sequence) -> bool:
        assert seq.request is not None
        params, token = seq.request.params, seq.token_ids[-1]
        stop_ids = self.spec.eos_token_ids if params.stop_token_ids is None else params.stop_token_ids
        hit_stop = seq.detokenizer is not None and seq.detokenizer.stops_at(token)
        if hit_stop or (token in stop_ids and not params.ignore_eos):
            seq.finish_reason = "stop"
            return True
        return len(seq.logprobs) == params.max_tokens or seq.num_tokens == self.settings.max_model_len

    def _count(self, schedule: Schedule, seconds: float) -> None:
        self.stats.num_steps += 1
        self.stats.largest_batch = max(self.stats.largest_batch, len(schedule.chunks))
        self.stats.largest_step = max(self.stats.largest_step, schedule.num_tokens)
        self.stats.num_computed_tokens += schedule.num_tokens
        self.stats.num_cached_tokens = self.scheduler.num_cached_tokens
        self.stats.num_preemptions = self.scheduler.num_preemptions
        self.stats.seconds += seconds

    # -- text --------------------------------------------------------------------------------------------------------

    def _collect(self, requests: SequenceOf[Request]) -> list[RequestOutput]:
        outputs = sorted(self.run(requests), key=lambda o: o.request_id)
        failed = [f"request {o.request_id}: {o.error}" for o in outputs if o.error]
        if failed:
            raise EvalEngineError("\n".join(failed))
        return outputs

    def _ids(self, prompt: Prompt) -> list[int]:
        return encode(self._text_tokenizer(), prompt) if isinstance(prompt, str) else list(prompt)

    def _text_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ConfigError("model.tokenizer: this model has no tokenizer (load_format=dummy); give token ids")
        return self.tokenizer


def _checkpoint(model: str | ModelConfig | Checkpoint) -> Checkpoint:
    if isinstance(model, str):
        model = ModelConfig(name=model, path=model)
    return resolve_checkpoint(model) if isinstance(model, ModelConfig) else model


def _prompt_list(prompts: Prompt | SequenceOf[Prompt]) -> list[Prompt]:
    """A single text, or a single list of token ids, is a batch of one."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and all(isinstance(x, Integral) for x in items) else items


def _engine_config(engine: EngineConfig | None, settings: dict[str, Any]) -> EngineConfig:
    known = {f.name for f in fields(EngineConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ConfigError(f"unknown engine settings {', '.join(unknown)}; known ones: {', '.join(sorted(known))}")
    if engine is not None and settings:
        raise ConfigError("give either engine=EngineConfig(...) or its fields as keyword arguments, not both")
    return engine or EngineConfig(**settings)
