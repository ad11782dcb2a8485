"""The engine's public face: `LLM.generate`, `chat`, `score` and `score_rolling`, over `Engine.run`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import count
from typing import Any

from evalengine.config.schema import TEMPLATE_DATE
from evalengine.engine.engine import Engine
from evalengine.engine.prompts import (
    Message,
    Prompt,
    context_and_continuation,
    conversations,
    each,
    items,
    prompt_list,
    text_or_ids,
)
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, SamplingParams, ScoreRequest
from evalengine.engine.text.chat_template import ChatTemplate, Wording
from evalengine.engine.text.encode import encode, encode_pair, prefix_token_id
from evalengine.engine.text.rolling import rolling_windows
from evalengine.engine.warm_up import warm_up
from evalengine.errors import ConfigError

OF_CHAT = Wording(
    where="LLM.chat",
    without_template="LLM.generate takes a text without one",
    without_system="leave the system message out",
    as_one_message="put all of it into one user message",
)


class LLM(Engine):
    """An `Engine` that also takes text: prompts and texts are given as text or as token ids.

    A request that fails (a non-finite activation) does not fail the others: its output says why, in `error`.
    """

    def load(self) -> None:
        """Load the weights unless that is done, and warm up on a GPU. Raises ConfigError and EvalEngineError."""
        if not self.loaded:
            self._make()
            if self.settings.device.type == "cuda":
                warm_up(self)

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt (text or token ids). Returns an output for each, in the prompts' order.

        With `SamplingParams.n`, an output's `outputs` holds its n samples. Equal prompts with equal parameters are
        their own samples, too: the k-th of them has always the same noise, whatever else is generated.

        Raises: ConfigError for requests that do not fit.
        """
        batch = prompt_list(prompts)
        params = SamplingParams() if sampling_params is None else sampling_params
        own = [params] * len(batch) if isinstance(params, SamplingParams) else items(params, "sampling_params")
        if len(own) != len(batch):
            raise ConfigError(f"sampling_params: {len(own)} given for {len(batch)} prompts; give one, or one each")
        met: Counter[tuple[tuple[int, ...], SamplingParams]] = Counter()
        numbers = count()  # the samples' request ids, in the prompts' order

        def samples(i: int, prompt: Any) -> list[GenerateRequest]:
            params, n = own[i], 1
            if isinstance(params, SamplingParams) and params.n > 1:  # the request refuses any other type
                params, n = replace(params, n=1), params.n
            request = GenerateRequest(next(numbers), self._ids(prompt), params)
            key = tuple(request.prompt_ids), request.params
            first, met[key] = met[key], met[key] + n
            others = [replace(request, request_id=next(numbers), sample=first + k) for k in range(1, n)]
            return [replace(request, sample=first) if first else request, *others]

        groups = each(batch, "prompt", samples)
        outputs = iter(self._collect([request for group in groups for request in group]))
        samples_of = [[next(outputs) for _ in group] for group in groups]
        numbered = [[replace(output, request_id=i) for output in group] for i, group in enumerate(samples_of)]
        return [replace(first, others=others) for first, *others in numbered]

    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        date: str = TEMPLATE_DATE,
    ) -> list[RequestOutput]:
        """Answers a conversation, or several: `{"role": ..., "content": ...}` messages, put into words by the model's
        own chat template.

        date: the day that the template's clock shows, YYYY-MM-DD; fixed, so that a prompt is the same on every day.

        Raises: ConfigError for a model without a chat template, and for messages that it refuses.
        """
        template = ChatTemplate(self._text_tokenizer(), date, OF_CHAT)
        prompts = each(conversations(messages), "conversation", lambda _, talk: template(talk))
        return self.generate(prompts, sampling_params)

    def score(self, pairs: SequenceOf[tuple[Prompt, Prompt]], logprobs: int = 0) -> list[RequestOutput]:
        """Log-likelihood of each continuation after its context, given as text pairs or token-id pairs.

        Text is split into tokens as lm-eval does (`encode_pair`). Equal contexts are computed once.
        """

        def request(i: int, pair: tuple[Prompt, Prompt]) -> ScoreRequest:
            context, continuation = context_and_continuation(pair)
            if isinstance(context, str) and isinstance(continuation, str):
                context, continuation = encode_pair(self._text_tokenizer(), context, continuation)
            return ScoreRequest(i, context, continuation, logprobs)  # type: ignore[arg-type]  # both sides are ids

        return self._collect(each(items(pairs, "pairs"), "pair", request))

    def score_rolling(self, texts: Prompt | SequenceOf[Prompt]) -> list[list[RequestOutput]]:
        """Log-likelihood of whole texts, each token once, in windows of `max_model_len`: a list of windows per text."""
        prefix = prefix_token_id(self._text_tokenizer())
        ids = each(prompt_list(texts), "text", lambda _, text: self._ids(text))
        requests: list[ScoreRequest] = []
        owners: list[int] = []
        for i, text in enumerate(ids):
            for context, continuation in rolling_windows(text, prefix, self.settings.max_model_len):
                requests.append(ScoreRequest(len(requests), context, continuation))
                owners.append(i)
        outputs: list[list[RequestOutput]] = [[] for _ in ids]
        for owner, output in zip(owners, self._collect(requests), strict=True):
            outputs[owner].append(output)
        return outputs

    def _collect(self, requests: SequenceOf[Request]) -> list[RequestOutput]:
        return sorted(self.run(requests), key=lambda output: output.request_id)

    def _ids(self, prompt: Prompt) -> list[int]:
        prompt = text_or_ids(prompt)
        return encode(self._text_tokenizer(), prompt) if isinstance(prompt, str) else prompt

    def _text_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ConfigError("model.tokenizer: this model has no tokenizer (load_format=dummy); give token ids")
        return self.tokenizer
