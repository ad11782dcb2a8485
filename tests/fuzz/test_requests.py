"""Random malformed calls of the API: each is a ConfigError, and the engine then answers as before."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from evalengine import LLM, SamplingParams
from evalengine.config.schema import EngineConfig
from evalengine.engine.load.generation_config import APPLIED, NEUTRAL, REFUSED, from_fields
from evalengine.engine.request import GenerateRequest, ScoreRequest
from evalengine.engine.settings import settings_problems
from evalengine.errors import ConfigError
from evalengine.models.processors import LogitsProcessors
from evalengine.util.plain_files import parse_json
from tests.fuzz.cases import Case, cases

REFERENCE = [[5, 6, 7], [9], list(range(20, 50))]
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1)


class Odd:
    """An object that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("repr")


ODDITIES: tuple[Callable[[Case], Any], ...] = (
    lambda case: None,
    lambda case: case.choice([True, False, np.True_]),
    lambda case: case.choice([1.7, -0.0, math.nan, math.inf, 1e300, 5e-324, np.float16(1), np.float64("nan")]),
    lambda case: case.choice([0, 1, -1, 3, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 10**5000]),
    lambda case: case.choice(["", "a", "5", "\ud800", "x" * 5000, "é", "\0"]),
    lambda case: case.choice([b"", b"abc", bytearray(b"x"), memoryview(b"x")]),
    lambda case: case.choice([np.zeros((2, 2)), np.array(3), np.array([1, 2]), np.array(["a"]), np.array([None])]),
    lambda case: case.choice([torch.tensor(3), torch.tensor([1.5]), torch.tensor([1, 2]), torch.ones(2, 2)]),
    lambda case: case.choice([[], [1, 2], [1.0], ["a"], [[1]], [None], [True], [-1], [10**9], (), (1,), [b"x"]]),
    lambda case: case.choice([{}, {"a": 1}, {1, 2}, frozenset(), range(3), range(-2, 2), object(), Odd(), len, int]),
    lambda case: [odd(case) for _ in range(case.randint(0, 3))],
    lambda case: {case.choice(["max_tokens", "prompt"]): odd(case)},
)


def odd(case: Case) -> Any:
    """A random value of any kind."""
    return case.choice(ODDITIES)(case)


def odd_json(case: Case) -> Any:
    """An odd value that a JSON file can hold."""
    while True:
        try:
            return parse_json(json.dumps(odd(case)))
        except (TypeError, ValueError, RuntimeError):
            continue


def attempts(case: Case, llm: LLM) -> Iterator[Callable[[], Any]]:
    """Calls with something odd in them; some of it may be right."""
    params = {f.name: odd(case) for f in fields(SamplingParams) if case.random() < 0.2}
    params.setdefault("max_tokens", 2)  # 256 tokens would only take time
    if isinstance(params["max_tokens"], int) and params["max_tokens"] > 2:
        params["max_tokens"] = 2.5
    yield lambda: llm.generate([REFERENCE[0]], SamplingParams(**params))
    yield lambda: llm.generate(odd(case), PARAMS)
    yield lambda: llm.generate([REFERENCE[0], odd(case)], PARAMS)
    yield lambda: llm.generate([[5]], [odd(case)])
    yield lambda: llm.score(odd(case))
    yield lambda: llm.score([(odd(case), odd(case))], odd(case))
    yield lambda: llm.score([([5, odd(case)], [6])], case.choice([0, odd(case)]))
    yield lambda: llm.score_rolling(odd(case))
    yield lambda: list(llm.run(odd(case)))
    yield lambda: list(llm.run([GenerateRequest(odd(case), [5], PARAMS), odd(case)]))
    yield lambda: list(llm.run([ScoreRequest(case.choice([0, odd(case)]), [5], odd(case), odd(case))]))
    processors = {name: odd(case) for name in APPLIED if case.random() < 0.3}
    yield lambda: llm.generate([[5]], SamplingParams(max_tokens=2, processors=LogitsProcessors(**processors)))


def answers(llm: LLM) -> list[tuple[list[int], bytes]]:
    """The ids and the logprobs' bytes for the reference prompts."""
    return [(o.token_ids, o.logprobs.tobytes()) for o in llm.generate(REFERENCE, PARAMS)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("asset:tinymath", num_kv_blocks=64, block_size=16, batch_invariant=False, dtype="float32") as llm:
        yield llm


def test_malformed_calls_are_refused_and_change_nothing(llm: LLM) -> None:
    """In `fast` mode the bits show another schedule: nothing may be left in queue or cache."""
    llm.reconfigure(enable_prefix_caching=False)
    expected, refused, total = answers(llm), 0, 0
    for case in cases("requests", 15):
        for number, attempt in enumerate(attempts(case, llm)):
            with case.named(f"attempt {number}"):
                total += 1
                try:
                    attempt()
                except ConfigError as error:
                    refused += 1
                    assert error.problems and all(len(problem) < 400 for problem in error.problems)
                assert not llm.scheduler.has_work
        with case.named("afterwards"):
            assert answers(llm) == expected
            llm.block_manager.check([])
    assert refused > total / 2


def test_engine_settings_of_any_kind_are_accepted_or_a_sentence() -> None:
    for case in cases("engine settings", 400):
        settings = {f.name: odd(case) for f in fields(EngineConfig) if case.random() < 0.4}
        with case.named(list(settings)):
            problems = list(settings_problems(EngineConfig(**settings), True, "auto", None))
            assert all(problem.startswith("engine.") and len(problem) < 400 for problem in problems)


def test_generation_configs_of_any_kind_are_applied_or_refused() -> None:
    names = [*APPLIED, *REFUSED, *sorted(NEUTRAL), "unknown"]
    for case in cases("generation config", 400):
        config = {name: odd_json(case) for name in names if case.random() < 0.1}
        with case.named(list(config)):
            try:
                processors = from_fields(config, 100)
            except ConfigError as error:
                assert all(len(problem) < 400 for problem in error.problems)
            else:
                applied = {n: v for n, v in config.items() if n in processors.in_force()}
                assert LogitsProcessors(**applied) == processors
                assert not any(REFUSED[n](v) for n, v in config.items() if n in REFUSED and v is not None)
