"""Write the files of a run whose answers are complete, and describe the run in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from evalengine.config.schema import Config
from evalengine.engine.protocol import EngineProtocol
from evalengine.engine.stats import EngineStats
from evalengine.engine.text.encode import find_prefix_token_id
from evalengine.engine.text.token_bytes import token_bytes
from evalengine.harness.outcome import Findings, program_facts, records
from evalengine.harness.requests import Plan
from evalengine.models.decoder import num_parameters
from evalengine.models.spec import dtype_name
from evalengine.records.digest import digests
from evalengine.records.evidence import TOKENS, bind
from evalengine.records.folder import RECORDS, RunFolder
from evalengine.records.lm_eval import ModelInfo, TaskResult, remove_results, results_dict, write_results
from evalengine.records.manifest import build_manifest
from evalengine.records.manifest_data import MANIFEST, Model, RunCounts, RunTimings
from evalengine.records.schema import Answers, RecordKey, RequestRecord, write_records
from evalengine.records.tokens import tokens_json
from evalengine.util.forked import ForkedTask
from evalengine.util.phases import phase

RESOLVED = ("numerics", "attention_backend", "max_model_len", "block_size", "num_threads", "speculation")  # settings
MANY = 5_000  # requests whose records take a quarter of a second to write and hash


@dataclass(frozen=True)
class EndedRun:
    """A run with all its answers, as `finish_run` records it.

    stats: what the engine counted for the run. resumed, cached: the requests whose answers come from an interrupted run
    and from the cache. datasets: task -> `Task.fingerprint`. libraries, command: as in `build_manifest`. cache:
    what it did for the run (`cache.engine.Counts`). judge: the judge's run, and what its verdicts come to.
    """

    config: Config
    llm: EngineProtocol
    identity: Mapping[str, Any]
    stats: EngineStats
    started: float  # UNIX seconds
    begin: float  # the monotonic clock at the start
    load_seconds: float
    run_seconds: float
    resumed: Set[RecordKey] = frozenset()
    cached: Set[RecordKey] = frozenset()
    findings: Findings = field(default_factory=Findings)
    datasets: Mapping[str, Any] = field(default_factory=dict)
    command: Sequence[str] | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    cache: Mapping[str, Any] | None = None
    judge: Mapping[str, Any] | None = None


Score = Callable[[Sequence[RequestRecord], datetime], Sequence[TaskResult]]


@phase("records")
def finish_run(folder: RunFolder, plan: Plan, answers: Answers, run: EndedRun, score: Score | None) -> str:
    """Write records, tokens, results, manifest and digest; returns the digest.

    The manifest follows the files whose hashes it lists, and the digest is the last. score: returns the tasks' results,
    with the samples that it has not written itself; None where another program scores.
    Raises: EvalEngineError if the disk fails.
    """
    rows = records(plan, answers, run.findings)
    config, model = run.config, run.llm.checkpoint
    # Several forked processes need it, and this one later. It takes 0.2 s, which a rejected run does not need.
    import pyarrow.parquet  # noqa: F401

    write = partial(folder.write_with, RECORDS, lambda path: write_records(path, rows))
    with ForkedTask(write, len(rows) >= MANY) as written:
        finished, results = datetime.now(), None
        if score is not None:
            remove_results(folder)
            results = score(rows, finished)
        pieces = token_bytes(model.tokenizer, sorted(set().union(*(row.output_ids for row in rows))))
        folder.write_json(TOKENS, tokens_json(pieces))
        found = digests(rows)
        written.result()
    timings = RunTimings(run.load_seconds, run.run_seconds, time.perf_counter() - run.begin)
    facts, tokenizer = run.llm.facts(), model.tokenizer
    if results is not None:
        info = ModelInfo(
            name=config.model.name,
            path=model.source,
            dtype=str(facts.settings.dtype),
            revision=model.revision,
            sha=run.identity["weights"],
            num_parameters=num_parameters(model.spec),
            max_length=facts.settings.max_model_len,
            device=str(facts.settings.device),
            tokenizer=tokenizer,
            chat_template=tokenizer.chat_template if config.apply_chat_template else None,
        )
        content = results_dict(results, info, config, run.started, timings.total_seconds)
        write_results(folder, results, content, finished)
    computed = [row for row in rows if row.key not in run.resumed and row.key not in run.cached]
    counts = RunCounts(
        documents=sum(len(own.instances) for own in plan.tasks) or len({row.key[:2] for row in rows}),
        requests=len(rows),
        resumed_requests=len(run.resumed),
        cached_requests=len(run.cached),
        truncated_prompts=sum(row.truncated > 0 for row in rows),
        truncated_thinking=sum(bool(row.thinking_truncated) for row in rows),
        unended_thinking=sum(thought.unended for thought in run.findings.thoughts.values()),
        length_limited=sum(row.kind == "generate_until" and row.finish_reason == "length" for row in rows),
        own_exemplar_prompts=plan.own_exemplars,
        special_token_documents=plan.special_documents,
        prompt_tokens=sum(len(row.prompt_ids) for row in computed),
        output_tokens=sum(len(row.output_ids) for row in computed),
    )
    verdicts = {"kernels": facts.kernels, "self_test_verdict": facts.self_test}
    manifest = build_manifest(
        run.identity,
        digests=found,
        started=run.started,
        device=str(facts.settings.device),
        command=run.command,
        libraries=run.libraries,
        cluster=facts.cluster,
        model=_model(run),
        tokenizer={**run.identity["tokenizer"], "vocab_size": model.spec.vocab_size},
        datasets=dict(run.datasets),
        engine={**engine_settings(run.llm), **verdicts, "stats": asdict(run.stats)},
        counts=counts,
        # Whether part of it ran in the batches of an interrupted run, on which fast numerics' bits depend.
        resumed_fast=run.identity["numerics"] == "fast" and counts.resumed_requests > 0,
        timings=timings,
        programs=program_facts(plan, config, run.findings.verdicts),
        cache=run.cache,
        judge=run.judge,
    )
    folder.write_text(MANIFEST, bind(manifest, folder.path, found.run).file_text())
    folder.finish(found.run)
    return found.run


def _model(run: EndedRun) -> Model:
    """The model as the manifest describes it."""
    model, spec = run.llm.checkpoint, run.llm.checkpoint.spec
    adapter: dict[str, Any] = {}
    if model.adapter is not None:
        sha256 = model.hashes.get("adapter")  # known, since the identity holds the hash of the weights
        adapter = {"source": model.adapter.source, "revision": model.adapter.revision, "sha256": sha256}
    return Model(
        name=run.config.model.name,
        source=model.source,
        revision=model.revision,
        format=model.format,
        architecture=spec.described,
        num_parameters=num_parameters(spec),
        weights_sha256=run.identity["weights"],
        eos_token_ids=list(spec.eos_token_ids),
        prefix_token_id=find_prefix_token_id(model.tokenizer),  # it precedes texts scored without context
        processors=spec.processors.in_force(),
        adapter=adapter,
    )


def engine_settings(llm: EngineProtocol) -> dict[str, Any]:
    """The engine's settings as they were resolved, as plain JSON values."""
    facts = llm.facts()
    settings = facts.settings
    plain = {name: getattr(settings, name) for name in RESOLVED}
    others = {"dtype": dtype_name(settings.dtype), "device": str(settings.device), "num_kv_blocks": facts.num_kv_blocks}
    return {**asdict(facts.config), **plain, **others}
