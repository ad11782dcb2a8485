"""A config or a tokenizer that contradicts the folder it lies in is read as transformers reads it, or refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from evalengine import LLM, SamplingParams
from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import load_model, resolve_checkpoint
from evalengine.engine.request import GenerateRequest
from evalengine.engine.text.encode import find_prefix_token_id
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.harness.requests import RequestBuilder
from evalengine.layers import create_ops
from evalengine.models.hf_config import spec_from_json
from evalengine.tasks.instance import Generation, Instance
from tests.engine.hf_folders import edit, engine_logits, tiny_llama
from tests.parity.families import case, configuration


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tiny Llama."""
    return tiny_llama(tmp_path / "tiny")


def test_a_tokenizer_without_bos_and_eos_fails_only_where_a_prefix_is_needed(folder: Path) -> None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            content = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**content, "bos_token": None, "eos_token": None}))
    with LLM(str(folder), numerics="exact", device="cpu") as llm:
        assert (llm.tokenizer.bos_token_id, llm.tokenizer.eos_token_id) == (None, None)
        assert find_prefix_token_id(llm.tokenizer) is None
        assert len(llm.score([("t3 t4", " t6"), ([3], [4])])) == 2
        assert llm.generate("t3 t4", SamplingParams(max_tokens=2))[0].token_ids
        for needs_prefix in (lambda: llm.score([("", "t3")]), lambda: llm.score_rolling(["t3 t4"])):
            with pytest.raises(ConfigError, match="neither a BOS nor an EOS token"):
                needs_prefix()
        builder = RequestBuilder(llm.tokenizer, 64)
        generation = Generation(until=("t9",), max_gen_toks=4)
        (built,) = builder.build([Instance("t", 0, 0, "generate_until", "t3", "", generation)])
        assert isinstance(built.request, GenerateRequest) and built.request.params.stop == ("t9",)
        with pytest.raises(ConfigError, match="t, document 0: the model's tokenizer has neither"):
            builder.build([Instance("t", 0, 0, "loglikelihood_rolling", "t3 t4")])


def test_of_several_chat_templates_the_default_one_is_taken(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    templates = [{"name": "default", "template": "A{{ messages[0].content }}"}, {"name": "tool_use", "template": "B"}]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": templates}))
    tokenizer = resolve_checkpoint(ModelConfig(name="t", path=str(folder))).tokenizer
    assert tokenizer is not None and tokenizer.chat_template == "A{{ messages[0].content }}"


def test_a_token_that_the_tokenizer_cannot_make_is_a_sentence(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    del content["model"]["vocab"]["t0"]  # t0 stands for unknown words.
    content["model"]["unk_token"] = "none"
    file.write_text(json.dumps(content))
    with (
        LLM(str(folder), numerics="exact", device="cpu") as llm,
        pytest.raises(ConfigError, match="the tokenizer cannot encode 'never seen'"),
    ):
        llm.generate("never seen")


def test_an_adapter_beside_the_model_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "x"}')
    with pytest.raises(ConfigError, match=r"adapter_config.json says that an adapter .*set model.adapter=.* to merge"):
        engine_logits(folder)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_class_that_contradicts_the_model_type_is_refused(folder: Path, architecture: str) -> None:
    edit(folder, architectures=[architecture])
    with pytest.raises(ConfigError, match=f"architectures='{architecture}' contradicts model_type=llama"):
        engine_logits(folder)


def test_fields_that_nothing_reads_are_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = engine_logits(folder)
    assert not caplog.messages
    edit(folder, layer_skip=3, my_scale=2.0, auto_map={"AutoModelForCausalLM": "modeling_own.Llama"}, **{"a\x1b[1m": 1})
    assert torch.equal(engine_logits(folder), plain)
    own_code, fields = caplog.messages
    assert own_code.endswith("auto_map names its own code, which is not run: it is a LlamaForCausalLM")
    assert fields.endswith("nothing reads these fields of config.json: layer_skip, my_scale, 'a\\x1b[1m'")


def test_a_field_of_another_family_is_refused(folder: Path) -> None:
    edit(folder, logit_scale=0.0625)
    with pytest.raises(ConfigError, match=r"tiny: LlamaForCausalLM: logit_scale=0.0625: .*; check model_type"):
        engine_logits(folder)


@pytest.mark.parametrize("value", [False, None, 0, "false"])
def test_attention_that_is_not_causal_is_refused(folder: Path, value: Any) -> None:
    edit(folder, is_causal=value)
    with pytest.raises(ConfigError, match=r"is_causal=.*attention is causal here"):
        engine_logits(folder)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "complex64"])
def test_a_dtype_that_nothing_is_computed_in_is_a_sentence(folder: Path, dtype: str) -> None:
    for key in ("dtype", "torch_dtype"):
        edit(folder, dtype=None, torch_dtype=None)
        edit(folder, **{key: dtype})
        with pytest.raises(ConfigError, match=f"dtype={dtype}: not supported; supported: bfloat16, float16"):
            engine_logits(folder)


def test_sizes_that_the_weights_do_not_have_are_refused_before_anything_is_allocated(folder: Path) -> None:
    edit(folder, hidden_size=1 << 17, intermediate_size=1 << 20, num_hidden_layers=1024, vocab_size=1 << 19)
    with pytest.raises(EvalEngineError, match=r"missing: model.layers.10.* and 9190 more; wrong shape or type"):
        engine_logits(folder)


def test_a_model_larger_than_the_memory_is_a_sentence(folder: Path) -> None:
    edit(folder, hidden_size=1 << 17, intermediate_size=1 << 20, num_hidden_layers=1024)
    checkpoint = resolve_checkpoint(ModelConfig(name="t", path=str(folder), load_format="dummy"))
    with pytest.raises(ConfigError, match=r"weights take \d+\.\d GiB .* are free"):
        load_model(checkpoint, create_ops("exact", torch.float32, torch.device("cpu")), 64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": float("inf")}, "config.json: rms_norm_eps=inf: must be a number from 1e-30 to 1"),
        ({"rms_norm_eps": float("nan")}, "config.json: rms_norm_eps=nan"),
        ({"rms_norm_eps": {"__float__": "Infinity"}}, "config.json: rms_norm_eps={'__float__': 'Infinity'}"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -2.0}},
            "rope_parameters.factor=-2.0",
        ),
        ({"rope_parameters": None, "rope_theta": float("inf")}, "rope_parameters.rope_theta=inf"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor=inf"),
        ({"rope_parameters": 5}, "config.json: rope_parameters=5: must be an object"),
        ({"num_hidden_layers": 10**9}, "config.json: num_hidden_layers=1000000000: must be an integer from 1 to 1024"),
        ({"vocab_size": 2**19 + 1}, "vocab_size=524289: must be an integer from 1 to 524288, the most"),
        ({"max_position_embeddings": 10**9}, "config.json: max_position_embeddings=1000000000"),
        ({"num_attention_heads": 0}, "config.json: num_attention_heads=0"),
        ({"num_labels": 10**9}, "num_labels=1000000000 cannot be meant"),
        ({"bos_token_id": 23}, "config.json: bos_token_id=23: must be a token id, an integer from 0 to 22"),
        ({"torch_dtype": "nn", "dtype": None}, "config.json: torch_dtype='nn': must be the name of a torch.dtype"),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM': must be a list of class names"),
        ({"model_type": 3}, "its model_type is 3; it is not a Hugging Face model's configuration"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_configurations_that_cannot_be_meant_name_the_field(folder: Path, changes: dict[str, Any], words: str) -> None:
    edit(folder, **changes)
    with pytest.raises(ConfigError) as caught:
        engine_logits(folder)
    assert words in str(caught.value) and f"model.path={folder}: " in str(caught.value)


@pytest.mark.parametrize("eos", [23, -1, 2.0, "2", [2, None], [[2]], {"id": 2}, True, float("nan")])
def test_ends_that_are_no_tokens_name_the_file(folder: Path, eos: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id=.*: must be a token id"):
        engine_logits(folder)
    (folder / "generation_config.json").unlink()
    edit(folder, eos_token_id=eos)
    with pytest.raises(ConfigError, match=r"tiny: config.json: eos_token_id=.*: must be a token id"):
        engine_logits(folder)


@pytest.mark.parametrize(("case_name", "field"), [("granite", "logits_scaling"), ("gemma2", "query_pre_attn_scalar")])
def test_a_divisor_of_zero_is_a_sentence(case_name: str, field: str) -> None:
    raw = {**configuration(*case(case_name)).to_dict(), field: 0}
    with pytest.raises(ConfigError, match=f"config.json: {field}=0: must not be 0"):
        spec_from_json(raw)


@pytest.mark.parametrize(
    ("case_name", "field", "value"),
    [
        ("falcon-h1", "time_step_limit", None),
        ("falcon-h1", "time_step_limit", [0.0]),
        ("nemotron-h", "layers_block_type", []),
        ("nemotron-h", "layer_types", {}),
        ("mixtral", "num_experts", [8]),
        ("lfm2", "block_ffn_dim_multiplier", math.nan),
        ("lfm2", "block_ffn_dim_multiplier", math.inf),
        ("stablelm", "partial_rotary_factor", "x"),
        ("stablelm", "partial_rotary_factor", math.nan),
    ],
)
def test_a_value_of_another_kind_is_a_sentence(case_name: str, field: str, value: Any) -> None:
    raw = {**configuration(*case(case_name)).to_dict(), field: value}
    for other in {"layer_types": ["layers_block_type"], "partial_rotary_factor": ["rope_parameters"]}.get(field, ()):
        del raw[other]
    with pytest.raises(ConfigError, match=field):
        spec_from_json(raw)
