"""`EvalEngineLM`: answers lm-eval's requests by this package's engine."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval import utils as lm_eval_utils
from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from evalengine.cache.engine import CachedEngine, through_cache
from evalengine.config.schema import TEMPLATE_DATE
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint, resolve_checkpoint
from evalengine.engine.request import RequestOutput
from evalengine.engine.settings import settings_problems
from evalengine.engine.submission import check_requests, refused
from evalengine.engine.text.chat_template import ChatTemplate, Wording
from evalengine.engine.text.encode import prefix_token_id
from evalengine.engine.text.pieces import PieceTokenizer
from evalengine.engine.text.tokenizer import plain_tokenizer
from evalengine.errors import ConfigError
from evalengine.harness.identity import engine_identity
from evalengine.harness.requests import HarnessRequest
from evalengine.integrations.lm_eval import LOGGER
from evalengine.integrations.lm_eval.arguments import ModelArguments, ignored_batch_size, read_arguments, with_device
from evalengine.integrations.lm_eval.recorder import EvaluationRecorder, find_place
from evalengine.integrations.lm_eval.requests import (
    answer_text,
    check_outputs,
    encode_prompt,
    encode_scored,
    generated,
    instance_keys,
    read_generation,
    scored,
    set_add_bos_token,
    warnings_of,
    windows,
)
from evalengine.models.decoder import num_parameters

logger = logging.getLogger(LOGGER)
Finished = Callable[[int, RequestOutput], None]  # takes a request's place in its call, and its output
OF_LM_EVAL = Wording(
    where="--apply_chat_template",
    without_template="leave --apply_chat_template out",
    without_system="leave --system_instruction out",
    as_one_message="--fewshot_as_multiturn=false sends one user message",
)


class EvalEngineLM(TemplateLM):
    """A model of lm-eval that is one `LLM`. Every request of a call goes to the engine at once; the answers come in the
    order of the requests.

    Args: those of `arguments.KNOWN`; lm-eval also passes `batch_size` and `max_batch_size`, which change nothing.

    Raises:
        ConfigError: unknown arguments, a model that is not found and settings that cannot be honoured, all at once.
    """

    def __init__(self, batch_size: Any = None, max_batch_size: Any = None, device: Any = None, **given: Any) -> None:
        super().__init__()
        begin = time.perf_counter()
        arguments, checkpoint = _resolved(with_device(given, device, torch.cuda.is_available()))
        place = find_place(arguments.output_dir, checkpoint.source)
        if ignored_batch_size(batch_size):
            logger.info("batch_size=%s is ignored: the engine chooses its batches, and no result depends on it "
                        "(max_num_seqs bounds the requests in a step)", batch_size)  # fmt: skip
        config = arguments.config
        self.arguments = arguments
        set_add_bos_token(checkpoint.tokenizer, arguments.add_bos_token)
        # With a cache, the weights are loaded only if an answer is missing.
        mode: Any = {"batch_invariant": config.batch_invariant, "numerics": config.numerics, "engine": config.engine}
        self.llm = LLM(checkpoint, **mode, load=config.cache.path is None)
        self.tokenizer: Any = self.llm.tokenizer
        self._pieces = PieceTokenizer(self.tokenizer)  # it encodes the lines that few-shot prompts share once
        self._template: ChatTemplate | None = None
        self._recorder: EvaluationRecorder | None = None
        self._identity: dict[str, Any] | None = None  # the engine's identity, for the cache
        self._cached: CachedEngine | None = None  # the cache of the last call, if one is set
        if place is not None:
            self._recorder = EvaluationRecorder(place, self.llm, arguments, begin, time.perf_counter())

    # -- facts about the model ----------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's EOS token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS, else EOS."""
        return prefix_token_id(self.tokenizer)

    @property
    def max_length(self) -> int:
        """The most tokens that prompt and answer may have together."""
        return self.llm.settings.max_model_len

    @property
    def max_gen_toks(self) -> int:
        """How many tokens an answer may have if its task names no length."""
        return self.arguments.max_gen_toks

    @property
    def device(self) -> Any:
        """torch's device of the weights."""
        return self.llm.settings.device

    @property
    def rank(self) -> int:
        """Always 0: with more ranks lm-eval would draw exemplars for each rank, and prompts would change."""
        return 0

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    @property
    def tokenizer_name(self) -> str:
        """Tells tokenizers and chat settings apart in lm-eval's request cache: by content, not by path."""
        plain = plain_tokenizer(self.tokenizer) or {}
        chat = f"{self.arguments.enable_thinking}-{self._date}"
        return f"{self.arguments.config.model.name}-{str(plain.get('sha256'))[:16]}-{chat}".replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Facts for the results that lm-eval writes once a run is over: the model, and the folder of its records."""
        checkpoint, settings = self.llm.checkpoint, self.llm.settings
        info: dict[str, Any] = {
            "model_num_parameters": num_parameters(self.llm.spec),
            "model_dtype": str(settings.dtype),
            "model_revision": self.arguments.config.model.revision or "main",
            "model_sha": checkpoint.revision or "",  # the Hub's commit, as lm-eval's hf model reports it
        }
        if self._recorder is not None and (records := self._recorder.end()):
            info["evalengine"] = {**records, "numerics": settings.numerics}
        return info

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Called for lm-eval's `--use_cache`. Answers out of that cache bypass this model: records would have gaps.

        Raises: ConfigError if `output_dir` is set.
        """
        if getattr(cache_hook, "dbdict", None) is not None and self._recorder is not None:
            if self.arguments.output_dir is not None:
                raise ConfigError("output_dir: with --use_cache not every answer is computed, and records would have "
                                  "gaps; leave one of the two out")  # fmt: skip
            logger.warning("--use_cache: no records are written, since answers out of a cache have none")
            self._recorder = None
        super().set_cache_hook(cache_hook)

    # -- text and tokens ---------------------------------------------------------------------------------------------

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids as lm-eval's hf model has them; `None`: what the tokenizer or `add_bos_token` adds."""
        return encode_scored(self._pieces, string, add_special_tokens, self.arguments.add_bos_token)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt that the model's own template makes of messages; without a generation prompt the last message is
        left open, to be continued.

        Raises: ConfigError for a model without a template, and for messages that it refuses.
        """
        if self._template is None:
            thinking = self.arguments.enable_thinking
            variables = {} if thinking is None else {"enable_thinking": thinking}
            self._template = ChatTemplate(self.tokenizer, self._date, OF_LM_EVAL, variables)
        if self._recorder is not None:
            self._recorder.templated = True
        return rendered(self._template, chat_history, add_generation_prompt)

    @property
    def _date(self) -> str:
        return self.arguments.config.chat_template_date or TEMPLATE_DATE

    # -- answers -----------------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood, is greedy) of each instance's continuation after its context."""
        if self.arguments.enable_thinking:
            raise ConfigError("enable_thinking=True: log-likelihoods of answers after no thinking mean nothing; leave "
                              "it out, or run tasks that generate")  # fmt: skip
        pairs = [request.args for request in requests]
        tokens = [(pair, *self._encoded_pair(*pair)) for pair in pairs]
        return self._scores(tokens, instance_keys(requests), disable_tqdm)

    def _encoded_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if context:
            return self._encode_pair(context, continuation)
        ids, prefix = self.tok_encode(continuation, add_special_tokens=False), self.prefix_token_id
        return ([prefix], ids[1:]) if ids[:1] == [prefix] else ([prefix], ids)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """`loglikelihood` of (texts, context ids, continuation ids), for callers that tokenise; it is not recorded."""
        return self._scores(requests, None, disable_tqdm)

    def _scores(
        self, tokens: Sequence[tuple[Any, list[int], list[int]]], keys: Sequence[Any] | None, disable_tqdm: bool
    ) -> list[tuple[float, bool]]:
        kind = "loglikelihood"
        named = keys if keys is not None else [("tokens", place, 0, 0) for place in range(len(tokens))]
        items = [
            scored(place, key, kind, context, continuation, self.max_length)
            for place, (key, (_, context, continuation)) in enumerate(zip(named, tokens, strict=True))
        ]

        def finished(place: int, output: RequestOutput) -> None:
            if tokens[place][0] is not None:
                self.cache_hook.add_partial(kind, tokens[place][0], (output.sum_logprob, output.is_greedy))

        outputs, seconds = self._run(items, kind, disable_tqdm, finished)
        if keys is not None:
            self._record(items, outputs, [""] * len(items), seconds)
        return [(output.sum_logprob, output.is_greedy) for output in outputs]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each instance's whole text: every token is scored once, in windows of `max_length`."""
        kind, keys = "loglikelihood_rolling", instance_keys(requests)
        by_text = [self._windows(request.args[0]) for request in requests]
        items = windows(keys, by_text)
        outputs, seconds = self._run(items, kind, disable_tqdm)
        self._record(items, outputs, [""] * len(items), seconds)
        left, totals = iter(outputs), []
        for request, own in zip(requests, by_text, strict=True):
            totals.append(math.fsum(value for _ in own for value in next(left).logprobs.tolist()))
            self.cache_hook.add_partial(kind, (request.args[0],), totals[-1])
        return totals

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        return [
            lm_eval_utils.make_disjoint_window(window)
            for window in lm_eval_utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
        ]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text generated after each instance's context, until one of its stop strings or its length.

        Raises: ConfigError that lists settings that are unknown or cannot be honoured, with the task.
        """
        kind, items, stops = "generate_until", [], []
        problems: dict[str, None] = {}  # a task's documents share their settings, so that each problem is listed once
        for place, (request, key) in enumerate(zip(requests, instance_keys(requests), strict=True)):
            context, settings = request.args
            try:
                generation = read_generation(
                    settings, self.max_gen_toks, self._eos, self.arguments.config.seed, "/".join(map(str, key))
                )
                items.append(generated(place, key, self._prompt(context), generation, self.max_length))
            except ConfigError as error:
                problems.update(dict.fromkeys(f"{key[0]}: {problem}" for problem in error.problems))
                continue
            stops.append(generation.until)
        if problems:
            raise refused([*problems])
        texts: dict[int, str] = {}

        def finished(place: int, output: RequestOutput) -> None:
            texts[place] = self._text(output, stops[place])
            self.cache_hook.add_partial(kind, requests[place].args, texts[place])

        outputs, seconds = self._run(items, kind, disable_tqdm, finished)
        answers = [texts[place] for place in range(len(items))]
        self._record(items, outputs, answers, seconds)
        return answers

    def _prompt(self, context: str) -> list[int]:
        return encode_prompt(self.tokenizer, context, self.arguments.add_bos_token)

    @property
    def _eos(self) -> str | None:
        """The text of the token that ends every answer."""
        end = self.tokenizer.eos_token_id
        return None if end is None else str(self.tokenizer.decode(end, skip_special_tokens=False))

    def _text(self, output: RequestOutput, until: tuple[str, ...]) -> str:
        """The answer's text; without its thinking, if the end of that is named by a token's id or by a text."""
        end, ids = self.arguments.think_end_token, output.token_ids
        if end is None:
            return output.text
        if isinstance(end, str):
            return answer_text(self.tokenizer.decode(ids, skip_special_tokens=True), until, end)
        after = len(ids) - ids[::-1].index(end) if end in ids else 0
        return answer_text(self.tokenizer.decode(ids[after:], skip_special_tokens=True).lstrip(), until, None)

    def _run(
        self,
        items: Sequence[HarnessRequest],
        kind: str,
        disable_tqdm: bool,
        finished: Finished = lambda place, output: None,
    ) -> tuple[list[RequestOutput], float]:
        """(every request's output, in order; seconds). finished: called as soon as a request is done.

        Raises: ConfigError before anything runs, for requests that never can; EvalEngineError for those that failed,
        once all others are done.
        """
        for warning in warnings_of(items, self.max_length):
            logger.warning(warning)
        requests = [item.request for item in items]
        check_requests(requests, self.llm.limits, lambda request: items[request.request_id].named)
        outputs: dict[int, RequestOutput] = {}
        started = time.perf_counter()
        bar = tqdm(total=len(items), desc=f"Running {kind} requests", disable=disable_tqdm)
        with bar, self._answering(items) as answering:
            for output in answering.run(requests):
                outputs[output.request_id] = output
                if output.error is None:
                    finished(output.request_id, output)
                bar.update(1)
        ordered = [outputs[place] for place in range(len(items))]
        check_outputs(items, ordered)
        return ordered, time.perf_counter() - started

    @contextmanager
    def _answering(self, items: Sequence[HarnessRequest]) -> Iterator[Any]:
        """The engine, through the cache if one is set; what the cache did is logged."""
        config = self.arguments.config
        if config.cache.path is None:
            yield self.llm
            return
        if self._identity is None:  # hashing the weights takes seconds, so it is done once
            self._identity = engine_identity(config, self.llm)
        with through_cache(config, self.llm, self._identity, lambda one: items[one.request_id].named) as cached:
            assert cached is not None
            yield cached
            logger.info("cache=%s: %s", config.cache.path, cached.counts)
            self._cached = cached

    def _record(
        self,
        items: Sequence[HarnessRequest],
        outputs: Sequence[RequestOutput],
        texts: Sequence[str],
        seconds: float,
    ) -> None:
        if self._recorder is not None:
            self._recorder.add(items, outputs, texts, seconds, self._cached)


def _resolved(given: dict[str, Any]) -> tuple[ModelArguments, Checkpoint]:
    """The arguments and the model they name, no weights read. Raises one ConfigError with everything that is wrong."""
    arguments, problems = read_arguments(given)
    config, checkpoint = arguments.config, None
    if "pretrained" in given:
        try:
            checkpoint = resolve_checkpoint(config.model)
        except ConfigError as error:
            problems += error.problems
    spec = None if checkpoint is None else checkpoint.spec
    problems += settings_problems(config.engine, config.batch_invariant, config.numerics, spec)
    if checkpoint is not None and checkpoint.tokenizer is None:
        problems.append("tokenizer: this model has none (load_format=dummy); name one")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    assert checkpoint is not None, "without one there is a problem"
    return arguments, checkpoint


def rendered(template: ChatTemplate, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    """The prompt; without a generation prompt the last message is left open. If a template refuses the messages,
    it is given them once more without the system message, as lm-eval's hf model does it.

    Raises: ConfigError with what the template said.
    """
    try:
        return template(messages) if add_generation_prompt else template.continued(messages)
    except ConfigError:
        others = [message for message in messages if message["role"] != "system"]
        if len(others) in (0, len(messages)):
            raise
        logger.warning("the chat template refuses the messages: tried again without the system message")
        return rendered(template, others, add_generation_prompt)
