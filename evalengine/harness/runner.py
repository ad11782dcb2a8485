"""One run, from its configuration to its folder: prepare, plan, execute, write.

Nothing is written before every setting, row and prompt has been checked; the digest is written last.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import evalengine
from evalengine.config import Config, to_yaml, validate
from evalengine.engine.llm import LLM
from evalengine.engine.loader import weights_fingerprint
from evalengine.harness.execute import execute
from evalengine.harness.outcome import records, task_results
from evalengine.harness.pieces import token_bytes
from evalengine.harness.plan import Plan, build_plan, prepare
from evalengine.records.digest import run_digest, task_digests
from evalengine.records.folder import RECORDS, RunFolder
from evalengine.records.lm_eval import Invocation, ModelInfo, TaskResult, write_lm_eval
from evalengine.records.manifest import (
    MANIFEST,
    RunCounts,
    RunTimings,
    build_manifest,
    code_version,
    run_id,
    run_identity,
)
from evalengine.records.schema import RecordKey, RequestRecord, write_records
from evalengine.records.tokens import TOKENS, tokens_json, used_ids


@dataclass(frozen=True)
class RunResult:
    """Where a finished run lies, and what came out."""

    folder: Path
    digest: str
    results: dict[str, Mapping[str, float | int | str]]  # task -> "metric,filter" -> value


@dataclass(frozen=True)
class _Facts:
    """What the run is, by content: everything that can change a result, and where its rows came from."""

    run_id: str
    identity: dict[str, Any]
    datasets: dict[str, dict[str, Any]]  # task -> Task.fingerprint


@dataclass(frozen=True)
class _Clock:
    started: float  # UNIX seconds
    begin: float  # of the monotonic clock, as the others
    loaded: float
    executed: float

    def timings(self) -> RunTimings:
        now = time.perf_counter()
        return RunTimings(self.loaded - self.begin, self.executed - self.loaded, now - self.begin)


def run(config: Config) -> RunResult:
    """Runs the configured tasks on the configured model.

    Raises:
        ConfigError: settings, rows or prompts that cannot be honoured; nothing has been written then.
        EvalEngineError: a damaged file, a failed request, a disk that refuses; the same command resumes.
        KeyboardInterrupt: with the run's folder as its argument, once there is one.
    """
    started, begin = time.time(), time.perf_counter()
    validate(config)
    checkpoint, tasks = prepare(config)
    with LLM(checkpoint, batch_invariant=config.batch_invariant, numerics=config.numerics, engine=config.engine) as llm:
        plan = build_plan(config, tasks, llm)
        facts = _facts(config, plan, llm)
        loaded = time.perf_counter()
        name = f"{'+'.join(config.tasks)}-{config.model.name}"
        with RunFolder.open(config.output_dir, name, facts.run_id, config.resume, facts.identity) as folder:
            folder.write_text("config.yaml", to_yaml(config))
            answers, ran = execute(plan, llm, folder, "+".join(config.tasks), config.progress)
            clock = _Clock(started, begin, loaded, time.perf_counter())
            rows = records(plan, answers)
            results = task_results(plan, answers)
            digest = _write(config, plan, llm, folder, facts, rows, results, ran, clock)
            return RunResult(folder.path, digest, {result.name: result.metrics for result in results})


def _facts(config: Config, plan: Plan, llm: LLM) -> _Facts:
    """Hashes files and rows, so it is called once."""
    datasets = {p.task.name: p.task.fingerprint(config.limit) for p in plan.tasks}
    extra = {
        "weights": weights_fingerprint(llm.checkpoint),
        "tokenizer": _tokenizer_sha256(llm.tokenizer),
        "datasets": {name: _rows_sha256(fingerprint) for name, fingerprint in datasets.items()},
        "prompts": plan.prompts_sha256(),
        "numerics": llm.settings.numerics,
        "dtype": str(llm.settings.dtype).removeprefix("torch."),
    }
    if llm.settings.numerics == "fast":
        extra["attention_backend"] = llm.settings.attention_backend
    if llm.settings.numerics == "native":  # its promise: one GPU architecture
        extra["gpu_architecture"] = "sm_{}{}".format(*torch.cuda.get_device_capability(llm.settings.device))
    return _Facts(run_id(config, extra), run_identity(config, extra), datasets)


def _rows_sha256(fingerprint: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: fingerprint[name] for name in ("sha256", "fewshot_sha256")}


def _tokenizer_sha256(tokenizer: Any) -> str:
    text = tokenizer.backend_tokenizer.to_str() + repr(sorted(tokenizer.special_tokens_map.items()))
    return hashlib.sha256((text + (tokenizer.chat_template or "")).encode()).hexdigest()


def _write(
    config: Config,
    plan: Plan,
    llm: LLM,
    folder: RunFolder,
    facts: _Facts,
    rows: Sequence[RequestRecord],
    results: Sequence[TaskResult],
    ran: set[RecordKey],
    clock: _Clock,
) -> str:
    """All files of a finished run, the digest last; returns it."""
    digest = run_digest(rows)
    folder.write_with(RECORDS, lambda path: write_records(path, rows))
    used = used_ids(row.output_ids for row in rows)
    folder.write_json(TOKENS, tokens_json(token_bytes(llm.tokenizer, used)))
    timings = clock.timings()
    manifest = build_manifest(
        run_id=facts.run_id,
        identity=facts.identity,
        model=_model_facts(config, llm, facts.identity),
        tokenizer={"sha256": facts.identity["tokenizer"], "vocab_size": llm.spec.vocab_size},
        datasets=facts.datasets,
        engine={**engine_settings(llm), "kernels": llm.kernels_verdict, "stats": asdict(llm.stats)},
        device=str(llm.settings.device),
        counts=_counts(plan, rows, ran),
        timings=timings,
        digest=digest,
        task_digests=task_digests(rows),
    )
    folder.write_json(MANIFEST, manifest)
    write_lm_eval(
        folder, results, _model_info(config, llm, facts.identity), _invocation(config, clock, timings), datetime.now()
    )
    folder.finish(digest)
    return digest


def _model_facts(config: Config, llm: LLM, identity: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": config.model.name,
        "source": llm.checkpoint.source,
        "revision": llm.checkpoint.revision,
        "format": llm.checkpoint.format,
        "architecture": llm.spec.architecture,
        "num_parameters": llm.spec.num_parameters,
        "weights_sha256": identity["weights"],
        "eos_token_ids": list(llm.spec.eos_token_ids),
    }


def engine_settings(llm: LLM) -> dict[str, Any]:
    """The engine's settings as they were resolved, as plain JSON values."""
    resolved = {
        "numerics": llm.settings.numerics,
        "dtype": str(llm.settings.dtype).removeprefix("torch."),
        "device": str(llm.settings.device),
        "attention_backend": llm.settings.attention_backend,
        "max_model_len": llm.settings.max_model_len,
        "block_size": llm.settings.block_size,
        "num_kv_blocks": llm.num_kv_blocks,
        "num_threads": llm.settings.num_threads,
    }
    return {**asdict(llm.config), **resolved}


def _counts(plan: Plan, rows: Sequence[RequestRecord], ran: set[RecordKey]) -> RunCounts:
    done_now = [row for row in rows if row.key in ran]
    return RunCounts(
        documents=sum(len(p.instances) for p in plan.tasks),
        requests=len(rows),
        resumed_requests=len(rows) - len(done_now),
        truncated_prompts=sum(row.truncated > 0 for row in rows),
        prompt_tokens=sum(len(row.prompt_ids) for row in done_now),
        output_tokens=sum(len(row.output_ids) for row in done_now),
    )


def _model_info(config: Config, llm: LLM, identity: Mapping[str, Any]) -> ModelInfo:
    tokenizer = llm.tokenizer
    assert tokenizer is not None, "prepare() refuses a model without one"
    return ModelInfo(
        name=config.model.name,
        path=llm.checkpoint.source,
        dtype=str(llm.settings.dtype),
        revision=llm.checkpoint.revision,
        sha=identity["weights"],
        num_parameters=llm.spec.num_parameters,
        max_length=llm.settings.max_model_len,
        device=str(llm.settings.device),
        eot_token_id=tokenizer.eos_token_id,
        pad_token=(tokenizer.pad_token, tokenizer.pad_token_id),
        eos_token=(tokenizer.eos_token, tokenizer.eos_token_id),
        bos_token=(tokenizer.bos_token, tokenizer.bos_token_id),
        chat_template=tokenizer.chat_template if config.apply_chat_template else None,
    )


def _invocation(config: Config, clock: _Clock, timings: RunTimings) -> Invocation:
    return Invocation(
        limit=config.limit,
        seed=config.seed,
        fewshot_seed=config.fewshot_seed,
        started=clock.started,
        total_seconds=timings.total_seconds,
        evalengine_version=evalengine.__version__,
        transformers_version=transformers.__version__,
        git_hash=code_version()["commit"],
        system_instruction=config.system_instruction,
        fewshot_as_multiturn=config.fewshot_as_multiturn if config.apply_chat_template else None,
        model_args={"numerics": config.numerics, "batch_invariant": config.batch_invariant},
    )
