"""An engine with a cache: answers in it are read, the others are computed and stored for the next run.

An answer's key is 32 bytes that stand for everything that it depends on, in two halves.

*Who computes*: the contract version, the weights by content, every field of the model's spec (with the end-of-sequence
ids and the logits processors of its generation configuration), numerics level and dtype. `exact` is the same on every
machine; `native` on one GPU architecture, and since no test compares what two compilers make of a kernel, its key also
contains the versions of torch, CUDA and Triton. Kernel schedules that failed verification are not in the key: those
that run give the bits of the reference. A generation's key also contains the tokenizer, with the version of its
library, since stop strings are found in text.

*The request*: the token ids, the number of alternatives, and for a generation everything in force that chooses or
ends its tokens: the room that `max_model_len` leaves, stop strings and ids, processors, and where noise is drawn
(temperature above 0) its seed and name. Tasks, documents, limits, orders, batches and pages are in neither half.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from evalengine.cache.store import CacheUnavailableError, Lookup, Row, Store, advice
from evalengine.config.schema import Config
from evalengine.engine.difference import difference
from evalengine.engine.expected import ExpectedAnswer
from evalengine.engine.protocol import EngineProtocol, OnStep
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, ScoreRequest
from evalengine.errors import EvalEngineError, ReplicaMismatchError, listed
from evalengine.models.spec import ModelSpec
from evalengine.plain_text import warn
from evalengine.records.schema import Answer, packed_ids
from evalengine.records.sealed import canonical
from evalengine.util.libraries import NATIVE_LIBRARIES, TEXT_LIBRARIES

VERSION = 1  # the keys' version: answers of other versions are not found
# The keys of a run's identity on which its answers depend.
COMPUTING = ("contract_version", "weights", "model_spec", "numerics", "dtype", "gpu_architecture")
BATCH, SECONDS = 512, 5.0  # computed answers are written in batches: of this many, or after this many seconds
MAX_LISTED = 5
ADDED = ("hits", "misses", "audited", "corrupt", "kept")  # the fields of `Counts` that add up


class Keys:
    """The keys of requests to one engine, and `facts`: what computes the answers, as `evalengine cache` shows it."""

    def __init__(
        self, name: str, identity: Mapping[str, Any], versions: Mapping[str, str | None], spec: ModelSpec, room: int
    ) -> None:
        """name: what the model is called; it changes no key. identity: a run's, or what `engine_identity` gives.
        versions: those of the libraries where the answers are computed (`util.libraries`). room: `max_model_len`."""
        assert identity["numerics"] in ("exact", "native"), "fast numerics' answers depend on the batch"
        scoring = {key: identity[key] for key in COMPUTING if key in identity}
        if identity["numerics"] == "native":
            assert "gpu_architecture" in scoring
            scoring["libraries"] = {library: versions.get(library) for library in NATIVE_LIBRARIES}
        text = {library: versions.get(library) for library in TEXT_LIBRARIES}
        generating = {**scoring, "tokenizer": identity["tokenizer"], "text_libraries": text}
        self.facts = {"name": name, **generating}
        self._scoring, self._generating = _sha256("score", scoring), _sha256("generate", generating)
        self._spec, self._room = spec, room

    def of(self, request: Request) -> bytes:
        """The request's key, 32 bytes."""
        if isinstance(request, ScoreRequest):
            return self._joined(
                self._scoring,
                request.logprobs.to_bytes(8, "little"),
                packed_ids(request.context_ids),
                packed_ids(request.continuation_ids),
            )
        return self._joined(self._generating, self._generation(request), packed_ids(request.prompt_ids))

    def _generation(self, request: GenerateRequest) -> bytes:
        """Everything that determines a generation except its prompt, as canonical JSON."""
        params, room = request.params, self._room - len(request.prompt_ids)
        content: dict[str, Any] = {
            "max_tokens": min(params.max_tokens, room),
            "stop": params.stop,
            "end_ids": sorted(self._spec.eos_token_ids if params.stop_token_ids is None else params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            "think_end_token": params.think_end_token,
            "logprobs": params.logprobs,
            "temperature": params.temperature,
            "processors": asdict(self._spec.processors if params.processors is None else params.processors),
        }
        if params.temperature > 0:
            sampling = {"top_k": params.top_k, "top_p": params.top_p, "seed": params.seed, "sample": request.sample}
            content |= {**sampling, "noise_key": params.noise_key}
        return canonical(content).encode()

    @staticmethod
    def _joined(*parts: bytes) -> bytes:
        lengths = array("q", map(len, parts))
        return hashlib.sha256(b"".join([lengths.tobytes(), *parts])).digest()


def _sha256(kind: str, facts: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(canonical({"version": VERSION, "kind": kind, **facts}).encode()).digest()


@dataclass
class Counts:
    """The cache's part in a run."""

    hits: int = 0  # answers that were read from the cache
    misses: int = 0  # answers that the cache did not have, and that were computed
    audited: int = 0  # hits that were computed again and compared: equal, or the run has failed
    corrupt: int = 0  # entries that failed their own hash or cannot be their request's answer, among the misses
    kept: int = 0  # answers that were written
    read_only: bool = False
    failed: str | None = None  # why the run went on without the cache, if it did

    def __add__(self, other: Counts) -> Counts:
        """The counts of two runs together."""
        added = {name: getattr(self, name) + getattr(other, name) for name in ADDED}
        return Counts(**added, read_only=self.read_only or other.read_only, failed=self.failed or other.failed)


class CachedEngine:
    """An engine whose `run` goes through a cache.

    A cache that fails in mid-run (a full disk, a damaged file) is not used from then on, and one message says so. The
    cache only saves time, so its failure must not end a run whose result it cannot change.
    """

    def __init__(
        self, engine: EngineProtocol, store: Store, keys: Keys, *, audit: float = 0.0, seed: int = 0,
        name: Callable[[Request], str] = lambda request: f"request {request.request_id}",
    ) -> None:  # fmt: skip
        """Wraps `engine`. audit: the share of the hits that is computed again, at least one hit if it is positive.
        seed: draws those hits. name: what a request is called in messages."""
        self.counts = Counts(read_only=store.read_only)
        self.answered: set[int] = set()  # ids of the requests that were read from the cache
        self._engine, self.store, self.keys = engine, store, keys
        self._audit, self._seed, self._name = audit, seed, name
        model, max_model_len = engine.checkpoint, engine.facts().settings.max_model_len
        self._expected = partial(
            ExpectedAnswer.of, spec=model.spec, max_model_len=max_model_len, tokenizer=model.tokenizer
        )
        self._looked_up: dict[int, tuple[Request, bytes, Answer | None]] = {}  # id -> request, key, answer
        self._corrupt: set[bytes] = set()
        if store.read_only:
            warn(f"cache={store.path.parent}: this folder cannot be written; answers are read, and none is written")

    def look_up(self, requests: Sequence[Request]) -> bool:
        """Reads the cached answers to these requests, so that `run` need not; returns whether any must be computed."""
        new = [
            (request, self.keys.of(request))
            for request in requests
            if self._looked_up.get(request.request_id, (None,))[0] is not request
        ]
        lookup = Lookup()
        with self._guarded():
            lookup = self.store.get([key for _, key in new] if self.counts.failed is None else ())
        for request, key in new:
            entry = lookup.entries.get(key)
            answer = None if entry is None else self._answer(request, entry)
            if entry is not None and answer is None:
                lookup.corrupt.append(key)
            self._looked_up[request.request_id] = request, key, answer
        if corrupt := set(lookup.corrupt) - self._corrupt:
            self._corrupt |= corrupt
            names = [self._name(request) for request, key in new if key in corrupt]
            warn(f"{self.store.path}: damaged entries, whose requests are computed again: "
                 f"{listed(names, MAX_LISTED, '; ')}")  # fmt: skip
        answers = [self._looked_up[request.request_id][2] for request in requests]
        return None in answers or bool(self._audit and answers)

    def run(self, requests: Iterable[Request], on_step: OnStep = None) -> Iterator[RequestOutput]:
        """Runs requests as `Engine.run` does; yields the cached answers first.

        Raises: EvalEngineError, before any cached answer is given, if an audited one differs from what is computed now.
        """
        batch = list(requests)
        self.look_up(batch)
        answers = {request.request_id: self._looked_up[request.request_id] for request in batch}
        hits = {number: answer for number, (_, _, answer) in answers.items() if answer is not None}
        self._check(hits, on_step)
        self.counts.hits += len(hits)
        self.answered.update(hits)  # The run's loop holds this very set: `|=` with a dict's keys would make another.
        for number, answer in hits.items():
            yield RequestOutput.of(answers[number][0], answer)
        rest = [request for request in batch if request.request_id not in hits]
        if rest:
            yield from self._computed(rest, on_step)

    def _answer(self, request: Request, row: Row) -> Answer | None:
        """The answer in a row; None if it cannot be this request's."""
        try:
            answer = row.answer(None if isinstance(request, GenerateRequest) else request.continuation_ids)
        except ValueError:
            return None
        return None if self._expected(request).problem(answer) is not None else answer

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Work on the cache, without which the run continues where the cache fails."""
        try:
            yield
        except sqlite3.Error as error:
            self.counts.failed = str(error)
            warn(f"{self.store.path}: {error}; the run goes on without the cache ({advice(error)})")

    def _check(self, hits: dict[int, Answer], on_step: OnStep) -> None:
        """Computes a sample of the hits again and compares it, bit by bit."""
        chosen = self._sample(hits)
        if not chosen:
            return
        for output in self._engine.run([self._looked_up[number][0] for number in chosen], on_step):
            request, _, stored = self._looked_up[output.request_id]
            assert stored is not None
            if different := difference(stored, output, "in the cache"):
                raise EvalEngineError(
                    f"cache.audit: {self._name(request)}: {different}. Either {self.store.path} was edited, or this "
                    "machine no longer computes what it did (python -m evalengine verify tells); run without cache=, "
                    "or delete the cache"
                )
            self.counts.audited += 1

    def _sample(self, hits: dict[int, Answer]) -> list[int]:
        """The hits to audit: those whose keys come first in an order that the seed draws."""

        def drawn(number: int) -> bytes:
            return hashlib.sha256(self._seed.to_bytes(8, "little", signed=True) + self._looked_up[number][1]).digest()

        return sorted(hits, key=drawn)[: math.ceil(self._audit * len(hits))] if self._audit else []

    def _computed(self, requests: list[Request], on_step: OnStep) -> Iterator[RequestOutput]:
        waiting: list[tuple[bytes, Row]] = []
        last = time.monotonic()
        try:
            for output in self._engine.run(requests, on_step):
                request, key, _ = self._looked_up[output.request_id]
                self.counts.misses += 1
                self.counts.corrupt += key in self._corrupt
                if output.error is None:
                    waiting.append((key, Row.of(output.answer, not isinstance(request, GenerateRequest))))
                if len(waiting) >= BATCH or time.monotonic() - last > SECONDS:
                    self._keep(waiting)
                    last = time.monotonic()
                yield output
        except ReplicaMismatchError as error:
            doubted = {self._looked_up[number][1] for number in error.doubted}  # answers of a machine that is in doubt
            waiting[:] = [(key, entry) for key, entry in waiting if key not in doubted]
            if self._may_write:
                with self._guarded():
                    self.store.forget(doubted)
            raise
        finally:  # an interrupted run also keeps what it computed
            self._keep(waiting)

    @property
    def _may_write(self) -> bool:
        return not self.counts.read_only and self.counts.failed is None

    def _keep(self, waiting: list[tuple[bytes, Row]]) -> None:
        """Writes the batch and empties it."""
        batch = waiting[:]
        waiting.clear()
        if batch and self._may_write:
            with self._guarded():
                self.store.put(self.keys.facts, batch, replace=self._corrupt)
                self.counts.kept += len(batch)


@contextmanager
def through_cache(
    config: Config, llm: EngineProtocol, identity: Mapping[str, Any], name: Callable[[Request], str]
) -> Iterator[CachedEngine | None]:
    """The engine whose answers `cache.path` keeps; None where no cache is set.

    identity: that of the engine (`engine_identity`), or a whole run's. name: gives a request's name in messages.
    Raises ConfigError for a folder that can be no cache. One that is locked, or whose disk is full, is done without.
    """
    if config.cache.path is None:
        yield None
        return
    failed = None
    try:
        opened = Store.open(config.cache.path)
    except CacheUnavailableError as error:  # the cache only saves time: its failure must not end a run
        opened, failed = Store.empty(config.cache.path), str(error)
        warn(f"{error}; the run goes on without the cache")
    with opened as store:
        facts = llm.facts()
        room = facts.settings.max_model_len
        keys = Keys(config.model.name, identity, facts.libraries, llm.checkpoint.spec, room)
        cached = CachedEngine(llm, store, keys, audit=config.cache.audit, seed=config.seed, name=name)
        cached.counts.failed = failed
        yield cached
