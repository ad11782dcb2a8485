"""The schema of `conf/`: frozen dataclasses, registered with Hydra so that typos and wrong types are refused.

`Config` is what one run is made of. Everything in it can change a result except `EngineConfig`'s schedule settings
(`SCHEDULE_FIELDS`), `output_dir`, `resume` and the other fields of `OUTPUT_FIELDS`: those stay out of a run's id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NUMERICS = ("auto", "native", "exact", "fast")
SCHEDULE_FIELDS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_kv_blocks",
    "kv_cache_memory_fraction",
    "enable_prefix_caching",
    "enforce_eager",
    "device",
    "num_threads",
)


@dataclass(frozen=True)
class ModelConfig:
    """Where the weights and the tokenizer come from."""

    name: str = "???"  # short name: run folders and tables
    path: str = "???"  # a directory, a Hub id, a .gguf file, `package:<module>/<file>`, or `asset:<name>`
    revision: str | None = None  # Hub revision (a commit)
    tokenizer: str | None = None  # a directory or Hub id; null: beside the weights
    load_format: str = "auto"  # auto | safetensors | gguf | dummy (seeded random weights from a config)
    alternatives: list[str] = field(default_factory=list)  # other paths to try, in order, if `path` is absent


@dataclass(frozen=True)
class EngineConfig:
    """The engine. Only `dtype` and `max_model_len` can change a result; the rest is schedule."""

    dtype: str = "auto"  # auto (the checkpoint's) | bfloat16 | float16 | float32
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    max_model_len: int | None = None  # tokens; null: the model's own limit
    max_num_seqs: int = 256  # sequences in one step
    max_num_batched_tokens: int = 4096  # tokens in one step
    block_size: Any = "auto"  # tokens in a KV page; auto: 64
    num_kv_blocks: int | None = None  # pages in the pool; null: from the memory fraction
    kv_cache_memory_fraction: float = 0.5  # of the memory free after loading
    enable_prefix_caching: bool = True
    enforce_eager: bool = False  # CUDA only: no CUDA graphs
    num_threads: int | None = None  # CPU threads; null: torch's default


@dataclass(frozen=True)
class DatasetConfig:
    """One dataset on the Hub, and where its rows lie below `data_dir`."""

    path: str | None = None  # Hub id, or any local file or folder that `datasets` reads
    name: str | None = None  # Hub configuration
    revision: str | None = None  # pinned Hub commit
    folder: str | None = None  # folder below data_dir that holds <split>.jsonl
    files: dict[str, str] = field(default_factory=dict)  # split -> file below data_dir, where it is not <folder>/<split>.jsonl


@dataclass(frozen=True)
class GenerationConfig:
    """How answers are generated (generate_until tasks)."""

    max_gen_toks: int | None = None
    until: list[str] | None = None  # stop strings, besides EOS
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repeats: int | None = None  # samples per document


@dataclass(frozen=True)
class TaskConfig:
    """One task. A null field takes the task's own value (conf/task/<name>.yaml)."""

    cls: str | None = None  # "module:Class" below evalengine.tasks
    version: float | None = None  # lm-eval's task version
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    split: str | None = None  # evaluated split
    fewshot_split: str | None = None  # where exemplars are drawn from
    fewshot_file: str | None = None  # exemplars from a file (.jsonl or .yaml) that the user names
    num_fewshot: int | None = None
    description: str | None = None
    generation: GenerationConfig = field(default_factory=GenerationConfig)


@dataclass(frozen=True)
class Config:
    """One run."""

    task: TaskConfig = field(default_factory=TaskConfig)  # set fields apply to every selected task
    tasks: dict[str, TaskConfig] = field(default_factory=dict)  # filled by conf/task/*.yaml
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    batch_invariant: bool = True
    numerics: str = "auto"
    limit: int | None = None  # documents per task
    seed: int = 0  # sampling noise
    fewshot_seed: int = 1234  # lm-eval's default
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = True
    system_instruction: str | None = None
    long_prompts: str = "truncate"  # truncate (from the left, as lm-eval; counted) | error
    data_dir: str | None = None
    output_dir: str = "results"
    resume: str = "auto"  # auto | never | <run folder>
    progress: bool = True


OUTPUT_FIELDS = ("data_dir", "output_dir", "resume", "progress")
