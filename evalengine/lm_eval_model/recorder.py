"""Leaves the records of an evaluation by lm-eval: `records-<time>-<digest>/`, beside lm-eval's own files.

A folder appears whole, under a name that holds its digest, or not at all: it is filled under a hidden name and renamed.
Each call of the model publishes the records of all calls so far and removes the folder of the call before. A killed
evaluation therefore leaves whole records of the calls that it finished.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import lm_eval

from evalengine.cache.engine import Counts
from evalengine.engine.llm import LLM
from evalengine.engine.request import RequestOutput
from evalengine.errors import EvalEngineError
from evalengine.harness.described import engine_facts, run_context
from evalengine.harness.identity import engine_identity
from evalengine.harness.pieces import token_bytes
from evalengine.harness.requests import requests_sha256
from evalengine.lm_eval_model import LOGGER
from evalengine.lm_eval_model.arguments import DEFAULT_MAX_GEN_TOKS, ModelArguments
from evalengine.lm_eval_model.place import Place
from evalengine.lm_eval_model.requests import EngineRequest
from evalengine.records.digest import Digests, digests
from evalengine.records.evidence import bind
from evalengine.records.folder import DIGEST, RECORDS, write_whole
from evalengine.records.manifest import MANIFEST, RunOutcome, build_manifest, run_identity
from evalengine.records.manifest_data import Manifest
from evalengine.records.manifest_parts import RunCounts, RunTimings
from evalengine.records.schema import RecordKey, RequestRecord, ids_sha256, write_records
from evalengine.records.tokens import TOKENS, tokens_json, used_ids

logger = logging.getLogger(LOGGER)

# Settings that lm-eval decides in a run of its own; its results hold them.
LM_EVALS = ("tasks", "limit", "fewshot_seed", "fewshot_as_multiturn", "system_instruction", "long_prompts")


@dataclass
class EvaluationRecorder:
    """The records of one evaluation after another. A request that is asked a second time begins the next evaluation."""

    place: Place
    llm: LLM
    arguments: ModelArguments
    begin: float  # the monotonic clock when the model began to load
    loaded: float
    started: float = 0.0  # UNIX seconds, when the evaluation's first request ran
    seconds: float = 0.0  # seconds in which requests ran
    templated: bool = False  # whether the chat template made the prompts
    cache: Counts | None = None  # the cache's counts for the evaluation so far, if there is a cache
    published: Path | None = None
    _asked: dict[RecordKey, EngineRequest] = field(default_factory=dict)
    _rows: dict[RecordKey, RequestRecord] = field(default_factory=dict)
    _identity: dict[bool, dict[str, Any]] = field(default_factory=dict)  # templated -> the engine's identity

    def add(
        self, asked: Sequence[EngineRequest], outputs: Sequence[RequestOutput], texts: Sequence[str], seconds: float
    ) -> None:
        """Adds the answers of one call and publishes all answers so far. texts: the answers as lm-eval was given them.

        Raises: EvalEngineError if the disk refuses.
        """
        if not asked:
            return
        if any(item.key in self._rows for item in asked):  # the new prompts are made already, so `templated` is theirs
            templated = self.templated
            self.end()
            self.templated = templated
        if not self._rows:
            self.started = time.time() - seconds
        self.seconds += seconds
        for item, output, text in zip(asked, outputs, texts, strict=True):
            self._asked[item.key] = item
            self._rows[item.key] = _record(item, output, text)
        self.publish()

    def publish(self) -> None:
        """Leaves a whole folder with every record so far. Raises EvalEngineError if the disk refuses."""
        rows = list(self._rows.values())
        digest, folder = digests(rows), self.place.folder
        name = f"records-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(self.started))}-{digest.run[:8]}"
        scratch = folder / f".{name}.{os.getpid()}.partial"
        try:
            scratch.mkdir(parents=True)
            self._fill(scratch, rows, digest)
            target = _free(folder / name)
            scratch.rename(target)
            if self.published is not None:
                self.published.rename(scratch)  # a kill must not leave half a folder under a name that readers know
        except OSError as error:
            why = error.strerror or str(error)
            raise EvalEngineError(f"could not write {folder / name}: {why}; cure that, or leave output_dir and "
                                  "--output_path out") from error  # fmt: skip
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        self.published = target
        logger.info("records of %d requests: %s, digest %s", len(rows), target, digest.run)

    def end(self) -> dict[str, str]:
        """Ends the evaluation. Returns what names its records in lm-eval's results, {} if it has none."""
        names = {}
        if self.published is not None:
            names = {"records": self.published.name, "digest": digests(self._rows.values()).run}
        self._asked, self._rows, self.published, self.templated, self.cache = {}, {}, None, False, None
        self.begin = self.loaded = time.perf_counter()  # the next evaluation finds the weights loaded
        self.seconds = 0.0
        return names

    def _fill(self, folder: Path, rows: Sequence[RequestRecord], digest: Digests) -> None:
        write_whole(folder / RECORDS, lambda path: write_records(path, rows))
        pieces = token_bytes(self.llm.tokenizer, used_ids(row.output_ids for row in rows))
        _write_json(folder / TOKENS, tokens_json(pieces))
        bound = bind(self._manifest(rows, digest), folder, digest.run)
        write_whole(folder / MANIFEST, lambda path: path.write_text(bound.file_text(), encoding="utf-8"))
        write_whole(folder / DIGEST, lambda path: path.write_text(f"{digest.run}\n", encoding="utf-8"))

    def _manifest(self, rows: Sequence[RequestRecord], digest: Digests) -> Manifest:
        llm, config = self.llm, self.arguments.config
        identity = self._run_identity()
        run = run_context(config, llm, identity, {}, self.started)
        outcome = RunOutcome(
            digest,
            _counts(rows, 0 if self.cache is None else self.cache.hits),
            RunTimings(self.loaded - self.begin, self.seconds, time.perf_counter() - self.begin),
            engine_facts(llm, llm.stats),
            cache=None if self.cache is None else asdict(self.cache),
        )
        libraries = {"lm-eval": str(getattr(lm_eval, "__version__", "unknown"))}
        return build_manifest(replace(run, libraries=libraries), outcome)

    def _run_identity(self) -> dict[str, Any]:
        """The run's identity: the engine's, every prompt, and what decides which part of an answer is scored. Settings
        that lm-eval decides stand in its results."""
        config = replace(self.arguments.config, apply_chat_template=self.templated)
        if self.templated not in self._identity:
            self._identity[self.templated] = engine_identity(config, self.llm)
        prompts = requests_sha256((key, item.request) for key, item in sorted(self._asked.items()))
        extra = {**self._identity[self.templated], "datasets": {}, "prompts": prompts}
        identity = run_identity(config, extra)
        for name in LM_EVALS:
            del identity[name]
        own = {"think_end_token": self.arguments.think_end_token}
        if self.arguments.max_gen_toks != DEFAULT_MAX_GEN_TOKS:
            own["max_gen_toks"] = self.arguments.max_gen_toks
        set_here = {name: value for name, value in own.items() if value is not None}
        return {**identity, **set_here, "harness": "lm-eval"}


def _record(item: EngineRequest, output: RequestOutput, text: str) -> RequestRecord:
    task, document, index, repeat = item.key
    return RequestRecord(
        task=task,
        doc_id=document,
        request_index=index,
        repeat=repeat,
        kind=item.kind,
        prompt_ids=item.prompt_ids,
        prompt_sha256=ids_sha256(item.prompt_ids),
        output_ids=output.token_ids,
        logprobs=output.logprobs,
        finish_reason=output.finish_reason,
        truncated=item.truncated,
        text=text,
        is_greedy=output.is_greedy,
    )


def _counts(rows: Sequence[RequestRecord], cached: int) -> RunCounts:
    return RunCounts(
        documents=len({row.key[:2] for row in rows}),
        requests=len(rows),
        resumed_requests=0,
        cached_requests=cached,
        truncated_prompts=sum(row.truncated > 0 for row in rows),
        prompt_tokens=sum(len(row.prompt_ids) for row in rows),
        output_tokens=sum(len(row.output_ids) for row in rows),
        length_limited=sum(row.kind == "generate_until" and row.finish_reason == "length" for row in rows),
    )


def _free(path: Path) -> Path:
    """The path, or one beside it if another evaluation of the same second has the same digest."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_whole(path, lambda scratch: scratch.write_text(text, encoding="utf-8"))
