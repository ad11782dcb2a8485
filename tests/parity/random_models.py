"""Random models whose numbers spread as trained ones' do, so that a level's loss of bits shows.

Weights have heavy tails (Student's t with 4 degrees of freedom), at trained models' scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import Checkpoint, file_stamp, resolve_checkpoint
from tests.engine.tied_folder import sizes

VOCAB = 1500
OUTLIERS = [7, 200, 311]  # channels of the residual stream a thousand times the median, as Qwen2.5 has a few
CONSTANT = [28, 30, 60, 62]  # a head's channels that RoPE hardly turns, where Qwen2 has large key biases


class ModelFolders:
    """The folders of models, each made when it is asked for first."""

    def __init__(self, make: Callable[[str, Path], object], paths: pytest.TempPathFactory) -> None:
        self._make, self._paths = make, paths
        self._made: dict[str, Path] = {}

    def __call__(self, name: str) -> Path:
        if name not in self._made:
            folder = self._paths.mktemp(name)
            self._make(name, folder)  # it may skip the test; then the next test of this name skips, too
            self._made[name] = folder
        return self._made[name]


def heavy(generator: torch.Generator, shape: torch.Size, std: float) -> Tensor:
    """Draws from Student's t with 4 degrees of freedom, scaled to the standard deviation."""
    squares = sum(torch.randn(shape, generator=generator).square() for _ in range(4))
    return torch.randn(shape, generator=generator) / squares.sqrt() * (2**0.5 * std)


def fan_in(generator: torch.Generator, shape: torch.Size, gain: float) -> Tensor:
    return heavy(generator, shape, gain * shape[-1] ** -0.5)


def norm_weight(generator: torch.Generator, shape: torch.Size, mean: float) -> Tensor:
    return mean * (1 + 0.3 * torch.randn(shape, generator=generator)).abs()


def trained_like_llama(folder: Path) -> None:
    """Saves a Llama with float32 weights without outliers."""
    config = LlamaConfig(
        **sizes(VOCAB, 512, 1408, 8, 8, 2),
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            value = norm_weight(generator, parameter.shape, 3.0 if name == "model.norm.weight" else 0.5)
        elif "embed" in name:
            value = heavy(generator, parameter.shape, 0.06)
        else:
            value = fan_in(generator, parameter.shape, 1.2)
        fill(parameter, value)
    save(model, folder)


def outlier_qwen2(folder: Path) -> None:
    """Saves a Qwen2 with float32 weights: three channels of the residual at 300 to 1000, key biases of hundreds.

    The lm_head's columns at these channels are 30 times the others; the final norm keeps their products ordinary."""
    config = Qwen2Config(
        **sizes(VOCAB, 512, 1408, 6, 8, 2),
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    channels = torch.tensor([1000.0, -600.0, 300.0])
    rms = float(channels.norm()) * config.hidden_size**-0.5
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        if "norm" in name:
            value = norm_weight(generator, shape, rms * (2.0 if name == "model.norm.weight" else 0.3))
            value[OUTLIERS] = 0.02
        elif "embed" in name:
            value = heavy(generator, shape, 1.0)
            value[:, OUTLIERS] = channels * (1 + 0.2 * torch.randn(shape[0], 3, generator=generator))
        elif "lm_head" in name:
            value = fan_in(generator, shape, 1.0)
            value[:, OUTLIERS] *= 30
        elif "q_proj" in name or "k_proj" in name:
            value = fan_in(generator, shape, 1.0) if parameter.ndim == 2 else heavy(generator, shape, 0.5)
            heads = value.view(-1, 64, *shape[1:])  # a view, so that the writes below reach `value`
            if parameter.ndim == 2:
                heads[:, CONSTANT] *= 0.05
            else:
                size = 300.0 if "k_proj" in name else 5.0
                heads[:, CONSTANT] = size * torch.randn(len(heads), len(CONSTANT), generator=generator)
        elif parameter.ndim == 1:
            value = heavy(generator, shape, 0.3)
        else:
            value = fan_in(generator, shape, 0.5 if "o_proj" in name or "down_proj" in name else 1.0)
        fill(parameter, value)
    save(model, folder)


def fill(parameter: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)


def without_tokenizer(folder: Path, implementation: str = "auto") -> Checkpoint:
    """A saved model that has no tokenizer: its spec is resolved as a dummy's, its weights are those of the file."""
    checkpoint = resolve_checkpoint(
        ModelConfig(name="t", path=str(folder), load_format="dummy", implementation=implementation)
    )
    return dataclasses.replace(checkpoint, format="safetensors", stamp=file_stamp(folder, "safetensors"))
