"""A folder whose files contradict each other is read as transformers reads it, or refused."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from evalengine import LLM, SamplingParams
from evalengine.config import ModelConfig
from evalengine.engine.loader import load_model, resolve_checkpoint, weights_fingerprint
from evalengine.engine.request import GenerateRequest
from evalengine.engine.text import find_prefix_token_id
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.harness.requests import RequestBuilder
from evalengine.layers import create_ops
from evalengine.tasks.instance import Generation, Instance
from tests.engine.test_loader import tokenizer
from tests.parity.paged import PagedRunner

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
IDS = [3, 1, 4, 1, 5, 9]
CONFIG: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 5,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama with an untied head."""
    torch.manual_seed(0)
    path = tmp_path / "tiny"
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def ours(folder: Path) -> Tensor:
    checkpoint = resolve_checkpoint(ModelConfig(name="t", path=str(folder)))
    model = load_model(checkpoint, create_ops("exact", torch.float32, torch.device("cpu")), 64)
    return PagedRunner(model).step({"s": IDS})["s"]


def theirs(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def save_shards(folder: Path, shards: dict[str, list[str]], weight_map: dict[str, str] | None = None) -> None:
    """The folder's tensors in these files. The index gives each to the first file that has it, unless told."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    places: dict[str, str] = {}
    for file, names in shards.items():
        save_file({name: tensors[name] + len(places) for name in names}, folder / file)
        places = {**dict.fromkeys(names, file), **places}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map or places}))


def halves(folder: Path) -> tuple[list[str], list[str]]:
    names = sorted(load_file(folder / SINGLE))
    return names[::2], names[1::2]


# -- which file a tensor is taken from --------------------------------------------------------------------------------


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    first, second = halves(folder)
    save_shards(folder, {"a.safetensors": first, "b.safetensors": [*second, first[0]]})
    with pytest.raises(EvalEngineError, match=f"{first[0]} stands in a.safetensors and in b.safetensors"):
        ours(folder)


def test_a_tensor_in_two_files_without_an_index_is_refused(folder: Path) -> None:
    first, second = halves(folder)
    save_shards(folder, {"a.safetensors": first, "b.safetensors": [*second, first[0]]})
    (folder / INDEX).unlink()
    with pytest.raises(EvalEngineError, match=f"{first[0]} stands in a.safetensors and in b.safetensors"):
        ours(folder)


def test_a_whole_copy_under_another_name_is_refused(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    save_file(tensors, folder / "a.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "b.safetensors")
    with pytest.raises(EvalEngineError, match=r"stands in a.safetensors and in b.safetensors.* and 13 more"):
        ours(folder)


def test_an_index_that_its_shards_do_not_bear_out_is_refused(folder: Path) -> None:
    first, second = halves(folder)
    shards = {"a.safetensors": first, "b.safetensors": second}
    right = {**dict.fromkeys(first, "a.safetensors"), **dict.fromkeys(second, "b.safetensors")}
    save_shards(folder, shards, right)
    ours(folder)

    def message(weight_map: dict[str, Any]) -> str:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(EvalEngineError) as caught:
            ours(folder)
        return str(caught.value)

    wrong = message({**right, first[0]: "b.safetensors"})
    assert f"{first[0]} stands in a.safetensors, and {INDEX} gives it to b.safetensors" in wrong
    assert f"{first[0]} is not in b.safetensors, where {INDEX} has it" in wrong
    assert "extra.weight is not in a.safetensors" in message({**right, "extra.weight": "a.safetensors"})
    unnamed = message({name: file for name, file in right.items() if name != first[0]})
    assert f"{first[0]} stands in a.safetensors, and {INDEX} does not name it" in unnamed


@pytest.mark.parametrize(
    "name",
    [
        *("../tiny2/a.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "", ".", "a.bin", "a\0.safetensors"),
        *("\ud800.safetensors", "x" * 5000 + ".safetensors", 3, None, ["a.safetensors"], {"a": 1}),
    ],
)
def test_a_shard_is_a_plain_file_name(folder: Path, name: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    (folder / SINGLE).unlink()
    with pytest.raises(EvalEngineError, match=r"weight_map gives model.norm.weight to .*not the plain name") as caught:
        ours(folder)
    str(caught.value).encode()  # a message that no terminal refuses


def test_model_safetensors_comes_before_an_index(folder: Path) -> None:
    """transformers' order: a stale index, of a checkpoint that was merged since, is not looked at."""
    expected = ours(folder)
    tensors = load_file(folder / SINGLE)
    stale = {name: tensor + 1 for name, tensor in tensors.items()}
    save_file(stale, folder / "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")})
    )
    assert torch.equal(ours(folder), expected)
    assert torch.allclose(theirs(folder), expected, atol=1e-5)
    before = weights_fingerprint(resolve_checkpoint(ModelConfig(name="t", path=str(folder))))
    (folder / INDEX).unlink()
    (folder / "model-00001-of-00001.safetensors").unlink()
    assert weights_fingerprint(resolve_checkpoint(ModelConfig(name="t", path=str(folder)))) == before


def test_a_checkpoint_spread_over_ranks_is_refused(folder: Path) -> None:
    """transformers would read it instead of model.safetensors."""
    (folder / "shard-00000-model-00001-of-00001.safetensors").write_bytes((folder / SINGLE).read_bytes())
    with pytest.raises(ConfigError, match="spread over ranks"):
        ours(folder)


def test_a_name_twice_in_one_header_is_refused(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + size].rstrip()
    assert header.endswith(b"}")
    shadowed = b'{"model.norm.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' + header[1:]
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(shadowed)) + shadowed + content[8 + size :])
    with pytest.raises(EvalEngineError, match=r"model\.norm\.weight: twice in its header"):
        ours(folder)


@pytest.mark.parametrize("file", [SINGLE, INDEX, "config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_pipe_is_refused_not_waited_for(folder: Path, file: str) -> None:
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    with pytest.raises(EvalEngineError, match=f"{file}: not a regular file"):
        ours(folder)


# -- the head ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["both", "equal", "head only", "embedding only", "nearly equal", "NaN"])
def test_a_tied_head_beside_another_is_what_transformers_makes_of_it(folder: Path, case: str) -> None:
    tensors = load_file(folder / SINGLE)
    embedding = tensors["model.embed_tokens.weight"]
    if case in ("equal", "nearly equal", "NaN"):
        tensors["lm_head.weight"] = embedding.clone()
    if case == "nearly equal":
        tensors["lm_head.weight"][22, 3] += 1e-7
    if case == "NaN":
        tensors["lm_head.weight"][22, 3] = embedding[22, 3] = torch.nan
    if case in ("head only", "embedding only"):
        del tensors["model.embed_tokens.weight" if case == "head only" else "lm_head.weight"]
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    edit(folder, tie_word_embeddings=True)
    actual, expected = ours(folder), theirs(folder)
    assert torch.allclose(actual, expected, atol=1e-5, equal_nan=True)
    tied = resolve_checkpoint(ModelConfig(name="t", path=str(folder))).spec.tie_word_embeddings
    assert tied is (case in ("equal", "head only", "embedding only"))


def test_a_head_of_another_shape_does_not_fit(folder: Path) -> None:
    save_file({**load_file(folder / SINGLE), "lm_head.weight": torch.zeros(22, 16)}, folder / SINGLE)
    edit(folder, tie_word_embeddings=True)
    with pytest.raises(EvalEngineError, match=r"lm_head.weight is float32 \[22, 16\], expected \[23, 16\]"):
        ours(folder)


# -- the tokenizer -----------------------------------------------------------------------------------------------------


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
    del content["model"]["vocab"]["t0"]  # the token for unknown words
    content["model"]["unk_token"] = "none"
    file.write_text(json.dumps(content))
    with (
        LLM(str(folder), numerics="exact", device="cpu") as llm,
        pytest.raises(ConfigError, match="the tokenizer cannot encode 'never seen'"),
    ):
        llm.generate("never seen")


# -- what says that the model is another one --------------------------------------------------------------------------


def test_an_adapter_beside_the_model_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "x"}')
    with pytest.raises(ConfigError, match=r"adapter_config.json says that an adapter .*merge it"):
        ours(folder)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_class_that_contradicts_the_model_type_is_refused(folder: Path, architecture: str) -> None:
    edit(folder, architectures=[architecture])
    with pytest.raises(ConfigError, match=f"architectures='{architecture}' contradicts model_type=llama"):
        ours(folder)


@pytest.mark.parametrize("value", [False, None, 0, "false"])
def test_attention_that_is_not_causal_is_refused(folder: Path, value: Any) -> None:
    edit(folder, is_causal=value)
    with pytest.raises(ConfigError, match=r"is_causal=.*attention is causal here"):
        ours(folder)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "complex64"])
def test_a_dtype_that_nothing_is_computed_in_is_a_sentence(folder: Path, dtype: str) -> None:
    for key in ("dtype", "torch_dtype"):
        edit(folder, dtype=None, torch_dtype=None)
        edit(folder, **{key: dtype})
        with pytest.raises(ConfigError, match=f"dtype={dtype}: not supported; supported: bfloat16, float16"):
            ours(folder)


def test_packed_weights_do_not_fit(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, folder / SINGLE)
    with pytest.raises(EvalEngineError, match=r"model.norm.weight is F8_E4M3 \[16\], expected"):
        ours(folder)


def test_sizes_that_the_weights_do_not_have_are_refused_before_anything_is_allocated(folder: Path) -> None:
    edit(folder, hidden_size=1 << 17, intermediate_size=1 << 20, num_hidden_layers=1024, vocab_size=1 << 22)
    with pytest.raises(EvalEngineError, match=r"missing: model.layers.10.* and 9190 more; wrong shape or type"):
        ours(folder)


def test_a_model_larger_than_the_memory_is_a_sentence(folder: Path) -> None:
    edit(folder, hidden_size=1 << 17, intermediate_size=1 << 20, num_hidden_layers=1024)
    checkpoint = resolve_checkpoint(ModelConfig(name="t", path=str(folder), load_format="dummy"))
    with pytest.raises(ConfigError, match=r"weights take \d+\.\d GiB .* are free"):
        load_model(checkpoint, create_ops("exact", torch.float32, torch.device("cpu")), 64)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rms_norm_eps": float("inf")}, "config.json: rms_norm_eps=inf: must be a number from 1e-30 to 1"),
        ({"rms_norm_eps": float("nan")}, "config.json: rms_norm_eps=nan"),
        ({"rms_norm_eps": {"__float__": "Infinity"}}, "config.json: rms_norm_eps={'__float__': 'Infinity'}"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -2.0}},
            "rope_parameters.factor=-2.0",
        ),
        ({"rope_parameters": None, "rope_theta": float("inf")}, "rope_parameters.theta=inf"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor=inf"),
        ({"rope_parameters": 5}, "config.json: rope_parameters=5: must be an object"),
        ({"num_hidden_layers": 10**9}, "config.json: num_hidden_layers=1000000000: must be an integer from 1 to 1024"),
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
def test_configurations_that_cannot_be_meant_name_the_field(folder: Path, changes: dict[str, Any], said: str) -> None:
    edit(folder, **changes)
    with pytest.raises(ConfigError) as caught:
        ours(folder)
    assert said in str(caught.value) and f"model.path={folder}: " in str(caught.value)


@pytest.mark.parametrize("eos", [23, -1, 2.0, "2", [2, None], [[2]], {"id": 2}, True, float("nan")])
def test_ends_that_are_no_tokens_name_the_file(folder: Path, eos: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id=.*: must be a token id"):
        ours(folder)
    (folder / "generation_config.json").unlink()
    edit(folder, eos_token_id=eos)
    with pytest.raises(ConfigError, match=r"tiny: config.json: eos_token_id=.*: must be a token id"):
        ours(folder)
