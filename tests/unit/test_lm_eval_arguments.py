"""`--model_args` of `lm_eval --model evalengine`, without lm-eval and without a model."""

from __future__ import annotations

from typing import Any

import pytest

from evalengine.integrations.lm_eval.arguments import ignored_batch_size, read_arguments, with_device


def problems(**arguments: Any) -> list[str]:
    return read_arguments({"pretrained": "asset:tinymath", **arguments})[1]


def test_names_are_those_of_our_configuration() -> None:
    model = {"pretrained": "models/m.gguf", "revision": 2024, "tokenizer": "t", "peft": "lora", "add_bos_token": True}
    engine = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": "None", "batch_size": 16}
    run = {"batch_invariant": False, "seed": 3, "max_gen_toks": 9, "think_end_token": "151668", "output_dir": "out"}
    arguments, wrong = read_arguments({**model, **engine, **run})
    assert wrong == []
    config = arguments.config
    assert (config.model.path, config.model.name, config.model.revision) == ("models/m.gguf", "m", "2024")
    assert config.model.adapter == "lora"
    assert (config.engine.dtype, config.engine.max_num_seqs, config.engine.max_model_len) == ("float32", 8, None)
    assert (config.batch_invariant, config.seed, arguments.max_gen_toks, arguments.think_end_token) == (
        False,
        3,
        9,
        151668,
    )
    assert (arguments.add_bos_token, arguments.output_dir, arguments.enable_thinking) == (True, "out", None)


def test_everything_wrong_is_said_at_once() -> None:
    wrong = problems(max_num_sequences=1, trust_remote_code=True, seed="x", numerics="quick", max_gen_toks=0, zebra=1)
    assert wrong[:2] == [
        "max_num_sequences: no such model argument; did you mean max_num_seqs?",
        "trust_remote_code: no such model argument; leave it out",
    ]
    assert wrong[2].startswith("zebra: no such model argument; there are: add_bos_token, attention_backend,")
    assert wrong[3] == "seed='x': must be an integer"
    assert "numerics=quick: must be 'auto', 'native', 'exact' or 'fast'" in wrong
    assert wrong[-1] == "max_gen_toks=0: must be an integer of at least 1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_invariant": 1}, "batch_invariant=1: must be True or False"),
        ({"batch_invariant": True, "numerics": "fast"}, "batch_invariant=true contradicts numerics=fast"),
        ({"chat_template_date": "today"}, "chat_template_date=today: must be a day"),
        ({"enable_thinking": True}, "enable_thinking=True: say where the thinking ends"),
        ({"max_length": 5}, "max_length: no such model argument; it is called max_model_len here"),
        ({"seed": -1}, "seed=-1: must be in 0 .. 2^63 - 1"),
    ],
)
def test_a_wrong_value_is_said_with_its_cure(arguments: dict[str, Any], message: str) -> None:
    (problem,) = problems(**arguments)
    assert problem.startswith(message)


def test_a_model_must_be_named() -> None:
    assert read_arguments({})[1] == ["pretrained: names no model; give a folder, a Hub id or a .gguf file"]


@pytest.mark.parametrize(
    ("size", "warned"),
    [(None, False), (1, False), ("1", False), ("auto", False), ("auto:4", False), (16, True), ("8", True)],
)
def test_a_batch_size_is_ignored_aloud(size: Any, warned: bool) -> None:
    assert ignored_batch_size(size) is warned


def test_cuda_is_lm_evals_default_even_without_it() -> None:
    assert with_device({"a": 1}, "cuda:0", has_cuda=False) == with_device({"a": 1}, None, has_cuda=True) == {"a": 1}
    assert with_device({}, "cuda:0", has_cuda=True) == {"device": "cuda:0"}
    assert with_device({}, "cpu", has_cuda=True) == {"device": "cpu"}
