"""Checks a whole configuration once, where it is composed, and lists all settings that cannot be honoured."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from evalengine.config.arguments import integer, number, shown
from evalengine.config.engine import engine_problems, numerics_problems
from evalengine.config.schema import GENERATION_CONFIGS, IMPLEMENTATIONS, TEMPLATE_DATE, Config
from evalengine.config.tasks import group_problems, task_problems
from evalengine.config.values import (
    as_typed,
    choice_problems,
    is_date,
    is_folder,
    least_problems,
    size_problems,
    text_problems,
)
from evalengine.errors import ConfigError

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
LONG_PROMPTS = ("truncate", "error")
CODE_EXECUTION = (False, True, "without_isolation")
TRACKERS = ("wandb", "mlflow")  # names of their libraries, and of this package's extras
BACKENDS = ("local", "ray")
MAX_REPLICAS = 4096
TEMPLATE_OWN = {"messages", "tools", "documents", "add_generation_prompt"}  # variables that every template is given
MAX_MODEL_NAME = 200


def validate(config: Config, selects: bool = True) -> None:
    """Raises one `ConfigError` that lists every setting that cannot be honoured. selects: whether a task must be."""
    problems = [
        *(_selection_problems(config) if selects else ()),
        *run_problems(config),
        *numerics_problems(config.batch_invariant, config.numerics),
        *engine_problems(config.engine),
        *cluster_problems(config),
        *(problem for name, task in config.tasks.items() for problem in task_problems(name, task)),
        *(problem for name in config.groups for problem in group_problems(name, config)),
        *text_problems(asdict(config), ""),
    ]
    if problems:
        raise ConfigError(problems)


def _selection_problems(config: Config) -> Iterator[str]:
    if not config.tasks:
        yield "task: no task is selected; name one or more, as in task=gsm8k or 'task=[gsm8k,arc_easy]'"


def run_problems(config: Config) -> Iterator[str]:
    """Yields what is wrong with a run's settings other than tasks, numerics and engine, a sentence each."""
    yield from least_problems("limit", config.limit, 1)
    yield from least_problems("logprobs", config.logprobs, 1)
    yield from least_problems("sequential.step", config.sequential.step, 1)
    if (config.sequential.step is None) != (config.sequential.baseline is None):
        yield "sequential: step and baseline are set together, as `gate BASELINE --step 100 -- SETTINGS` does"
    if not 0 <= config.seed < 2**63:
        yield f"seed={config.seed}: must lie in 0 .. 2^63 - 1"
    yield from choice_problems("model.load_format", config.model.load_format, LOAD_FORMATS)
    yield from choice_problems("model.implementation", config.model.implementation, IMPLEMENTATIONS)
    yield from choice_problems("model.generation_config", config.model.generation_config, GENERATION_CONFIGS)
    if not config.model.name.isprintable() or len(config.model.name) > MAX_MODEL_NAME:
        yield (
            f"model.name={config.model.name[:40]!r}: must be at most {MAX_MODEL_NAME} printable characters; it names "
            "the run in folders and tables"
        )
    yield from _thinking_problems(config)
    yield from choice_problems("long_prompts", config.long_prompts, LONG_PROMPTS)
    if config.chat_template_date is not None and not is_date(config.chat_template_date):
        yield f"chat_template_date={config.chat_template_date}: must be a day, as in {TEMPLATE_DATE}"
    if config.resume not in ("auto", "never") and not is_folder(config.resume):
        yield f"resume={config.resume}: must be auto, never, or an existing run folder"
    if config.data_dir is not None and not is_folder(config.data_dir):
        yield f"data_dir={config.data_dir}: no such folder"
    yield from tracker_problems("log_to", config.log_to)
    if config.allow_code_execution not in CODE_EXECUTION:
        yield (
            f"allow_code_execution={as_typed(config.allow_code_execution)}: must be false, true or without_isolation "
            "(no more than limits; for a container or virtual machine)"
        )
    yield from _cache_problems(config)
    if not config.output_dir:
        yield "output_dir: names no folder; results is the default"
    try:
        if Path(config.output_dir).exists() and not Path(config.output_dir).is_dir():
            yield f"output_dir={config.output_dir}: exists and is not a folder"
    except OSError as error:  # the name is too long, or a folder above may not be read
        yield f"output_dir={config.output_dir}: {error.strerror}; name another folder"


def tracker_problems(name: str, tracker: str | None) -> Iterator[str]:
    """Yields what is wrong with a setting that names a tracker: an unknown word, or a library that is not installed."""
    if tracker is None:
        return
    problems = list(choice_problems(name, tracker, TRACKERS))
    yield from problems
    if not problems and not _is_installed(tracker):
        yield f"{name}={tracker}: {tracker} is not installed; pip install 'evalengine[{tracker}]'"


def _is_installed(library: str) -> bool:
    """Whether the library is installed. A mere folder of its name, as W&B leaves in the working directory, is none."""
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None


def _cache_problems(config: Config) -> Iterator[str]:
    path, audit = config.cache.path, number(config.cache.audit)
    if audit is None or not 0 <= audit <= 1:
        yield f"cache.audit={shown(config.cache.audit)}: must lie in 0 ... 1, a share of the kept answers"
    elif audit and path is None:
        yield f"cache.audit={audit}: there is no cache to audit; set cache=FOLDER"
    if path is None:
        return
    if not config.batch_invariant or config.numerics == "fast":
        yield (
            f"cache={path}: fast numerics' bits depend on the batch, so that no answer of theirs can be kept for "
            "another run; leave cache out, or set batch_invariant=true"
        )
    if not path:
        yield "cache: names no folder"
    try:
        if Path(path).exists() and not Path(path).is_dir():
            yield f"cache={path}: exists and is not a folder"
    except OSError as error:
        yield f"cache={path}: {error.strerror}; name another folder"


def _thinking_problems(config: Config) -> Iterator[str]:
    end = config.model.think_end_token
    if end is not None and not (isinstance(end, str) and end) and (integer(end) is None or integer(end) < 0):  # type: ignore[operator]
        yield f"model.think_end_token={shown(end)}: must be the text or the id of what ends a thinking, or null"
    if config.enable_thinking is not None and not config.apply_chat_template:
        yield (
            f"enable_thinking={str(config.enable_thinking).lower()}: it is told to the chat template, and the prompts "
            "are written without one; set apply_chat_template=true"
        )
    variables = {} if config.chat_template_args is None else config.chat_template_args
    if not isinstance(variables, dict) or not all(isinstance(name, str) for name in variables):
        yield f"chat_template_args={shown(variables)}: must be variables with their values, as in {{effort: high}}"
        return
    if variables and not config.apply_chat_template:
        yield "chat_template_args: the prompts are written without a chat template; set apply_chat_template=true"
    if own := sorted(TEMPLATE_OWN & variables.keys()):
        yield f"chat_template_args: {', '.join(own)}: a run's own, which cannot be told; take them out"
    if config.enable_thinking is not None and variables.get("enable_thinking") not in (None, config.enable_thinking):
        yield "chat_template_args.enable_thinking: enable_thinking says otherwise; set one of them"
    if (config.enable_thinking or variables.get("enable_thinking")) and end is None:
        yield (
            "enable_thinking=true: name what ends the thinking, or it would be scored as the answer: "
            "model.think_end_token='</think>', or the token's id"
        )


def cluster_problems(config: Config) -> Iterator[str]:
    """Yields what is wrong with the settings of replicas, a sentence each. `evalengine.cluster.settings` checks what
    depends on Ray and the machine."""
    cluster = config.cluster
    yield from choice_problems("cluster.backend", cluster.backend, BACKENDS)
    automatic = isinstance(cluster.replicas, str) and cluster.replicas == "auto"
    if not automatic:
        yield from size_problems("cluster.replicas", cluster.replicas, MAX_REPLICAS, words="auto or a positive number")
    if cluster.backend == "local":
        if not automatic and cluster.replicas != 1 and integer(cluster.replicas) is not None:
            yield f"cluster.replicas={shown(cluster.replicas)}: several replicas run on Ray; add cluster=ray"
        if cluster.address is not None:
            yield f"cluster.address={as_typed(cluster.address)}: it is a Ray cluster's; add cluster=ray"
    elif cluster.address is not None and not re.fullmatch(r"auto|[^/\s]+:\d{1,5}", str(cluster.address)):
        yield f"cluster.address={shown(cluster.address)}: must be host:port of a Ray cluster, auto, or null"
    if cluster.backend == "ray" and isinstance(config.engine.device, str) and config.engine.device.startswith("cuda:"):
        yield f"engine.device={config.engine.device}: Ray chooses each replica's GPUs; set it to cuda or auto"
    yield from _audit_problems(config)


def _audit_problems(config: Config) -> Iterator[str]:
    audit, cluster = number(config.cluster.audit), config.cluster
    if audit is None or not 0 <= audit <= 1:
        yield f"cluster.audit={shown(cluster.audit)}: must lie in 0 .. 1, a share of the requests"
    elif audit > 0:
        if not config.batch_invariant:
            yield (
                f"cluster.audit={audit}: it compares bits, and with batch_invariant=false these depend on the batch; "
                "set batch_invariant=true, or cluster.audit=0"
            )
        if integer(cluster.replicas) == 1:
            yield f"cluster.audit={audit}: it needs a second replica; set cluster=ray cluster.replicas=2 or more"
