"""Models that transformers' own module computes give the same bytes under every schedule; what cannot is refused by
name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from evalengine import LLM, ConfigError, EvalEngineError, SamplingParams
from evalengine.certify.cases import EFFORTS
from evalengine.certify.proof import Prover
from evalengine.certify.subject import Subject
from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import Checkpoint, load_model, resolve_checkpoint
from evalengine.harness.identity import plain_spec
from evalengine.invariant import is_batch_invariant_mode
from evalengine.layers import create_ops
from evalengine.layers.hooks import op_hook
from evalengine.models.hf_module.model import TransformersForCausalLM
from tests.engine.certify_double import CPU as CPU_WORDS
from tests.engine.certify_double import TINY
from tests.engine.test_families import SCHEDULES, differs_from_scores, requests
from tests.engine.test_schedule_invariance import differing, one_by_one, run
from tests.parity.families import make as make_family
from tests.parity.families import random_model
from tests.parity.modules import make
from tests.parity.random_models import ModelFolders, without_tokenizer

CPU = torch.device("cpu")
MODE = {"batch_invariant": True, "max_model_len": 96, "device": "cpu"}
FAST = {**MODE, "batch_invariant": False}
ON_SCHEDULES = ["gpt2", "phi", "exaone", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "mimo_v2_flash"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    return ModelFolders(make, tmp_path_factory)


@pytest.fixture
def folder(name: str, folders: ModelFolders) -> Path:
    return folders(name)


@pytest.fixture
def checkpoint(folder: Path) -> Checkpoint:
    return without_tokenizer(folder, "transformers")


@pytest.mark.parametrize("name", ON_SCHEDULES)
def test_no_schedule_changes_a_bit(checkpoint: Checkpoint) -> None:
    one, other = (run(checkpoint, requests(), schedule, **MODE) for schedule in SCHEDULES)
    assert not differing(one, other) and not differs_from_scores(checkpoint, one, **MODE)
    assert not is_batch_invariant_mode(), "the mode stays within a step"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_SCHEDULES)
def test_no_schedule_changes_a_bit_on_cuda(checkpoint: Checkpoint) -> None:
    """Decode steps are graphs where the module can be captured: those of experts cannot, whose ends the host reads."""
    mode = {**MODE, "device": "cuda"}
    expected = one_by_one(checkpoint, requests(), enforce_eager=True, **mode)
    for schedule in SCHEDULES:
        assert not differing(run(checkpoint, requests(), schedule, **mode), expected), schedule
    with LLM(checkpoint, **mode) as llm:
        list(llm.run(requests()))
        assert llm.runner is not None
        captured = llm.runner.num_graph_steps > 0
    assert captured is ("experts" not in str(llm.spec.module))


@pytest.mark.parametrize("name", ["mixtral"])
def test_the_ordinary_mode_is_seen_to_differ(checkpoint: Checkpoint) -> None:
    expected = one_by_one(checkpoint, requests(), **FAST)
    outputs = run(checkpoint, requests(), SCHEDULES[0], **FAST)
    assert differing(outputs, expected), "the comparison sees nothing"


@pytest.mark.parametrize("name", ["phi"])
def test_bfloat16_weights_too(checkpoint: Checkpoint) -> None:
    expected = one_by_one(checkpoint, requests(), dtype="bfloat16", **MODE)
    assert not differing(run(checkpoint, requests(), SCHEDULES[0], dtype="bfloat16", **MODE), expected)


@pytest.mark.parametrize("name", ["qwen3_moe"])
def test_a_tie_between_experts_is_broken_alike_in_every_batch(folder: Path, tmp_path: Path) -> None:
    """Four of six experts have one row of the router, so that tokens choose two of several equals."""
    checkpoint = _copy(folder, tmp_path, _tied_router)
    with LLM(checkpoint, **MODE) as llm:
        assert llm.runner is not None
        ties: list[bool] = []

        def chosen(_module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            best = output[0].topk(3, dim=-1).values
            ties.append(bool((best[:, 1] == best[:, 2]).any()))

        llm.runner.model.get_submodule("module.model.layers.1.mlp.gate").register_forward_hook(chosen)
        list(llm.run(requests()))
    assert any(ties), "no token met a tie at the border of the chosen"
    expected = one_by_one(checkpoint, requests(), **MODE)
    for schedule in SCHEDULES:
        assert not differing(run(checkpoint, requests(), schedule, **MODE), expected), schedule


def _tied_router(tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        if name.endswith("mlp.gate.weight"):
            tensors[name][1:4] = tensors[name][0]


def _copy(folder: Path, to: Path, change: Any) -> Checkpoint:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text((folder / "config.json").read_text())
    return without_tokenizer(to, "transformers")


@pytest.mark.parametrize("name", ["mixtral"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing: model\.norm\.weight"),
        (lambda t: t.update(extra=torch.zeros(2)), "unexpected: extra"),
        (lambda t: t.update({"model.layers.1.q_norm.weight": torch.zeros(2)}), r"unexpected: model\.layers\.1\.q_norm"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(5)}), r"wrong shape: model\.norm\.weight is \[5\]"),
        (lambda t: t.pop(next(n for n in t if "experts.1.w1" in n)), "transformers cannot load these tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder: Path, tmp_path: Path, change: Any, words: str) -> None:
    checkpoint = _copy(folder, tmp_path, change)
    with pytest.raises(EvalEngineError, match=words):
        load_model(checkpoint, create_ops("fast", torch.float32, CPU), 64)


@pytest.mark.parametrize("name", ["mixtral"])
def test_tensors_of_further_modules_are_skipped(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ("mtp.fc.weight", "model.layers.9.enorm.weight", "model.layers.9.e.weight")
    extra = {name: torch.ones(2) for name in names}
    checkpoint = _copy(folder, tmp_path, lambda tensors: tensors.update(extra))
    load_model(checkpoint, create_ops("fast", torch.float32, CPU), 64)
    assert "model.layers.9.* (2), mtp.* (1)" in caplog.text


@pytest.mark.parametrize("name", ["olmo"])
def test_dummy_weights_are_the_same_everywhere(folder: Path) -> None:
    checkpoint = resolve_checkpoint(ModelConfig(name="t", path=str(folder), load_format="dummy"))
    models = [load_model(checkpoint, create_ops("exact", torch.float32, CPU), 64) for _ in range(2)]
    ours, again = (dict(model.named_parameters()) for model in models)
    assert ours.keys() == again.keys() and all(torch.equal(x, again[name]) for name, x in ours.items())
    assert 0.01 < float(ours["module.model.layers.0.mlp.up_proj.weight"].std()) < 0.03


# config.json's content -> what the refusal says
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "recurrent": ({"model_type": "jamba"}, "layers of linear_attention are not supported"),
    "linear": ({"model_type": "minimax"}, "layers of linear_attention are not supported"),
    "stateful": ({"model_type": "rwkv"}, "it keeps a recurrent state, which is not supported"),
    "chunks": ({"model_type": "llama4_text"}, "layers of chunked_attention are not supported"),
    "own attention": ({"model_type": "bloom"}, "does not go through transformers' AttentionInterface"),
    "own calls": ({"model_type": "diffllama", "num_hidden_layers": 2}, r"attended: \[0, 0, 1, 1\]"),
    "dynamic rope": (
        {"model_type": "olmo", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "RoPE of type dynamic depends on the longest row of a batch",
    ),
    "both ways": ({"model_type": "bert"}, "its attention is not causal"),
    "packed": ({"model_type": "mixtral", "quantization_config": {"bits": 4}}, "packed weights are not supported"),
    "too deep": ({"model_type": "olmo", "num_hidden_layers": 10**9}, "must be a number of layers"),
    "no decoder": ({"model_type": "t5"}, "transformers has no decoder of texts for it"),
    "other class": ({"model_type": "olmo", "architectures": ["Foo"]}, "only OlmoForCausalLM runs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_by_name(case: str, tmp_path: Path) -> None:
    raw, words = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=words):
        resolve_checkpoint(ModelConfig(name="t", path=str(tmp_path), load_format="dummy"))


def test_a_refusal_says_why_transformers_cannot_and_what_is_native(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon"}))
    with pytest.raises(ConfigError) as caught:
        resolve_checkpoint(ModelConfig(name="t", path=str(tmp_path), load_format="dummy"))
    (problem,) = caught.value.problems
    assert "model type falcon is not supported (by transformers' own module: FalconForCausalLM: its attent" in problem
    assert "LlamaForCausalLM (llama)" in problem


def test_what_a_native_family_does_not_compute_transformers_module_runs(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_act": "gelu", "rope_theta": 10000.0, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig(name="t", path=str(tmp_path), load_format="dummy")
    with pytest.raises(ConfigError, match=r"hidden_act='gelu': .*; use model\.implementation=auto or transformers"):
        resolve_checkpoint(dataclasses.replace(model, implementation="native"))
    specs = [resolve_checkpoint(dataclasses.replace(model, implementation=i)).spec for i in ("auto", "transformers")]
    assert specs[0] == specs[1] and specs[0].implementation == "transformers" and specs[0].num_layers == 32
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "surely_not"}))
    with pytest.raises(ConfigError, match="has no such model"):
        resolve_checkpoint(dataclasses.replace(model, implementation="transformers"))
    with pytest.raises(ConfigError, match="must be 'auto', 'native' or 'transformers'"):
        resolve_checkpoint(dataclasses.replace(model, implementation="vllm"))


def test_ops_without_a_promise_are_named_and_the_ordinary_mode_runs_them(tmp_path: Path) -> None:
    """Apertus' activation is a softplus, whose vector body and scalar tail round differently on a CPU."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    random_model("apertus", {"rope_parameters": rope}, tmp_path)
    checkpoint = without_tokenizer(tmp_path, "transformers")
    with pytest.raises(ConfigError, match=r"ApertusForCausalLM .* aten::softplus on cpu \(float32\)\. Use batch_inv"):
        LLM(checkpoint, **MODE)
    with LLM(checkpoint, **FAST) as llm:
        assert len(llm.generate([[3, 4, 5]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


@pytest.mark.parametrize("name", ["olmo"])
@pytest.mark.parametrize("level", ["fast", "exact"])
def test_a_module_that_mixes_rows_or_forgets_positions_is_refused(
    folder: Path, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No op shows it: a maximum over the rows of a step, and positions counted from the step's beginning."""
    from transformers.models.olmo.modeling_olmo import OlmoMLP, OlmoRotaryEmbedding

    real, turn = OlmoMLP.forward, OlmoRotaryEmbedding.forward
    checkpoint, ops = without_tokenizer(folder, "transformers"), create_ops(level, torch.float32, CPU)
    with monkeypatch.context() as patch:
        patch.setattr(OlmoMLP, "forward", lambda self, x: real(self, x) + 5 * x.amax(dim=1, keepdim=True))
        with pytest.raises(ConfigError, match="a sequence in a batch, or in parts, is not computed as it is alone"):
            load_model(checkpoint, ops, 64)
    counted = lambda self, x, position_ids: turn(self, x, torch.arange(x.shape[1])[None])  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(OlmoRotaryEmbedding, "forward", counted)
        if level == "exact":
            with pytest.raises(ConfigError, match="a sequence in a batch, or in parts"):
                load_model(checkpoint, ops, 64)
    load_model(checkpoint, ops, 64)


def test_two_implementations_of_a_model_are_two_identities(tmp_path: Path) -> None:
    """Of a native one the identity says nothing of implementations, as before there were two."""
    make_family("mistral", tmp_path)
    native, same, theirs = (without_tokenizer(tmp_path, name).spec for name in ("auto", "native", "transformers"))
    assert native == same and "module" not in plain_spec(native) and native.described == "MistralForCausalLM"
    assert theirs.described == f"MistralForCausalLM by transformers {transformers.__version__}"
    module = json.loads(plain_spec(theirs)["module"])
    assert module["transformers"] == transformers.__version__ and module["config"]["sliding_window"] is None
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plain_spec(without_tokenizer(tmp_path, "transformers").spec) != plain_spec(theirs)


@pytest.mark.parametrize("name", ["olmo"])
def test_ranks_and_gguf_files_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot share this model's layers, which transformers' own module .* takes 1$"
    ):
        LLM(checkpoint, tensor_parallel_size=2, **MODE)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="is a GGUF file, which only native families read"):
        resolve_checkpoint(ModelConfig(name="t", path=str(tmp_path / "m.gguf"), implementation="transformers"))


@pytest.mark.parametrize("name", ["phi"])
def test_a_row_that_is_not_finite_names_the_module(checkpoint: Checkpoint) -> None:
    with LLM(checkpoint, **MODE) as llm:
        assert llm.runner is not None
        weight = llm.runner.model.get_parameter("module.model.layers.2.mlp.fc1.bias")
        weight[3] = float("nan")
        (output,) = llm.generate([[3, 4, 5]], SamplingParams(max_tokens=2))
    assert output.error is not None and "first in the output of model.layers.2.mlp.fc1" in output.error


@pytest.mark.parametrize("name", ["phi"])
def test_a_hook_sees_each_part_with_a_row_for_each_token(checkpoint: Checkpoint) -> None:
    seen: dict[str, tuple[int, ...]] = {}
    with LLM(checkpoint, **MODE) as llm:
        assert llm.runner is not None
        with op_hook(llm.runner.model, lambda op, output: seen.setdefault(op, tuple(output.shape)) and None):
            llm.generate([[3, 4, 5, 6]], SamplingParams(max_tokens=1))
        assert not any(module._forward_hooks for module in llm.runner.model.modules()), "a hook was left"
    assert seen["model.layers.0.self_attn.q_proj"] == (4, 96) and seen["lm_head"] == (1, 211)
    assert {shape[0] for op, shape in seen.items() if op != "lm_head"} == {4}


def test_verify_finds_no_difference_and_sees_a_planted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_model("mixtral", {"num_local_experts": 6, "vocab_size": 1024, "num_hidden_layers": 1}, tmp_path)
    checkpoint = without_tokenizer(tmp_path, "transformers")
    monkeypatch.setitem(EFFORTS, "tiny", dataclasses.replace(TINY, documents=0))
    subject = Subject((*CPU_WORDS, "engine.max_model_len=256"), "tiny")
    proven = Prover(subject, checkpoint, []).prove(("batch", "prefix"))
    assert proven.verdict == "IDENTICAL", proven.incomplete
    assert proven.control.tally.differing_logprobs, "the comparison can see a difference"
    real = TransformersForCausalLM.compute_logits
    planted = lambda self, hidden: real(self, hidden) * (1 + 1e-6 * (len(hidden) > 4))  # noqa: E731
    monkeypatch.setattr(TransformersForCausalLM, "compute_logits", planted)
    assert Prover(subject, checkpoint, []).prove(("batch",)).verdict == "DIFFERENT"
