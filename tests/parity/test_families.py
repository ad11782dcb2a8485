"""Every family's logits are as near to float64 as transformers' own, and its greedy generations are transformers'.

Prompts are longer than the windows, and the pool of keys and values starts as NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from evalengine import LLM, SamplingParams
from evalengine.engine.load.loader import load_model
from evalengine.engine.request import GenerateRequest
from evalengine.layers import create_ops
from evalengine.models.registry import MODEL_REGISTRY
from tests.parity.families import CASES, VOCAB, WINDOW, make, random_model
from tests.parity.modules import CASES as MODULES
from tests.parity.paged import PagedRunner
from tests.parity.random_models import ModelFolders, without_tokenizer

ON_CUDA = [pytest.mark.gpu]
# level, device, and how many times transformers' error ours may be: both are sums of many roundings, `exact` of fewer.
LEVELS = [
    ("fast", "cpu", 1.5),
    ("exact", "cpu", 1.0),
    *(pytest.param(level, "cuda", most, marks=ON_CUDA) for level, most in (("fast", 3), ("exact", 1), ("native", 3))),
]


def models_of(make: Callable[[str, Path], PreTrainedModel], cases: Iterable[str]) -> Any:
    """A fixture that makes each case's model: transformers' and its folder."""

    @pytest.fixture(scope="module", params=cases)
    def reference(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> tuple[PreTrainedModel, Path]:
        folder = tmp_path_factory.mktemp("model")
        return make(request.param, folder), folder

    return reference


reference = models_of(make, CASES)


def tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logprobs(model: PreTrainedModel, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)


@contextmanager
def without_float32() -> Iterator[None]:
    """transformers' recurrences and their norms go on in float32 whatever the model's dtype: here in float64."""
    real = Tensor.to

    def to(x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        wide = [torch.float64 if argument is torch.float32 else argument for argument in arguments]
        return real(x, *wide, **{n: torch.float64 if v is torch.float32 else v for n, v in named.items()})

    with patch.object(Tensor, "float", Tensor.double), patch.object(Tensor, "to", to):
        yield


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def check_as_near(hf: PreTrainedModel, model: Any, ids: list[int], most: float) -> None:
    """Ours, of a whole prompt and of one in chunks, is at most `most` times as far from float64 as transformers'."""
    theirs = logprobs(hf, ids)
    exact = logprobs(hf.double(), ids)
    hf.float()
    allowed = most * rms(theirs - exact)
    whole = PagedRunner(model, block_size=7).step({"s": ids})["s"]
    chunked = PagedRunner(model, block_size=7)
    parts = torch.cat([chunked.step({"s": ids[i : i + 19]})["s"] for i in range(0, len(ids), 19)])
    for ours in (whole, parts):
        error = rms(torch.log_softmax(ours.double().cpu(), -1) - exact)
        assert error <= allowed, f"RMS error {error:.2e}, transformers' {allowed / most:.2e}"


@pytest.mark.parametrize(("level", "device", "most"), LEVELS)
def test_logits_are_as_near_to_float64_as_transformers_are(
    reference: tuple[PreTrainedModel, Path], level: str, device: str, most: float
) -> None:
    """Of whole prompts, and of prompts in chunks whose borders lie within windows and pages. Of several, where a
    recurrence (its state is a product of many factors) makes a float32 run's error differ from one to another."""
    hf, folder = reference
    model = load_model(without_tokenizer(folder), create_ops(level, torch.float32, torch.device(device)), 128)
    errors: dict[str, list[Tensor]] = {"theirs": [], "whole": [], "chunks": []}
    for seed in range(1, 5 if model.spec.recurrences else 2):
        ids = tokens(5 * WINDOW - 4, seed)
        theirs = logprobs(hf.float(), ids)
        with without_float32() if model.spec.recurrences else nullcontext():
            exact = logprobs(hf.double(), ids)
        hf.float()
        whole = PagedRunner(model, block_size=7).step({"s": ids})["s"]
        chunked = PagedRunner(model, block_size=7)
        parts = torch.cat([chunked.step({"s": ids[i : i + 19]})["s"] for i in range(0, len(ids), 19)])
        errors["theirs"].append(theirs - exact)
        for name, ours in (("whole", whole), ("chunks", parts)):
            errors[name].append(torch.log_softmax(ours.double().cpu(), -1) - exact)
    allowed = most * rms(torch.cat(errors["theirs"]))
    for name in ("whole", "chunks"):
        error = rms(torch.cat(errors[name]))
        assert error <= allowed, f"{name}: RMS error {error:.2e}, transformers' {allowed / most:.2e}"


def test_greedy_generation_equals_generate(reference: tuple[PreTrainedModel, Path]) -> None:
    hf, folder = reference
    prompts = [tokens(count, count) for count in (1, WINDOW, 2 * WINDOW + 1)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(without_tokenizer(folder), numerics="exact", max_model_len=64, dtype="float32") as llm:
        outputs = {o.request_id: o for o in llm.run([GenerateRequest(i, p, params) for i, p in enumerate(prompts)])}
    hf.generation_config.eos_token_id = None
    for number, prompt in enumerate(prompts):
        with torch.inference_mode():
            whole = hf.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)
        assert list(outputs[number].token_ids) == whole[0, len(prompt) :].tolist()


def test_the_time_step_has_one_rule(tmp_path: Path) -> None:
    """transformers clamps Mamba-2's time step in a forward pass of several tokens, and not in its decode steps; here
    both are clamped, so that a token's logprobs do not depend on how it was computed."""
    model_type, more = CASES["nemotron-h"]
    hf = random_model(model_type, {**more, "time_step_min": 0.9}, tmp_path)
    hf.generation_config.eos_token_id = None
    prompt, params = tokens(17), SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(without_tokenizer(tmp_path), numerics="exact", max_model_len=64, dtype="float32") as llm:
        (output,) = llm.run([GenerateRequest(0, prompt, params)])
    whole, cached = (
        hf.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, use_cache=cache)[0, 17:].tolist()
        for cache in (False, True)
    )
    assert list(output.token_ids) == whole != cached


def test_every_family_has_a_case() -> None:
    """A wrapper's text part is that of another family, whose case it is."""
    named = {family.model_type for family in MODEL_REGISTRY.values() if family.wraps is None}
    assert named == {model_type for model_type, _ in CASES.values()}


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="needs transformers 5.24, which has every case"
)
def test_transformers_has_every_case() -> None:
    """A misspelled or removed model type fails here; everywhere else its tests are skipped."""
    named = {model_type for model_type, _ in (*CASES.values(), *MODULES.values())}
    assert named <= set(CONFIG_MAPPING)


def test_a_model_type_that_transformers_lacks_is_skipped_each_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = ModelFolders(lambda name, folder: random_model(name, {}, folder), tmp_path_factory)
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception, match=r"transformers [\d.]+.* has no model type surely_not"):
            folders("surely_not")
    with pytest.raises(KeyError):  # a mistake within a case is no reason to skip
        random_model("mistral", {"rope_parameters": {"rope_type": "yarn"}}, tmp_path_factory.mktemp("mistral"))


@pytest.mark.parametrize(
    ("name", "family"), [("gemma3", "Gemma3ForConditionalGeneration"), ("mistral", "Mistral3ForConditionalGeneration")]
)
def test_a_wrapper_of_texts_and_images_loads_its_text_part(name: str, family: str, tmp_path: Path) -> None:
    """Its text part lies below other names, beside the tensors of the part for images, which are left out."""
    import json

    from safetensors.torch import load_file, save_file

    plain, wrapped = tmp_path / "plain", tmp_path / "wrapped"
    make(name, plain)
    wrapped.mkdir()
    tensors = load_file(plain / "model.safetensors")
    renamed = {f"language_model.{key}": tensor for key, tensor in tensors.items()}
    save_file(
        {**renamed, "vision_tower.patch.weight": torch.ones(2), "multi_modal_projector.w": torch.ones(2)},
        wrapped / "model.safetensors",
    )
    text = json.loads((plain / "config.json").read_text())
    outer = {
        "architectures": [family],
        "model_type": next(f.model_type for f in MODEL_REGISTRY.values() if f.architecture == family),
    }
    (wrapped / "config.json").write_text(
        json.dumps({**outer, "text_config": text, "vision_config": {"hidden_size": 8}})
    )
    specs = [without_tokenizer(folder).spec for folder in (plain, wrapped)]
    assert specs[1] == dataclasses.replace(specs[0], architecture=family)
    ids = tokens(23)
    results = []
    for folder in (plain, wrapped):
        model = load_model(without_tokenizer(folder), create_ops("exact", torch.float32, torch.device("cpu")), 64)
        results.append(PagedRunner(model).step({"s": ids})["s"])
    assert torch.equal(*results)
