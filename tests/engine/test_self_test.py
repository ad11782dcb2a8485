"""The engine's self-test: it passes for every kind of state and finds an injected fault on each axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine import LLM
from evalengine.certify.model import open_checkpoint
from evalengine.config.schema import EngineConfig, ModelConfig
from evalengine.engine import self_test
from evalengine.engine.engine import Engine
from evalengine.engine.execute.batch import Batch
from evalengine.engine.execute.decode_inputs import DecodeInputs
from evalengine.engine.execute.rank_runner import Errors, RankRunner
from evalengine.engine.load.loader import Checkpoint, load_model
from evalengine.engine.settings import resolve_settings
from evalengine.engine.states import NUM_SNAPSHOTS
from evalengine.errors import EvalEngineError
from evalengine.layers import create_ops
from evalengine.layers.plain import PlainOps, computed_by
from tests.engine.test_uncommitted_steps import GUESSLESS, KINDS, RECURRENT
from tests.parity.paged import PagedRunner
from tests.parity.random_models import ModelFolders, without_tokenizer
from tests.parity.test_families import rms, tokens

CPU = torch.device("cpu")
CUDA = torch.cuda.is_available()
MODE: dict[str, Any] = {"batch_invariant": True, "max_model_len": 128, "block_size": 16, "self_test": "always"}
AXES = ["batch", "chunks", *(["graphs"] if CUDA else []), "prefix", "preemption", "guesses"]


@pytest.fixture
def checkpoint(kind: str, folders: ModelFolders) -> Checkpoint:
    return without_tokenizer(folders(KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_it_passes_and_exercises_every_axis(kind: str, checkpoint: Checkpoint) -> None:
    with LLM(checkpoint, **MODE) as llm:
        verdict = llm.self_test_verdict
        assert verdict is not None and verdict["status"] == "passed" and not verdict["cached"]
        assert verdict["axes"] == [axis for axis in AXES if axis != "guesses" or kind not in GUESSLESS]
        assert llm.runner is not None and len(llm.runner.kv_caches) == checkpoint.spec.num_layers
        assert llm.stats.num_steps == 0 and not llm.scheduler.has_work


def test_a_cut_has_one_layer_of_each_kind(folders: ModelFolders) -> None:
    """Two at least; the model itself stays whole."""
    for kind, expected in {
        "dense": (0, 1),
        "windows": (0, 5),
        "gated delta": (0, 2),
        "short convolution": (0, 1),
    }.items():
        model = load_model(without_tokenizer(folders(KINDS[kind])), create_ops("exact", torch.float32, CPU), 96)
        assert model.sample_layers() == expected
        part = model.of_layers(expected)
        assert part.spec.num_layers == len(part.model.layers) == 2 and len(model.model.layers) == model.spec.num_layers
        assert part.model.layers[1] is model.model.layers[expected[1]] and part.lm_head is model.lm_head
        assert [part.spec.block(i) for i in range(2)] == [model.spec.block(i) for i in expected]


def noise_in(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes the hidden states of every step under one axis's settings."""
    forward, trial, config = RankRunner.forward, Engine._trial, {}

    @contextmanager
    def noted(self: Engine, part: Any, ops: Any, layers: Any, own: dict[str, Any]) -> Iterator[Engine]:
        config.clear()
        config.update(own)
        with trial(self, part, ops, layers, own) as engine:
            yield engine

    def noisy(self: RankRunner, batch: Batch) -> Tensor:
        hidden = forward(self, batch)
        return hidden * 1.001 if FAULTS[axis][0](config) else hidden

    monkeypatch.setattr(Engine, "_trial", noted)
    monkeypatch.setattr(RankRunner, "forward", noisy)


# Of each axis: which settings are its own, and what the user reads.
FAULTS: dict[str, tuple[Callable[[dict[str, Any]], bool], str]] = {
    "batch": (
        lambda c: c["max_num_seqs"] > 2 and c["max_num_batched_tokens"] > 19,
        "engine.max_num_seqs=1",
    ),
    "chunks": (lambda c: c["max_num_batched_tokens"] == 19, "batch_invariant=false"),
    "prefix": (lambda c: c["enable_prefix_caching"], "engine.enable_prefix_caching=false"),
    "preemption": (lambda c: c["num_kv_blocks"] == 3, "engine.max_num_seqs=1"),
    "guesses": (lambda c: c["speculation"] == "always", "engine.speculation=off"),
}


@pytest.mark.parametrize("axis", FAULTS)
def test_a_difference_is_found_before_any_request(
    axis: str, folders: ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the axis, the first difference, its size and a way out."""
    noise_in(axis, monkeypatch)
    with pytest.raises(EvalEngineError) as caught:
        LLM(without_tokenizer(folders("mistral")), **MODE, enforce_eager=True)
    text = str(caught.value)
    assert f"({axis})" in text and FAULTS[axis][1] in text and "engine.self_test=off" in text
    assert "token" in text and "alone" in text and "nats" in text
    if axis != "chunks" and FAULTS[axis][1].startswith("engine."):  # the workaround lets the engine start
        name, value = FAULTS[axis][1].removeprefix("engine.").split("=")
        own = {name: {"false": False, "1": 1}.get(value, value)}
        with LLM(without_tokenizer(folders("mistral")), **{**MODE, "enforce_eager": True, **own}) as llm:
            assert llm.self_test_verdict is not None and axis not in llm.self_test_verdict["axes"]


@pytest.mark.parametrize("max_model_len", [2, 3, 5, 8, 9, 10, 17, 33, 40])
def test_short_models_are_tested_too(max_model_len: int, folders: ModelFolders) -> None:
    with LLM(without_tokenizer(folders("mistral")), **{**MODE, "max_model_len": max_model_len}) as llm:
        assert llm.self_test_verdict is not None and llm.self_test_verdict["status"] == "passed"


@pytest.mark.parametrize(
    "own", [{"max_num_seqs": 1, "max_num_batched_tokens": 1}, {"num_kv_blocks": 40}, {"block_size": 256}], ids=str
)
def test_any_schedule_settings_may_be_given(own: dict[str, Any], folders: ModelFolders) -> None:
    with LLM(without_tokenizer(folders("mistral")), **{**MODE, **own}) as llm:
        assert llm.self_test_verdict is not None and llm.self_test_verdict["status"] == "passed"


def test_a_model_without_finite_numbers_is_not_tested(folders: ModelFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless plain PyTorch ops give finite ones, so that the engine is to blame."""
    forward = RankRunner.forward
    monkeypatch.setattr(RankRunner, "forward", lambda self, batch: forward(self, batch) * torch.nan)
    with LLM(without_tokenizer(folders("mistral")), **MODE) as llm:
        assert llm.self_test_verdict is not None
        assert llm.self_test_verdict["status"].startswith("not tested: not a finite number")
    monkeypatch.setattr("evalengine.engine.engine.errors", lambda *_: (Errors(0.1, 0.0), Errors(0.1, 0.0)))
    with pytest.raises(EvalEngineError, match=r"not a finite number .*, plain ops have"):
        LLM(without_tokenizer(folders("mistral")), **MODE)


def test_a_verdict_is_cached_under_what_was_tested(folders: ModelFolders) -> None:
    """Another length, the graphs, another module of transformers' and an axis that is switched off are another test."""
    spec, config = without_tokenizer(folders("mistral")).spec, EngineConfig(max_model_len=96)
    settings = resolve_settings(config, True, "exact", spec)
    kinds = [
        (spec, config, settings, True),
        (spec, config, settings, False),
        (replace(spec, module="{}"), config, settings, True),
        (spec, replace(config, enable_prefix_caching=False), settings, True),
        (spec, config, replace(settings, max_model_len=9000), True),
        (spec, config, replace(settings, block_size=16), True),
    ]
    keys = [self_test.CachedVerdict(a, (), b, c, has_graphs=d)._key for a, b, c, d in kinds]
    assert all(keys[i] != keys[j] for i in range(len(keys)) for j in range(i))


def test_an_error_is_too_large_beyond_three_times_that_of_plain_ops() -> None:
    def why(ours: float, plain: float, choices: float = 0.0, plain_choices: float = 0.0) -> str:
        return self_test._too_far(Errors(ours, choices), Errors(plain, plain_choices))

    assert not why(0.003, 0.001) and not why(1e-4, 0.0) and not why(0.1, torch.nan) and not why(0.1, 0.1, 0.04)
    assert "RMS error" in why(0.0031, 0.001) and "RMS error" in why(torch.nan, 0.1) and "RMS error" in why(3e-4, 0.0)
    assert "different experts" in why(0.1, 0.1, 0.06) and not why(0.1, 0.1, 0.06, 0.01)


@pytest.mark.parametrize(("kind", "method"), [("gated delta", "copy_states"), ("dense", "_copy_pages")])
def test_a_copy_that_is_not_made_is_found(method: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankRunner, method, lambda *_: None)
    with pytest.raises(EvalEngineError, match=r"self-test failed .*\(prefix\)"):
        LLM(checkpoint, **MODE)


@pytest.mark.parametrize("kind", ["gated delta"])
def test_a_context_whose_state_a_choice_does_not_get_is_found(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots are copied as they should be, states of contexts are not."""
    copy = RankRunner.copy_states

    def of_snapshots(self: RankRunner, copies: list[tuple[int, int]]) -> None:
        running = self.states[0].shape[1] - NUM_SNAPSHOTS
        copy(self, [(source, to) for source, to in copies if max(source, to) >= running])

    monkeypatch.setattr(RankRunner, "copy_states", of_snapshots)
    with pytest.raises(EvalEngineError, match=r"self-test failed .*\(prefix\)"):
        LLM(checkpoint, **MODE)


def test_it_can_be_switched_off_and_says_so(folders: ModelFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    noise_in("batch", monkeypatch)
    with LLM(without_tokenizer(folders("mistral")), **{**MODE, "self_test": "off"}) as llm:
        assert llm.self_test_verdict is not None and llm.self_test_verdict["status"] == "off"


@pytest.mark.skipif(CUDA, reason="tests what `auto` does on a CPU")
def test_auto_is_for_gpus_and_no_test_is_made_in_the_ordinary_mode(folders: ModelFolders) -> None:
    for mode in ({"self_test": "auto"}, {"batch_invariant": False, "numerics": "fast"}):
        with LLM(without_tokenizer(folders("mistral")), **{**MODE, **mode}) as llm:
            assert llm.self_test_verdict is None


@pytest.mark.parametrize("kind", KINDS)
def test_plain_ops_compute_the_model(kind: str, folders: ModelFolders) -> None:
    """Over another level's layers they give the logits of `fast`, in float32 and nearly so in bfloat16."""
    model = load_model(without_tokenizer(folders(KINDS[kind])), create_ops("fast", torch.float32, CPU), 96)
    ids, own = tokens(41), model.ops
    expected = PagedRunner(model).step({"s": ids})["s"]
    for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 0.5)):
        plain = PlainOps(own, dtype)
        with computed_by(model, plain):
            runner = RunnerOf(model, plain)
            found = runner.step({"s": ids})["s"]
        assert rms(found - expected) < most
    assert model.ops is own and all(getattr(layer, "ops", own) is own for layer in model.modules())


class RunnerOf(PagedRunner):
    """`PagedRunner` with pools of these ops."""

    def __init__(self, model: Any, ops: PlainOps) -> None:
        model.ops = ops
        super().__init__(model)


# -- on a GPU: the faults that the first GPU run of hybrids, mixtures and packed weights found -------------------------


@pytest.mark.gpu
def test_a_pass_is_cached(folders: ModelFolders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Per kind of model, and not for another page size; a failure is not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    auto = {**MODE, "self_test": "auto"}
    for settings, cached in ((auto, False), (auto, True), ({**auto, "block_size": 32}, False)):
        with LLM(without_tokenizer(folders("mistral")), **settings) as llm:
            assert llm.self_test_verdict is not None and llm.self_test_verdict["cached"] == cached
    noise_in("batch", monkeypatch)
    for _ in range(2):
        with pytest.raises(EvalEngineError, match="self-test failed"):
            LLM(without_tokenizer(folders("gemma3")), **auto)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_our_error_is_near_that_of_plain_ops(kind: str, dtype: str, checkpoint: Checkpoint) -> None:
    with LLM(checkpoint, **MODE, dtype=dtype) as llm:
        verdict = llm.self_test_verdict
        assert verdict is not None and verdict["errors"] is not None
        ours, plain = verdict["errors"]["ours"], verdict["errors"]["plain"]
        assert 0 < ours["rms"] <= max(3 * plain["rms"], 2e-4) and ours["choices"] < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kind in RECURRENT if kind != "short convolution"])
def test_a_warm_up_over_real_inputs_is_found(
    kind: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It brings a state behind a chunk twice. Other steps may run twice, and so may all of a convolution alone."""
    monkeypatch.setattr(DecodeInputs, "padding", lambda _: nullcontext())
    with pytest.raises(EvalEngineError, match=r"self-test failed .*\(graphs\)"):
        LLM(checkpoint, **MODE)


@pytest.mark.gpu
def test_a_launch_repeated_for_another_mixture_is_found(folders: ModelFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key forgets how many experts a token has, as it did."""
    from evalengine.kernels import expert_matmul

    class Forgetful(dict):
        def get(self, key: tuple, default: Any = None) -> Any:
            return super().get((*key[:5], *key[6:]), default)

        def __setitem__(self, key: tuple, value: Any) -> None:
            super().__setitem__((*key[:5], *key[6:]), value)

    monkeypatch.setattr(expert_matmul, "_launches", Forgetful())
    with LLM(without_tokenizer(folders("mixtral")), **MODE) as llm:
        assert llm.self_test_verdict is not None and llm.self_test_verdict["status"] == "passed"
    with pytest.raises(EvalEngineError, match="self-test failed"):
        LLM(without_tokenizer(folders("olmoe")), **MODE)


@pytest.mark.gpu
def test_a_packed_product_with_other_bytes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the comparison at load does not see here."""
    from evalengine.kernels import packed_matmul
    from evalengine.kernels.packed_rows import fragments_of
    from evalengine.verification import packed

    real = packed_matmul.fused
    monkeypatch.setattr(packed, "verified", lambda rows, *_: fragments_of(rows))
    monkeypatch.setattr(packed_matmul, "fused", lambda *args: real(*args).mul_(1 + 2**-7))
    checkpoint = open_checkpoint(ModelConfig(path="shape:gpt-oss-20b-mxfp4"), 2)
    with pytest.raises(EvalEngineError, match="self-test failed"):
        LLM(checkpoint, batch_invariant=True, max_model_len=2048, self_test="always")
