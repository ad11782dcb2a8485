"""Whole models of families whose norms, activations, caps and RoPE differ from Llama's, on the Triton kernels: in the
interpreter, where no GPU is needed. `test_families` does the same for every family on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evalengine.engine.load.loader import load_model
from tests.parity.families import make
from tests.parity.paged import PagedRunner
from tests.parity.random_models import without_tokenizer
from tests.parity.test_families import logprobs, rms, tokens

pytest.importorskip("triton")
from evalengine.layers.cuda import CudaFastOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.slow  # a program of the interpreter takes milliseconds
@pytest.mark.parametrize(
    "name",
    [
        *("gemma2", "olmo2", "cohere2", "pythia", "qwen3-moe", "gpt-oss", "deepseek-v3"),
        *("qwen3.5", "lfm2", "falcon-h1-normed", "nemotron-h", "olmo-hybrid", "command-r-plus"),
    ],
)
def test_logits_are_as_near_to_float64_as_transformers_are(name: str, tmp_path: Path) -> None:
    """Those of a prompt that is longer than the windows, of a few tokens after it, and of an op at a time."""
    hf, ids = make(name, tmp_path), tokens(41)
    theirs, exact = logprobs(hf, ids), logprobs(hf.double(), ids)
    ops = CudaFastOps(torch.float32, DEVICE, "triton")
    model = load_model(without_tokenizer(tmp_path), ops, 128)
    runner = PagedRunner(model, block_size=16)
    with torch.inference_mode():
        ours = torch.cat([runner.step({"s": part})["s"] for part in (ids[:38], ids[38:])])
        error = rms(torch.log_softmax(ours.double().cpu(), -1) - exact)
        assert error <= 1.5 * rms(theirs - exact)
        ops.fused = False
        unfused = PagedRunner(model, block_size=16).step({"s": ids[:38]})["s"]
    assert torch.equal(unfused, ours[:38])
