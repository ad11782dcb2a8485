"""A task's generation settings -> `SamplingParams`: every setting is honoured or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lm_eval.models import utils as lm_eval_utils

from evalengine.config.arguments import integer, number, shown
from evalengine.config.schema import LM_EVAL_LENGTHS, LM_EVAL_NEUTRAL
from evalengine.engine.request import SamplingParams
from evalengine.errors import ConfigError

HONOURED = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k")


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
