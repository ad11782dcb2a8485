"""The records of lm-eval's evaluations.

They are in `records-<time>-<digest>/`, next to lm-eval's own files. A folder appears whole, under a name that holds
its digest, or not at all: it is filled under a hidden name and renamed. Each call of the model publishes the records of
all calls so far and removes the folder of the call before. A killed evaluation therefore leaves whole records of the
calls that it finished.

lm-eval tells a model neither its `--output_path` nor when it is done. Its tracker holds the path, and is a local
variable of `simple_evaluate` while that function makes the model; the tracker is read from there.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import lm_eval
from lm_eval import utils as lm_eval_utils

from evalengine.cache.engine import CachedEngine, Counts
from evalengine.engine.llm import LLM
from evalengine.engine.request import RequestOutput
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.harness.finish import EndedRun, finish_run
from evalengine.harness.identity import engine_identity
from evalengine.harness.requests import HarnessRequest, Plan, requests_sha256
from evalengine.integrations.lm_eval import LOGGER
from evalengine.integrations.lm_eval.arguments import DEFAULT_MAX_GEN_TOKS, ModelArguments
from evalengine.records.folder import RunFolder
from evalengine.records.manifest import run_identity
from evalengine.records.schema import Answer, RecordKey

# Settings that lm-eval decides in its own run; its results hold them.
LM_EVALS = ("tasks", "limit", "fewshot_seed", "fewshot_as_multiturn", "system_instruction", "long_prompts")

logger = logging.getLogger(LOGGER)


@dataclass
class EvaluationRecorder:
    """The records of one evaluation after another. A request that comes a second time begins the next evaluation."""

    place: Place
    llm: LLM
    arguments: ModelArguments
    begin: float  # the monotonic clock when the model began to load
    loaded: float
    started: float = 0.0  # UNIX seconds, when the evaluation's first request ran
    seconds: float = 0.0  # seconds in which requests ran
    templated: bool = False  # whether the chat template made the prompts
    cache: Counts | None = None  # the cache's counts for the evaluation so far, if there is a cache
    cached: set[RecordKey] = field(default_factory=set)  # the requests that the cache answered
    published: Path | None = None
    digest: str = ""  # of the published records
    _asked: dict[RecordKey, HarnessRequest] = field(default_factory=dict)
    _answers: dict[RecordKey, Answer] = field(default_factory=dict)
    _identity: dict[bool, dict[str, Any]] = field(default_factory=dict)  # templated -> the engine's identity

    def add(
        self,
        items: Sequence[HarnessRequest],
        outputs: Sequence[RequestOutput],
        texts: Sequence[str],
        seconds: float,
        cached: CachedEngine | None,
    ) -> None:
        """Adds the answers of one call and publishes all answers so far. texts: the answers as lm-eval was given them.
        cached: the cache of this call.

        Raises: EvalEngineError if the disk refuses.
        """
        if not items:
            return
        if any(item.key in self._answers for item in items):  # the new prompts are made already: `templated` is theirs
            templated = self.templated
            self.end()
            self.templated = templated
        if not self._answers:
            self.started = time.time() - seconds
        self.seconds += seconds
        if cached is not None:
            self.cache = cached.counts if self.cache is None else self.cache + cached.counts
            self.cached |= {items[number].key for number in cached.answered}
        for item, output, text in zip(items, outputs, texts, strict=True):
            self._asked[item.key] = item
            self._answers[item.key] = replace(output.answer, text=text)
        self.publish()

    def publish(self) -> None:
        """Leaves a whole folder with every record so far. Raises EvalEngineError if the disk refuses."""
        folder = self.place.folder
        name = f"records-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(self.started))}"
        scratch = folder / f".{name}.{os.getpid()}.partial"
        try:
            scratch.mkdir(parents=True)
            self.digest = self._fill(scratch)
            target = _free(folder / f"{name}-{self.digest[:8]}")
            scratch.rename(target)
            if self.published is not None:
                self.published.rename(scratch)  # a kill must not leave half a folder under a name that readers know
        except (OSError, EvalEngineError) as error:
            why = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(why, OSError):
                raise
            raise EvalEngineError(f"could not write {folder / name}: {why.strerror or why}; fix that, or leave "
                                  "output_dir and --output_path out") from error  # fmt: skip
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        self.published = target
        logger.info("records of %d requests: %s, digest %s", len(self._answers), target, self.digest)

    def end(self) -> dict[str, str]:
        """Ends the evaluation. Returns what names its records in lm-eval's results, {} if it has none."""
        names = {} if self.published is None else {"records": self.published.name, "digest": self.digest}
        self._asked, self._answers, self.published, self.templated = {}, {}, None, False
        self.cache, self.cached = None, set()
        self.begin = self.loaded = time.perf_counter()  # the next evaluation finds the weights loaded
        self.seconds = 0.0
        return names

    def _fill(self, folder: Path) -> str:
        """Writes the evaluation's files; returns its digest."""
        ended = EndedRun(
            config=self.arguments.config,
            llm=self.llm,
            identity=self._run_identity(),
            stats=self.llm.stats,
            started=self.started,
            begin=self.begin,
            load_seconds=self.loaded - self.begin,
            run_seconds=self.seconds,
            cached=self.cached,
            libraries={"lm-eval": str(getattr(lm_eval, "__version__", "unknown"))},
            cache=None if self.cache is None else asdict(self.cache),
        )
        plan = Plan([], [*self._asked.values()])
        return finish_run(RunFolder(folder), plan, self._answers, ended, None)

    def _run_identity(self) -> dict[str, Any]:
        """The run's identity: the engine's, every prompt, and what decides which part of an answer is scored. Settings
        that lm-eval decides are in its results."""
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


def _free(path: Path) -> Path:
    """The path, or one next to it if another evaluation of the same second has the same digest."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


@dataclass(frozen=True)
class Place:
    """The folder of results that lm-eval writes, or that its Python caller writes."""

    root: Path  # lm-eval's output path
    model: str  # the model's name as lm-eval was given it
    tracker: Any = None

    @property
    def folder(self) -> Path:
        """<output path>/<model>, with the characters that lm-eval replaces; next to an output path that is a file."""
        if self.root.suffix == ".json":
            return self.root.parent
        sanitized = getattr(getattr(self.tracker, "general_config_tracker", None), "model_name_sanitized", None)
        return self.root / (sanitized or lm_eval_utils.sanitize_model_name(self.model))


def find_place(output_dir: str | None, model: str) -> Place | None:
    """The place by the model argument `output_dir`, else by lm-eval's `--output_path`; None without either.

    Raises: ConfigError if the two name different folders (results and records would not be found together), and for
    a folder that cannot be written.
    """
    tracker = running_tracker()
    path = getattr(tracker, "output_path", None) or None
    if output_dir is None:
        return _writable(Place(Path(path), model, tracker), "--output_path") if path else None
    if path and os.path.realpath(path) != os.path.realpath(output_dir):
        raise ConfigError(
            f"output_dir={output_dir}: lm-eval writes its results to {path}, and records are written next to them; "
            "leave output_dir out, or name the same folder"
        )
    return _writable(Place(Path(output_dir), model, tracker), "output_dir")


def _writable(place: Place, setting: str) -> Place:
    """The place, with its root made now, since failing after hours of answers would lose them. Raises ConfigError."""
    root = place.root.parent if place.root.suffix == ".json" else place.root
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{setting}={place.root}: cannot be made ({error.strerror})"
        raise ConfigError(f"{why}; name a folder that can be written") from error
    if not os.access(root, os.W_OK):
        raise ConfigError(f"{setting}={place.root}: cannot be written; name another folder, or mend its permissions")
    return place


def running_tracker() -> Any:
    """The tracker of the `simple_evaluate` that is making a model; None if Python code makes it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "simple_evaluate" and frame.f_globals.get("__name__") == "lm_eval.evaluator":
            return frame.f_locals.get("evaluation_tracker")
        frame = frame.f_back
    return None
