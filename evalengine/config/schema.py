"""The schema of the settings: frozen dataclasses by whose types pydantic reads and checks what Hydra composed.

`Config` holds the settings of one run. Every setting can change a result except `EngineConfig`'s schedule settings
(`SCHEDULE_FIELDS`), `output_dir`, `resume` and the other fields of `OUTPUT_FIELDS`: those stay out of a run's id.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, MinLen, Predicate
from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from typing_extensions import LiteralString, Required, TypedDict

from evalengine.util.validation import integer, must, number

Numerics = Literal["fast", "exact", "native"]
TEMPLATE_DATE = "2024-07-26"  # the date that Llama 3.1's and 3.2's own templates write without a clock
RESOLVED = {"resolved": True}  # of a setting whose recorded value follows from the machine or the numerics level
SCHEDULE_FIELDS = (
    *("max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks", "kv_cache_memory_fraction"),
    *("gpu_memory_utilization", "enable_prefix_caching", "enforce_eager", "cascade_attention", "speculation"),
    *("device", "num_threads", "tensor_parallel_size", "self_test"),
)

# lm-eval's names for `max_gen_toks`, of which the first one given counts, and its generation settings that change
# nothing at these values.
LM_EVAL_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
LM_EVAL_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1}
LM_EVAL_OWN = ("cls", "cluster", "items", "fewshot_file", "judge")  # settings in a task's file that lm-eval lacks


MAX_RANKS = 64  # ranks of one model: more GPUs than any machine has
MAX_SIZE = (1 << 31) - 1  # the most tokens in a step, and pages: kernels index both with int32
MAX_MODEL_NAME = 200


def _as_python(read: Callable[[Any], Any], expected: LiteralString) -> BeforeValidator:
    """NumPy's and torch's numbers as Python's, and texts unchanged; no truth value and no fraction is an integer."""

    def check(value: Any) -> Any:
        if (found := read(value)) is None and not isinstance(value, str):
            raise PydanticCustomError("number", "must be a valid " + expected)
        return value if found is None else found

    return BeforeValidator(check)


# A number is taken as a text, since a Hub configuration may be called 2024. Objects that Python made are checked, too.
SETTINGS = ConfigDict(extra="forbid", coerce_numbers_to_str=True, revalidate_instances="always")
Whole = Annotated[int, _as_python(integer, "integer")]
Real = Annotated[float, _as_python(number, "number")]
Documents = Annotated[Whole, must("be a whole number of documents, not a share of them"), Ge(1)]
Least0 = Annotated[Whole, Ge(0)]
Least1 = Annotated[Whole, Ge(1)]
Size = Annotated[Whole, Ge(1), Le(MAX_SIZE)]
Share = Annotated[Real, Gt(0), Le(1), must("be in (0, 1]")]
ShareOfAnswers = Annotated[Real, Ge(0), Le(1), must("be in 0 .. 1, a share of the answers")]
Seed = Annotated[Whole, Ge(0), Le((1 << 63) - 1), must("be in 0 .. 2^63 - 1")]
Day = Annotated[str, Predicate(lambda day: str(date.fromisoformat(day)) == day), must("be a day, as in 2024-07-26")]
ModelName = Annotated[
    str, Predicate(lambda name: name.isprintable() and len(name) <= MAX_MODEL_NAME),
    must(f"be at most {MAX_MODEL_NAME} printable characters; it names the run in folders and tables"),
]  # fmt: skip
TaskName = Annotated[
    str, Field(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_-]{0,99}\z"),
    must("be up to 100 of A-Z a-z 0-9 _ -, no - first: a task's name is part of file names"),
]  # fmt: skip
NonEmpty = Annotated[str, MinLen(1)]
TokenOrText = Annotated[  # as in lm-eval, a text of digits is a token id
    Least0 | NonEmpty, BeforeValidator(lambda end: int(end) if isinstance(end, str) and end.isdecimal() else end),
    must("be the text or the id of what ends a thinking, or null"),
]  # fmt: skip
Implementation = Literal["auto", "native", "transformers"]
Chosen = Literal["auto", "always", "off"]
AttentionBackend = Literal["auto", "flash_attn", "triton", "sdpa"]
Level = Literal["auto", "native", "exact", "fast"]
LEVELS = get_args(Level)
Sequences = Annotated[Whole, Ge(1), Le((1 << 16) - 1)]  # a decode kernel's grid has one row per sequence
# OpenMP ends a process that gets no more threads. A larger machine's run may be explained on a smaller one.
Threads = Annotated[Whole, Ge(1), Le(max(256, os.cpu_count() or 1))]
Seconds = Annotated[Whole, Ge(1), Le(86_400)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$"), must("be auto, cpu, cuda or cuda:<number>")]
BlockSize = Annotated[Literal["auto"] | Size, must(f"be auto or a number of tokens from 1 to {MAX_SIZE}")]
Replicas = Annotated[Literal["auto"] | Annotated[Whole, Ge(1), Le(4096)], must("be auto or a number from 1 to 4096")]
ChatVariables = Annotated[dict[str, Any], must("be variables with their values, as in {effort: high}")]
Resume = Annotated[
    str, Predicate(lambda name: name in ("auto", "never") or os.path.isdir(name)),
    must("be auto, never, or an existing run folder"),
]  # fmt: skip
CodeExecution = Annotated[
    Literal[False, True, "without_isolation"],
    must("be false, true or without_isolation (no more than limits; for a container or virtual machine)"),
]


@dataclass(frozen=True)
class ModelConfig:
    """Where the weights and the tokenizer come from."""

    __pydantic_config__ = SETTINGS

    name: ModelName = ""  # a short name for run folders and tables; empty: the path's last part
    path: str = "???"  # a directory, a Hub id, a .gguf file, `package:<module>/<file>`, or `asset:<name>`
    revision: str | None = None  # Hub revision (a commit)
    tokenizer: str | None = None  # a directory or Hub id; null: next to the weights
    load_format: Literal["auto", "safetensors", "pytorch", "gguf", "dummy"] = "auto"  # dummy: seeded random weights
    implementation: Implementation = "auto"  # auto: native where there is a family, else transformers
    adapter: str | None = None  # a LoRA adapter, merged at load: a directory or Hub id
    adapter_revision: str | None = None  # Hub revision (a commit) of the adapter
    generation_config: Literal["auto", "none"] = "auto"  # auto: apply the logits processors of generation_config.json
    alternatives: list[str] = field(default_factory=list)  # other paths to try, in order, if `path` is absent
    api: str | None = None  # the address of an endpoint that answers instead, as https://HOST/v1; its model is `name`
    think_end_token: TokenOrText | None = None  # text or token id that ends a thinking; the answer follows


@dataclass(frozen=True)
class EngineConfig:
    """The engine. Only `dtype`, `max_model_len` and, with numerics=fast, `attention_backend` can change a result; the
    rest is schedule."""

    __pydantic_config__ = SETTINGS

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # auto: the checkpoint's
    device: Device = "auto"
    max_model_len: Size | None = None  # tokens; null: the model's own limit
    max_num_seqs: Sequences = 256  # sequences in one step
    max_num_batched_tokens: Size = 4096  # tokens in one step
    attention_backend: AttentionBackend = field(default="auto", metadata=RESOLVED)  # only numerics=fast has one
    block_size: BlockSize = "auto"  # tokens in a KV page; auto: 256 with flash_attn, else 64
    num_kv_blocks: Size | None = field(default=None, metadata=RESOLVED)  # pages; null: from the memory fraction
    kv_cache_memory_fraction: Share = 0.5  # share of the memory that is free after loading
    gpu_memory_utilization: Share | None = None  # instead: of the GPU's whole memory, weights included (as vLLM)
    enable_prefix_caching: bool = True
    enforce_eager: bool = False  # true: decode steps are launched kernel by kernel, not as CUDA graphs
    # auto: tokens are guessed and checked where that pays | always | off
    speculation: Chosen = field(default="auto", metadata=RESOLVED)
    cascade_attention: Chosen = "auto"  # auto: pages that decodes share are read once where it pays
    num_threads: Threads | None = None  # CPU threads; null: torch's default
    tensor_parallel_size: Annotated[Whole, Ge(1), Le(MAX_RANKS)] = 1  # processes that share the model, a GPU for each
    # auto: at the first use of a kind of model on a GPU | always: at every start | off
    self_test: Chosen = field(default="auto", metadata=RESOLVED)


@dataclass(frozen=True)
class ClusterConfig:
    """The engines that answer the requests. No setting here can change a batch-invariant result."""

    backend: Literal["local", "ray"] = "local"  # local: an engine in this process | ray: replicas of it
    replicas: Replicas = 1  # a number; auto: as many as the GPUs of this machine or Ray cluster allow
    address: str | None = None  # a running Ray cluster's (host:port, auto); null: Ray is started here, for this run
    audit: ShareOfAnswers = 0.0  # share of requests that a second replica answers, too; a difference fails


@dataclass(frozen=True)
class DatasetConfig:
    """One dataset on the Hub, and where its rows lie below `data_dir`."""

    path: str | None = None  # Hub id, or any local file or folder that `datasets` reads
    name: str | None = None  # Hub configuration
    revision: str | None = None  # pinned Hub commit
    folder: str | None = None  # folder below data_dir that holds <split>.jsonl
    files: dict[str, str] = field(default_factory=dict)  # split -> file below data_dir, if not <folder>/<split>.jsonl
    gated: bool | None = None  # true: the Hub gives the rows only to accounts that accepted their conditions
    rows: Whole | None = None  # documents in the evaluated split, as published
    where: dict[str, str] = field(default_factory=dict)  # column -> text: only rows with that text


@dataclass(frozen=True)
class GenerationConfig:
    """How answers are generated (generate_until tasks)."""

    max_gen_toks: Least1 | None = None
    until: list[NonEmpty] | None = None  # stop strings, in addition to EOS
    temperature: Annotated[Real, Ge(0)] | None = None
    top_k: Least0 | None = None
    top_p: Share | None = None
    repeats: Least1 | None = None  # samples per document: an older name of the task's own `repeats`


@dataclass(frozen=True)
class FewshotTemplates:
    """Settings of exemplars only (templated tasks); null: as for the evaluated documents."""

    sampler: str | None = None  # default (drawn, as lm-eval draws) | first_n (in file order)
    samples: Any = None  # exemplars written out: a list of rows
    doc_to_text: Any = None
    doc_to_target: Any = None
    doc_to_choice: Any = None
    target_delimiter: str | None = None
    fewshot_delimiter: str | None = None


@dataclass(frozen=True)
class TemplateConfig:
    """A templated task's prompts, answers and scores, under lm-eval's own names (tasks/templated.py)."""

    lm_eval_file: str | None = None  # a file below lm-eval's tasks/, from which null settings are read
    output_type: str | None = None  # multiple_choice | generate_until | loglikelihood | loglikelihood_rolling
    doc_to_text: Any = None  # a Jinja2 template or a column's name; an integer: which choice a text begins with
    doc_to_target: Any = None  # the same, or a list of answers that are all right
    doc_to_choice: Any = None  # a list, a column's name, or a template that writes a list
    target_delimiter: str | None = None
    fewshot_delimiter: str | None = None
    fewshot_config: FewshotTemplates = field(default_factory=FewshotTemplates)
    spare_exemplar: bool | None = None  # whether one exemplar more is drawn, for any class; null: decided by the splits
    filter_list: Any = None  # [{name, filter: [{function, ...}]}]
    metric_list: Any = None  # [{metric, aggregation, higher_is_better, ...}]


@dataclass(frozen=True)
class LmEvalConfig:
    """A task of the installed lm-eval (evalengine/integrations/lm_eval_tasks)."""

    # The chosen name and its task, as mmlu_stem/mmlu_anatomy, or a YAML file; task=lm_eval/NAME or ./FILE fills it.
    name: str | None = None


@dataclass(frozen=True)
class JudgeConfig:
    """A model that scores a task's answers (docs/judge.md); `judge.model=` stands for `task.judge.model=`."""

    model: str | None = None  # a name of conf/model/, a folder, a Hub id or a .gguf file; self: the run's own
    revision: str | None = None  # Hub revision (a commit)
    api: str | None = None  # the address of an endpoint that judges, as https://HOST/v1; its model is `model`
    template: str | None = None  # Jinja2 over the row's columns, `response` and `target`; pairs: `response_a`, `_b`
    scale: Any = None  # labels, the worst first; {label: value}; yes_no; pairs, or {label: first | second | tie}
    extract: str | None = None  # reads the label out of a text that the judge writes; null: the likeliest label
    generation: GenerationConfig = field(default_factory=GenerationConfig)  # of such a text
    against: str | None = None  # pairs: the column of the other answer, or the folder of a run whose answers it has
    labels: str | None = None  # the column of given labels, with which the verdicts are compared
    labelled: str | None = None  # the column of the texts that were given them; null: the run's own answers
    apply_chat_template: bool | None = None  # null: as the run's
    chat_template_args: ChatVariables | None = None
    system_instruction: str | None = None
    think_end_token: TokenOrText | None = None  # as `model.think_end_token`, of the judge
    max_model_len: Size | None = None  # tokens; null: the judge's own limit


ITEM_MARK = "#"  # stands between the name of a set of items and an item's, in the names of clusters


@dataclass(frozen=True)
class TaskConfig:
    """One task. A null field takes the task's own value (conf/task/<name>.yaml).

    A special token's string in a row's text, as "<|endoftext|>", becomes the token itself, as with lm-eval's hf
    backend; the manifest counts such documents.
    """

    cls: str | None = None  # "module:Class" below evalengine.tasks, or of any package that can be imported
    alias: str | None = None  # its name in tables, below a group's
    version: Annotated[Real, Field(allow_inf_nan=False)] | None = None  # lm-eval's task version
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    split: str | None = None  # evaluated split
    fewshot_split: str | None = None  # the split that exemplars are drawn from
    fewshot_file: str | None = None  # exemplars from a file (.jsonl or .yaml) that the user names
    num_fewshot: Least0 | None = None
    description: str | None = None
    cluster: str | None = None  # the column that names what rows share (a passage, a video); statistics count these
    items: str | None = None  # the name of a set of items that other tasks ask, too, as a translation: row n is item n
    repeats: Least1 | None = None  # samples a document, at a temperature above 0
    gen_prefix: str | None = None  # the start of the assistant's answer: a text, or a template if the task takes them
    pass_at: list[Whole] | None = None  # the j of each pass@j that is reported; pass@repeats always is
    choice_order: Whole | None = None  # the seed of another order of a question's options; null: the rows' own
    code_timeout: Seconds | None = None  # of processor time for each program of a task that runs them; null: 3
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    template: TemplateConfig = field(default_factory=TemplateConfig)  # for tasks that a file describes
    lm_eval: LmEvalConfig = field(default_factory=LmEvalConfig)  # for tasks that lm-eval itself runs
    judge: JudgeConfig = field(default_factory=JudgeConfig)  # a model that scores the answers


class Aggregate(TypedDict, total=False):
    """How a group's metric is made of its tasks' metrics."""

    __pydantic_config__ = SETTINGS  # type: ignore[misc]
    metric: Required[str]
    weight_by_size: bool
    filter_list: Any
    aggregation: Annotated[Literal["mean"], must("be mean: no others are built")]


@dataclass(frozen=True)
class GroupConfig:
    """Tasks that are reported together, with their aggregation written as in lm-eval's groups."""

    tasks: list[str] = field(default_factory=list)  # tasks and groups
    alias: str | None = None  # its name in tables
    version: Any = None  # a number as it is written: lm-eval's results hold it as a text, "2" or "2.0"
    aggregate_metric_list: list[Aggregate] | None = None


@dataclass(frozen=True)
class CacheConfig:
    """The cache of answers (`evalengine/cache`); `cache=FOLDER` stands for `cache.path=FOLDER`."""

    path: NonEmpty | None = None  # a folder, which several processes may share; null: no cache
    audit: ShareOfAnswers = 0.0  # the share of the answers read from it that is computed again and compared


@dataclass(frozen=True)
class EndpointConfig:
    """How requests are sent to a hosted model (`model.api`)."""

    concurrency: Least1 = 16  # requests at once
    retries: Least0 = 5  # of a request that failed for a reason that may pass
    timeout: Seconds = 300  # for a whole answer, from the connection to its last byte
    repeats: Least1 = 1  # how often each request is sent, with identical bytes: shows the endpoint's noise
    body: ChatVariables | None = None  # more fields of every request, {name: value}; null takes one of ours away


@dataclass(frozen=True)
class SequentialConfig:
    """A run that computes its documents in steps and ends once a gate is decided; `gate --step` sets it."""

    step: Least1 | None = None  # documents of each task in a step; null: all at once
    baseline: str | None = None  # what the gate holds the run to; its digest orders the documents
    policy: str = "accuracy"
    base: str | None = None  # the git revision that the baseline is taken from


@dataclass(frozen=True)
class Config:
    """One run."""

    __pydantic_config__ = SETTINGS

    task: TaskConfig = field(default_factory=TaskConfig)  # set fields apply to every selected task
    tasks: dict[TaskName, TaskConfig] = field(default_factory=dict)  # filled by conf/task/*.yaml
    groups: dict[TaskName, GroupConfig] = field(default_factory=dict)  # filled by files that choose several tasks
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    batch_invariant: bool = True
    numerics: Level = "auto"
    limit: Documents | None = None  # documents per task
    seed: Seed = 0  # sampling noise
    fewshot_seed: Whole = 1234  # lm-eval's default
    apply_chat_template: bool = False
    chat_template_args: ChatVariables | None = None  # more variables for the chat template
    enable_thinking: bool | None = None  # the chat template's variable of this name; null: not set
    score_unfinished_thinking: bool = False  # true: a text whose thinking did not end is scored as an answer
    chat_template_date: Day | None = None  # the date of a chat template's clock; null: TEMPLATE_DATE
    fewshot_as_multiturn: bool = True
    system_instruction: str | None = None
    logprobs: Least1 | None = None  # most probable alternatives recorded for every generated token; null: none
    long_prompts: Literal["truncate", "error"] = "truncate"  # truncate: from the left, as lm-eval; counted
    data_dir: str | None = None
    output_dir: str = "results"
    resume: Resume = "auto"
    progress: bool = True
    steps: list[Whole] | None = None  # for experiment=checkpoints: the models' steps, if their names have none
    log_to: str | None = None  # wandb | mlflow: where the finished run is logged, too
    drafts: str | None = None  # an earlier run's folder, whose answers are guesses of this one's (`engine.speculation`)
    allow_code_execution: CodeExecution = False  # true: the model's programs are run, isolated
    cache: CacheConfig = field(default_factory=CacheConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    sequential: SequentialConfig = field(default_factory=SequentialConfig)


OUTPUT_FIELDS = (
    *("data_dir", "output_dir", "resume", "progress", "steps", "log_to", "drafts"),
    *("allow_code_execution", "cluster", "cache", "endpoint"),
)


def selection(config: Config) -> str:
    """A run's name: its groups, and its tasks outside all groups, joined by +."""
    grouped = {child for group in config.groups.values() for child in group.tasks}
    return "+".join(name for name in (*config.groups, *config.tasks) if name not in grouped)


def leaves(name: str, groups: Mapping[str, GroupConfig]) -> list[str]:
    """The names of a group's tasks, tasks of groups within it included, each once."""
    tasks: dict[str, None] = {}
    for child in groups[name].tasks:
        tasks.update(dict.fromkeys(leaves(child, groups) if child in groups else [child]))
    return [*tasks]


def to_yaml(config: Config) -> str:
    """The resolved configuration, as `config.yaml` in a run's folder holds it."""
    import yaml

    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)


def template_date(config: Config) -> str | None:
    """The fixed date that the chat template sees; None for a run without the template."""
    return (config.chat_template_date or TEMPLATE_DATE) if config.apply_chat_template else None


def template_variables(config: Config) -> dict[str, Any]:
    """The chat template's variables other than the messages."""
    thinking = {} if config.enable_thinking is None else {"enable_thinking": config.enable_thinking}
    return {**(config.chat_template_args or {}), **thinking}
