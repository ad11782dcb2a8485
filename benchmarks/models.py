"""The models whose sizes are measured: no weights, and no name beyond what their publishers call them."""

from __future__ import annotations

from evalengine.certify.model import shapes
from evalengine.kernels.shapes import Shapes
from evalengine.models.hf_config import spec_from_json
from evalengine.models.spec import ModelSpec

# Models of which only the products are measured.
OTHERS = {
    "Qwen3-1.7B": Shapes(2048, 6144, 16, 8, 128, 151936),
    "Qwen3-4B": Shapes(2560, 9728, 32, 8, 128, 151936),
    "Llama-3.2-1B": Shapes(2048, 8192, 32, 8, 64, 128256),
    "Llama-3.1-8B": Shapes(4096, 14336, 32, 8, 128, 128256),
    "SmolLM2-135M": Shapes(576, 1536, 9, 3, 64, 49152),
}
PRODUCTS_OF = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Llama-3.2-1B", "Llama-3.1-8B", "SmolLM2-135M")


def published_spec(name: str) -> ModelSpec:
    """The spec of a model whose config.json `verify` knows as `shape:<name>`."""
    return spec_from_json(shapes()[name.lower()])


def shapes_of(name: str) -> Shapes:
    """The shapes of a model of `PRODUCTS_OF`."""
    return OTHERS[name] if name in OTHERS else published_spec(name).shapes
