"""`EvalEngineLM`: answers lm-eval's requests by this package's engine."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lm_eval import utils as lm_eval_utils
from tqdm import tqdm

from evalengine.engine.request import Request, RequestOutput
from evalengine.engine.submission import check_requests, refused
from evalengine.errors import ConfigError
from evalengine.harness.execute import through_cache
from evalengine.harness.identity import engine_identity
from evalengine.harness.requests import HarnessRequest
from evalengine.integrations.lm_eval import LOGGER
from evalengine.integrations.lm_eval.base import EngineBackedModel
from evalengine.integrations.lm_eval.requests import (
    answer_text,
    check_outputs,
    encode_prompt,
    generated,
    instance_keys,
    read_generation,
    scored,
    warnings_of,
    windows,
)

logger = logging.getLogger(LOGGER)
Finished = Callable[[int, RequestOutput], None]  # takes a request's place in its call, and its output


def _name_of(asked: Sequence[HarnessRequest], request: Request) -> str:
    return asked[request.request_id].named


class EvalEngineLM(EngineBackedModel):
    """A model of lm-eval that is one `LLM`. Every request of a call goes to the engine at once; the answers come in the
    order of the requests.

    Args: those of `arguments.KNOWN`; lm-eval also passes `batch_size` and `max_batch_size`, which change nothing.
    """

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
        asked = [
            scored(place, key, kind, context, continuation, self.max_length)
            for place, (key, (_, context, continuation)) in enumerate(zip(named, tokens, strict=True))
        ]

        def finished(place: int, output: RequestOutput) -> None:
            if tokens[place][0] is not None:
                self.cache_hook.add_partial(kind, tokens[place][0], (output.sum_logprob, output.is_greedy))

        outputs, seconds = self._run(asked, kind, disable_tqdm, finished)
        if keys is not None:
            self._record(asked, outputs, [""] * len(asked), seconds)
        return [(output.sum_logprob, output.is_greedy) for output in outputs]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each instance's whole text: every token is scored once, in windows of `max_length`."""
        kind, keys = "loglikelihood_rolling", instance_keys(requests)
        by_text = [self._windows(request.args[0]) for request in requests]
        asked = windows(keys, by_text)
        outputs, seconds = self._run(asked, kind, disable_tqdm)
        self._record(asked, outputs, [""] * len(asked), seconds)
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
        kind, asked, stops = "generate_until", [], []
        problems: dict[str, None] = {}  # a task's documents share their settings, so that each problem is listed once
        for place, (request, key) in enumerate(zip(requests, instance_keys(requests), strict=True)):
            context, settings = request.args
            try:
                generation = read_generation(
                    settings, self.max_gen_toks, self._eos, self.arguments.config.seed, "/".join(map(str, key))
                )
                asked.append(generated(place, key, self._prompt(context), generation, self.max_length))
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

        outputs, seconds = self._run(asked, kind, disable_tqdm, finished)
        answers = [texts[place] for place in range(len(asked))]
        self._record(asked, outputs, answers, seconds)
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
        asked: Sequence[HarnessRequest],
        kind: str,
        disable_tqdm: bool,
        finished: Finished = lambda place, output: None,
    ) -> tuple[list[RequestOutput], float]:
        """(every request's output, in order; seconds). finished: called as soon as a request is done.

        Raises: ConfigError before anything runs, for requests that never can; EvalEngineError for those that failed,
        once all others are done.
        """
        for warning in warnings_of(asked, self.max_length):
            logger.warning(warning)
        requests = [item.request for item in asked]
        check_requests(requests, self.llm.limits, lambda request: asked[request.request_id].named)
        outputs: dict[int, RequestOutput] = {}
        started = time.perf_counter()
        bar = tqdm(total=len(asked), desc=f"Running {kind} requests", disable=disable_tqdm)
        with bar, self._answering(asked) as answering:
            for output in answering.run(requests):
                outputs[output.request_id] = output
                if output.error is None:
                    finished(output.request_id, output)
                bar.update(1)
        ordered = [outputs[place] for place in range(len(asked))]
        check_outputs(asked, ordered)
        return ordered, time.perf_counter() - started

    @contextmanager
    def _answering(self, asked: Sequence[HarnessRequest]) -> Iterator[Any]:
        """The engine, through the cache if one is set; what the cache did is logged."""
        config = self.arguments.config
        if config.cache.path is None:
            yield self.llm
            return
        if self._identity is None:  # hashing the weights takes seconds, so it is done once
            self._identity = engine_identity(config, self.llm)
        named = partial(_name_of, asked)
        with through_cache(config, self.llm, self._identity, named) as cached:
            assert cached is not None
            yield cached
            logger.info("cache=%s: %s", config.cache.path, cached.counts)
            self._cached = cached

    def _record(
        self, asked: Sequence[HarnessRequest], outputs: Sequence[RequestOutput], texts: Sequence[str], seconds: float
    ) -> None:
        if self._recorder is not None:
            self._recorder.add(asked, outputs, texts, seconds, self._cached)
