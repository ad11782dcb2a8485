"""A run's `manifest.json` as it is read: what is wrong with a file in one sentence, and typed parts whose fields a
reader may use by name.

A part that is read has every field. What an older version did not record, or what is no value of the field's type, is
the type's neutral value: None where the type allows it, else "", 0, False or nothing. A reader that must know the
difference calls `missing_for_page` first. What no field names stays in `Manifest.content`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from evalengine.errors import ConfigError
from evalengine.records.shapes import Count, Flag, Number, Sha256, Text, each, fits, with_fields, wrong
from evalengine.util.plain_files import read_json

MANIFEST = "manifest.json"
_IDENTITY = with_fields(
    {
        "numerics?": Text,
        "dtype?": Text,
        "weights?": Text,
        "tokenizer?": Any,  # compared, field by field; a hash alone in the manifests of older versions
        "tasks?": each(with_fields({"generation?": with_fields({"temperature?": Number})})),
        "datasets?": each(with_fields({"sha256?": Text})),
    }
)
# What every reader relies on. A page needs more (`PAGE`).
_MANIFEST = with_fields(
    {
        "digest": Sha256,
        "task_digests": dict[str, Sha256],
        "identity": _IDENTITY,
        "run_id?": Text,
        "started?": Text,  # "2026-01-02T03:04:05Z"; as the command, not in the manifests of older versions
        "command?": list[Text],
        "numerics?": Text,
        "model?": with_fields({"name?": Text}),
        "engine?": dict,
        "code?": with_fields({"commit?": Text}),
        "counts?": with_fields({"requests?": Count, "resumed_requests?": Count, "cached_requests?": Count}),
        "cache?": dict,
        "timings?": dict[str, Number],
        "programs?": with_fields({"isolated": Flag, "outcomes": dict[str, dict[str, Count]]}),
    }
)
_COUNTS = ("documents", "requests", "resumed_requests", "truncated_prompts", "prompt_tokens", "output_tokens")
_STATS = ("num_steps", "num_computed_tokens", "num_cached_tokens", "num_preemptions", "largest_batch", "largest_step")
_MODEL = ("name", "architecture", "format", "weights_sha256")
PAGE = with_fields(
    {
        "contract_version": Number,
        "numerics": Text,
        "python": Text,
        "model": with_fields({**dict.fromkeys(_MODEL, Text), "num_parameters": Count}),
        "datasets": each(with_fields({"rows?": Count})),
        "engine": with_fields({"dtype": Text, "device": Text, "stats?": with_fields(dict.fromkeys(_STATS, Count))}),
        "counts": with_fields(dict.fromkeys(_COUNTS, Count)),
        "timings": with_fields(dict.fromkeys(("load_seconds", "run_seconds", "total_seconds"), Number)),
        "code": with_fields({"version": Text, "commit?": Text, "dirty?": Flag}),
        "hardware": with_fields({"device": Text, "cpu": Text, "cpu_count?": Count, "gpus": list[Text]}),
        "libraries": dict[str, Text],
    }
)


@dataclass(frozen=True)
class Code:
    """The package that ran."""

    version: str
    commit: str | None  # the commit of the package's git checkout
    dirty: bool | None  # whether the checkout differed from the commit


@dataclass(frozen=True)
class Hardware:
    """The hardware of a computation."""

    device: str  # as torch names it: "cpu", "cuda:0"
    cpu: str
    cpu_count: int | None
    gpus: list[str]  # with their architecture and CUDA version; empty on CPU


@dataclass(frozen=True)
class Model:
    """Which model it was."""

    name: str
    source: str | None  # a folder, a file, a Hub id, or `asset:NAME`
    revision: str | None  # the Hub's commit
    format: str  # safetensors | gguf | dummy
    architecture: str
    num_parameters: int
    weights_sha256: str
    eos_token_ids: list[int]
    prefix_token_id: int | None  # what scores of a text without context begin with
    processors: dict[str, Any]  # those of generation_config.json in force; older manifests have none
    adapter: dict[str, Any]  # source, revision and sha256 of the one that is merged into the weights; {} without one


@dataclass(frozen=True)
class Dataset:
    """The rows of one task."""

    dataset: str | None  # a Hub id or a path
    name: str | None  # the dataset's configuration
    revision: str | None
    split: str | None
    rows: int  # the number of rows that were evaluated
    sha256: str | None  # SHA-256 of the evaluated rows, in their order
    source: str | None = None  # the file, the folder or the Hub's dataset that they were read from


@dataclass(frozen=True)
class SchedulerStats:
    """The scheduler's counters, a part of `EngineStats`."""

    num_steps: int
    num_computed_tokens: int
    num_cached_tokens: int  # not computed thanks to the prefix cache
    num_preemptions: int
    largest_batch: int  # sequences in one step
    largest_step: int  # tokens in one step
    num_generated_tokens: int | None = None  # without those scored; manifests of older versions have none
    num_guesses: int | None = None  # tokens computed before it was known that they would be chosen; older ones: none
    num_right_guesses: int | None = None


@dataclass(frozen=True)
class EngineSetup:
    """How the engine was set, as it was resolved; `Manifest.engine_settings` has all settings by name."""

    numerics: str
    dtype: str
    device: str
    max_model_len: int | None
    stats: SchedulerStats | None  # None where none were recorded


@dataclass(frozen=True)
class RunCounts:
    """Counts of a run's work."""

    documents: int
    requests: int
    resumed_requests: int  # taken from the journal, not run again
    truncated_prompts: int  # cut from the left to fit max_model_len
    prompt_tokens: int  # prompt tokens of the requests that ran
    output_tokens: int  # tokens generated or scored by the requests that ran
    truncated_thinking: int = 0  # generations that reached max_gen_toks before the end of their thinking
    unended_thinking: int = 0  # generations that stopped before the end of their thinking
    length_limited: int = 0  # generations that ended at max_gen_toks, or at the end of the context
    cached_requests: int = 0  # read from the cache, not run
    own_exemplar_prompts: int = 0  # documents whose prompts contain the document itself as an exemplar
    special_token_documents: int = 0  # whose text holds a special token's string: it was read as the token


@dataclass(frozen=True)
class RunTimings:
    """Seconds of wall-clock time."""

    load_seconds: float  # seconds that loading weights and tokenizer took
    run_seconds: float  # seconds that the requests took
    total_seconds: float


@dataclass(frozen=True)
class Programs:
    """How the programs that a model wrote were run, and ended."""

    isolated: bool  # from network, files and other processes
    outcomes: dict[str, dict[str, int]]  # task -> outcome -> programs


@dataclass(frozen=True)
class CacheUse:
    """The cache of answers in a run."""

    hits: int  # answers that were read
    audited: int  # answers that were computed again and compared: equal, or the run has failed
    corrupt: int  # entries whose hash is wrong
    failed: str | None  # why the run went on without the cache, if it did


@dataclass(frozen=True)
class Agreement:
    """How often a judge's verdicts and given labels fell together."""

    labels: list[str]  # the worst first
    ordered: bool  # whether some labels are nearer to each other than others
    table: list[list[int]]  # documents by given label (row) and verdict (column)


@dataclass(frozen=True)
class JudgedTask:
    """A judge's verdicts on one task's answers."""

    verdicts: int
    flipped: int | None  # pairs whose verdict hung on which answer stood first; None where answers were graded
    unread: int | None  # texts without a label; None where the likeliest label was the verdict
    empty: int | None  # answers without a text, which have the lowest value; None for none
    rejected: int | None  # documents without a verdict, since the judge's endpoint rejected them; None for none
    agreement: Agreement | None  # None without given labels


@dataclass(frozen=True)
class Judged:
    """The run of the judge that scored a run's answers."""

    run: str  # its folder, from that of the judged run
    digest: str | None  # None where it is behind an API
    model: str
    api: str | None  # its address
    tasks: dict[str, JudgedTask]


@dataclass(frozen=True)
class ClusterMember:
    """One engine of a run on a cluster."""

    host: str
    device: str
    lost: str | None  # why it left in mid-run
    suspect: str | None  # why its answers are doubted


@dataclass(frozen=True)
class Cluster:
    """The replicas of a run, and what became of them."""

    replicas: list[ClusterMember]
    refused: list[str]  # why each one that was not let in was not
    audited: int  # requests that two of them answered, in equal bits
    unaudited: int  # that were to be, and were not


@dataclass(frozen=True)
class Manifest:
    """A run: its settings, machine and counts. What is not recorded reads as in every part."""

    content: dict[str, Any]  # the JSON object, with what newer versions add; empty where a run has no manifest
    run_id: str | None = field(init=False)
    started: str | None = field(init=False)  # "2026-01-02T03:04:05Z"; older versions recorded no start and no command
    command: list[str] | None = field(init=False)  # the words after `python -m evalengine`; None if Python started it
    digest: str = field(init=False)
    task_digests: dict[str, str] = field(init=False)
    contract_version: float | None = field(init=False)
    numerics: str | None = field(init=False)  # exact | native | fast
    identity: dict[str, Any] = field(init=False)  # what `run_identity` gives: plain JSON values, compared one by one
    model: Model = field(init=False)
    datasets: dict[str, Dataset] = field(init=False)  # task -> its rows; lm-eval loads its own, and records none
    engine: EngineSetup = field(init=False)
    counts: RunCounts = field(init=False)
    timings: RunTimings = field(init=False)
    programs: Programs | None = field(init=False)  # None where no task runs what the model wrote
    cache: CacheUse | None = field(init=False)  # None where the run had no cache of answers
    judge: Judged | None = field(init=False)  # None where no judge scored the answers
    cluster: Cluster | None = field(init=False)  # None where one engine answered
    code: Code = field(init=False)
    hardware: Hardware = field(init=False)  # with replicas, the first one's
    python: str = field(init=False)
    libraries: dict[str, str] = field(init=False)  # package -> version
    files: dict[str, str] | None = field(init=False)  # name -> SHA-256 of every other file of the run (`evidence`)
    sha256: str | None = field(init=False)  # SHA-256 of the manifest without this field

    def __post_init__(self) -> None:
        for name, value in read_fields(Manifest, {**self.content, "content": self.content}).items():
            object.__setattr__(self, name, value)  # the fields are frozen for everybody else

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self.content)

    @property
    def from_cache(self) -> int:
        """How many answers were read from a cache and not computed again."""
        return 0 if self.cache is None else self.cache.hits - self.cache.audited

    @property
    def output_kind(self) -> str:
        """The kind of the output tokens: "scored" where the model was only given them, else "output"."""
        stats = self.engine.stats
        return "scored" if stats is not None and stats.num_generated_tokens == 0 else "output"

    @property
    def unsealed(self) -> dict[str, Any]:
        """The content that `sha256` is the hash of."""
        return {name: value for name, value in self.content.items() if name != "sha256"}

    @property
    def engine_settings(self) -> dict[str, Any]:
        """All settings of the engine by name, as they were resolved."""
        part = self.content.get("engine")
        items = part.items() if isinstance(part, Mapping) else ()
        return {name: value for name, value in items if name not in ("stats", "kernels", "self_test_verdict")}

    def file_text(self) -> str:
        """`manifest.json`: every run's is written so."""
        return json.dumps(self.content, indent=2, ensure_ascii=False) + "\n"


def not_run(counts: RunCounts) -> int:
    """How many of a manifest's requests its run did not compute: from an interrupted run, or read from a cache."""
    return counts.resumed_requests + counts.cached_requests


def resumed_fast(manifest: Manifest) -> int:
    """Of a run whose numerics are fast: how many requests it took from an interrupted one; 0 for any other run.

    The rest ran in other batches than an unbroken run's, and fast numerics' bits depend on the batch: the same command
    gives these bits never again.
    """
    return manifest.counts.resumed_requests if manifest.numerics == "fast" else 0


def credit_words(manifest: Manifest) -> str:
    """How a run scored texts whose thinking did not end. One from before there was the setting scored them."""
    scored = manifest.identity.get("score_unfinished_thinking", True)
    return "scored as if they were answers" if scored else "no credit"


def load_manifest(path: Path, fix: str) -> Manifest:
    """`manifest.json`. Raises `ConfigError` if it is missing or is no manifest."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: missing or damaged ({error}); {fix}") from error
    if problem := wrong(content, _MANIFEST):
        raise ConfigError(f"{path}: not the manifest of a run ({problem}); {fix}")
    return Manifest(content)


def glance_at_manifest(path: Path) -> Manifest:
    """`manifest.json` without any check, to choose among many runs. Raises OSError if it cannot be read, ValueError if
    it is no JSON object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return Manifest(content)


def missing_for_page(manifest: Manifest) -> str:
    """The fields that a page needs and this manifest lacks, in words; "" if there are none."""
    return wrong(manifest.content, PAGE)


PartType = TypeVar("PartType")
_PLAIN: dict[Any, Any] = {str: Text, int: Count, float: Number, bool: Flag}


def read_part(kind: type[PartType], value: Any) -> PartType:
    """A part from the file's JSON value; one that is no object holds nothing."""
    return kind(**read_fields(kind, value))


def read_fields(kind: type, value: Any) -> dict[str, Any]:
    """Field name -> what the JSON object says of it, for the fields that the constructor or the class itself sets."""
    members = value if isinstance(value, Mapping) else {}
    return {name: _read(kind_of_field, members.get(name)) for name, kind_of_field in _types(kind).items()}


def _read(expected: Any, value: Any) -> Any:
    """The value if it is of the wanted type, else the type's neutral value."""
    inner = get_args(expected)
    if expected is Any:
        return value
    if is_dataclass(expected):
        return read_part(expected, value)  # type: ignore[arg-type]
    if type(None) in inner:
        absent = value in (None, {}) or (inner[0] in _PLAIN and not fits(value, _PLAIN[inner[0]]))
        return None if absent else _read(inner[0], value)
    if get_origin(expected) is list:
        return [_read(inner[0], one) for one in value] if isinstance(value, list) else []
    if get_origin(expected) is dict:
        return {name: _read(inner[1], one) for name, one in value.items()} if isinstance(value, Mapping) else {}
    return value if fits(value, _PLAIN[expected]) else expected()


@cache
def _types(kind: type) -> dict[str, Any]:
    types = get_type_hints(kind)
    return {item.name: types[item.name] for item in fields(kind)}
