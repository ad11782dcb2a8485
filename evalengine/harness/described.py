"""What a run's files say of the run besides what it came to: its model, its engine, how it was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

from evalengine.config.schema import Config
from evalengine.engine.answering import Answering
from evalengine.engine.stats import EngineStats
from evalengine.engine.text.encode import find_prefix_token_id
from evalengine.models.decoder import num_parameters
from evalengine.models.spec import dtype_name
from evalengine.records.lm_eval import Invocation, ModelInfo
from evalengine.records.manifest import RunContext, code_version
from evalengine.records.manifest_parts import Model, RunTimings
from evalengine.records.sealed import content_sha256
from evalengine.version import __version__


def run_context(
    config: Config,
    llm: Answering,
    identity: Mapping[str, Any],
    datasets: Mapping[str, Any],
    started: float,
    command: Sequence[str] | None = None,
) -> RunContext:
    """What the manifest says of a run besides what it came to."""
    merged: dict[str, Any] = {}
    if (adapter := llm.checkpoint.adapter) is not None:
        sha256 = llm.checkpoint.hashes.get("adapter")  # known, since the identity holds the hash of the weights
        merged = {"source": adapter.source, "revision": adapter.revision, "sha256": sha256}
    model = Model(
        name=config.model.name,
        source=llm.checkpoint.source,
        revision=llm.checkpoint.revision,
        format=llm.checkpoint.format,
        architecture=llm.spec.described,
        num_parameters=num_parameters(llm.spec),
        weights_sha256=identity["weights"],
        eos_token_ids=list(llm.spec.eos_token_ids),
        prefix_token_id=find_prefix_token_id(llm.tokenizer),  # it precedes texts scored without context
        processors=llm.spec.processors.in_force(),
        adapter=merged,
    )
    tokenizer = {**identity["tokenizer"], "vocab_size": llm.spec.vocab_size}
    run_id, device = content_sha256(identity)[:8], str(llm.settings.device)
    return RunContext(run_id, identity, model, tokenizer, datasets, device, started, command)


def engine_facts(llm: Answering, stats: EngineStats) -> dict[str, Any]:
    """The manifest's `engine`: its settings, its verdicts on kernels and on itself, and what it counted for the run."""
    verdicts = {"kernels": llm.kernels_verdict, "self_test_verdict": llm.self_test_verdict}
    return {**engine_settings(llm), **verdicts, "stats": asdict(stats)}


def engine_settings(llm: Answering) -> dict[str, Any]:
    """The engine's settings as they were resolved, as plain JSON values."""
    resolved = {
        "numerics": llm.settings.numerics,
        "dtype": dtype_name(llm.settings.dtype),
        "device": str(llm.settings.device),
        "attention_backend": llm.settings.attention_backend,
        "max_model_len": llm.settings.max_model_len,
        "block_size": llm.settings.block_size,
        "num_kv_blocks": llm.num_kv_blocks,
        "num_threads": llm.settings.num_threads,
        "speculation": llm.settings.speculation,
    }
    return {**asdict(llm.config), **resolved}


def model_info(config: Config, llm: Answering, identity: Mapping[str, Any]) -> ModelInfo:
    """The model as lm-eval's results describe it."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None, "prepare() refuses a model without one"
    return ModelInfo(
        name=config.model.name,
        path=llm.checkpoint.source,
        dtype=str(llm.settings.dtype),
        revision=llm.checkpoint.revision,
        sha=identity["weights"],
        num_parameters=num_parameters(llm.spec),
        max_length=llm.settings.max_model_len,
        device=str(llm.settings.device),
        eot_token_id=tokenizer.eos_token_id,
        pad_token=(tokenizer.pad_token, tokenizer.pad_token_id),
        eos_token=(tokenizer.eos_token, tokenizer.eos_token_id),
        bos_token=(tokenizer.bos_token, tokenizer.bos_token_id),
        chat_template=tokenizer.chat_template if config.apply_chat_template else None,
    )


def invocation(config: Config, started: float, timings: RunTimings) -> Invocation:
    """How the run was asked for, as lm-eval's results say it."""
    peft = {} if config.model.adapter is None else {"peft": config.model.adapter}
    return Invocation(
        limit=config.limit,
        seed=config.seed,
        fewshot_seed=config.fewshot_seed,
        started=started,
        total_seconds=timings.total_seconds,
        evalengine_version=__version__,
        transformers_version=metadata.version("transformers"),
        git_hash=code_version().commit,
        system_instruction=config.system_instruction,
        fewshot_as_multiturn=config.fewshot_as_multiturn if config.apply_chat_template else None,
        model_args={"numerics": config.numerics, "batch_invariant": config.batch_invariant, **peft},
    )
