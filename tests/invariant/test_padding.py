"""The aten mode on a CPU under padded batches: a row of a batch has the bits that it has alone."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.invariant import CoverageAudit, set_batch_invariant_mode
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.invariant.small_models import small_model

NEW_TOKENS = 8
LENGTHS = (3, 9, 17, 60, 1, 100, 31)


def prompts_of(lengths: Sequence[int]) -> list[Tensor]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 211, (length,), generator=generator) for length in lengths]


def padded(prompts: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """The prompts as ids and mask, both [n, longest], padded on the side."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        cut = slice(longest - len(prompt), longest) if side == "left" else slice(0, len(prompt))
        ids[row, cut], mask[row, cut] = prompt, 1
    return ids, mask


def generate(model: torch.nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Scores [n, NEW_TOKENS, V] of a greedy continuation."""
    generated = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
        pad_token_id=0, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    return torch.stack(generated.scores, 1)


def rows_that_differ(model: torch.nn.Module, counts: Sequence[int]) -> tuple[int, int]:
    """How many rows differ from their prompts alone: generated from batches padded on the left, and computed in batches
    padded on the right."""
    prompts = prompts_of(LENGTHS[: max(counts)])
    scores_alone = [generate(model, prompt[None], torch.ones_like(prompt)[None])[0] for prompt in prompts]
    logits_alone = [model(prompt[None]).logits[0] for prompt in prompts]
    left = right = 0
    for count in counts:
        scores = generate(model, *padded(prompts[:count], "left"))
        ids, mask = padded(prompts[:count], "right")
        logits = model(ids, attention_mask=mask).logits
        for row, prompt in enumerate(prompts[:count]):
            left += bool(count_differing(scores[row], scores_alone[row]))
            right += bool(count_differing(logits[row, : len(prompt)], logits_alone[row]))
    return left, right


# Every architecture, attention and dtype stays quick in one of these; slow are their other combinations.
QUICK = [("Llama", "sdpa", torch.float32), ("Qwen2", "eager", torch.bfloat16), ("Qwen3", "sdpa", torch.bfloat16)]


@pytest.mark.parametrize(
    ("architecture", "attention", "dtype"),
    [
        pytest.param(*values, marks=() if values in QUICK else pytest.mark.slow)
        for values in itertools.product(["Llama", "Qwen2", "Qwen3"], ["eager", "sdpa"], [torch.float32, torch.bfloat16])
    ],
)
def test_a_padded_batch_has_the_bits_of_its_rows_alone(architecture: str, attention: str, dtype: torch.dtype) -> None:
    with torch.no_grad(), set_batch_invariant_mode():
        assert rows_that_differ(small_model(architecture, attention, dtype), (4, 7)) == (0, 0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_in_stock_torch_a_padded_batch_has_other_bits(attention: str) -> None:
    """The inverse: the same comparison finds differing rows in stock torch, so it can fail."""
    with torch.no_grad():
        left, right = rows_that_differ(small_model("Llama", attention, torch.float32), (4,))
    assert left and right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_decoded_tokens_have_the_bits_of_a_prefill(attention: str, dtype: torch.dtype) -> None:
    model, prompt = small_model("Qwen3", attention, dtype), prompts_of([37])[0][None]
    with torch.no_grad(), set_batch_invariant_mode():
        whole = model(prompt).logits
        cache = model(prompt[:, :20], use_cache=True).past_key_values
        for position in range(20, 37):
            step = model(prompt[:, position : position + 1], past_key_values=cache, use_cache=True)
            assert_bitwise_equal(step.logits[:, 0], whole[:, position])
        assert_bitwise_equal(model(prompt[:, :29]).logits, whole[:, :29])


MOE = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 52},
    "GptOss": {"num_local_experts": 4, "layer_types": ["full_attention"] * 2},
}


def moe_model(architecture: str, dtype: torch.dtype, experts: str) -> torch.nn.Module:
    """A small mixture of experts with random weights; `experts` is the implementation of its experts."""
    import transformers

    config = getattr(transformers, f"{architecture}Config")(
        hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=211, max_position_embeddings=128, num_experts_per_tok=2, attn_implementation="eager",
        experts_implementation=experts, pad_token_id=0, **MOE[architecture],
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1) if parameter.ndim > 1 else None
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("architecture", MOE)
def test_a_mixture_of_experts(architecture: str, experts: str, dtype: torch.dtype) -> None:
    """In the mode a row of a padded batch has the bits that it has alone, however the experts are computed."""
    model = moe_model(architecture, dtype, experts)
    prompts = prompts_of((3, 9, 17, 40))
    ids, mask = padded(prompts, "right")
    with torch.no_grad(), set_batch_invariant_mode():
        together = model(ids, attention_mask=mask).logits
        for row, prompt in enumerate(prompts):
            assert_bitwise_equal(model(prompt[None]).logits[0], together[row, : len(prompt)])
        with CoverageAudit() as audit:
            model(ids, attention_mask=mask)
    assert (experts == "grouped_mm") == ("_grouped_mm" in audit.met)


@pytest.mark.parametrize("architecture", MOE)
def test_in_stock_torch_a_mixture_of_experts_has_other_bits(architecture: str) -> None:
    """The inverse: in stock torch the same comparison finds rows that differ, so it can fail."""
    model, prompts = moe_model(architecture, torch.float32, "grouped_mm"), prompts_of((3, 9, 17, 40))
    ids, mask = padded(prompts, "right")
    with torch.no_grad():
        together = model(ids, attention_mask=mask).logits
        alone = [model(prompt[None]).logits[0] for prompt in prompts]
    assert any(count_differing(x, together[row, : len(x)]) for row, x in enumerate(alone))


def grouped(shape: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """Operands of `_grouped_mm`, its offsets, and the products that its groups stand for, in order."""
    generator = torch.Generator().manual_seed(1)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    ends = torch.tensor([8, 8, 32, 40], dtype=torch.int32)  # The second group is empty.
    cuts = [slice(0, 8), slice(8, 8), slice(8, 32), slice(32, 40)]
    if shape == "rows":
        a, b = randn(40, 48), randn(4, 48, 16)
        return a, b, ends, [a[c] @ b[g] for g, c in enumerate(cuts)]
    if shape == "columns":
        a, b = randn(4, 16, 48), randn(48, 40)
        return a, b, ends, [a[g] @ b[:, c] for g, c in enumerate(cuts)]
    if shape == "terms":
        a, b = randn(16, 40), randn(40, 24)
        return a, b, ends, [a[:, c] @ b[c] for c in cuts]
    a, b = randn(4, 16, 48), randn(4, 48, 24)
    return a, b, None, [a[g] @ b[g] for g in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ["rows", "columns", "terms", "batches"])
def test_grouped_products_are_products(shape: str, dtype: torch.dtype) -> None:
    """`_grouped_mm` has the bits of the products it stands for; what torch refuses is refused."""
    with set_batch_invariant_mode():
        a, b, ends, products = grouped(shape, dtype)
        out = torch._grouped_mm(a, b, offs=ends)
    joined = {"rows": torch.cat, "columns": lambda x: torch.cat(x, 1)}.get(shape, torch.stack)(products)
    assert_bitwise_equal(out, joined)
    torch.testing.assert_close(out.float(), joined.float())
    with set_batch_invariant_mode(), pytest.raises(RuntimeError):
        torch._grouped_mm(a.double(), b.double(), offs=ends)
    with set_batch_invariant_mode(), pytest.raises(RuntimeError):
        torch._grouped_mm(a, b, offs=None if ends is not None else torch.tensor([1, 2]))


def rwkv() -> torch.nn.Module:
    """A small model with a recurrent state, which reads no mask."""
    import transformers

    torch.manual_seed(0)
    config = transformers.RwkvConfig(hidden_size=64, num_hidden_layers=2, vocab_size=211, context_length=128)
    return transformers.RwkvForCausalLM(config).eval()


def test_the_audit_says_that_it_does_not_judge_padding_on_the_left() -> None:
    """Of a recurrent state every op is covered, and a row padded on the left has other bits than alone."""
    prompts = prompts_of((3, 9))
    model, (ids, mask) = rwkv(), padded(prompts, "left")
    with torch.no_grad(), set_batch_invariant_mode():
        with pytest.warns(UserWarning, match=r"rows padded on the left \(1 x Rwkv") as told, CoverageAudit() as audit:
            logits = model(ids, attention_mask=mask).logits
        assert count_differing(logits[0, -3:], model(prompts[0][None]).logits[0])
    assert told[0].filename == __file__ and audit.unjudged == {"RwkvForCausalLM": 1}
    assert "any" not in audit.met  # what the audit asks of the mask is no op of the model's


@pytest.mark.parametrize("side", ["right", None])
def test_the_audit_is_silent_without_padding_on_the_left(side: str | None) -> None:
    """The inverse: a batch padded on the right, or not at all, is judged whole."""
    prompts = prompts_of((3, 9) if side else (9, 9))
    model, (ids, mask) = rwkv(), padded(prompts, side or "left")
    with warnings.catch_warnings(), torch.no_grad(), set_batch_invariant_mode():
        warnings.simplefilter("error")
        with CoverageAudit() as audit:
            logits = model(ids, attention_mask=mask).logits
        for row, prompt in enumerate(prompts):
            assert_bitwise_equal(logits[row, : len(prompt)], model(prompt[None]).logits[0])
    assert not audit.unjudged and audit.met


def test_attention_ignores_what_stands_behind_its_mask() -> None:
    """Large values in the padding, which would raise the others' scale if they counted, change no bit."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 40, 16, generator=generator) for _ in range(3))
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    for pad in (1, 88, 89, 8200):  # 128 and 129 keys once had other limbs, and 8192 terms were one exact sum.
        padded_qkv = [F.pad(x, (0, 0, pad, 0)) for x in (q, k, v)]
        padded_qkv[2][:, :, :pad] = 1e4
        mask = F.pad(causal, (pad, 0, pad, 0))
        with set_batch_invariant_mode():
            alone = F.scaled_dot_product_attention(q, k, v, attn_mask=causal)
            if pad > 1000:
                padded_qkv[0], mask = padded_qkv[0][:, :, -40:], mask[-40:]
            out = F.scaled_dot_product_attention(*padded_qkv, attn_mask=mask)
        assert_bitwise_equal(out[:, :, -40:], alone)
