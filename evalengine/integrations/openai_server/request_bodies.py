"""From a body to the engine's requests: prompts, sampling settings, the seed, and the answer's id."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from evalengine.engine.request import GenerateRequest, Request, SamplingParams, ScoreRequest
from evalengine.engine.submission import check_requests
from evalengine.engine.text.detokenizer import special_ids
from evalengine.errors import ConfigError
from evalengine.integrations.openai_server.bodies import ChatBody, CompletionBody, NamedTool, SamplingBody
from evalengine.integrations.openai_server.errors import ApiError
from evalengine.integrations.openai_server.grammars import AnswerGrammar, of_format, of_tools
from evalengine.integrations.openai_server.model import ServedModel
from evalengine.integrations.openai_server.settings import ServeSettings
from evalengine.integrations.openai_server.tool_calls import offered
from evalengine.models.processors import LogitsProcessors, RequestProcessors
from evalengine.records.sealed import canonical
from evalengine.util.validation import LARGEST, shown

logger = logging.getLogger(__name__)
# The tools are part of the prompt, the grammar of the params.
NOT_OF_THE_ID = ("params", "stream", "include_usage", "tools", "grammar")
COMPLETION_TOKENS = 16  # of a completion that names no max_tokens, as OpenAI's
MOST_STOPS = 1024  # stop strings of a request, and stop tokens


@dataclass(frozen=True)
class Choice:
    """One answer of a request: the prompt that it continues, and which of its samples it is."""

    index: int
    prompt: int
    sample: int  # counts equal prompts of one request, too: each has its own noise


@dataclass(frozen=True)
class ServerRequest:
    """One request, resolved. Equal asks have equal answers, to the byte."""

    chat: bool
    prompts: list[list[int]]
    texts: list[str | None]  # each prompt as it was given, None for token ids
    n: int
    params: SamplingParams | None  # None: the prompt alone is wanted (echo with max_tokens=0)
    alternatives: int | None  # logprobs are wanted, with so many alternatives a token
    echo: bool = False
    prompt_alternatives: int | None = None  # the prompt's logprobs are wanted, likewise
    stream: bool = False
    include_usage: bool = False
    token_ids: bool = False
    tools: tuple[str, ...] = ()  # the functions whose calls are read out of the answer
    first_sample: int = 0  # the number of each prompt's first sample
    grammar: AnswerGrammar | None = None  # to be compiled before it reaches the engine

    @cached_property
    def id(self) -> str:
        """The answer's id: the request's hash, the same for a stream."""
        content = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in NOT_OF_THE_ID}
        sampled = None if self.params is None else vars(self.params)  # `asdict` copies each field: a tenth of a request
        if sampled is not None and sampled["processors"] is not None:
            sampled = {**sampled, "processors": asdict(sampled["processors"])}
        content["params"] = sampled
        before = canonical({name: value for name, value in content.items() if name < "prompts"})
        after = canonical({name: value for name, value in content.items() if name > "prompts"})
        digest = _sha256(f'{before[:-1]},"prompts":[', self.prompts, f"],{after[1:]}").hex()
        return f"{'chatcmpl' if self.chat else 'cmpl'}-{digest[:24]}"

    @property
    def seed(self) -> int:
        return 0 if self.params is None else self.params.seed

    @cached_property
    def choices(self) -> list[Choice]:
        """The answers, prompt by prompt."""
        met: Counter[tuple[int, ...]] = Counter()
        choices: list[Choice] = []
        for place, prompt in enumerate(self.prompts):
            for _ in range(self.n):
                choices.append(Choice(len(choices), place, self.first_sample + met[tuple(prompt)]))
                met[tuple(prompt)] += 1
        return choices

    @property
    def scores_prompts(self) -> bool:
        """Whether the prompts' own logprobs are wanted."""
        return self.prompt_alternatives is not None or (self.echo and self.alternatives is not None)

    def scores(self, ids: list[int]) -> dict[int, ScoreRequest]:
        """Prompt -> the request of its tokens' logprobs, of which the first has none."""
        if not self.scores_prompts:
            return {}
        most = max(self.alternatives or 0, self.prompt_alternatives or 0)
        return {place: ScoreRequest(ids[place], prompt[:1], prompt[1:], most)
                for place, prompt in enumerate(self.prompts) if len(prompt) > 1}  # fmt: skip

    def generations(self, ids: list[int]) -> dict[int, GenerateRequest]:
        """Choice -> its request. Without sampling noise the samples of a prompt are one request."""
        if self.params is None:
            return {}
        if self.params.temperature == 0:
            return {index: GenerateRequest(ids[index], [*prompt], self.params) for prompt, index in self._first.items()}
        return {c.index: GenerateRequest(ids[c.index], self.prompts[c.prompt], self.params, c.sample)
                for c in self.choices}  # fmt: skip

    def answered_by(self, choice: Choice) -> int:
        """The choice whose generation answers this one."""
        assert self.params is not None
        return choice.index if self.params.temperature > 0 else self._first[tuple(self.prompts[choice.prompt])]

    @property
    def task(self) -> str:
        """The task of its records."""
        return "chat" if self.chat else "completions"

    @cached_property
    def _first(self) -> dict[tuple[int, ...], int]:
        """Prompt -> its first choice."""
        first: dict[tuple[int, ...], int] = {}
        for choice in self.choices:
            first.setdefault(tuple(self.prompts[choice.prompt]), choice.index)
        return first


def completion_request(body: CompletionBody, model: ServedModel, settings: ServeSettings) -> ServerRequest:
    """The requests of a completion. Raises ApiError, or ConfigError for what the engine rejects."""
    texts, prompts = _prompts(body, model)
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, "best_of: not built; leave it out", "best_of")
    budget = min(COMPLETION_TOKENS, settings.max_tokens or COMPLETION_TOKENS)
    budget = budget if body.max_tokens is None else body.max_tokens
    if budget == 0 and not body.echo:
        raise ApiError(400, "max_tokens=0 without echo=true requests nothing", "max_tokens")
    if body.stream and body.echo:
        raise ApiError(400, "echo: a stream does not repeat the prompt; leave one of the two out", "echo")
    params = None if budget == 0 else _params(body, budget, prompts, model, body.logprobs)
    ask = ServerRequest(False, prompts, texts, body.n or 1, params, body.logprobs, bool(body.echo), **_common(body))
    return _checked(ask, model, settings)


def chat_request(body: ChatBody, prompt: str, model: ServedModel, settings: ServeSettings) -> ServerRequest:
    """The requests of a chat, whose messages the template has rendered. Raises as `completion_request`."""
    grammar = _answer_grammar(body, model)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens differ: give one", "max_tokens")
    ids = model.prompt_ids(prompt, field="messages")
    content = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    budget = max(1, model.limits.max_model_len - len(ids)) if content is None else content
    if content is None and settings.max_tokens:
        budget = min(budget, settings.max_tokens)
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    # A prompt that ends the thinking itself leaves none to the answer.
    end = None if grammar is None else model.thinking_end(prompt, grammar.param)
    params = _params(body, budget, [ids], model, alternatives, grammar, end)
    if model.think_end is not None and (grammar is None or end is not None):
        params = replace(params, think_end_token=model.think_end)
    tools = offered(body.tools) if model.tool_format is not None and body.tool_choice != "none" else ()
    ask = ServerRequest(
        True, [ids], [prompt], body.n or 1, params, alternatives, tools=tools, grammar=grammar, **_common(body)
    )
    return _checked(ask, model, settings)


def _answer_grammar(body: ChatBody, model: ServedModel) -> AnswerGrammar | None:
    """The grammar of a chat's answer; None for any answer. Raises ApiError."""
    grammar, choice = of_format(body.response_format), body.tool_choice
    if grammar is not None and body.tools and choice != "none":
        raise ApiError(400, "response_format: a schema leaves no room for calls of tools; leave tools out, or set "
                       "tool_choice=none", "response_format")  # fmt: skip
    if choice in (None, "auto", "none"):
        return grammar
    named = choice.function.name if isinstance(choice, NamedTool) else None
    return of_tools(body.tools, named, model.tool_format, special_ids(model.tokenizer))


def _common(body: SamplingBody) -> Mapping[str, Any]:
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs: a stream has none; leave one of the two out", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", "stream_options")
    return {
        "prompt_alternatives": body.prompt_logprobs,
        "stream": bool(body.stream),
        "include_usage": body.stream_options is not None and body.stream_options.include_usage,
        "token_ids": bool(body.return_token_ids),
    }


def _prompts(body: CompletionBody, model: ServedModel) -> tuple[list[str | None], list[list[int]]]:
    given = body.prompt
    batch: Any = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not batch:
        raise ApiError(400, "prompt: an empty list requests nothing", "prompt")
    texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
    return texts, [model.prompt_ids(p, body.add_special_tokens) if isinstance(p, str) else p for p in batch]


def _params(
    body: SamplingBody,
    budget: int,
    prompts: list[list[int]],
    model: ServedModel,
    alternatives: int | None,
    grammar: AnswerGrammar | None = None,
    grammar_after: int | None = None,
) -> SamplingParams:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    changed: dict[str, Any] = {}
    if body.repetition_penalty is not None:
        changed["repetition_penalty"] = body.repetition_penalty
    if body.min_tokens:
        changed["min_new_tokens"] = body.min_tokens
    of_request: dict[str, Any] = {name: float(value) for name in ("presence_penalty", "frequency_penalty")
                                  if (value := getattr(body, name))}  # fmt: skip
    if body.logit_bias:
        of_request["logit_bias"] = _biases(body.logit_bias, model.limits.vocab_size)
    if grammar is not None:
        of_request |= _grammar_fields(body, grammar, model) | {"grammar_after": grammar_after}
    kind = RequestProcessors if of_request else LogitsProcessors
    params = SamplingParams(
        max_tokens=budget,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=0 if body.top_k in (None, -1) else body.top_k,
        stop=tuple(stop),
        stop_token_ids=None if body.stop_token_ids is None else tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        seed=0 if body.seed is None else body.seed,
        logprobs=alternatives or 0,
        processors=kind(**asdict(model.spec.processors) | changed | of_request) if changed or of_request else None,
    )
    return params if body.seed is not None else replace(params, seed=derived_seed(prompts, params))


def _grammar_fields(body: SamplingBody, grammar: AnswerGrammar, model: ServedModel) -> dict[str, Any]:
    """The settings that hold an answer to its grammar. Raises ApiError."""
    library = model.grammars.check_installed(grammar.param)
    if body.ignore_eos or body.stop_token_ids == [] or not (body.stop_token_ids or model.spec.eos_token_ids):
        raise ApiError(400, f"{grammar.param}: the answer needs a token that ends it; leave ignore_eos out, and give "
                       "stop_token_ids if the model has none", grammar.param)  # fmt: skip
    return {"grammar": grammar.text, "grammar_library": library}


def _biases(given: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """`logit_bias` by token id. Raises ApiError for a name that is no token id."""
    for name in given:
        if not (name.isascii() and name.isdecimal() and len(name) < 10 and int(name) < vocab_size):
            why = f"logit_bias: {name[:20]!r} is no token id; they are 0 ... {vocab_size - 1}"
            raise ApiError(400, why, "logit_bias")
    if len({int(name) for name in given}) < len(given):
        raise ApiError(400, "logit_bias: a token id is given twice", "logit_bias")
    return tuple((int(name), float(bias)) for name, bias in given.items())


def derived_seed(prompts: list[list[int]], params: SamplingParams) -> int:
    """The seed of a request that names none: 31 bits of the hash of its prompts and of how tokens are drawn, so that
    the same request has the same one, and a longer answer begins as the shorter one did."""
    drawn = canonical([params.temperature, params.top_p, params.top_k])
    return int.from_bytes(_sha256("[[", prompts, f"],{drawn[1:]}")[:4], "big") >> 1


def _sha256(before: str, prompts: list[list[int]], after: str) -> bytes:
    """The hash of canonical JSON that has a list of prompts in its middle. It is written prompt by prompt: the library
    does not let other threads run while it writes millions of numbers."""
    digest = hashlib.sha256(before.encode())
    for place, prompt in enumerate(prompts):
        digest.update(f"{',' if place else ''}{canonical(prompt)}".encode())
    digest.update(after.encode())
    return digest.digest()


def check_counts(value: Any, model: ServedModel, settings: ServeSettings) -> None:
    """Checks how many prompts, tokens and stop strings the JSON value of a body has, before any of them is looked at,
    and its integers.

    Raises: ApiError for what is out of bounds.
    """
    if not isinstance(value, dict):
        return
    for name, (least, most, named) in _bounds("messages" in value, model, settings).items():
        number = value.get(name)
        if isinstance(number, int) and not isinstance(number, bool) and not least <= number <= most:
            raise ApiError(400, f"{name}={shown(number)}: must be an integer from {least} to {named}", name)
    for name, most in (("stop", MOST_STOPS), ("stop_token_ids", MOST_STOPS), ("tokens", model.most_detokenized)):
        if isinstance(value.get(name), list) and len(value[name]) > most:
            raise ApiError(400, f"{name}: {len(value[name])} are too many, a request has at most {most}", name)
    prompt, n = value.get("prompt"), value.get("n")
    prompts: list[Any] = [prompt]
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        prompts = prompt
    _check_choices(len(prompts) * (n if isinstance(n, int) else 1), settings)
    for tokens in prompts:
        if isinstance(tokens, list):
            model.check_length(len(tokens))


def _bounds(chat: bool, model: ServedModel, settings: ServeSettings) -> dict[str, tuple[int, int, int]]:
    """Field -> (the least that is taken, the most, the most that is useful)."""
    tokens = int(chat), settings.max_tokens or LARGEST, settings.max_tokens or model.limits.max_model_len
    alternatives = 0, settings.max_logprobs, settings.max_logprobs
    return {
        "max_tokens": tokens,
        "max_completion_tokens": tokens,
        "min_tokens": (0, LARGEST, model.limits.max_model_len),
        "n": (1, settings.max_choices, settings.max_choices),
        "logprobs": alternatives,
        "top_logprobs": alternatives,
        "prompt_logprobs": alternatives,
        "top_k": (-1, LARGEST, model.limits.vocab_size),
        "seed": (-LARGEST - 1, LARGEST, LARGEST),
    }


def _check_choices(count: int, settings: ServeSettings) -> None:
    if count > settings.max_choices:
        raise ApiError(400, f"{count} choices (prompts times n): this server answers at most "
                       f"{settings.max_choices} in one request", "n")  # fmt: skip


def _checked(ask: ServerRequest, model: ServedModel, settings: ServeSettings) -> ServerRequest:
    """The ask, if the engine can answer it. Raises ApiError and ConfigError."""
    _check_choices(len(ask.prompts) * ask.n, settings)  # before a list of so many is made
    most = max(ask.alternatives or 0, ask.prompt_alternatives or 0)
    if most > settings.max_logprobs:
        why = f"{most} alternatives a token: this server gives at most {settings.max_logprobs}"
        raise ApiError(400, why, "top_logprobs" if ask.chat else "logprobs")
    if any(not prompt for prompt in ask.prompts):
        raise ApiError(400, "prompt: the tokenizer makes no tokens of it; give at least one", "prompt")
    vocab_size = model.limits.vocab_size
    if any(max(prompt) >= vocab_size or min(prompt) < 0 for prompt in ask.prompts):
        raise ApiError(400, f"prompt: token ids must be in 0 ... {vocab_size - 1}", "prompt")
    field = "messages" if ask.chat else "prompt"
    model.check_length(max(map(len, ask.prompts)), int(ask.params is not None), field)
    generations = ask.generations([choice.index for choice in ask.choices])
    of_prompts = {tuple(request.prompt_ids): request for request in generations.values()}
    requests: list[Request] = [*ask.scores([*range(len(ask.prompts))]).values(), *of_prompts.values()]
    for request in requests:
        try:  # one by one: the messages then name no numbers, which clients do not know
            check_requests([request], model.limits)
        except ConfigError as error:
            problems = [problem.partition(": ")[2] for problem in error.problems]
            if any("engine." in problem for problem in problems):  # advice that only the server's operator can follow
                logger.warning("a request is rejected: %s", "; ".join(problems))
                raise ApiError(400, "prompt and answer may have more tokens than this server has memory for: lower "
                               "max_tokens, or shorten the prompt", "max_tokens") from error  # fmt: skip
            raise ConfigError(problems) from error
    return ask
