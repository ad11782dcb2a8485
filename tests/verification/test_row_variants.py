"""Row kernels of other families are compared with their parts, where a model has them, and a difference is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, LlamaConfig, Olmo2Config, StableLmConfig

from evalengine.kernels import layer_norm, qkv, rms_norm
from evalengine.kernels.row_variants import LLAMA, NormVariant, RowVariants
from evalengine.layers.variants import Norm
from evalengine.models.hf_config import from_hf
from evalengine.verification import operands, verify
from evalengine.verification.comparisons import verify_row_variants
from evalengine.verification.operands import Random
from evalengine.verification.verdict import KernelsVerdict
from tests.verification.tiny_shapes import TINY, verified
from tests.verification.verify_double import DEVICE
from tests.verification.verify_double import alone as alone  # The fixture is used by its name.

GEMMA, OLMO = NormVariant(offset=1.0, cast_first=False), NormVariant(cast_first=False)
HEADS = NormVariant("layer of each head", cast_first=False)
NORMS = (GEMMA, OLMO, NormVariant("layer", cast_first=False, bias=True), NormVariant("layer", cast_first=False))


def row_verdict(variants: RowVariants) -> KernelsVerdict:
    verdict = KernelsVerdict()
    verify_row_variants(verdict, 96, 2, 1, 16, torch.float16, DEVICE, variants, rows=5)
    return verdict


def test_fused_kernels_equal_their_parts() -> None:
    """Three comparisons a norm, and four for q and k of each RMS norm, and with float32 tables Llama's, too; two for
    norms of each head."""
    cases = ((NORMS, False, 20), (NORMS, True, 24), ((), True, 4), ((HEADS,), False, 2))
    for norms, wide, checked in cases:
        verdict = row_verdict(RowVariants(norms, wide))
        assert not verdict.failed and not verdict.dropped and verdict.checked == checked


def test_a_fused_kernel_that_differs_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is planted with the Llama form of what it should compute; integers would round alike in both."""
    monkeypatch.setattr(operands, "Random", Random)
    add_rms_norm, add_layer_norm, store = rms_norm.add_rms_norm, layer_norm.add_layer_norm, qkv.qk_norm_rope_store
    monkeypatch.setattr(rms_norm, "add_rms_norm", lambda *args, **_: add_rms_norm(*args))
    monkeypatch.setattr(layer_norm, "add_layer_norm", lambda x, y, w, bias, eps: add_layer_norm(x, y, w, w, eps))

    def store_with_llamas_norm(*args: Any, offset: float, cast_first: bool) -> Tensor:
        return store(*args)

    monkeypatch.setattr(qkv, "qk_norm_rope_store", store_with_llamas_norm)
    norm = layer_norm.layer_norm
    monkeypatch.setattr(layer_norm, "layer_norm", lambda x, w, *args: norm(x, w if w.ndim == 1 else w[0], *args))
    failed = row_verdict(RowVariants((*NORMS, HEADS))).failed
    names = [text.split(": ")[0] for text in failed]
    for words in ("offset 1.0, cast first False", "offset 0.0, cast first False"):
        assert f"add_rms_norm, {words}, H96 against rms_norm, {words}," in names
    assert "add_layer_norm, bias False, H96 against layer_norm, bias False," in names
    assert "layer_norm of 2 heads D16 against each head" in names
    assert sum(name.startswith("qk_norm_rope_store D16 with norms, offset 1.0") for name in names) == 2


def test_a_models_variants_are_compared_under_a_key_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of Llama's norms is compared as before, under the same key; another model's variants are in its key."""
    seen: list[RowVariants] = []
    keys: list[dict[str, Any]] = []
    real = verify._part
    monkeypatch.setattr(verify, "verify_matmul", lambda *args: None)
    monkeypatch.setattr(verify, "verify_rows", lambda *args: None)
    monkeypatch.setattr(verify, "verify_attention", lambda *args: None)
    monkeypatch.setattr(verify, "verify_row_variants", lambda *args: seen.append(args[-1]))
    monkeypatch.setattr(verify, "_part", lambda key, *args: keys.append(key) or real(key, *args))
    variants = RowVariants((GEMMA,), True)
    for shapes in (TINY, replace(TINY, row_variants=variants)):
        verified(shapes)
    assert seen == [variants]
    plain, other = (key["shapes"] for key in keys if key["part"] == "rows")
    assert TINY.row_variants == LLAMA and len(plain) == 5 and other == [*plain, variants]


def test_a_models_description_says_what_to_compare() -> None:
    for config, variants in (
        (LlamaConfig(), LLAMA),
        (Gemma2Config(), RowVariants((GEMMA,))),
        (Olmo2Config(), RowVariants((OLMO,), True)),
        (StableLmConfig(qk_layernorm=True), RowVariants((NORMS[2], HEADS))),
    ):
        assert from_hf(config).shapes.row_variants == variants, type(config)


def test_a_layers_norm_says_what_its_kernel_computes() -> None:
    assert Norm(1e-6).variant == NormVariant() and Norm(1e-6, offset=1.0, cast_first=False).variant == GEMMA
    assert Norm(1e-5, kind="layer", bias=True).variant == Norm(1e-6, kind="layer", cast_first=False, bias=True).variant
