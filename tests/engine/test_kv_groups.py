"""Layers with windows keep no more than their windows, and every byte is what it is where they keep everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from evalengine import LLM, SamplingParams
from evalengine.engine import loaded_model, submission
from evalengine.engine.execute import memory
from evalengine.engine.kv_layout import KVGroup, KVLayout, kv_layout
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, ScoreRequest
from evalengine.engine.schedule.block_manager import BlockManager
from evalengine.engine.settings import Settings
from evalengine.errors import ConfigError
from evalengine.models.spec import Block, ModelSpec
from tests.engine.test_families import requests
from tests.engine.test_schedule_invariance import differing
from tests.parity.families import VOCAB, WINDOW, make
from tests.parity.random_models import ModelFolders, without_tokenizer

# Windows alone and beside layers that see everything, in one block table and in six.
WINDOWED = [
    *("mistral-window", "gemma3", "qwen2-window"),
    # Their layers are grouped as qwen2-window's, and test_families varies their schedules.
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "olmo3")),
]
SIZE, STEP = 4, 3  # tokens of a page, and of a step
GENERATED = 50


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    folders = ModelFolders(make, tmp_path_factory)
    return cache(lambda name: without_tokenizer(folders(name)))


def keep_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """One group of layers and one block table, whatever the layers see."""

    def one(spec: ModelSpec, settings: Settings) -> KVLayout:
        return KVLayout(spec.num_layers, (KVGroup(),), tuple((0, layer) for layer in range(spec.num_layers)))

    for module in (loaded_model, memory, submission):
        monkeypatch.setattr(module, "kv_layout", one)


def poison_what_is_given_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills pages with NaN as soon as no sequence holds them; returns the list of these pages, which goes on growing.
    Without a prefix cache nobody may read them again."""
    assert not llm.config.enable_prefix_caching
    real, poisoned = BlockManager._give_back, []

    def give_back(self: BlockManager, block: Any) -> None:
        real(self, block)
        if block.ref_count == 0 and llm.runner is not None:
            llm.runner.kv_pool[:, :, list(block.pages)] = float("nan")
            poisoned.extend(block.pages)

    monkeypatch.setattr(BlockManager, "_give_back", give_back)
    return poisoned


def run(checkpoint: Checkpoint, batch: list[Request], **settings: Any) -> dict[int, RequestOutput]:
    with LLM(checkpoint, max_model_len=128, num_threads=1, **settings) as llm:
        return outputs(llm, batch)


def run_keeping_everything(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, batch: list[Request], **settings: Any
) -> dict[int, RequestOutput]:
    with monkeypatch.context() as patch:
        keep_everything(patch)
        return run(checkpoint, batch, **settings)


def outputs(llm: LLM, batch: list[Request]) -> dict[int, RequestOutput]:
    """The outputs of the batch, after which no page may be held."""
    found = {output.request_id: output for output in llm.run(batch)}
    llm.block_manager.check([])
    assert llm.block_manager.num_free_blocks == llm.num_kv_blocks
    return found


def growing() -> list[Request]:
    """Generations that have room together while they are short."""
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    return [GenerateRequest(20 + i, [4 + i, 9], greedy) for i in range(5)]


def long_generation() -> list[Request]:
    prompt = [3 + (5 * j + j * j) % (VOCAB - 3) for j in range(30)]
    return [GenerateRequest(0, prompt, SamplingParams(max_tokens=GENERATED, ignore_eos=True))]


@pytest.mark.parametrize("level", ["exact", "fast"])
@pytest.mark.parametrize("name", WINDOWED)
def test_pages_before_a_window_are_not_needed(
    name: str, level: str, checkpoints: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches, chunks, pages and preemption, over pages that turn to NaN once a window has passed them."""
    mode: dict[str, Any] = {"numerics": level, "batch_invariant": level != "fast", "enable_prefix_caching": False}
    # `fast` promises no bytes, so there the schedules are equal; `exact` may take any.
    wide = {"block_size": SIZE, "max_num_batched_tokens": 11, "max_num_seqs": 5, "num_kv_blocks": 200}
    batch = [*requests(), *growing()]
    expected = run_keeping_everything(monkeypatch, checkpoints(name), batch, **mode, **wide)
    with LLM(checkpoints(name), max_model_len=128, num_threads=1, **mode, **wide) as llm:
        llm.runner.fill_pool(float("nan"))
        poisoned = poison_what_is_given_back(llm, monkeypatch)
        assert not differing(outputs(llm, batch), expected)
        assert poisoned
        if level == "exact":
            llm.reconfigure(num_kv_blocks=llm.limits.blocks_for(33 + 33 + 7))
            llm.runner.fill_pool(float("nan"))
            assert not differing(outputs(llm, batch), expected)
            assert llm.stats.num_preemptions > 0


@pytest.mark.parametrize("name", WINDOWED)
def test_a_hit_ends_where_every_layer_has_what_it_sees(
    name: str, checkpoints: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts many windows long begin alike; those that come later find that beginning, and no byte changes."""
    settings = {"block_size": SIZE, "num_kv_blocks": 60, "max_num_batched_tokens": 32, "max_num_seqs": 2}
    common = [3 + (5 * j + j * j) % (VOCAB - 3) for j in range(61)]
    greedy = SamplingParams(max_tokens=20, ignore_eos=True)
    batch: list[Request] = [GenerateRequest(i, [*common[: 61 - i], 5 + i, 7], greedy) for i in range(4)]
    batch += [ScoreRequest(10 + i, common[:50], [9, 8 + i, 7]) for i in range(3)]
    expected = run_keeping_everything(monkeypatch, checkpoints(name), batch, enable_prefix_caching=False, **settings)
    with LLM(checkpoints(name), max_model_len=128, num_threads=1, **settings) as llm:
        for _ in range(2):  # the second time over what the first has left
            llm.stats.num_cached_tokens = llm.scheduler.num_cached_tokens = 0
            assert not differing(outputs(llm, batch), expected)
            assert llm.stats.num_cached_tokens > 50


@pytest.mark.parametrize("name", WINDOWED)
def test_a_long_generation_is_bounded_by_its_windows(
    name: str, checkpoints: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in a pool that has room for all its tokens in full layers alone, and in no page less."""
    checkpoint = checkpoints(name)
    settings: dict[str, Any] = {"block_size": SIZE, "max_num_batched_tokens": STEP, "num_kv_blocks": 200}
    expected = run_keeping_everything(monkeypatch, checkpoint, long_generation(), **settings)
    with LLM(checkpoint, max_model_len=128, num_threads=1, **settings) as llm:
        layout = llm.kv_layout
        least = layout.blocks_for(30 + GENERATED - 1, SIZE, STEP)
        llm.reconfigure(num_kv_blocks=least)
        assert not differing(outputs(llm, long_generation()), expected)
        assert llm.stats.num_preemptions == 0
        llm.reconfigure(num_kv_blocks=least - 1)
        with pytest.raises(ConfigError, match=r"raise engine\.num_kv_blocks"):
            list(llm.run(long_generation()))
    spanned = (WINDOW - 1 + 2 * STEP + SIZE - 2) // SIZE + 1
    pages = sum(g.num_tables * (spanned if g.window else -(-(30 + GENERATED - 1) // SIZE)) for g in layout.groups)
    assert least == -(-pages // layout.num_tables) < 20, "where every layer keeps everything, it needs 20"


def layout_of(spec: ModelSpec, windows: list[int | None], **settings: Any) -> KVLayout:
    blocks = tuple(Block(window=window) for window in windows)
    made = Settings(torch.device("cpu"), "exact", torch.float32, "exact", 1000, 16, 1)
    return kv_layout(replace(spec, num_layers=len(windows), blocks=blocks), replace(made, **settings))


@pytest.mark.parametrize(
    ("local", "full", "layers_per_page", "tables"),
    [(22, 4, 4, (1, 6)), (29, 5, 5, (1, 6)), (40, 8, 8, (1, 5)), (52, 10, 11, (1, 5)), (13, 13, 13, (1, 1)),
     (20, 21, 21, (1, 1)), (24, 8, 8, (1, 3)), (32, 0, 32, (1,)), (0, 32, 32, (1,)), (1, 1, 1, (1, 1))],
)  # fmt: skip
def test_pages_fit_every_group(
    local: int, full: int, layers_per_page: int, tables: tuple[int, ...], checkpoints: Callable[[str], Checkpoint]
) -> None:
    """Gemma 3's, Gemma 2's and OLMo 3's numbers of layers, and others; little room is of no layer."""
    layout = layout_of(checkpoints("gemma2").spec, [100] * local + [None] * full)
    assert layout.layers_per_page == layers_per_page
    assert tuple(group.num_tables for group in layout.groups) == tables
    assert len(set(layout.places)) == local + full, "no two layers share a place"
    assert all(table < layout.num_tables and place < layers_per_page for table, place in layout.places)
    assert layout.num_tables * layers_per_page <= 7 / 6 * (local + full)


def test_a_window_that_nothing_outgrows_is_none(checkpoints: Callable[[str], Checkpoint]) -> None:
    """So it is, too, where the kernels multiply what lies before it by zero."""
    spec = checkpoints("gemma2").spec
    assert layout_of(spec, [999, None]).groups == (KVGroup(None, 1), KVGroup(999, 1))
    assert layout_of(spec, [1000, None]).groups == (KVGroup(),)
    assert layout_of(spec, [999, None], attention_backend="flash_attn").groups == (KVGroup(),)
