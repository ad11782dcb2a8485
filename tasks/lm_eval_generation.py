"""lm-eval's generation_kwargs -> `Generation`: every setting is honoured or refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from evalengine.config.schema import LM_EVAL_LENGTHS, LM_EVAL_NEUTRAL, GenerationConfig
from evalengine.tasks.instance import Generation

HONOURED = ("until", "do_sample", "temperature", "top_p", "top_k", *LM_EVAL_LENGTHS)


def with_own(settings: Mapping[str, Any], own: GenerationConfig) -> dict[str, Any]:
    """lm-eval's settings of a task; those that the run's configuration sets replace them."""
    chosen = {name: value for name, value in asdict(own).items() if value is not None and name != "repeats"}
    if "max_gen_toks" in chosen:
        settings = {name: value for name, value in settings.items() if name not in LM_EVAL_LENGTHS}
    if "temperature" in chosen:
        chosen["do_sample"] = chosen["temperature"] > 0
    return {**settings, **chosen}


def generation_kwargs_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields what cannot be honoured; each problem starts with the setting."""
    for name, value in settings.items():
        where = f"generation_kwargs.{name}={str(value)[:80]}"
        if value is None or (name in LM_EVAL_NEUTRAL and value == LM_EVAL_NEUTRAL[name]):
            continue
        if name not in HONOURED:
            yield f"{where}: lm-eval's task sets it, the engine does not build it, and it changes what is generated"
        elif name in ("temperature", "top_p", "top_k", *LM_EVAL_LENGTHS) and not _is_number(value):
            yield f"{where}: must be a number"
        elif name == "until" and not all(isinstance(stop, str) for stop in _listed(value)):
            yield f"{where}: must be a text or a list of texts"
    if settings.get("do_sample") is True and not float(settings.get("temperature") or 0.0):
        yield "generation_kwargs.do_sample=True at temperature=0 samples nothing: set task.generation.temperature"


def generation_of(settings: Mapping[str, Any]) -> Generation:
    """The settings by lm-eval's rules: greedy without a temperature, 256 tokens without a length."""
    length = next((settings[name] for name in LM_EVAL_LENGTHS if settings.get(name) is not None), 256)
    temperature = float(settings.get("temperature") or 0.0)
    top_p = settings.get("top_p")
    return Generation(
        until=tuple(stop for stop in _listed(settings.get("until")) if stop),  # an empty string stops nothing
        max_gen_toks=int(length),
        temperature=0.0 if settings.get("do_sample") is False else temperature,
        top_k=int(settings.get("top_k") or 0),
        top_p=1.0 if top_p is None else float(top_p),
    )


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, bool)
