"""Turns lm-eval's instances into the engine's requests, each with the key of its record.

Texts become token ids by the rules of lm-eval's hf model, `add_bos_token` among them. Each generation setting
of a task takes effect, or an error names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.models import utils as lm_eval_utils

from evalengine.config.schema import LM_EVAL_LENGTHS, LM_EVAL_NEUTRAL
from evalengine.engine.request import GenerateRequest, RequestOutput, SamplingParams, ScoreRequest
from evalengine.engine.text.encode import encode_as, prefix_token_id
from evalengine.errors import ConfigError, EvalEngineError, first_of
from evalengine.harness.requests import HarnessRequest
from evalengine.records.schema import RecordKey
from evalengine.util.validation import integer, number, shown

HONOURED = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k")
UNNAMED = "unnamed"  # the task of an instance that was made without one
MAX_LISTED = 10


def set_add_bos_token(tokenizer: Any, add_bos_token: bool | None) -> None:
    """Makes the tokenizer add BOS, or not, where it adds special tokens at all; None leaves it as it came.

    Raises: ConfigError for a tokenizer without a BOS token.
    """
    if add_bos_token is None:
        return
    if add_bos_token and tokenizer.bos_token is None:
        raise ConfigError("add_bos_token=True: the model's tokenizer has no BOS token; leave it out")
    tokenizer.add_bos_token = add_bos_token


def encode_scored(tokenizer: Any, text: str, add_special_tokens: bool | None, add_bos_token: bool | None) -> list[int]:
    """The token ids of a text to be scored. add_special_tokens None: as `add_bos_token` says, else as the tokenizer's
    default does; nothing is added to a text that begins with the prefix token itself."""
    if add_special_tokens is None:
        has_prefix = text.startswith(tokenizer.decode([prefix_token_id(tokenizer)]))
        add_special_tokens = not has_prefix and add_bos_token is not False
    return encode_as(tokenizer, text, add_special_tokens)


def encode_prompt(tokenizer: Any, text: str, add_bos_token: bool | None) -> list[int]:
    """The token ids of a text to be continued. Nothing is added to one that begins with BOS, as templates write it."""
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return encode_as(tokenizer, text, not has_bos and add_bos_token is not False)


@dataclass(frozen=True)
class AnswerSettings:
    """How one answer is generated, and where its text is cut."""

    params: SamplingParams
    until: tuple[str, ...]  # the EOS token's text is the last


def read_generation(
    given: Mapping[str, Any], max_gen_toks: int, eos: str | None, seed: int, key: str
) -> AnswerSettings:
    """given: a request's own settings. max_gen_toks: the length if `given` names none. eos: the text that ends every
    answer. seed, key: those of the sampling noise.

    Raises: ConfigError that lists what is unknown or out of range.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"generation_kwargs={shown(given)}: must be a mapping")
    settings = {name: value for name, value in given.items() if value is not None}
    problems = [_refused(name, value) for name, value in settings.items() if not _known(name, value)]
    problems += _ill_typed(settings)
    if problems:
        raise ConfigError(problems)
    settings = _normalized(
        {name: value for name, value in settings.items() if name not in LM_EVAL_NEUTRAL}, max_gen_toks
    )
    until = _stops(settings["until"], eos)
    temperature = float(settings.get("temperature", 0.0))
    if settings.get("do_sample") and temperature == 0:
        raise ConfigError("do_sample=True at temperature=0 samples nothing: set a temperature, or do_sample=False")
    params = SamplingParams(
        max_tokens=settings["max_gen_toks"],
        temperature=temperature,
        top_k=settings.get("top_k", 0),
        top_p=settings.get("top_p", 1.0),
        stop=until,
        seed=seed,
        noise_key=key,
    )
    return AnswerSettings(params, until)


def answer_text(text: str, until: tuple[str, ...], think_end_token: str | None) -> str:
    """A generated text without its thinking, cut at the first occurrence of each stop string in turn."""
    helper: Callable[..., str] | None = getattr(lm_eval_utils, "postprocess_generated_text", None)
    if helper is not None:
        return helper(generation=text, stop=list(until), think_end_token=think_end_token)
    if think_end_token:
        text = text.split(think_end_token)[-1].lstrip()
    for stop in until:
        text = text.split(stop)[0]
    return text


def _known(name: str, value: Any) -> bool:
    return name in (*HONOURED, *LM_EVAL_LENGTHS) or (name in LM_EVAL_NEUTRAL and value == LM_EVAL_NEUTRAL[name])


def _refused(name: str, value: Any) -> str:
    if name in LM_EVAL_NEUTRAL:
        return f"{name}={shown(value)}: only {LM_EVAL_NEUTRAL[name]} is supported"
    return f"{name}={shown(value)}: not supported; it would change what is generated, so it is not left out in silence"


def _ill_typed(settings: Mapping[str, Any]) -> list[str]:
    """Problems with values that lm-eval's own helper would round, parse or fail on."""
    problems = []
    for name in LM_EVAL_LENGTHS:
        if name in settings and integer(settings[name]) is None:
            problems.append(f"{name}={shown(settings[name])}: must be an integer")
    if "temperature" in settings and number(settings["temperature"]) is None:
        problems.append(f"temperature={shown(settings['temperature'])}: must be a number")
    if "do_sample" in settings and not isinstance(settings["do_sample"], bool):
        problems.append(f"do_sample={shown(settings['do_sample'])}: must be True or False")
    until = settings.get("until", [])
    if not isinstance(until, str) and not (isinstance(until, list) and all(isinstance(s, str) for s in until)):
        problems.append(f"until={shown(until)}: must be a text or a list of texts")
    return problems


def _normalized(settings: dict[str, Any], max_gen_toks: int) -> dict[str, Any]:
    """The settings by lm-eval's rules: `until` is a list, one length, a temperature that agrees with `do_sample`."""
    helper: Callable[..., Any] | None = getattr(lm_eval_utils, "normalize_gen_kwargs", None)
    if helper is not None:
        return dict(helper(settings, max_gen_toks))
    lengths = [settings.pop(name) for name in LM_EVAL_LENGTHS if name in settings]
    until = settings.get("until", [])
    greedy = settings.get("do_sample") is False
    return {
        **settings,
        "until": [until] if isinstance(until, str) else list(until),
        "max_gen_toks": int(lengths[0] if lengths else max_gen_toks),
        "temperature": 0.0 if greedy else float(settings.get("temperature", 0.0)),
    }


def _stops(until: list[str], eos: str | None) -> tuple[str, ...]:
    """The stop strings with EOS last, without empty ones."""
    stops = lm_eval_utils.handle_stop_sequences(list(until), eos=eos)
    return tuple(stop for stop in stops if stop)


def instance_keys(instances: Sequence[Any]) -> list[RecordKey]:
    """(task, document, request index, repeat) of each instance; lm-eval repeats one by listing it several times."""
    repeats: Counter[tuple[str, int, int]] = Counter()
    keys = []
    for place, instance in enumerate(instances):
        document = place if instance.doc_id is None else instance.doc_id
        request = (instance.task_name or UNNAMED, document, instance.idx)
        keys.append((*request, repeats[request]))
        repeats[request] += 1
    return keys


def scored(
    place: int, key: RecordKey, kind: str, context: list[int], continuation: list[int], max_length: int
) -> HarnessRequest:
    """The request of a continuation's log-likelihood. Its context is cut from the left so that both fit, as lm-eval's
    hf model does: of max_length + 1 tokens the last is predicted, not fed. `check_requests` refuses what cannot fit."""
    cut = max(0, len(context) - max(1, max_length + 1 - len(continuation)))
    return HarnessRequest.of(key, kind, ScoreRequest(place, context[cut:], continuation), cut)


def generated(
    place: int, key: RecordKey, prompt: list[int], generation: AnswerSettings, max_length: int
) -> HarnessRequest:
    """The request of an answer. Its prompt is cut from the left to leave room for it.

    Raises: ConfigError if there is no room for any prompt.
    """
    room = max_length - generation.params.max_tokens
    if room < 1:
        raise ConfigError(
            f"max_gen_toks={generation.params.max_tokens} leaves no room for a prompt in max_model_len={max_length}; "
            "lower it (--gen_kwargs max_gen_toks=N, or model_args max_gen_toks=N for tasks that name none)"
        )
    cut = max(0, len(prompt) - room)
    return HarnessRequest.of(key, "generate_until", GenerateRequest(place, prompt[cut:], generation.params), cut)


def windows(
    keys: Sequence[RecordKey], windows_by_text: Sequence[list[tuple[list[int], list[int]]]]
) -> list[HarnessRequest]:
    """A request for each window of each text, in order; its index counts the windows of the document, as in other runs.

    windows_by_text: the windows (context, continuation) of each text.
    """
    num_windows: Counter[tuple[str, int, int]] = Counter()
    items: list[HarnessRequest] = []
    for (task, document, _, repeat), own in zip(keys, windows_by_text, strict=True):
        for context, continuation in own:
            key = (task, document, num_windows[task, document, repeat], repeat)
            num_windows[task, document, repeat] += 1
            items.append(
                HarnessRequest.of(key, "loglikelihood_rolling", ScoreRequest(len(items), context, continuation))
            )
    return items


def check_outputs(items: Sequence[HarnessRequest], outputs: Sequence[RequestOutput]) -> None:
    """Raises EvalEngineError that names the first few of the requests that failed."""
    failed = [f"{a.named}: {output.error}" for a, output in zip(items, outputs, strict=True) if output.error]
    if failed:
        raise EvalEngineError(f"{len(failed)} requests failed:", *first_of(failed, MAX_LISTED))


def warnings_of(items: Sequence[HarnessRequest], max_length: int) -> Iterator[str]:
    """Yields a warning if prompts of the call were cut."""
    if cut := [a for a in items if a.truncated]:
        most = max(a.truncated for a in cut)
        yield (
            f"{len(cut)} of {len(items)} prompts are longer than max_model_len={max_length} leaves room for: cut from "
            f"the left, by {most} tokens at most (the first is of {cut[0].named})"
        )
