"""Our models' logits equal transformers' eager float32 forward on random weights, with a KV pool that starts as NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from evalengine.engine.load.loader import load_model
from evalengine.layers import create_ops
from evalengine.layers.hooks import op_hook
from evalengine.models.decoder import DecoderForCausalLM
from tests.parity.paged import PagedRunner
from tests.parity.random_models import without_tokenizer

VOCAB = 211
TOLERANCE = 2e-4  # the difference allowed to logits, relative to the reference logits' range
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
ON_CUDA = [pytest.mark.gpu, needs_cuda]
LEVELS = [
    ("fast", "cpu"),
    ("exact", "cpu"),
    *(pytest.param(level, "cuda", marks=ON_CUDA) for level in ("fast", "exact", "native")),
]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LONG = {"rope_type": "default", "rope_theta": 1000000.0}


def tiny(config: type, heads: int, kv_heads: int, head_dim: int, tied: bool, rope: dict[str, Any], **more: Any) -> Any:
    if config is Qwen2Config:  # Qwen2's head_dim is always hidden_size / heads
        hidden = heads * head_dim
    else:
        hidden, more["head_dim"] = 96, head_dim
        hidden += -hidden % heads
    return config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=149,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        rope_parameters=rope,
        max_position_embeddings=40960,
        initializer_range=0.2,
        **more,
    )


CASES = {
    "llama-gqa1-d48-tied-llama3": tiny(LlamaConfig, 2, 2, 48, True, LLAMA3),
    "llama-gqa3-d64-untied-linear": tiny(LlamaConfig, 9, 3, 64, False, LINEAR),
    "llama-gqa4-d128-bias": tiny(LlamaConfig, 4, 1, 128, False, LONG, attention_bias=True),
    "qwen2-gqa3-d64-tied": tiny(Qwen2Config, 3, 1, 64, True, LONG),
    "qwen2-gqa4-d48-untied": tiny(Qwen2Config, 8, 2, 48, False, LONG),
    "qwen3-gqa8-d128-untied": tiny(Qwen3Config, 8, 1, 128, False, LONG),
    "qwen3-gqa4-d48-tied-bias": tiny(Qwen3Config, 4, 1, 48, True, LONG, attention_bias=True),
}


@pytest.fixture(scope="module", params=CASES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """A random transformers model, whose biases and norm weights are random, too, and the folder it is saved in."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CASES[request.param], attn_implementation="eager").eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim == 1:
                param.copy_(torch.randn_like(param) * 0.5 + ("norm" in name))
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return model, folder


def our_model(
    folder: Path, level: str, dtype: torch.dtype = torch.float32, max_model_len: int = 128, device: str = "cpu"
) -> DecoderForCausalLM:
    return load_model(without_tokenizer(folder), create_ops(level, dtype, torch.device(device)), max_model_len)


def sequences(lengths: dict[str, int]) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(0, VOCAB, (n,), generator=generator).tolist() for name, n in lengths.items()}


def reference_logits(model: PreTrainedModel, tokens: list[int], first_position: int = 0) -> Tensor:
    positions = torch.arange(first_position, first_position + len(tokens))[None]
    with torch.inference_mode():
        return model(torch.tensor([tokens]), position_ids=positions).logits[0].float()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    error = (actual - expected).abs().max() / (expected.max() - expected.min())
    assert error <= tolerance, f"max |diff| is {error:.2e} of the logit range"


@pytest.mark.parametrize(("level", "device"), LEVELS)
def test_logits_equal_transformers(reference: tuple[PreTrainedModel, Path], level: str, device: str) -> None:
    """Logits equal transformers' to TOLERANCE for whole prompts, and for prompts in chunks that share steps."""
    hf, folder = reference
    model = our_model(folder, level, device=device)
    prompts = sequences({"one": 1, "page": 16, "over a page": 17, "prime": 37})
    whole = PagedRunner(model).step(prompts)
    chunked = PagedRunner(model, block_size=7)
    parts = [
        chunked.step({"one": prompts["one"], "prime": prompts["prime"][:19], "page": prompts["page"][:15]}),
        chunked.step(
            {"page": prompts["page"][15:], "prime": prompts["prime"][19:36], "over a page": prompts["over a page"]}
        ),
        chunked.step({"prime": prompts["prime"][36:]}),
    ]
    for name, tokens in prompts.items():
        expected = reference_logits(hf, tokens)
        assert_close(whole[name], expected)
        assert_close(torch.cat([part[name] for part in parts if name in part]), expected)


@pytest.mark.parametrize(("level", "device"), LEVELS)
def test_long_positions_equal_transformers(reference: tuple[PreTrainedModel, Path], level: str, device: str) -> None:
    """Logits equal transformers' at positions from 40,000 on."""
    hf, folder = reference
    model = our_model(folder, level, max_model_len=40960, device=device)
    tokens = sequences({"s": 23})
    assert_close(PagedRunner(model).step(tokens, first_position=40000)["s"], reference_logits(hf, tokens["s"], 40000))


@pytest.mark.parametrize(("level", "device"), [LEVELS[0], LEVELS[2], LEVELS[4]])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(
    reference: tuple[PreTrainedModel, Path], level: str, device: str
) -> None:
    """In bfloat16 our error is at most 1.25 times that of transformers in bfloat16."""
    _, folder = reference
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    tokens = sequences({"s": 41})
    # Both errors are taken against float32 arithmetic on the bfloat16 weights.
    expected = reference_logits(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").float().eval(),
        tokens["s"],
    )
    actual = PagedRunner(our_model(folder, level, torch.bfloat16, device=device)).step(tokens)["s"]
    hf_error = (reference_logits(rounded, tokens["s"]) - expected).pow(2).mean().sqrt()
    our_error = (actual - expected).pow(2).mean().sqrt()
    assert our_error <= 1.25 * hf_error, f"RMS error {our_error:.3e}, transformers' {hf_error:.3e}"


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_gives_the_same_bytes_on_cpu_and_cuda(
    reference: tuple[PreTrainedModel, Path], dtype: torch.dtype
) -> None:
    tokens = sequences({"a": 41, "b": 1})

    def logits(level: str, device: str) -> list[Tensor]:
        runner = PagedRunner(our_model(reference[1], level, dtype, device=device))
        return [*runner.step(tokens).values(), runner.step({"a": [7]})["a"]]

    def bits(level: str) -> list[bool]:
        pairs = zip(logits(level, "cpu"), logits(level, "cuda"), strict=True)
        return [torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs]

    assert all(bits("exact"))
    assert not all(bits("fast")), "fast agrees here: this test shows nothing"


def test_op_hook_reports_every_op_in_order(reference: tuple[PreTrainedModel, Path]) -> None:
    model = our_model(reference[1], "fast")
    calls: list[tuple[str, torch.Size]] = []
    runner = PagedRunner(model)
    with op_hook(model, lambda name, output: calls.append((name, output.shape))):
        runner.step({"s": [1, 2, 3]})
    names = [name for name, _ in calls]
    per_layer = 14 + 2 * model.spec.qk_norm
    assert len(names) == len(set(names)) == 3 + per_layer * model.spec.num_layers + 3
    assert names[0] == "model.embed_tokens" and names[-3:] == ["model.norm.0", "model.norm.1", "lm_head"]
    residual = "model.layers.1.input_layernorm.1"
    assert (
        names.index("model.layers.0.mlp.down_proj")
        < names.index(residual)
        < names.index("model.layers.1.self_attn.qkv_proj")
    )
    assert all(shape[0] == 3 for _, shape in calls)
    runner.step({"s": [4]})
    assert len(calls) == len(names), "the hook outlived its context"
