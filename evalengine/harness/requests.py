"""Turn a task's instances into the engine's requests (tokenisation, truncation, the key of each answer), and keep
requests that clients made.

All of it happens before anything is scheduled, so a request never depends on how the work is divided. A run of tasks is
planned again from its rows. Requests of clients are recorded only in `asked.jsonl` of a server's run, one line per
request, and `check` and `prove` compute them again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from evalengine.engine.request import GenerateRequest, Request, SamplingParams, ScoreRequest
from evalengine.engine.text.encode import encode, encode_pair, prefix_token_id, stop_strings
from evalengine.engine.text.rolling import rolling_windows
from evalengine.errors import ConfigError, first_of
from evalengine.records.evidence import CLIENT_REQUESTS
from evalengine.records.journal import record_key
from evalengine.records.schema import RecordKey, ids_sha256
from evalengine.records.shapes import Count, with_fields, wrong
from evalengine.tasks.base import Task
from evalengine.tasks.instance import Instance
from evalengine.util.plain_files import parse_json, read_bytes

SERVED = "serve"  # `harness` of a run's identity whose requests came from clients
_LINE = with_fields({
    "key": list, "prompt_ids": list[Count], "params?": dict, "scored?": list[Count], "logprobs?": Count
})  # fmt: skip


@dataclass(frozen=True)
class HarnessRequest:
    """One engine request: an instance, or one window of a rolling instance."""

    key: RecordKey
    instance: Instance
    request: Request
    truncated: int  # tokens cut from the left of the prompt

    @classmethod
    def of(cls, key: RecordKey, kind: Any, request: Request, truncated: int = 0) -> HarnessRequest:
        """A request whose prompt another program wrote: its instance has no text."""
        return cls(key, Instance(key[0], key[1], key[2], kind, "", repeat=key[3]), request, truncated)

    @property
    def prompt_ids(self) -> list[int]:
        return self.request.prompt_ids

    @cached_property  # the journal and the records have it
    def prompt_sha256(self) -> str:
        return ids_sha256(self.prompt_ids)

    @property
    def named(self) -> str:
        """The request's name in messages."""
        return f"{self.key[0]}, document {self.key[1]}, request {self.key[2]}"


@dataclass(frozen=True)
class TaskPlan:
    task: Task
    instances: list[list[Instance]]  # a list per document


@dataclass(frozen=True)
class Plan:
    tasks: list[TaskPlan]
    requests: list[HarnessRequest]
    warnings: tuple[str, ...] = ()  # what is probably not meant in the tasks' prompts
    own_exemplars: int = 0  # documents whose prompts contain the document itself as an exemplar
    special_documents: int = 0  # documents with a special token's string in their texts, read as the token
    prompts_sha256: str = ""  # `requests_sha256` of all requests, in order


def requests_sha256(requests: Iterable[tuple[RecordKey, Request]]) -> str:
    """SHA-256 (hex) over every request: its key, its token ids and how it is sampled, in order."""
    digest = hashlib.sha256()
    last: list[int] = []
    text = "[]"  # the last prompt, which a document's choices share
    names: dict[str, str] = {}  # task -> JSON of its name
    for (task, *numbers), request in requests:
        name = names.get(task) or names.setdefault(task, json.dumps(task))
        if request.prompt_ids is not last and request.prompt_ids != last:  # mostly one list: comparing it takes 3 us
            last, text = request.prompt_ids, str(request.prompt_ids)
        if isinstance(request, GenerateRequest):
            settings = asdict(request.params)
            if request.params.think_end_token is None:  # left out: older runs keep their hash
                del settings["think_end_token"]
            requested = json.dumps(settings)
        else:
            requested = str(request.continuation_ids)
        # The text is JSON, made without the encoder: Python's text of a list of integers is JSON, in half the time.
        digest.update(f"[[{name}, {str(numbers)[1:]}, {text}, {requested}]".encode())
    return digest.hexdigest()


@dataclass
class RequestBuilder:
    """Turns instances into requests for one tokenizer and one context length."""

    tokenizer: Any
    max_model_len: int
    seed: int = 0
    long_prompts: str = "truncate"  # truncate | error
    think_end_token: str | int | None = None
    logprobs: int = 0  # recorded alternatives of each generated token
    _context: list[int] = field(default_factory=list, init=False)  # the last one, which a document's choices share

    def build(self, instances: Iterable[Instance], first_id: int = 0) -> list[HarnessRequest]:
        """The requests, numbered from `first_id` in the instances' order.

        Raises ConfigError that lists the prompts that cannot be run.
        """
        requests: list[HarnessRequest] = []
        problems: list[str] = []
        indices: Counter[tuple[str, int, int]] = Counter()
        for instance in instances:
            document = (instance.task, instance.doc_id, instance.repeat)
            try:
                built = self._build(instance, first_id + len(requests))
            except ConfigError as error:
                problems.extend(f"{instance.task}, document {instance.doc_id}: {p}" for p in error.problems)
                continue
            for request, truncated in built:
                key = (instance.task, instance.doc_id, indices[document], instance.repeat)
                requests.append(HarnessRequest(key, instance, request, truncated))
                indices[document] += 1
        if problems:
            raise ConfigError(first_of(problems, 10))
        return requests

    def _build(self, instance: Instance, first_id: int) -> list[tuple[Request, int]]:
        if instance.kind == "generate_until":
            return [self._generate(instance, first_id)]
        if instance.kind == "loglikelihood":
            return [self._score(instance, first_id)]
        ids = encode(self.tokenizer, instance.context)
        if instance.context and not ids:  # an empty text has no request and scores 0, as in lm-eval
            raise ConfigError(f"the tokenizer makes no tokens of its text {instance.context[:40]!r}")
        windows = rolling_windows(ids, prefix_token_id(self.tokenizer), self.max_model_len)
        return [(ScoreRequest(first_id + i, *window), 0) for i, window in enumerate(windows)]

    def _generate(self, instance: Instance, request_id: int) -> tuple[Request, int]:
        generation = instance.generation
        assert generation is not None
        room = self.max_model_len - generation.max_gen_toks
        if room < 1:
            raise ConfigError(
                f"max_gen_toks={generation.max_gen_toks} leaves no room for a prompt in "
                f"engine.max_model_len={self.max_model_len}; lower task.generation.max_gen_toks"
            )
        ids = encode(self.tokenizer, instance.context)
        cut = self._cut(
            len(ids), room, f"max_model_len={self.max_model_len} less max_gen_toks={generation.max_gen_toks}"
        )
        params = SamplingParams(
            max_tokens=generation.max_gen_toks,
            temperature=generation.temperature,
            top_k=generation.top_k,
            top_p=generation.top_p,
            stop=stop_strings(self.tokenizer, generation.until),
            seed=self.seed,
            logprobs=self.logprobs,
            think_end_token=self.think_end_token,
            noise_key=f"{instance.task}/{instance.doc_id}/{instance.index}/{instance.repeat}",
        )
        return GenerateRequest(request_id, ids[cut:], params), cut

    def _score(self, instance: Instance, request_id: int) -> tuple[Request, int]:
        """A log-likelihood's request. As in lm-eval max_length + 1 tokens remain: the last is predicted, not fed."""
        context, continuation = encode_pair(self.tokenizer, instance.context, instance.continuation)
        if not continuation:
            raise ConfigError(f"the continuation {instance.continuation!r} has no tokens of its own")
        room = self.max_model_len + 1 - len(continuation)
        if room < 1:
            raise ConfigError(
                f"the continuation alone has {len(continuation)} tokens, engine.max_model_len={self.max_model_len}"
            )
        cut = self._cut(len(context), room, f"max_model_len={self.max_model_len} and {len(continuation)} to predict")
        context = context[cut:] if cut else context
        if context != self._context:
            self._context = context
        return ScoreRequest(request_id, self._context, continuation), cut

    def _cut(self, length: int, room: int, what: str) -> int:
        """How many tokens to cut from the left of a prompt. Raises ConfigError if prompts may not be cut."""
        if length <= room:
            return 0
        if self.long_prompts == "error":
            raise ConfigError(
                f"the prompt has {length} tokens, {room} fit ({what}); shorten it (fewer exemplars: task.num_fewshot; "
                "a judge's: judge.template), or set long_prompts=truncate (a judge's is never cut: judge.max_model_len)"
            )
        return length - room


def request_line(key: RecordKey, request: Request) -> bytes:
    """The line of one request."""
    line: dict[str, Any] = {"key": key, "prompt_ids": request.prompt_ids}
    if isinstance(request, GenerateRequest):
        assert not request.sample, "it is in the name of the noise"
        line["params"] = asdict(request.params)
    else:
        line |= {"scored": request.continuation_ids, "logprobs": request.logprobs}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def read_requests(folder: Path, unfinished: bool = False) -> dict[RecordKey, Request]:
    """Key -> request, numbered from 0 in the file's order.

    unfinished: whether a last line that was cut off by a kill may be there; it is left out.
    Raises ConfigError for a file that is missing or damaged.
    """
    file, requests, where = folder / CLIENT_REQUESTS, dict[RecordKey, Request](), ""
    try:
        content = read_bytes(file)
        whole = content[: content.rfind(b"\n") + 1] if unfinished else content
        for number, line in enumerate(whole.splitlines(), 1):
            where = f"line {number}: "
            key, request = _request(parse_json(line), len(requests))
            if key in requests:
                raise ValueError("its key is in an earlier line")
            requests[key] = request
    except (OSError, TypeError, ValueError) as error:
        fix = "take the folder from where it was copied"
        raise ConfigError(f"{file}: missing or damaged ({where}{error}); {fix}") from error
    return requests


def in_order(requested: Mapping[RecordKey, Request]) -> list[HarnessRequest]:
    """The requests of a plan: in the order of their keys, numbered from 0."""
    planned = []
    for number, key in enumerate(sorted(requested)):
        kind = "generate_until" if isinstance(requested[key], GenerateRequest) else "loglikelihood"
        planned.append(HarnessRequest.of(key, kind, replace(requested[key], request_id=number)))
    return planned


def _request(line: Any, request_id: int) -> tuple[RecordKey, Request]:
    """The request of a line. Raises TypeError or ValueError if it is none."""
    if problem := wrong(line, _LINE):
        raise ValueError(problem)
    key = record_key(line["key"])
    if "params" not in line:
        return key, ScoreRequest(request_id, line["prompt_ids"], line.get("scored", []), line.get("logprobs", 0))
    return key, GenerateRequest(request_id, line["prompt_ids"], SamplingParams.of_plain(line["params"]))
