"""Mixtures of experts in the engine: ties of the router, fused checkpoints, what is counted and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING

from evalengine import LLM
from evalengine.certify.model import open_checkpoint
from evalengine.config.schema import EngineConfig, ModelConfig
from evalengine.engine.execute.memory import _activation_bytes
from evalengine.engine.load.loader import Checkpoint, load_model, resolve_checkpoint
from evalengine.engine.request import ScoreRequest
from evalengine.engine.settings import resolve_settings
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.explain.rerun import ComputationRecorder
from evalengine.layers import create_ops
from evalengine.layers.hooks import op_hook
from evalengine.models.decoder import num_parameters
from evalengine.models.widths import widths
from tests.engine.test_families import SCHEDULES, differs_from_scores, requests
from tests.engine.test_schedule_invariance import differing, run
from tests.parity.families import CASES, SIZES, make, random_model
from tests.parity.paged import PagedRunner
from tests.parity.random_models import without_tokenizer
from tests.parity.test_families import tokens

FIRST, SECOND = 1, 4  # the experts whose logits are equal
LAYERS = 4


def edited(folder: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Checkpoint:
    file = folder / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})
    return without_tokenizer(folder)


def with_ties(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two experts of every layer have one row of the router, and its biases."""
    ends = (
        "gate.weight",
        "router.weight",
        "router.bias",
        "router.layer.weight",
        "e_score_correction_bias",
        "expert_bias",
    )
    for name in [name for name in tensors if name.endswith(ends)]:
        by_expert = tensors[name].view(-1) if "bias" in name else tensors[name]
        if len(by_expert) > 1:  # a shared expert's gate has one row
            by_expert[SECOND] = by_expert[FIRST]
    return tensors


def swapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The two experts in each other's place."""
    for name in [name for name in tensors if f".experts.{FIRST}." in name]:
        other = name.replace(f".experts.{FIRST}.", f".experts.{SECOND}.")
        tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()
    return tensors


@pytest.fixture
def tied(tmp_path: Path) -> Checkpoint:
    make("qwen3-moe", tmp_path)
    return edited(tmp_path, with_ties)


def logits_of(checkpoint: Checkpoint, level: str = "exact") -> Tensor:
    model = load_model(checkpoint, create_ops(level, torch.float32, torch.device("cpu")), 64)
    return PagedRunner(model).step({"s": tokens(29)})["s"]


@pytest.mark.parametrize(
    "name",
    ["qwen3-moe", "gpt-oss", "ernie-moe", "minimax-m2", "granite-moe", "mixtral", "olmoe", "qwen2-moe", "lfm2-moe"],
)
def test_a_tie_of_the_router_goes_to_the_lower_id_under_every_schedule(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    tied = edited(tmp_path, with_ties)
    mode = {"batch_invariant": True, "max_model_len": 96}
    one, other = (run(tied, requests(), schedule, **mode) for schedule in SCHEDULES)
    assert not differing(one, other) and not differs_from_scores(tied, one, **mode)
    chosen: list[list[int]] = []

    def see(name: str, output: Tensor) -> None:
        if name.endswith("choice.0"):
            chosen.extend(output.tolist())

    with LLM(tied, **mode) as llm, op_hook(llm.runner.model, see):
        list(llm.run(requests()))
    both = [row for row in chosen if FIRST in row and SECOND in row]
    cut = [row for row in chosen if (FIRST in row) != (SECOND in row)]
    assert both and all(row.index(SECOND) == row.index(FIRST) + 1 for row in both)
    assert cut and all(row[-1] == FIRST for row in cut), "the last place is the lower id's"


def test_which_of_two_equals_is_taken_shows(tied: Checkpoint) -> None:
    """The two experts compute other numbers: in each other's place they give another model."""
    before = logits_of(tied)
    assert not torch.equal(logits_of(edited(tied.path, swapped)), before)


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts as transformers 5 holds them: one tensor for gate and up of all, one for down."""
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([tensors[f"{prefix}.{expert}.{part}.weight"] for expert in range(6)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        kept[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
        kept[f"{prefix}.down_proj"] = parts["down_proj"]
    return kept


def test_experts_in_one_tensor_are_the_same_model(tmp_path: Path) -> None:
    make("qwen3-moe", tmp_path)
    separate = logits_of(without_tokenizer(tmp_path))
    assert torch.equal(logits_of(edited(tmp_path, fused)), separate)


def test_every_expert_counts_in_memory_and_must_be_there(tmp_path: Path) -> None:
    hf = make("qwen3-moe", tmp_path)
    checkpoint = without_tokenizer(tmp_path)
    assert num_parameters(checkpoint.spec) == sum(p.numel() for p in hf.parameters())
    lost = "model.layers.2.mlp.experts.5.up_proj.weight"
    with pytest.raises(EvalEngineError, match=f"missing: {lost}"):
        logits_of(edited(tmp_path, lambda tensors: {name: x for name, x in tensors.items() if name != lost}))


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("num_experts_per_tok", 9, "9 of 6 experts"),
        ("num_experts", 0, "experts=0: must be an integer"),
        ("decoder_sparse_step", 0, "decoder_sparse_step=0"),
        ("moe_intermediate_size", 0, "experts of 0"),
        ("n_shared_experts", 1, "n_shared_experts=1: no model of this class computes it"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(field: str, value: int, why: str, tmp_path: Path) -> None:
    random_model("qwen3_moe", {"moe_intermediate_size": 52, "num_experts": 6, "num_hidden_layers": 1}, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config = {name: v for name, v in config.items() if name != {"num_experts": "num_local_experts"}.get(field)}
    file.write_text(json.dumps({**config, field: value}))
    with pytest.raises(ConfigError, match=why):
        without_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "field", "value", "why"),
    [
        ("olmoe", "clip_qkv", 3.0, "clip_qkv=3.0: no model of this class computes it"),
        ("gpt-oss", "swiglu_limit", 5.0, "swiglu_limit=5.0: the feed-forward"),
        ("ernie-moe", "use_bias", True, "its head would have a bias"),
        ("ernie-moe", "moe_layer_interval", 0, "moe_layer_interval=0: must name layers"),
        ("minimax-m2", "scoring_func", "softmax", "only 'sigmoid' is supported"),
        ("glm4-moe", "n_group", 3, "8 experts in 3 groups"),
        ("glm4-moe", "topk_group", 1, "a token cannot have 3 of 8 experts"),
        ("mixtral", "quantization_config", {"quant_method": "bitsandbytes"}, "packed weights are not supported"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(
    name: str, field: str, value: object, why: str, tmp_path: Path
) -> None:
    model_type, more = CASES[name]
    sizes = {n: v for n, v in {**SIZES, **more}.items() if v is not None}
    config = {**CONFIG_MAPPING[model_type](**sizes).to_dict(), field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=why):
        resolve_checkpoint(ModelConfig(name="t", path=str(tmp_path), load_format="dummy", implementation="native"))


def test_an_expert_that_is_not_finite_fails_those_that_choose_it_alone(tmp_path: Path) -> None:
    """The others have the bytes that they had; the message names the product of the experts."""
    make("qwen3-moe", tmp_path)
    scores = [ScoreRequest(token, [token], [5]) for token in range(10, 40)]
    params = {"batch_invariant": True, "max_model_len": 64}

    def poisoned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.layers.3.mlp.experts.2.up_proj.weight"].fill_(torch.nan)
        return tensors

    with LLM(without_tokenizer(tmp_path), **params) as llm:
        whole = {output.request_id: output for output in llm.run(scores)}
    with LLM(edited(tmp_path, poisoned), **params) as llm:
        outputs = {output.request_id: output for output in llm.run(scores)}
    failed = {key for key, output in outputs.items() if output.error}
    assert 0 < len(failed) < len(scores)
    assert all("model.layers.3.mlp.experts.gate_up_proj" in outputs[key].error for key in failed)
    others = whole.keys() - failed
    assert not differing({key: outputs[key] for key in others}, {key: whole[key] for key in others})


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss"])
def test_sums_over_ranks_hold_each_bias_and_the_shared_expert_once(name: str, tmp_path: Path) -> None:
    """In `fast`, where each rank has some of the inputs of every expert."""
    make(name, tmp_path)
    checkpoint = without_tokenizer(tmp_path)
    scores = [ScoreRequest(i, tokens(9, i), tokens(6, 50 + i)) for i in range(4)]
    settings = {"batch_invariant": False, "dtype": "float32", "max_model_len": 64, "num_kv_blocks": 64}
    with LLM(checkpoint, **settings) as one:
        alone = {output.request_id: output for output in one.run(scores)}
    with LLM(checkpoint, tensor_parallel_size=2, **settings) as two:
        together = {output.request_id: output for output in two.run(scores)}
    for key, output in together.items():
        assert abs(output.logprobs - alone[key].logprobs).max() < 1e-3


def test_an_explanation_shows_the_choice(tmp_path: Path) -> None:
    """The experts and their weights are outputs of an op, one row a token."""
    make("qwen3-moe", tmp_path)
    request = ScoreRequest(0, tokens(7), tokens(3, 2))
    recorder = ComputationRecorder(request)
    with LLM(without_tokenizer(tmp_path), batch_invariant=True, max_model_len=64) as llm, recorder.listening(llm):
        list(llm.run([request]))
    chosen = [f"model.layers.{layer}.mlp.choice.{part}" for layer in range(LAYERS) for part in ("experts", "weights")]
    assert {*chosen} <= recorder.ops.keys() and recorder.ops[chosen[0]] == "float32"
    assert all(chosen[0] in computation.digests for computation in recorder.computations)


def test_a_step_is_planned_with_the_rows_of_all_experts_of_its_tokens() -> None:
    """Of Qwen3-30B-A3B in bfloat16: residual, norm, and for each token 8 rows of 768 inputs and of 2,048 outputs."""
    spec = open_checkpoint(ModelConfig(name="t", path="shape:qwen3-30b-a3b")).spec
    config = EngineConfig(device="cpu", max_num_batched_tokens=4096)
    settings = resolve_settings(config, False, "fast", spec)
    assert _activation_bytes(config, spec, settings) == 4096 * 2 * (2 * 2048 + 8 * (768 + 2048))
    assert widths(spec)[1:4] == (32 * 128, 8 * 768, 8 * 2048) and not spec.dense
