"""Every field of the config.json of a model that transformers' module computes is given values that it cannot have: the
answer is a spec or a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import resolve_checkpoint
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.harness.identity import plain_spec
from tests.fuzz.cases import cases
from tests.fuzz.test_hf_folder import VALUES, in_time, mutated, places_in
from tests.parity.families import SIZES
from tests.parity.modules import CASES


@pytest.mark.parametrize("name", ["mixtral", "gpt2", "deepseek_v3", "gpt_oss"])
def test_impossible_values_are_refused_with_a_sentence_or_described(name: str, tmp_path: Path) -> None:
    model_type, more = CASES[name]
    sizes = {field: value for field, value in {**SIZES, **more}.items() if value is not None}
    text = json.dumps({**CONFIG_MAPPING[model_type](**sizes).to_dict(), "architectures": None})
    places, refused, described = list(places_in(json.loads(text))), 0, 0
    asked = {"name": "t", "path": str(tmp_path), "load_format": "dummy", "implementation": "transformers"}
    for case in cases(f"module-{name}", 150):
        place, value = case.choice(places), case.choice(VALUES)
        content = mutated(text, place, value)
        (tmp_path / "config.json").write_text(content, encoding="utf-8", errors="surrogatepass")
        with case.named((place, value)), in_time():
            try:
                plain_spec(resolve_checkpoint(ModelConfig(**asked)).spec)
                described += 1
            except (ConfigError, EvalEngineError) as error:
                problems = error.problems if isinstance(error, ConfigError) else [str(error)]
                assert all(problem.isprintable() and len(problem) < 1500 for problem in problems), problems
                refused += 1
    assert refused and described
