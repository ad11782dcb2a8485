"""Python's arguments as settings: what goes in comes out of the configuration, and out of the words that record it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from evalengine import LLM
from evalengine.api.evaluate import evaluate, flat, task_word
from evalengine.config.compose import compose_jobs
from evalengine.config.overrides import word
from evalengine.config.schema import Config, ModelConfig
from evalengine.config.shipped import available, shipped_model
from evalengine.errors import ConfigError


def composed(**args: object) -> Config:
    """The configuration that arguments from Python become."""
    problems: list[str] = []
    given = flat(args, problems)
    files = [word(name, given.pop(name)) for name in ("model",) if name in given]
    (job,) = compose_jobs(files, settings=given)
    assert not problems and compose_jobs([*files, *(word(*item) for item in given.items())])[0].config == job.config
    return job.config


def test_settings_of_every_kind() -> None:
    """NumPy numbers, None, paths, and texts with signs of Hydra's grammar arrive as they are."""
    config = composed(
        limit=np.int64(3), seed=0, batch_invariant=False, system_instruction=None, data_dir=Path("."),
        engine={"max_num_seqs": 4, "kv_cache_memory_fraction": np.float64(0.25)},
        task={"generation": {"until": ["a,b", "it's", "${x}"], "temperature": 1e-05}},
    )  # fmt: skip
    assert (config.limit, config.seed, config.batch_invariant, config.system_instruction) == (3, 0, False, None)
    assert (config.data_dir, config.engine.max_num_seqs, config.engine.kv_cache_memory_fraction) == (".", 4, 0.25)
    generation = config.tasks["arithmetic"].generation
    assert generation.until == ["a,b", "it's", "${x}"] and generation.temperature == 1e-05


@settings(deadline=None, max_examples=5)
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20))
def test_a_text_arrives_as_it_is(text: str) -> None:
    assert composed(system_instruction=text).system_instruction == text


@pytest.mark.parametrize(
    "text",
    [
        ".5",
        "5",
        "1e5",
        "é",
        "../x",
        "./a.b-c/d",
        "/a",
        "null",
        "Inf",
        "nan",
        "True",
        "",
        "a b",
        "a\\",
        "'\"",
        "${a}",
        ".",
    ],
)
def test_a_written_text_is_the_same_text(text: str) -> None:
    assert OverridesParser.create().parse_override(word("output_dir", text)).value() == text.replace("${", "\\${")


def test_tasks_by_name_and_by_file(tmp_path: Path) -> None:
    assert task_word("arithmetic", []) == ["task=arithmetic"]
    assert task_word(["a", tmp_path / "b c.yaml"], []) == [f"task=[a,'{tmp_path}/b c.yaml']"]


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        evaluate(3, ["arithmetic", 4], limit=object(), engine={5: 1}, experiment="noise_floor")  # type: ignore[list-item,arg-type]
    names = [problem.split(":")[0].split("=")[0] for problem in refused.value.problems]
    assert names == ["tasks", "limit", "engine.5", "model", "experiment"]


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("batch_size", 'engine={"max_num_seqs": ...}'),
        ("max_new_tokens", 'task={"generation": {"max_gen_toks": ...}}'),
        ("num_samples", "limit"),
    ],
)
def test_a_suggestion_is_an_argument_of_python(name: str, argument: str) -> None:
    with pytest.raises(ConfigError) as refused:
        evaluate("tinymath", "arithmetic", **{name: 8})
    assert str(refused.value) == f"{name}: no such setting; did you mean {argument}?"


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("tinymath", ["arithmetic"]), {"tasks": {"arithmetic": {"num_fewshot": -2}}}),
        (("tinymath", {"arithmetic": {"num_fewshot": -2}}), {}),
        (("tinymath",), {"tasks": {"arithmetic": {"num_fewshot": -2}}}),
        ((), {"model": "tinymath", "tasks": "arithmetic", "task": {"num_fewshot": -2}}),
    ],
)
def test_a_tasks_own_settings_reach_it(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"tasks?(\.arithmetic)?\.num_fewshot=-2: must be greater than or equal to 0"):
        evaluate(*args, **named)


def test_what_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        evaluate("tinymath", "arithmetic", tasks="gsm8k", model="qwen3-8b")
    assert [problem.partition("; ")[0] for problem in refused.value.problems] == [
        "model='qwen3-8b': is given already",
        "tasks='gsm8k': is given already",
    ]
    with pytest.raises(ConfigError, match=r"tasks.arithmetic=3: must be settings, such as \{'num_fewshot': 5\}"):
        evaluate("tinymath", {"arithmetic": 3})  # type: ignore[dict-item]


def test_a_model_of_transformers_is_named_with_the_cure() -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=7, hidden_size=32, intermediate_size=8, num_hidden_layers=1))
    for refuses in (lambda: evaluate(model, "arithmetic"), lambda: LLM(model)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"a LlamaForCausalLM in memory is not taken; save it .*FOLDER"):
            refuses()


def test_a_shipped_models_name_is_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in available("model"):
        assert ModelConfig(**(shipped_model(name) or {})) == composed(model=name).model
    assert shipped_model("tinymoth") is None
    with LLM("tinymath", device="cpu") as llm:
        assert (llm.model_config.name, llm.model_config.path) == ("tinymath", "asset:tinymath")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tinymath").mkdir()
    for refuses in (lambda: evaluate("tinymath", "arithmetic"), lambda: LLM("tinymath")):
        with pytest.raises(ConfigError, match=r"write \./tinymath for that, or asset:tinymath for the other"):
            refuses()


@pytest.mark.parametrize(
    ("model", "arguments", "messages"),
    [
        ("tinymath", {"num_fewshot": 5}, ['num_fewshot: no such setting; did you mean task={"num_fewshot": ...}?']),
        ("tinymath", {"device": "cpu"}, ['did you mean engine={"device": ...}?']),
        ("tinymath", {"engine": {"max_num_seq": 4}}, ["did you mean engine.max_num_seqs?"]),
        ("tinymath", {"limit": 0.01}, ["limit=0.01: must be a whole number of documents, not a share of them"]),
        ("tinymath", {"limt": 4, "sed": 1}, ["limt: no such setting; did you mean limit?", "sed: no such"]),
        ("tinymath", {"limit": 0, "seed": -1}, ["limit=0: must be greater than or equal to 1", "seed=-1"]),
        ("tinymath", {"limit": "many"}, ["limit"]),
        ("/nowhere/weights", {"limit": 1}, ["/nowhere/weights"]),
        (ModelConfig(), {}, ["model.path: names no weights"]),
    ],
)
def test_refusals_are_those_of_the_command_line(
    model: str | ModelConfig, arguments: dict[str, object], messages: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        evaluate(model, "arithmetic", output_dir=tmp_path / "out", **arguments)
    assert all(text in str(refused.value) for text in messages)
    assert not (tmp_path / "out").exists()
