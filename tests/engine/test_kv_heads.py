"""Layers whose heads differ in number or size share one pool, and no schedule changes a byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evalengine import LLM, ConfigError, SamplingParams
from evalengine.certify.kernels import schedules_verdict
from evalengine.engine.execute.memory import plan_num_kv_blocks
from evalengine.engine.kv_layout import KVLayout, kv_layout
from evalengine.engine.load.loader import Checkpoint, load_model
from evalengine.engine.request import GenerateRequest, Request, ScoreRequest
from evalengine.engine.settings import Settings
from evalengine.layers import create_ops, verify_heads
from evalengine.models.spec import Block, Heads, ModelSpec
from evalengine.verification import verify
from tests.engine.test_families import requests
from tests.engine.test_kv_groups import growing, outputs, poison_what_is_given_back
from tests.engine.test_schedule_invariance import differing, one_by_one
from tests.parity.families import VOCAB, WINDOW, random_model
from tests.parity.modules import make
from tests.parity.random_models import without_tokenizer
from tests.parity.test_families import check_as_near, tokens

MODE: dict[str, Any] = {"batch_invariant": True, "numerics": "exact", "max_model_len": 128, "device": "cpu"}
SETTINGS = Settings(torch.device("cpu"), "exact", torch.float32, "exact", 1000, 16, 1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Six layers: the four with a window have 4 KV heads of 24, the others 2."""
    folder: Path = tmp_path_factory.mktemp("mimo")
    make("mimo_v2_flash", folder)
    return without_tokenizer(folder, "transformers")


def layout_of(spec: ModelSpec, blocks: list[Block]) -> KVLayout:
    return kv_layout(replace(spec, num_layers=len(blocks), blocks=tuple(blocks)), SETTINGS)


@pytest.mark.parametrize(
    ("local", "every", "layers"),
    [
        (Heads(32, 16, 256), Heads(32, 4, 512), 60),
        (Heads(8, 1, 256), Heads(8, 1, 512), 30),
        (Heads(8, 4, 24), Heads(8, 2, 24), 6),
        (Heads(6, 2, 20), Heads(6, 3, 28), 12),
    ],
)
def test_pages_have_room_for_each_kind_of_heads(
    local: Heads, every: Heads, layers: int, checkpoint: Checkpoint
) -> None:
    """Five layers in six see a window, as in Gemma 4 31B: no two layers of a table overlap in a page, and hardly any
    room is of no layer."""
    blocks = [Block(heads=every) if i % 6 == 5 else Block(window=100, heads=local) for i in range(layers)]
    layout = layout_of(checkpoint.spec, blocks)
    taken: dict[int, set[int]] = {}
    for (table, _), (first, heads, size), block in zip(layout.places, layout.slots, blocks, strict=True):
        own = set(range(first, first + 2 * heads * size))
        assert block.heads is not None and (heads, size) == block.heads[1:]
        assert max(own) < layout.width and not own & taken.setdefault(table, set())
        taken[table] |= own
    assert len(taken) == layout.num_tables == sum(group.num_tables for group in layout.groups)
    assert [group.window for group in layout.groups] == [None, 100]
    used = sum(map(len, taken.values()))
    assert used <= layout.num_tables * layout.width <= 7 / 6 * used
    pool = torch.zeros(layout.pool_shape(3, 4, 1, 1))
    for slot, (k, v) in zip(layout.slots, layout.caches(pool), strict=True):
        assert k.shape == v.shape == (3, 4, *slot[1:]) and k.stride() == v.stride()
        assert (k.storage_offset(), v.storage_offset()) == (slot[0], slot[0] + slot[1] * slot[2])


def test_layers_with_a_window_of_two_sizes_are_one_group(checkpoint: Checkpoint) -> None:
    blocks = [Block(window=100, heads=Heads(4, 2, 16)), Block(window=100, heads=Heads(4, 1, 16)), Block()]
    layout = layout_of(checkpoint.spec, blocks)
    assert [group.window for group in layout.groups] == [None, 100] and layout.groups[1].num_tables == 2


def test_the_pool_is_planned_by_the_heads_of_each_layer(checkpoint: Checkpoint) -> None:
    """Bytes of a page of all tables: of 4 layers of 4 x 24 numbers and 2 of 2 x 24, keys and values, in float32."""
    spec = checkpoint.spec
    with LLM(checkpoint, **MODE, block_size=4, num_kv_blocks=10, dtype="float32") as llm:
        layout, config = llm.kv_layout, llm.config
        assert llm.runner.kv_pool.numel() == 10 * layout.num_tables * 4 * layout.width
        assert plan_num_kv_blocks(config, spec, llm.settings) == 10
    assert layout.num_tables * layout.width == 2 * (4 * 4 + 2 * 2) * 24


@pytest.mark.parametrize("size", [7, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4, 16))])
def test_pages_of_any_size_and_preemption_change_nothing(
    size: int, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages turn to NaN once no sequence holds them; in a pool for little more than one sequence some are preempted."""
    batch = [*requests(), *growing()]
    with LLM(checkpoint, **MODE, num_kv_blocks=64, enable_prefix_caching=False) as llm:  # as each alone: `test_modules`
        expected = outputs(llm, batch)
    settings = {"block_size": size, "num_kv_blocks": 2 + 75 // size, "max_num_seqs": 5, "max_num_batched_tokens": 11}
    with LLM(checkpoint, **MODE, **settings, enable_prefix_caching=False) as llm:
        llm.runner.fill_pool(float("nan"))
        poisoned = poison_what_is_given_back(llm, monkeypatch)
        assert not differing(outputs(llm, batch), expected)
        assert poisoned and llm.stats.num_preemptions > 0


def test_prefixes_are_found_again(checkpoint: Checkpoint) -> None:
    common = [3 + (5 * j + j * j) % (VOCAB - 3) for j in range(61)]
    greedy = SamplingParams(max_tokens=9, ignore_eos=True)
    batch: list[Request] = [GenerateRequest(i, [*common[: 61 - i], 5 + i, 7], greedy) for i in range(4)]
    batch += [ScoreRequest(10 + i, common[:50], [9, 8 + i, 7]) for i in range(3)]
    expected = one_by_one(checkpoint, batch, **MODE)
    with LLM(checkpoint, **MODE, block_size=4, num_kv_blocks=60, max_num_batched_tokens=32, max_num_seqs=2) as llm:
        llm.runner.fill_pool(float("nan"))
        assert not differing(outputs(llm, batch), expected)
        assert llm.stats.num_cached_tokens > 50


def test_the_ordinary_mode_is_seen_to_differ(checkpoint: Checkpoint) -> None:
    mode: dict[str, Any] = {"batch_invariant": False, "max_model_len": 128, "dtype": "float32"}
    expected = one_by_one(checkpoint, requests(), **mode)
    with LLM(checkpoint, **mode, block_size=7, num_kv_blocks=120, max_num_batched_tokens=11) as llm:
        assert differing(outputs(llm, requests()), expected), "the comparison sees nothing"


def test_kernels_are_compared_with_all_kinds_of_heads(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `verify kernels` and where a model is loaded; one that drops or fails is named, whichever it is."""
    spec = replace(checkpoint.spec, blocks=(Block(heads=Heads(4, 2, 16)), Block(heads=Heads(4, 1, 32))))

    def verdict(shapes: Any, *_: Any, **about: Any) -> dict[str, Any]:
        found = [f"heads of {shapes.head_dim}"]
        return {"schedules": 2, "checked": 5, "dropped": found, "failed": found, "cached": True, "seconds": 1.0}

    both = ["heads of 16", "heads of 32"]
    whole = {"schedules": 4, "checked": 10, "dropped": both, "failed": both, "cached": True, "seconds": 2.0}
    monkeypatch.setattr(verify, "verify", verdict)
    assert schedules_verdict(spec, torch.bfloat16, torch.device("cpu"), True) == whole
    ops = create_ops("fast", torch.float32, torch.device("cpu"))
    assert verify_heads(ops, spec.every_shapes, 16) is None
    monkeypatch.setattr(ops, "verify_kernels", verdict)
    assert verify_heads(ops, spec.every_shapes, 16) == whole


def test_gemma_4_runs_at_fast_and_is_refused_where_it_could_not_keep_a_row(tmp_path: Path) -> None:
    """Its layers that see everything have heads of twice the size, and its norms a power that no level promises."""
    config = {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "sliding_window": WINDOW,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "num_hidden_layers": 6,
    }
    hf = random_model("gemma4_text", config, tmp_path)
    of_folder = without_tokenizer(tmp_path, "transformers")
    assert [spec.head_dim for spec in of_folder.spec.every_shapes] == [16, 32]
    model = load_model(of_folder, create_ops("fast", torch.float32, torch.device("cpu")), 128)
    check_as_near(hf, model, tokens(41), 1.5)
    with pytest.raises(ConfigError, match="pow"):
        load_model(of_folder, create_ops("exact", torch.float32, torch.device("cpu")), 128)
