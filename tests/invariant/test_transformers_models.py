"""Models of transformers in the mode, on a CPU: rows do not depend on the batch, and no uncovered op is met."""

from __future__ import annotations

import pytest
import torch

from evalengine.invariant import (
    CoverageAudit,
    UncoveredOpError,
    set_batch_invariant_mode,
)
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.invariant.small_models import small_model
from tests.random_tensors import randn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Qwen3"])
def test_a_transformers_model(architecture: str, attention: str, dtype: torch.dtype) -> None:
    """In the mode a row's logits do not depend on the batch; in stock float32 they do."""
    model = small_model(architecture, attention, dtype)
    stock_differs = 0
    for length in (1, 7, 23):
        ids = torch.randint(0, 211, (5, length), generator=torch.Generator().manual_seed(length))
        with torch.inference_mode():
            together = model(ids).logits
            stock_differs += sum(count_differing(model(ids[i : i + 1]).logits, together[i : i + 1]) for i in range(5))
            with set_batch_invariant_mode():
                together = model(ids).logits
                for i in range(5):
                    assert_bitwise_equal(model(ids[i : i + 1]).logits, together[i : i + 1])
                assert_bitwise_equal(model(ids[[3, 1]]).logits, together[[3, 1]])
    if dtype == torch.float32:
        assert stock_differs


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Qwen3"])
def test_a_transformers_model_meets_no_uncovered_reduction(architecture: str, attention: str, guard: type) -> None:
    model = small_model(architecture, attention, torch.bfloat16)
    ids = torch.randint(0, 211, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with guard(), set_batch_invariant_mode():
        with pytest.warns(UserWarning, match="not judged: rows padded"), CoverageAudit() as audit:
            model(ids).logits.log_softmax(-1)
            model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert {"mm", "bmm", "mean.dim", "silu"} <= set(audit.met)
        assert "_safe_softmax" in audit.met if attention == "sdpa" else "_softmax" in audit.met
        with set_batch_invariant_mode(False), pytest.raises(UncoveredOpError, match="flash"), CoverageAudit():
            model.set_attn_implementation("sdpa")
            model(ids)


def test_a_model_with_layer_norm_and_gelu_is_covered() -> None:
    import transformers

    config = transformers.GPT2Config(
        n_embd=24, n_layer=2, n_head=2, vocab_size=61, n_positions=32, bos_token_id=0, eos_token_id=1
    )
    torch.manual_seed(0)
    model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.arange(35).view(5, 7)
    with torch.no_grad(), set_batch_invariant_mode(), CoverageAudit() as audit:
        together = model(ids).logits
        for row in range(5):
            assert_bitwise_equal(model(ids[row : row + 1]).logits, together[row : row + 1])
    assert {"native_layer_norm", "addmm"} <= set(audit.met)


def test_a_model_with_a_convolution_is_caught() -> None:
    convolution = torch.nn.Conv1d(3, 5, 2)
    caught = pytest.raises(UncoveredOpError, match="1 x aten::convolution on cpu")
    with torch.no_grad(), set_batch_invariant_mode(), caught, CoverageAudit():
        convolution(randn(2, 3, 9))
