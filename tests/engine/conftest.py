"""A small random model with a real tokenizer: enough to drive the engine in seconds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from evalengine import LLM
from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import Checkpoint, resolve_checkpoint

if TYPE_CHECKING:
    from tests.parity.random_models import ModelFolders


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint of two layers, GQA 2, q/k norm and seeded random weights, with tinymath's tokenizer."""
    asset = Path(str(files("evalengine.assets") / "tinymath"))
    folder = tmp_path_factory.mktemp("small")
    config = json.loads((asset / "config.json").read_text())
    config.update(num_hidden_layers=2, hidden_size=64, intermediate_size=96, head_dim=32, max_position_embeddings=512)
    config.pop("layer_types", None)
    config["max_window_layers"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((asset / name).read_text())
    checkpoint = resolve_checkpoint(ModelConfig(name="small", path=str(folder), load_format="dummy"))
    assert checkpoint.tokenizer is not None
    return dataclasses.replace(checkpoint)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    """The tiny model of each family (`tests.parity.families.CASES`), each made when it is first asked for."""
    from tests.parity.families import make  # imports transformers' models, which few files need
    from tests.parity.random_models import ModelFolders

    return ModelFolders(make, tmp_path_factory)


@pytest.fixture
def make_llm(small_checkpoint: Checkpoint) -> Iterator[Callable[..., LLM]]:
    """Makes `LLM(small_checkpoint, ...)` with a small pool, and closes each at the end of the test."""
    llms: list[LLM] = []

    def make(**settings: object) -> LLM:
        settings.setdefault("num_kv_blocks", 256)
        settings.setdefault("block_size", 16)
        llms.append(LLM(small_checkpoint, **settings))  # type: ignore[arg-type]
        return llms[-1]

    yield make
    for llm in llms:
        llm.close()


@pytest.fixture
def llm(make_llm: Callable[..., LLM]) -> LLM:
    """The small model in fast mode, float32."""
    return make_llm(batch_invariant=False, dtype="float32")
