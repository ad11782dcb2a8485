"""Beyond the original length: LongRoPE's factors belong to a request, Ministral 3 scales its queries, YaRN lengthens.

Logits with YaRN are compared in `test_families` (the cases with `NEAR`).
"""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from evalengine import LLM, SamplingParams
from evalengine.engine.load.hf_folder import folder_spec
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, ScoreRequest
from evalengine.models.hf_config import from_hf
from evalengine.models.rope import NO_ROPE
from tests.engine.test_schedule_invariance import differing
from tests.parity.families import CASES, NEAR, VOCAB, YARN, case, configuration, make
from tests.parity.random_models import without_tokenizer

SHORT = 128  # tokens: the original length of the case phi3-long
SETTINGS = {"max_model_len": 512, "num_kv_blocks": 200, "block_size": 16, "num_threads": 1, "dtype": "float32"}


def made(name: str, folder: Path) -> tuple[PreTrainedModel, Checkpoint]:
    return make(name, folder), without_tokenizer(folder)


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Checkpoint]:
    return made("phi3-long", tmp_path_factory.mktemp("phi"))


@pytest.fixture(scope="module")
def ministral(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Checkpoint]:
    return made("ministral3", tmp_path_factory.mktemp("ministral"))


def tokens(count: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def score(number: int, fed: int, scored: int = 40) -> ScoreRequest:
    """The last `scored` tokens of a row of which so many are fed."""
    ids = tokens(fed + 1)
    return ScoreRequest(number, ids[:-scored], ids[-scored:])


def theirs(model: PreTrainedModel, request: ScoreRequest) -> Tensor:
    """transformers' logprobs of the row alone, in the model's dtype."""
    ids = torch.tensor(request.context_ids + request.continuation_ids)
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(ids[None, :-1]).logits[0].double(), -1)
    return logprobs.gather(1, ids[1:, None])[-len(request.continuation_ids) :, 0]


def alone(checkpoint: Checkpoint, batch: list[Request]) -> dict[int, RequestOutput]:
    """Every request by itself, in one chunk, with no prefix cache."""
    with LLM(checkpoint, **SETTINGS, enable_prefix_caching=False) as llm:
        return {output.request_id: output for request in batch for output in llm.run([request])}


@pytest.mark.parametrize("fed", [60, SHORT, SHORT + 1, 300])
def test_long_rows_have_the_long_factors_in_any_company(phi: tuple[PreTrainedModel, Checkpoint], fed: int) -> None:
    """Rows are scored side by side, with others that begin alike, and have transformers' values of each row alone."""
    hf, checkpoint = phi
    rows: list[Request] = [score(number, own) for number, own in enumerate((fed, 90, 200))]
    with LLM(checkpoint, **SETTINGS) as llm:
        outputs = {output.request_id: output for output in llm.run(rows)}
    request = rows[0]
    assert isinstance(request, ScoreRequest)
    expected, ours = theirs(hf, request), outputs[0].logprobs
    exact = theirs(hf.double(), request)
    hf.float()
    errors = [float((x - exact).abs().max()) for x in (torch.from_numpy(ours).double(), expected)]
    assert errors[0] <= max(errors[1], 1e-6), errors


def test_greedy_generation_beyond_the_original_length(phi: tuple[PreTrainedModel, Checkpoint]) -> None:
    hf, checkpoint = phi
    prompt = tokens(SHORT + 9)
    request = GenerateRequest(0, prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    hf.generation_config.eos_token_id = None
    with torch.inference_mode():
        whole = hf.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)
    assert list(alone(checkpoint, [request])[0].token_ids) == whole[0, len(prompt) :].tolist()


def mixed() -> list[Request]:
    """Short and long requests that begin with the same 100 tokens."""
    common = tokens(100)
    batch: list[Request] = []
    for i, room in enumerate((10, 60, 27, 28, 90)):  # 101 tokens and these: the third is the last short one
        batch.append(GenerateRequest(i, [*common, 5], SamplingParams(max_tokens=room, ignore_eos=True)))
    batch += [ScoreRequest(10 + i, common, tokens(length)) for i, length in enumerate((3, 29, 30, 80))]
    return batch


@pytest.fixture(scope="module")
def each_alone(phi: tuple[PreTrainedModel, Checkpoint]) -> dict[int, RequestOutput]:
    """The outputs of `mixed`, each computed alone."""
    return alone(phi[1], mixed())


def test_no_schedule_mixes_the_two_tables(
    phi: tuple[PreTrainedModel, Checkpoint], each_alone: dict[int, RequestOutput]
) -> None:
    _, checkpoint = phi
    for settings in ({}, {"max_num_batched_tokens": 13, "block_size": 7}, {"num_kv_blocks": 15, "max_num_seqs": 3}):
        with LLM(checkpoint, **{**SETTINGS, **settings}) as llm:
            for order in (mixed(), mixed()[::-1]):
                assert not differing({o.request_id: o for o in llm.run(order)}, each_alone), settings
            assert llm.stats.num_cached_tokens > 0, "what is alike is shared"


def test_the_length_that_a_request_may_have_decides(
    phi: tuple[PreTrainedModel, Checkpoint], each_alone: dict[int, RequestOutput]
) -> None:
    """The first tokens of a generation of 128 in all are those of any shorter one, and one more token changes them."""
    found = {number: output.logprobs for number, output in each_alone.items()}
    assert found[2][:10].tobytes() == found[0].tobytes()
    assert found[3][:27].tobytes() != found[2].tobytes()
    assert found[4][:28].tobytes() == found[3].tobytes()
    with LLM(phi[1], **{**SETTINGS, "max_model_len": SHORT}) as llm:  # a generation ends there, so none is long
        (cut,) = llm.run(mixed()[4:5])
    assert cut.logprobs.tobytes() == found[2].tobytes()


def test_the_factors_and_the_length_are_part_of_the_identity(phi: tuple[PreTrainedModel, Checkpoint]) -> None:
    rope = phi[1].spec.plain["rope"]
    assert rope["long_factors"] == tuple(4.0 + i for i in range(12))
    assert rope["original_max_position_embeddings"] == SHORT and phi[1].spec.max_position_embeddings == 512
    assert phi[1].spec.described == "Phi3ForCausalLM (long RoPE factors for requests of more than 128 tokens)"


@pytest.mark.parametrize("level", ["exact", "fast"])
def test_queries_beyond_the_original_length_are_scaled(
    ministral: tuple[PreTrainedModel, Checkpoint], level: str
) -> None:
    hf, checkpoint = ministral
    request = score(0, 2 * YARN["original_max_position_embeddings"] - 10)
    expected = theirs(hf, request)
    exact = theirs(hf.double(), request)
    hf.float()
    mode = {"numerics": level, "batch_invariant": level == "exact"}
    with LLM(checkpoint, **{**SETTINGS, "max_num_batched_tokens": 100, **mode}) as llm:
        (output,) = llm.run([request])
    error = float((torch.from_numpy(output.logprobs).double() - exact).abs().max())
    assert error <= 2 * float((expected - exact).abs().max())
    factors = checkpoint.spec.rope.query_factors(512)
    assert factors is not None and np.allclose(factors[[255, 256]], [1.0, 1 + 0.1 * np.log(2)])
    assert checkpoint.spec.rope.query_factors(256) is None


def test_schedules_give_scaled_queries_the_same_bytes(ministral: tuple[PreTrainedModel, Checkpoint]) -> None:
    _, checkpoint = ministral
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    batch: list[Request] = [GenerateRequest(i, tokens(length), params) for i, length in enumerate((9, 246, 250, 300))]
    expected = alone(checkpoint, batch)
    with LLM(checkpoint, **{**SETTINGS, "max_num_batched_tokens": 37}) as llm:
        assert not differing({o.request_id: o for o in llm.run(batch)}, expected)


@pytest.mark.parametrize("name", {model_type: name for name, (model_type, _) in CASES.items()}.values())
def test_yarn_has_transformers_frequencies_in_every_family(name: str) -> None:
    """And its factor of cosines and sines. Phi-3's class takes the name for LongRoPE."""
    model_type, more = case(name)
    yarn = {**NEAR, "beta_fast": 2, "beta_slow": 0.25, "mscale": 1.0, "mscale_all_dim": 0.5}
    before = getattr(configuration(model_type, more), "rope_parameters", None) or {}
    if "partial_rotary_factor" in before:
        yarn["partial_rotary_factor"] = before["partial_rotary_factor"]
    rope = dict.fromkeys(("full_attention", "sliding_attention"), yarn) if "full_attention" in before else yarn
    try:
        config = configuration(model_type, {**more, "rope_parameters": rope})
    except Exception:
        assert model_type == "phi3"
        return
    spec = from_hf(config)
    module = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    classes = [c for n, c in vars(module).items() if n.endswith("RotaryEmbedding") and "Vision" not in n]
    if not classes or getattr(config, "position_embedding_type", "rope") != "rope":
        assert spec.rope == NO_ROPE
        return
    table = classes[0](config)
    theirs = next(b for n, b in table.named_buffers() if "original" not in n)
    assert torch.allclose(spec.rope.inv_freq(spec.head_dim)[: len(theirs)], theirs, rtol=1e-6)
    scales = [v for n, v in vars(table).items() if n.endswith("attention_scaling")]
    assert scales and set(scales) == {spec.rope.attention_factor}
    assert spec.max_position_embeddings == 512


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize(
    ("named", "rope", "longest"),
    [
        (40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (131072, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (262144, {"type": "yarn", "factor": 2.5, "original_max_position_embeddings": 32768}, 81920),
        (32768, {"type": "yarn", "factor": 4.0}, 131072),
        (40960, {"type": "yarn", "factor": 4.0, "top": 16384}, 65536),
        (40960, {"type": "linear", "factor": 4.0}, 40960),
    ],
)
def test_yarn_decides_the_longest_context(
    named: int,
    rope: dict[str, Any],
    longest: int,
    implementation: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in vLLM; transformers has no limit. A warning says so where config.json names another one."""
    raw = configuration("qwen3", {"max_position_embeddings": named}).to_dict()
    rope = {**rope}
    top = {"original_max_position_embeddings": original} if (original := rope.pop("top", None)) else {}
    raw |= {"rope_parameters": None, "rope_scaling": rope, "rope_theta": 1e6, **top}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with caplog.at_level(logging.WARNING, "evalengine"):
        spec = folder_spec(tmp_path, "here", with_weights=False, implementation=implementation)
    assert spec.max_position_embeddings == longest
    said = f"longest context is {longest} tokens", f"max_position_embeddings={named}"
    assert sum(all(part in message for part in said) for message in caplog.messages) == (named != longest)
