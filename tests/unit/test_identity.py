"""A run's identity holds what the model is: every field of its spec, its tokenizer, the chat template in use."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from evalengine.certify.model import open_checkpoint
from evalengine.config.compose import compose_jobs
from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import Checkpoint, resolve_checkpoint, weights_fingerprint
from evalengine.engine.text.tokenizer import plain_tokenizer
from evalengine.harness.identity import model_identity, plain_spec
from evalengine.integrations.lm_eval.arguments import read_arguments
from evalengine.kernels.recurrent_variant import GatedDelta
from evalengine.layers.variants import Norm
from evalengine.models.processors import LogitsProcessors
from evalengine.models.rope import RopeSpec
from evalengine.models.spec import Block, ModelSpec

(JOB,) = compose_jobs([])
(CHAT,) = compose_jobs(["apply_chat_template=true"])


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return resolve_checkpoint(ModelConfig(path="asset:tinymath"))


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, RopeSpec):
        return replace(value, theta=value.theta + 1)
    if isinstance(value, LogitsProcessors):
        return replace(value, repetition_penalty=1.1)
    if isinstance(value, Norm):
        return replace(value, cast_first=False)
    if isinstance(value, tuple):
        return (*value, Block(window=7) if isinstance(value[0], Block) else 7)
    if value is None:
        return 3
    if value == 0 and isinstance(value, float):
        return 0.5
    return not value if isinstance(value, bool) else value + "x" if isinstance(value, str) else value * 2


@pytest.mark.parametrize("name", [f.name for f in fields(ModelSpec) if f.name != "dtype"])
def test_every_field_of_the_spec_counts(checkpoint: Checkpoint, name: str) -> None:
    spec = checkpoint.spec
    other = replace(spec, **{name: changed(getattr(spec, name))})
    before, after = plain_spec(spec), plain_spec(other)
    assert {key for key in after if before.get(key) != after[key]} == {name}


def test_what_came_later_leaves_plain_models_their_identity(checkpoint: Checkpoint) -> None:
    """Receipts, caches and baselines name a Llama as before."""
    values = plain_spec(checkpoint.spec)
    assert not values.keys() & {"blocks", "norm", "embedding_scale", "logits_scale", "logits_softcap", "module"}
    assert not values["rope"].keys() & {f.name for f in fields(RopeSpec) if f.metadata}


def test_what_came_later_leaves_recurrences_their_identity(checkpoint: Checkpoint) -> None:
    """Qwen3.5 is named as before OLMo-Hybrid's fields came, which count where they are used."""

    def plain(rule: GatedDelta) -> Any:
        return plain_spec(replace(checkpoint.spec, blocks=(Block(recurrence=rule),)))["blocks"][0]["recurrence"]

    rule = GatedDelta(2, 4, 16, 32, 4)
    assert plain(rule) == {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 16, "value_dim": 32, "taps": 4}
    assert plain(replace(rule, beta_scale=2.0)) == {**plain(rule), "beta_scale": 2.0}


@pytest.mark.parametrize("name", [f.name for f in fields(RopeSpec)])
def test_every_field_of_rope_counts(checkpoint: Checkpoint, name: str) -> None:
    rope = replace(checkpoint.spec.rope, **{name: changed(getattr(checkpoint.spec.rope, name))})
    assert plain_spec(replace(checkpoint.spec, rope=rope))["rope"] != plain_spec(checkpoint.spec)["rope"]


def test_dummy_weights_of_plain_models_are_named_as_before() -> None:
    """Committed certificates name the shapes' weights by this hash, which is of the spec's `repr`."""
    found = weights_fingerprint(open_checkpoint(ModelConfig(name="qwen3-0.6b", path="shape:qwen3-0.6b")))
    assert found == "b9a74f19c16fb783ae8310a1aff6b181bb9d0b2fbf8e6bdd2bf690dc97938b1c"


def test_the_checkpoints_dtype_does_not_count(checkpoint: Checkpoint) -> None:
    """The dtype in which the run computes is in its identity instead."""
    assert plain_spec(replace(checkpoint.spec, dtype=torch.float64)) == plain_spec(checkpoint.spec)


def test_what_encodes_and_decodes_counts(checkpoint: Checkpoint) -> None:
    before = plain_tokenizer(checkpoint.tokenizer)
    assert before is not None and before["special_tokens"]["eos_token"] == "<|endoftext|>"
    for change in (
        lambda t: setattr(t, "eos_token", "<|im_end|>"),
        lambda t: setattr(t, "clean_up_tokenization_spaces", True),
        lambda t: setattr(t, "split_special_tokens", True),
        lambda t: t.add_tokens(["<tool>"]),
    ):
        other = copy.deepcopy(checkpoint.tokenizer)
        change(other)
        assert plain_tokenizer(other) != before


def test_the_chat_template_counts_where_it_is_applied(checkpoint: Checkpoint) -> None:
    def identity(config: Any, template: Any) -> dict[str, Any]:
        tokenizer = copy.deepcopy(checkpoint.tokenizer)
        tokenizer.chat_template = template  # type: ignore[union-attr]
        return model_identity(config, replace(checkpoint, tokenizer=tokenizer))

    assert identity(JOB.config, "a") == identity(JOB.config, "b")
    assert identity(CHAT.config, "a") != identity(CHAT.config, "b")
    assert identity(CHAT.config, {"default": "a"}) != identity(CHAT.config, {"default": "b"})


ENGINE_PART = {
    name: name
    for name in ("contract_version", "weights", "model_spec", "tokenizer", "chat_template", "numerics", "dtype")
}


def test_what_decides_the_scored_part_under_lm_eval_counts() -> None:
    """Two settings of lm-eval's model that are none of the engine's change what is scored of equal tokens."""
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")
    from evalengine.integrations.lm_eval.recorder import EvaluationRecorder

    def identity(**own: Any) -> dict[str, Any]:
        recorder = EvaluationRecorder.__new__(EvaluationRecorder)
        recorder.arguments, problems = read_arguments({"pretrained": "asset:tinymath", **own})
        assert not problems
        recorder.templated, recorder._identity, recorder._asked = False, {False: ENGINE_PART}, {}
        return recorder._run_identity()

    plain = identity()
    assert plain == identity(batch_size=4) and plain["harness"] == "lm-eval"
    for own in ({"think_end_token": "####"}, {"max_gen_toks": 16}):
        assert {name: value for name, value in identity(**own).items() if plain.get(name) != value} == own
