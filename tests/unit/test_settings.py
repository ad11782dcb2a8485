"""What a numerics level and an attention backend ask of the machine and the model: all of it found at start, at once.

CUDA devices here are only said to exist: nothing runs on them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import EngineConfig
from evalengine.engine import llm, loaded_model
from evalengine.engine.execute import memory
from evalengine.engine.settings import Settings, resolve_settings, settings_problems
from evalengine.errors import ConfigError
from evalengine.layers import flash_attention, kernel_support
from evalengine.models.hf_config import from_hf
from evalengine.models.spec import ModelSpec
from evalengine.records.manifest import IDENTITY_KEYS, run_identity
from tests.unit.flash_attn_double import FlashAttnDouble

SPEC = replace(from_hf(LlamaConfig(hidden_size=256, num_attention_heads=4)), dtype=torch.bfloat16)
assert SPEC.head_dim == 64


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says which device, and which packages, this machine has."""

    def say(capability: tuple[int, int] | None = (9, 0), flash: bool = True, triton: bool = True) -> None:
        def package() -> FlashAttnDouble:
            if not flash:
                raise ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn")
            return FlashAttnDouble()

        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: int(capability is not None))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(flash_attention, "package", package)
        monkeypatch.setattr(kernel_support, "find_spec", lambda name: object() if triton else None)

    return say


def fast(spec: ModelSpec = SPEC, **engine: Any) -> Settings:
    return resolve_settings(EngineConfig(**engine), False, "auto", spec)


def problems(batch_invariant: bool, spec: ModelSpec | None = SPEC, numerics: str = "auto", **engine: Any) -> list[str]:
    return list(settings_problems(EngineConfig(**engine), batch_invariant, numerics, spec))


# -- fast ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has", "engine", "spec", "backend", "block_size"),
    [
        ({"capability": (8, 0)}, {}, {}, "flash_attn", 256),
        ({"capability": (8, 9)}, {"block_size": 512}, {}, "flash_attn", 512),
        ({"capability": (8, 0)}, {"block_size": 64}, {}, "triton", 64),
        ({"capability": (8, 0)}, {"block_size": 384}, {}, "triton", 384),
        ({"capability": (8, 0)}, {}, {"dtype": torch.float16}, "flash_attn", 256),
        ({}, {}, {}, "triton", 64),
        ({}, {"block_size": 512}, {}, "triton", 512),
        ({}, {}, {"dtype": torch.float32}, "triton", 64),
        ({}, {"dtype": "float32"}, {}, "triton", 64),
        ({}, {}, {"head_dim": 52}, "triton", 64),
        ({}, {}, {"head_dim": 264}, "sdpa", 64),
        ({}, {}, {"head_dim": 8}, "flash_attn", 256),
        ({"flash": False}, {}, {}, "triton", 64),
        ({"flash": False}, {}, {"head_dim": 8}, "sdpa", 64),
        ({"flash": False, "triton": False}, {}, {}, "sdpa", 64),
        ({"triton": False}, {}, {}, "flash_attn", 256),
        ({"capability": (7, 5)}, {}, {}, "sdpa", 64),
        ({}, {"device": "cpu"}, {}, "sdpa", 64),
        ({"capability": None}, {}, {}, "sdpa", 64),
        ({}, {"attention_backend": "flash_attn"}, {}, "flash_attn", 256),
        ({}, {"attention_backend": "triton"}, {}, "triton", 64),
        ({}, {"attention_backend": "sdpa"}, {}, "sdpa", 64),
    ],
)
def test_the_fastest_backend_that_serves_is_taken(
    has: dict, engine: dict, spec: dict, backend: str, block_size: int, machine: Any
) -> None:
    machine(**has)
    settings = fast(replace(SPEC, **spec), **engine)
    assert (settings.attention_backend, settings.block_size) == (backend, block_size)


@pytest.mark.parametrize(
    ("has", "engine", "spec", "words"),
    [
        ({"flash": False}, {"attention_backend": "flash_attn"}, {}, "pip install 'evalengine[flash]'"),
        (
            {},
            {"attention_backend": "flash_attn", "block_size": 64},
            {},
            "engine.block_size=64; set engine.block_size=auto",
        ),
        ({}, {"attention_backend": "flash_attn", "dtype": "float32"}, {}, "this run's dtype is float32; take triton"),
        ({}, {"attention_backend": "flash_attn"}, {"head_dim": 52}, "this model's is 52; take triton"),
        ({}, {"attention_backend": "flash_attn"}, {"head_dim": 264}, "this model's is 264; take triton, or auto"),
        ({"capability": (7, 5)}, {"attention_backend": "flash_attn"}, {}, "this device's is 7.5"),
        ({}, {"attention_backend": "flash_attn", "device": "cpu"}, {}, "this run's device is cpu; take sdpa, or auto"),
        ({}, {"attention_backend": "triton", "device": "cpu"}, {}, "this run's device is cpu; take sdpa, or auto"),
        ({"triton": False}, {"attention_backend": "triton"}, {}, "pip install triton"),
        ({}, {"attention_backend": "triton"}, {"head_dim": 8}, "even head_dim from 16 to 256, and this model's is 8"),
    ],
)
def test_a_backend_that_cannot_serve_names_the_cure(
    has: dict, engine: dict, spec: dict, words: str, machine: Any
) -> None:
    machine(**has)
    (problem,) = problems(False, replace(SPEC, **spec), **engine)
    assert problem.startswith(f"engine.attention_backend={engine['attention_backend']}: ") and words in problem


def test_several_problems_are_listed_at_once(machine: Any) -> None:
    machine(flash=False)
    wrong = {"attention_backend": "flash_attn", "block_size": 100, "dtype": "float32", "max_model_len": 1 << 30}
    with pytest.raises(ConfigError) as caught:
        fast(replace(SPEC, head_dim=52), **wrong)
    assert len(caught.value.problems) == 5
    # Without a model, only the problems that do not depend on one are listed.
    assert len(problems(False, None, attention_backend="flash_attn", block_size=100)) == 2


def test_an_absent_device_is_named_once(machine: Any) -> None:
    machine(capability=None)
    (problem,) = problems(False, device="cuda", attention_backend="flash_attn")
    assert "no usable CUDA device" in problem


# -- native and exact ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_native_runs_on_cuda(backend: str, dtype: str, machine: Any) -> None:
    machine(flash=False)
    settings = resolve_settings(EngineConfig(attention_backend=backend, dtype=dtype), True, "auto", SPEC)
    assert (settings.numerics, settings.attention_backend, settings.block_size) == ("native", "triton", 64)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_exact_has_its_own_attention(device: str, machine: Any) -> None:
    machine()
    settings = resolve_settings(EngineConfig(device=device), True, "exact", SPEC)
    assert (settings.attention_backend, settings.block_size) == ("exact", 64)


@pytest.mark.parametrize(
    ("numerics", "device", "backend"),
    [
        ("auto", "cuda", "flash_attn"),
        ("auto", "cuda", "sdpa"),
        ("native", "cuda", "flash_attn"),
        ("auto", "cpu", "flash_attn"),
        ("exact", "cuda", "triton"),
        ("exact", "cpu", "sdpa"),
    ],
)
def test_an_invariant_run_has_no_choice_of_attention(numerics: str, device: str, backend: str, machine: Any) -> None:
    machine()
    (problem,) = problems(True, numerics=numerics, device=device, attention_backend=backend)
    assert problem.startswith(f"engine.attention_backend={backend}: batch_invariant=true")
    assert "leave engine.attention_backend at auto, or set batch_invariant=false" in problem


@pytest.mark.parametrize(
    ("has", "spec", "words"),
    [
        ({"capability": (7, 5)}, {}, "compute capability 8.0, Ampere, or later), and this device's is 7.5"),
        ({"triton": False}, {}, "pip install triton"),
        ({}, {"head_dim": 8}, "even head_dim from 16 to 256, and this model's is 8"),
        ({}, {"head_dim": 288}, "this model's is 288"),
        ({}, {"head_dim": 65}, "this model's is 65"),
        ({}, {"hidden_size": 16385}, "a hidden_size up to 16384, and this model's is 16385"),
        ({}, {"dtype": torch.float64}, "this run's dtype is float64; set engine.dtype"),
    ],
)
def test_native_refuses_what_it_does_not_cover(has: dict, spec: dict, words: str, machine: Any) -> None:
    machine(**has)
    (problem,) = problems(True, replace(SPEC, **spec))
    assert problem.startswith("numerics=native: ") and words in problem


def test_fast_with_our_kernels_has_their_limit_of_hidden_size(machine: Any) -> None:
    machine()
    (problem,) = problems(False, replace(SPEC, hidden_size=16385))
    assert problem.startswith("numerics=fast: the RMSNorm kernel takes a hidden_size up to 16384")
    assert not problems(False, replace(SPEC, hidden_size=16384)) and not problems(
        True, replace(SPEC, hidden_size=16384)
    )
    assert not problems(False, replace(SPEC, hidden_size=16385), device="cpu")
    machine(triton=False)
    assert not problems(False, replace(SPEC, hidden_size=16385)), "torch's own ops run"


def test_native_lists_everything_at_once(machine: Any) -> None:
    machine(capability=(7, 0), triton=False)
    listed = problems(
        True, replace(SPEC, head_dim=8, dtype=torch.float64), attention_backend="flash_attn", max_model_len=1 << 30
    )
    assert len(listed) == 6
    assert sum("batch_invariant=false" in problem for problem in listed) == 4
    with pytest.raises(ConfigError):
        resolve_settings(EngineConfig(), True, "auto", SPEC)


# -- the run's identity ----------------------------------------------------------------------------------------------


def test_the_backend_is_part_of_a_fast_runs_identity_only() -> None:
    (job,) = compose_jobs(["batch_invariant=false"])
    (other,) = compose_jobs(["batch_invariant=false", "engine.attention_backend=sdpa"])
    extra = dict.fromkeys(IDENTITY_KEYS, "x")
    flash, triton = ({**extra, "numerics": "fast", "attention_backend": name} for name in ("flash_attn", "triton"))
    assert run_identity(job.config, flash) != run_identity(job.config, triton)
    # The backend in force counts, not the setting.
    assert run_identity(job.config, flash) == run_identity(other.config, flash)
    with pytest.raises(AssertionError, match="attention_backend"):
        run_identity(job.config, {**extra, "numerics": "fast"})
    invariant = run_identity(other.config, {**extra, "numerics": "exact"})
    assert "attention_backend" not in str(invariant)


# -- what no machine has -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"num_threads": 100_000}, "engine.num_threads=100000: must be less than or equal to"),
        ({"num_threads": 1.5}, "engine.num_threads=1.5: must be a valid integer"),
        ({"num_threads": True}, "engine.num_threads=True: must be a valid integer"),
        (
            {"max_num_batched_tokens": 10**18},
            "engine.max_num_batched_tokens=1000000000000000000: must be less than or equal to",
        ),
        ({"max_num_batched_tokens": None}, "engine.max_num_batched_tokens=None: must be a valid integer"),
        ({"num_kv_blocks": 10**15}, "engine.num_kv_blocks=1000000000000000: must be less than or equal to"),
        ({"max_model_len": 10**15}, "engine.max_model_len=1000000000000000: must be less than or equal to"),
        ({"max_model_len": 1e3}, "engine.max_model_len=1000.0: must be a valid integer"),
        ({"block_size": 10**12}, "engine.block_size=1000000000000: must be auto or a number of tokens from 1 to"),
        ({"block_size": None}, "engine.block_size=None: must be auto or a number of tokens from 1"),
        ({"max_num_seqs": "8"}, "engine.max_num_seqs='8': must be a valid integer"),
        ({"max_num_seqs": 10**5000}, "engine.max_num_seqs=(int): must be less than or equal to"),
        ({"kv_cache_memory_fraction": "x"}, "engine.kv_cache_memory_fraction=x: must be in (0, 1]"),
        ({"kv_cache_memory_fraction": float("nan")}, "engine.kv_cache_memory_fraction=nan: must be in (0, 1]"),
        ({"device": None}, "engine.device=None"),
        ({"device": "cuda:99999999999999999999"}, "engine.device=cuda:9999"),
        ({"dtype": 5}, "engine.dtype=5"),
        ({"attention_backend": ["sdpa"]}, "engine.attention_backend=['sdpa']"),
        ({"enable_prefix_caching": "no"}, "engine.enable_prefix_caching=no: must be true or false"),
        ({"enforce_eager": 0}, "engine.enforce_eager=0: must be true or false"),
    ],
)
def test_settings_of_another_type_or_beyond_any_machine_are_a_sentence(engine: dict[str, Any], words: str) -> None:
    (problem,) = problems(False, **engine)
    assert problem.startswith(words) and len(problem) < 250


def test_a_word_is_no_flag() -> None:
    (problem,) = problems("false")  # type: ignore[arg-type]
    assert problem == "batch_invariant='false': must be true or false"


@pytest.mark.parametrize("level", ["fast", "exact"])
def test_what_cannot_fit_is_refused_before_a_weight_is_read(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free_bytes", lambda device: 1 << 30)
    spec = replace(SPEC, max_position_embeddings=1 << 23, intermediate_size=1 << 20)

    def problems_of(**engine: Any) -> list[str]:
        config = EngineConfig(device="cpu", dtype="float32", **engine)
        settings = resolve_settings(config, level != "fast", "auto", spec)
        return list(memory.memory_problems(config, spec, settings))

    small = {"max_model_len": 64, "max_num_batched_tokens": 64}
    assert not problems_of(**small)
    for engine, words in (
        ({"max_model_len": 1 << 23, "max_num_batched_tokens": 64}, "engine.max_model_len=8388608: one sequence needs"),
        ({"max_model_len": 1 << 23, "num_kv_blocks": 2, "max_num_batched_tokens": 64}, "RoPE's tables take 2.0 GiB"),
        ({**small, "max_num_batched_tokens": 1 << 30}, "engine.max_num_batched_tokens=1073741824: a step of 16384 tok"),
        ({**small, "num_kv_blocks": 1 << 30}, "engine.num_kv_blocks=1073741824: that pool takes"),
    ):
        assert any(words in problem for problem in problems_of(**engine)), problems_of(**engine)
    tiny = replace(SPEC, num_layers=1, num_kv_heads=1, head_dim=2)
    config = EngineConfig(device="cpu", num_kv_blocks=1 << 23, block_size=1)
    settings = resolve_settings(config, True, "auto", tiny)
    (problem,) = memory.memory_problems(config, tiny, settings)
    assert "keeping books of so many pages takes 3.1 GiB of the host's memory" in problem


def test_no_weight_is_read_for_a_pool_that_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_model, "load_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="that pool takes"):
        llm.LLM("asset:tinymath", device="cpu", num_kv_blocks=10**9)
