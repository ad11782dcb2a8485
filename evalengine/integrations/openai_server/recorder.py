"""Keeps what a server answers as a run, and names each answer's record to its client.

The run's requests come from clients, one by one: each answer is a leaf, written before the client has it. Its folder is
that of any run. While requests arrive it contains their journal and the requests (`asked.jsonl`); `finish` makes
records, digest and manifest of them. The line of a request is written before that of its answer: after a kill or on a
full disk there may be requests without an answer, which do not count, but no answer without its request.

A document is a request: its number is a hash of the request, so that two servers with the same requests have comparable
runs, whatever the order. An equal request is one leaf: its answer must be the same to the bit, and a machine
that gives another is found.
"""

from __future__ import annotations

import hashlib
import logging
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from evalengine.config.schema import Config, to_yaml
from evalengine.engine.llm import LLM
from evalengine.engine.request import GenerateRequest, Request, RequestOutput
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.harness.finish import EndedRun, finish_run
from evalengine.harness.identity import identify
from evalengine.harness.outcome import Findings, hash_string, task_hash, thoughts
from evalengine.harness.requests import SERVED, Plan, in_order, read_requests, request_line, requests_sha256
from evalengine.harness.runner import expectation
from evalengine.integrations.openai_server.answering import Submission
from evalengine.integrations.openai_server.errors import ApiError
from evalengine.integrations.openai_server.request_bodies import ServerRequest
from evalengine.records.evidence import CLIENT_REQUESTS, CONFIG
from evalengine.records.folder import RunFolder, write_failed
from evalengine.records.journal import Entry, Journal, LineFile
from evalengine.records.lm_eval import Sample, TaskResult
from evalengine.records.schema import Answer, RecordKey, RequestRecord, ids_sha256
from evalengine.records.sealed import canonical

SCORES = "prompts"  # the task of prompts whose logprobs were requested
BITS = 52  # of a document's number: JavaScript reads 53 exactly
logger = logging.getLogger(__name__)
RECEIPT, RUN = "x-evalengine-receipt", "x-evalengine-run"
MOST_NAMED = 64  # choices of one request whose records its answer's header names


@dataclass
class ServedRun:
    """An open run. `add` keeps answers, `finish` makes the folder a run that every command reads."""

    config: Config
    llm: LLM
    identity: dict[str, Any]
    folder: RunFolder
    journal: Journal
    stored: dict[RecordKey, Request]  # what `file` has
    file: LineFile  # `asked.jsonl`
    resumed: Set[RecordKey]  # answers of a server that was killed
    started: float = field(default_factory=time.time)
    begin: float = field(default_factory=time.perf_counter)

    @classmethod
    def open(cls, output_dir: str, name: str, config: Config, llm: LLM) -> ServedRun:
        """The run in a new folder below `output_dir`, or in that of a server which was killed.

        Raises: ConfigError in fast numerics, whose bits no one can check; EvalEngineError if the disk refuses.
        """
        if llm.settings.numerics == "fast":
            raise ConfigError("record: numerics=fast gives no answer twice, so that none can be checked; set "
                              "batch_invariant=true, or leave record out")  # fmt: skip
        config = replace(
            config, tasks={}, groups={}, apply_chat_template=bool(getattr(llm.tokenizer, "chat_template", None))
        )
        identity = identify(config, llm, None, {}, harness=SERVED)
        folder = RunFolder.open(output_dir, name, "auto", identity)
        try:
            stored = _read_back(folder)
            folder.write_text(CONFIG, to_yaml(config))
            journal = Journal.open(folder.journal, folder.identity_sha256, expectation(llm, stored))
            file = _opened(folder.path / CLIENT_REQUESTS)
        except BaseException:
            folder.close()
            raise
        return cls(config, llm, identity, folder, journal, stored, file, {*journal.finished})

    def add(self, answers: Iterable[tuple[str, Request, RequestOutput]]) -> None:
        """Keeps the answers of one client's request, (task, request, answer) each: all of them or none.

        Raises: EvalEngineError if the disk fails, and for an answer that is not the one given before.
        """
        requests: dict[RecordKey, Request] = {}
        entries: dict[RecordKey, Entry] = {}
        for task, request, output in answers:
            plain = recorded(request)
            key = served_key(task, plain, request)
            answer = output.answer.without_top()
            before = entries[key][2] if key in entries else self.journal.finished.get(key)
            if before is None:
                requests[key], entries[key] = plain, (key, ids_sha256(plain.prompt_ids), answer)
            elif not _same(before, answer) or plain.prompt_ids != (requests.get(key) or self.stored[key]).prompt_ids:
                raise EvalEngineError(f"{'/'.join(map(str, key))}: the same request has another answer than before: "
                                      "this machine computes wrong")  # fmt: skip
        new = {key: request for key, request in requests.items() if key not in self.stored}
        self.file.append(b"".join(request_line(*one) for one in new.items()))
        self.stored |= new
        self.journal.append(*entries.values())

    def problem(self) -> str | None:
        """Why no answer can be recorded now; None if the disk has room for as many bytes as it rejected last."""
        return self.file.problem() or self.journal.file.problem()

    def finish(self) -> str | None:
        """Makes the folder a finished run and returns its digest; without any answer nothing is left, and None."""
        with self.folder:
            try:
                self.file.close()
            finally:
                self.journal.close()
            if not self.journal.finished:
                shutil.rmtree(self.folder.path, ignore_errors=True)
                return None
            digest = self._write(Plan([], in_order({key: self.stored[key] for key in self.journal.finished})))
            self.folder.tidy()
            return digest

    def _write(self, plan: Plan) -> str:
        folder, llm, answers = self.folder, self.llm, self.journal.finished
        folder.write_text(CLIENT_REQUESTS, b"".join(request_line(i.key, i.request) for i in plan.requests).decode())
        ended = EndedRun(
            config=self.config,
            llm=llm,
            identity={**self.identity, "prompts": requests_sha256((item.key, item.request) for item in plan.requests)},
            stats=llm.stats,
            started=self.started,
            begin=self.begin,
            load_seconds=0.0,
            run_seconds=time.perf_counter() - self.begin,
            resumed=self.resumed,
            findings=Findings(thoughts(plan, answers, llm.tokenizer)),
        )
        return finish_run(folder, plan, answers, ended, lambda rows, _: [*_results(rows, self.stored, llm.tokenizer)])


def recorded(request: Request) -> Request:
    """The request as it is recorded: without alternatives, which no digest holds, and with its own noise."""
    if isinstance(request, GenerateRequest):
        return with_own_noise(replace(request, params=replace(request.params, logprobs=0)))
    return replace(request, logprobs=0)


def with_own_noise(request: GenerateRequest) -> GenerateRequest:
    """The same request as a single sample: its number among the prompt's samples goes into the name of its noise."""
    if not request.sample:
        return request
    name = request.params.noise_key
    if name is None:
        name = "ids:" + ",".join(map(str, request.prompt_ids))
    return replace(request, sample=0, params=replace(request.params, noise_key=f"{name}\0sample {request.sample}"))


def served_key(task: str, plain: Request, request: Request) -> RecordKey:
    """The key of a request's record. Samples of one prompt are repeats of one document."""
    sample, content = 0, [plain.prompt_ids, getattr(plain, "continuation_ids", None)]
    if isinstance(request, GenerateRequest):
        sample, content = request.sample, [plain.prompt_ids, asdict(replace(request.params, logprobs=0))]
    digest = hashlib.sha256(canonical(content).encode()).digest()
    return task, int.from_bytes(digest[:8], "big") >> (64 - BITS), 0, sample


def _read_back(folder: RunFolder) -> dict[RecordKey, Request]:
    return read_requests(folder.path, unfinished=True) if (folder.path / CLIENT_REQUESTS).exists() else {}


def _opened(path: Path) -> LineFile:
    try:
        return LineFile(path)
    except OSError as error:
        raise write_failed(path, error) from error


def _same(a: Answer, b: Answer) -> bool:
    said = [(list(e.output_ids), e.logprobs.tobytes(), e.finish_reason, e.text) for e in (a, b)]
    return said[0] == said[1]


def _results(rows: Sequence[RequestRecord], stored: dict[RecordKey, Request], tokenizer: Any) -> Iterator[TaskResult]:
    """Each task's answers, without a metric: the targets are unknown."""
    for task, own in groupby(rows, key=lambda row: row.task):
        samples = [_sample([*some], stored, tokenizer) for _, some in groupby(own, key=lambda row: row.doc_id)]
        hashes = [(sample.doc_hash, sample.prompt_hash, sample.target_hash) for sample in samples]
        size = len(samples)
        yield TaskResult(task, "N/A", 0, {}, {}, {}, size, size, task_hash(hashes), samples)


def _sample(rows: Sequence[RequestRecord], stored: dict[RecordKey, Request], tokenizer: Any) -> Sample:
    row, request = rows[0], stored[rows[0].key]
    prompt = tokenizer.decode(list(row.prompt_ids), skip_special_tokens=False)
    doc: dict[str, Any] = {"prompt": prompt}
    if isinstance(request, GenerateRequest):
        params = request.params
        settings = {"until": list(params.stop), "max_gen_toks": params.max_tokens, "temperature": params.temperature,
                    "top_k": params.top_k, "top_p": params.top_p, "do_sample": params.temperature > 0}  # fmt: skip
        arguments: tuple[Any, ...] = (prompt, settings)
        answers: list[Any] = [one.text for one in rows]
    else:
        doc["scored"] = tokenizer.decode(list(row.output_ids), skip_special_tokens=False)
        arguments = (prompt, doc["scored"])
        answers = [(math.fsum(one.logprobs.tolist()), one.is_greedy) for one in rows]
    hashes = hash_string(canonical([doc, arguments])), hash_string(prompt), hash_string("")
    return Sample(row.doc_id, doc, "", [arguments], [answers], answers[:1], "none", {}, *hashes)


class Recorder:
    """Of one server. Used in the event loop alone."""

    def __init__(self, run: ServedRun) -> None:
        self.run = run
        self._reported = False  # that answers cannot be recorded

    def headers(self, ask: ServerRequest) -> dict[str, str]:
        """The run's name, and the item of each generation, as `prove RUN --item ITEM` takes it."""
        requests = ask.generations([*range(len(ask.choices))])
        keys = {place: served_key(ask.task, recorded(one), one) for place, one in requests.items()}
        named = {"/".join(map(str, key)): None for key in keys.values()}
        receipts = {} if not named or len(named) > MOST_NAMED else {RECEIPT: ", ".join(named)}
        return {RUN: self.run.folder.path.name, **receipts}

    def check(self, thorough: bool = False) -> None:
        """Raises ApiError while answers cannot be recorded.

        thorough: also if the last ones could be. A full disk is found by writing to it, which takes some system calls.
        """
        if (self._reported or thorough) and (why := self.run.problem()) is not None:
            self._report(why)
            raise ApiError(503, f"answers cannot be recorded: {why}")
        if self._reported:
            logger.warning("answers are recorded again")
            self._reported = False

    def add(self, submission: Submission) -> None:
        """Record a complete answer. Raises ApiError: an answer that is not recorded is not sent."""
        ask = submission.ask
        scores = [(SCORES, request, submission.scores[prompt])
                  for prompt, request in ask.scores([*range(len(ask.prompts))]).items()]  # fmt: skip
        answers = [(ask.task, request, submission.outputs[index])
                   for index, request in ask.generations([*range(len(ask.choices))]).items()]  # fmt: skip
        try:
            self.run.add([*scores, *answers])
        except EvalEngineError as error:
            if isinstance(cause := error.__cause__, OSError):
                self._report(cause.strerror or str(cause))
                raise ApiError(503, "the answer could not be recorded; come back later") from error
            logger.error("%s", error)
            raise ApiError(500, "the answer could not be recorded; the server's log has why") from error

    def _report(self, why: str) -> None:
        """Logs why answers cannot be recorded, once until they can be."""
        if not self._reported:
            logger.error("%s: answers cannot be recorded (%s), and requests are answered 503 until they can",
                         self.run.folder.path, why)  # fmt: skip
            self._reported = True
