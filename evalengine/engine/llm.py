"""The engine's public face: `LLM.generate`, `LLM.score` and `LLM.score_rolling`, over `Engine.run`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from evalengine.engine.engine import Engine
from evalengine.engine.prompts import Prompt, context_and_continuation, each, items, prompt_list, text_or_ids
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, SamplingParams, ScoreRequest
from evalengine.engine.rolling import rolling_windows
from evalengine.engine.text import encode, encode_pair, prefix_token_id
from evalengine.errors import ConfigError, EvalEngineError


class LLM(Engine):
    """An `Engine` that also takes text: prompts and texts are given as text or as token ids."""

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt (text or token ids); outputs in the prompts' order.

        Raises: ConfigError for requests that do not fit; EvalEngineError if one failed (non-finite activations).
        """
        batch = prompt_list(prompts)
        params = SamplingParams() if sampling_params is None else sampling_params
        own = [params] * len(batch) if isinstance(params, SamplingParams) else items(params, "sampling_params")
        if len(own) != len(batch):
            raise ConfigError(f"sampling_params: {len(own)} given for {len(batch)} prompts; give one, or one each")
        return self._collect(each(batch, "prompt", lambda i, p: GenerateRequest(i, self._ids(p), own[i])))

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
        outputs = sorted(self.run(requests), key=lambda o: o.request_id)
        failed = [f"request {o.request_id}: {o.error}" for o in outputs if o.error]
        if failed:
            raise EvalEngineError("\n".join(failed))
        return outputs

    def _ids(self, prompt: Prompt) -> list[int]:
        prompt = text_or_ids(prompt)
        return encode(self._text_tokenizer(), prompt) if isinstance(prompt, str) else prompt

    def _text_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ConfigError("model.tokenizer: this model has no tokenizer (load_format=dummy); give token ids")
        return self.tokenizer
