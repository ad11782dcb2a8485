"""A GGUF file's metadata are read as llama.cpp reads the file and transformers the model, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from evalengine.engine.text.encode import prefix_token_id
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.models.spec import RopeSpec
from tests.engine.test_gguf import PROMPT, TOKENS, Q, hf_model, load, logits, resolve, write_gguf

HEAD_DIM = 16
SETTINGS = "tokenizer.ggml"


def spec_of(folder: Path, config: type[PretrainedConfig] = LlamaConfig, **metadata: Any) -> Any:
    """The model spec of a file written from a tiny model with this metadata."""
    return resolve(write_gguf(folder / "m.gguf", hf_model(config, True), **metadata)).spec


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({}, RopeSpec(theta=1e4)),
        ({"rope.scaling.factor": 4.0}, RopeSpec(theta=1e4, type="linear", factor=4.0)),
        ({"rope.scale_linear": 4.0}, RopeSpec(theta=1e4, type="linear", factor=4.0)),
        ({"rope.scale_linear": 4.0, "rope.scaling.factor": 2.0}, RopeSpec(theta=1e4, type="linear", factor=2.0)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, RopeSpec(theta=1e4)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.1}, RopeSpec(theta=1e4, type="linear", factor=1.1)),
        ({"rope.scaling.type": "linear"}, RopeSpec(theta=1e4)),
        ({"rope.scaling.factor": 0.0}, RopeSpec(theta=1e4)),
        ({"rope.freq_base": None}, RopeSpec(theta=1e4)),
    ],
)
def test_rope_scaling_is_read_as_llama_cpp_reads_it(tmp_path: Path, metadata: dict[str, Any], rope: RopeSpec) -> None:
    assert spec_of(tmp_path, **{f"llama.{key}": value for key, value in metadata.items()}).rope == rope


def test_divisors_and_a_factor_both_apply(tmp_path: Path) -> None:
    divisors = torch.linspace(1, 8, HEAD_DIM // 2)
    path = write_gguf(
        tmp_path / "m.gguf",
        hf_model(LlamaConfig, True),
        extra={"rope_freqs.weight": divisors},
        **{"llama.rope.scaling.factor": 4.0},
    )
    expected = RopeSpec(theta=1e4).inv_freq(HEAD_DIM) / (divisors * 4)
    assert torch.equal(resolve(path).spec.rope.inv_freq(HEAD_DIM), expected)


@pytest.mark.parametrize(
    ("divisors", "message"),
    [
        (torch.ones(7), r"rope_freqs.weight is \[7\], and heads of 16 need \[8\]"),
        (torch.ones(2, 4), r"rope_freqs.weight is \[2, 4\]"),
        (torch.full((8,), float("nan")), "freq_factors"),
        (-torch.ones(8), "freq_factors"),
    ],
)
def test_rope_divisors_that_fit_no_head_are_refused(tmp_path: Path, divisors: torch.Tensor, message: str) -> None:
    model = hf_model(LlamaConfig, True)
    with pytest.raises(EvalEngineError, match=message):
        resolve(write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": divisors}))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.attention.causal": False}, r"both directions .*\(attention.causal\)"),
        ({"llama.logit_scale": 0.5}, "logit_scale=0.5 is not supported"),
        ({"llama.residual_scale": 0.22}, "residual_scale=0.2"),
        ({"llama.embedding_scale": 12.0}, "embedding_scale=12.0"),
        ({"llama.attention.clamp_kqv": 8.0}, "attention.clamp_kqv=8.0"),
        ({"llama.attention.scale": 0.0625}, "attention.scale=0.0625: only the inverse root"),
        ({"llama.attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"llama.rope.scaling.attn_factor": 1.2}, "rope.scaling.attn_factor=1.2"),
        ({"llama.rope.scaling.yarn_ext_factor": 1.0}, "yarn_ext_factor=1.0"),
        ({"llama.rope.dimension_sections": [16, 24, 24, 0]}, r"rope.dimension_sections=\[16, 24, 24, 0\]"),
        ({"llama.pooling_type": 3}, "pooling_type=3"),
        ({"llama.expert_used_count": 2}, "expert_used_count=2"),
        ({"llama.use_parallel_residual": True}, "use_parallel_residual=True"),
        ({"llama.attention.value_length": 8}, "keys and values of different sizes"),
        ({"tokenizer.ggml.suppress_tokens": [1, 2]}, "never generated .*suppress_tokens: 2"),
        ({"general.type": "adapter"}, "general.type=adapter"),
        ({"llama.rope.scaling.factor": -2.0}, "factor=-2.0"),
        ({"llama.rope.freq_base": 0.0}, "theta=0.0"),
        ({"llama.context_length": 10**9}, "max_position_embeddings=1000000000"),
        ({"llama.block_count": 10**9}, "num_hidden_layers=1000000000"),
        ({"llama.feed_forward_length": 0}, "intermediate_size=0"),
        ({"llama.attention.head_count_kv": 3}, "num_key_value_heads=3|num_kv_heads=3"),
        ({"llama.attention.layer_norm_rms_epsilon": 2.0}, "rms_norm_eps=2.0"),
    ],
)
def test_what_would_change_the_numbers_is_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"m.gguf: .*{message}"):
        spec_of(tmp_path, **metadata)


def test_settings_without_effect_are_accepted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = spec_of(tmp_path)
    neutral: dict[str, Any] = {
        "llama.attention.causal": True,
        "llama.attention.scale": HEAD_DIM**-0.5,
        "llama.logit_scale": 0.0,
        "llama.residual_scale": 1.0,
        "llama.expert_count": 0,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.tensor_data_layout": "Meta AI original pth",
        "general.type": "model",
        "someone.quantized_by": "me",
    }
    assert spec_of(tmp_path, **neutral) == plain and not caplog.records
    assert spec_of(tmp_path, **{"llama.rope.freq_basf": 5e5, "lama.rope.freq_base": 5e5}) == plain
    assert "nothing reads these metadata keys: llama.rope.freq_basf, lama.rope.freq_base" in caplog.text


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": 3}, "missing: blk.2.attn_norm.weight, .* and 1 more"),
        ({"llama.block_count": 1}, "unexpected: blk.1.*"),
        ({"llama.feed_forward_length": 128}, r"wrong shape: blk.0.ffn_gate.weight is \[96, 64\], expected \[128, 64\]"),
        ({"llama.embedding_length": 128}, "wrong shape: token_embd"),
        ({"llama.attention.head_count": 8}, "wrong shape: blk.0.attn_q"),
        ({"llama.attention.key_length": 32}, "wrong shape: blk.0.attn_q"),
        ({"tokenizer.ggml.tokens": TOKENS[:-1], "tokenizer.ggml.token_type": None}, "262 tokens for the 263 rows"),
    ],
)
def test_metadata_are_held_against_the_tensors(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(EvalEngineError, match=rf"m.gguf: the tensors do not fit LlamaForCausalLM .*{message}"):
        spec_of(tmp_path, **metadata)


def test_another_architectures_tensors_are_refused(tmp_path: Path) -> None:
    model = hf_model(Qwen3Config, True)  # Qwen3 has norms over q and k, and Llama has none.
    path = write_gguf(tmp_path / "m.gguf", model)
    path.write_bytes(path.read_bytes().replace(b"qwen3", b"llama"))
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM with blk\.\*\.attn_q_norm\.weight, .* is not supported"):
        resolve(path)
    model = hf_model(LlamaConfig, True)  # Llama lacks the biases that Qwen2 has.
    path = write_gguf(tmp_path / "q.gguf", model)
    path.write_bytes(path.read_bytes().replace(b"llama", b"qwen2"))
    with pytest.raises(ConfigError, match=r"Qwen2ForCausalLM without blk\.\*\.attn_q\.bias, .* is not supported in"):
        resolve(path)


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        (
            {"blk.1.ffn_down.bias": 64},
            ConfigError,
            r"LlamaForCausalLM with blk\.\*\.ffn_down\.bias is not",
        ),
        (
            {"blk.0.attn_q.bias": 64},
            ConfigError,
            r"without blk\.\*\.attn_k\.bias, .* is not supported",
        ),
        (
            {"token_embd_norm.weight": 64},
            ConfigError,
            r"LlamaForCausalLM with token_embd_norm\.weight is not",
        ),
        ({"blk.2.attn_q.weight": 64}, EvalEngineError, r"unexpected: blk\.2\.attn_q\.weight\. Download"),
        ({"blk.0.attn_z.weight": 64}, EvalEngineError, r"unexpected: blk\.0\.attn_z\.weight\. Download"),
        (
            {"blk.0.attn_qkv.weight": 64},
            EvalEngineError,
            r"unexpected: blk\.0\.attn_.*wrong shape: blk\.0\.attn_qkv",
        ),
    ],
)
def test_tensors_that_llama_cpp_reads_are_not_damage(
    tmp_path: Path, extra: dict[str, int], error: type[EvalEngineError], message: str
) -> None:
    tensors = {name: torch.ones(size) for name, size in extra.items()}
    path = write_gguf(tmp_path / "m.gguf", hf_model(LlamaConfig, True), extra=tensors)
    with pytest.raises(error, match=message) as raised:
        resolve(path)
    assert raised.type is error


@pytest.mark.parametrize(
    ("stored", "embedding", "dtype", "warned"),
    [
        (Q.F32, Q.F32, torch.float32, False),
        (Q.F16, Q.F16, torch.float16, False),
        (Q.BF16, Q.BF16, torch.bfloat16, False),
        (Q.Q8_0, Q.Q8_0, torch.float32, False),
        (Q.Q4_1, Q.Q8_0, torch.float32, False),  # SmolLM2's file is stored so.
        (Q.Q8_0, Q.F16, torch.float32, True),
        (Q.BF16, Q.F16, torch.float32, True),
        (Q.F32, Q.BF16, torch.float32, True),
        (Q.F16, Q.F32, torch.float32, True),
    ],
)
def test_dtype_holds_every_matrix(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    stored: Q,
    embedding: Q,
    dtype: torch.dtype,
    warned: bool,
) -> None:
    """The model's dtype holds every stored matrix; a warning names types that only together need float32."""
    path = write_gguf(tmp_path / "m.gguf", hf_model(Qwen2Config, False), stored, kinds={"token_embd.weight": embedding})
    assert resolve(path).spec.dtype == dtype
    assert ("together they are taken for float32" in caplog.text) is warned


@pytest.mark.parametrize("eos", [0, 5])
def test_end_of_generation_is_as_transformers_reads_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, eos: int
) -> None:
    ids = {"eos_token_id": eos, "eot_token_id": 1, "bos_token_id": 6}
    metadata = {f"{SETTINGS}.{name}": token_id for name, token_id in ids.items()}
    path = write_gguf(tmp_path / "m.gguf", hf_model(LlamaConfig, True), **metadata, **{"general.name": "x"})
    checkpoint, transformers_config = resolve(path), load_gguf_checkpoint(str(path))["config"]
    assert checkpoint.spec.eos_token_ids == (transformers_config["eos_token_id"],) == (eos,)
    assert checkpoint.spec.bos_token_id == transformers_config["bos_token_id"]
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="m.gguf")
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.eos_token_id == tokenizer.eos_token_id
    assert checkpoint.tokenizer.bos_token_id == tokenizer.bos_token_id
    assert f"eot_token_id=1 does not end generation, only ({eos},)" in caplog.text


def test_a_file_without_eos_ends_at_eot(tmp_path: Path) -> None:
    ids = {f"{SETTINGS}.eos_token_id": None, f"{SETTINGS}.eot_token_id": 1}
    assert spec_of(tmp_path, **ids).eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("pre", "add_bos", "bos"),
    [
        ("qwen2", None, None),
        ("qwen2", False, None),  # The folders of Qwen2 and 2.5 have a BOS in config.json only.
        ("deepseek-r1-qwen", True, 6),  # DeepSeek's distillation is so.
        ("smollm", False, 6),
        ("llama-bpe", None, 6),
        ("gpt-2", False, 6),
    ],
)
def test_the_prefix_token_is_that_of_the_models_folder(
    tmp_path: Path, pre: str, add_bos: bool | None, bos: int | None
) -> None:
    metadata = {"pre": pre, "bos_token_id": 6, "add_bos_token": add_bos}
    path = write_gguf(
        tmp_path / "m.gguf", hf_model(LlamaConfig, True), **{f"{SETTINGS}.{k}": v for k, v in metadata.items()}
    )
    tokenizer = resolve(path).tokenizer
    assert tokenizer is not None and tokenizer.bos_token_id == bos
    assert prefix_token_id(tokenizer) == (0 if bos is None else bos)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"merges": None}, "it has no merges .*set model.tokenizer"),
        ({"merges": ["h zz"]}, "makes no tokenizer .*out of vocabulary.*set model.tokenizer"),
        ({"merges": ["he"]}, "merge 'he' is not two tokens"),
        ({"merges": ["h e l"]}, "merge 'h e l' is not two tokens"),
        ({"merges": [1, 2]}, "tokenizer.ggml.merges is a list of 2 values of type INT32, expected a list of strings"),
        ({"tokens": [*TOKENS[:-1], "he"]}, "1 of its tokens occur twice: 'he'"),
        ({"token_type": [3, 4]}, "token_type is .*expected a list of 263 integers from 0 to 6"),
        ({"token_type": [9] * 263}, "token_type is .*expected a list of 263 integers from 0 to 6"),
        ({"bos_token_id": 1.5}, "bos_token_id is FLOAT32 1.5, expected an integer"),
        ({"bos_token_id": 263, "add_bos_token": True}, "adds a BOS token .* and has none"),
        ({"add_bos_token": True}, "adds a BOS token .* and has none"),
        ({"add_eos_token": True}, "add_eos_token=true is not supported"),
        ({"add_bos_token": 1}, "add_bos_token is UINT32 1, expected true or false"),
        ({"pre": 7}, "tokenizer.ggml.pre is UINT32 7, expected a string"),
    ],
)
def test_a_vocabulary_that_cannot_be_meant_is_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(EvalEngineError, match=message):
        spec_of(tmp_path, **{f"{SETTINGS}.{key}": value for key, value in metadata.items()})


@pytest.mark.parametrize(("token_id", "warned"), [(2**32 - 1, False), (263, True), (2**32 - 2, True)])
def test_an_id_outside_the_vocabulary_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, token_id: int, warned: bool
) -> None:
    ids = {f"{SETTINGS}.{role}_token_id": token_id for role in ("bos", "eos", "padding")}
    checkpoint = resolve(write_gguf(tmp_path / "m.gguf", hf_model(LlamaConfig, True), **ids))
    tokenizer, spec = checkpoint.tokenizer, checkpoint.spec
    assert tokenizer is not None
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == (None, None, None)
    assert (spec.bos_token_id, spec.eos_token_ids) == (None, ())
    lines = [f"{role}_token_id={token_id} is outside the vocabulary of 263 tokens" for role in ("bos", "eos")]
    assert [line in caplog.text for line in lines] == [warned, warned]


def test_a_factor_changes_the_logits(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    model = hf_model(LlamaConfig, True, rope)
    path = write_gguf(tmp_path / "m.gguf", model, **{"llama.rope.scaling.factor": 4.0})
    reference = model(torch.tensor([PROMPT]), position_ids=torch.arange(400, 407)[None]).logits[0].detach()
    actual = logits(load(resolve(path)), first_position=400)
    torch.testing.assert_close(actual, reference, rtol=0, atol=2e-4 * float(reference.max() - reference.min()))
