"""Models that transformers' module computes, over the Triton kernels: in the interpreter, where no GPU is needed.
`test_modules` does the same for every case on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evalengine.engine.load.loader import load_model
from tests.parity.modules import make
from tests.parity.paged import PagedRunner
from tests.parity.random_models import without_tokenizer
from tests.parity.test_families import logprobs, rms, tokens

pytest.importorskip("triton")
from evalengine.layers.cuda import CudaFastOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.slow  # a program of the interpreter takes milliseconds
@pytest.mark.parametrize("name", ["gpt_oss", "vaultgemma", "deepseek_v3"])
def test_logits_are_as_near_to_float64_as_transformers_are(name: str, tmp_path: Path) -> None:
    """Windows, caps, sinks, and values smaller than keys: of a prompt, and of a few tokens after it."""
    hf, ids = make(name, tmp_path), tokens(41)
    theirs, exact = logprobs(hf, ids), logprobs(hf.double(), ids)
    model = load_model(without_tokenizer(tmp_path, "transformers"), CudaFastOps(torch.float32, DEVICE, "triton"), 128)
    runner = PagedRunner(model, block_size=16)
    with torch.inference_mode():
        ours = torch.cat([runner.step({"s": part})["s"] for part in (ids[:38], ids[38:])])
    error = rms(torch.log_softmax(ours.double().cpu(), -1) - exact)
    assert error <= 1.5 * rms(theirs - exact)
