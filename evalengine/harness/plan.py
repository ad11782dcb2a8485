"""What a run will ask, fixed before anything runs: the tasks' documents, their prompts, and the engine's requests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from evalengine.config import Config
from evalengine.engine.llm import LLM
from evalengine.engine.loader import Checkpoint, resolve_checkpoint
from evalengine.engine.request import GenerateRequest
from evalengine.engine.settings import settings_problems
from evalengine.engine.submission import check_requests
from evalengine.errors import ConfigError
from evalengine.harness.requests import HarnessRequest, RequestBuilder
from evalengine.tasks.base import Instance, Task
from evalengine.tasks.registry import load_task


@dataclass(frozen=True)
class TaskPlan:
    task: Task
    instances: list[list[Instance]]  # a list per document


@dataclass(frozen=True)
class Plan:
    tasks: list[TaskPlan]
    requests: list[HarnessRequest]

    def prompts_sha256(self) -> str:
        """SHA-256 (hex) over every request: its key, its token ids and how it is sampled, in order."""
        digest = hashlib.sha256()
        for item in self.requests:
            request = item.request
            if isinstance(request, GenerateRequest):
                wanted: Any = asdict(request.params)
            else:
                wanted = request.continuation_ids
            digest.update(json.dumps([item.key, item.prompt_ids, wanted]).encode())
        return digest.hexdigest()


def prepare(config: Config) -> tuple[Checkpoint, list[Task]]:
    """Finds the model, reads the tasks' rows and checks the engine's settings, before any weight is loaded.

    Raises one ConfigError with everything that is wrong with any of them.
    """
    problems: list[str] = []
    checkpoint = _collect(problems, lambda: resolve_checkpoint(config.model))
    chat = (
        _collect(problems, lambda: chat_renderer(checkpoint.tokenizer))
        if checkpoint and config.apply_chat_template
        else None
    )
    tasks = [_collect(problems, lambda name=name: _loaded(name, config, chat)) for name in config.tasks]  # type: ignore[misc]
    spec = checkpoint.spec if checkpoint else None
    problems.extend(settings_problems(config.engine, config.batch_invariant, config.numerics, spec))
    if checkpoint is not None and checkpoint.tokenizer is None:
        problems.append("model.tokenizer: this model has no tokenizer (load_format=dummy); name one to run tasks on it")
    if problems:
        raise ConfigError(problems)
    assert checkpoint is not None
    return checkpoint, [task for task in tasks if task is not None]


def build_plan(config: Config, tasks: list[Task], llm: LLM) -> Plan:
    """All prompts of all documents, in document order, and their requests.

    Raises ConfigError for prompts and requests that can never run (RequestBuilder, `check_requests`): the engine would
    refuse them too, but only once the run has a folder.
    """
    plans = [TaskPlan(task, task.instances(config.limit)) for task in tasks]
    builder = RequestBuilder(llm.tokenizer, llm.settings.max_model_len, config.seed, config.long_prompts)
    instances = chain.from_iterable(chain.from_iterable(plan.instances) for plan in plans)
    requests = builder.build(instances)
    names = {item.request.request_id: f"{item.key[0]}, document {item.key[1]}" for item in requests}
    check_requests([item.request for item in requests], llm, lambda request: names[request.request_id])
    return Plan(plans, requests)


def chat_renderer(tokenizer: Any) -> Callable[[list[dict[str, str]]], str]:
    """Messages -> the prompt that the model's chat template makes of them."""
    if tokenizer is None or not tokenizer.chat_template:
        raise ConfigError("apply_chat_template=true: the model's tokenizer has no chat template")

    def render(messages: list[dict[str, str]]) -> str:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    return render


def _loaded(name: str, config: Config, chat: Callable[[list[dict[str, str]]], str] | None) -> Task:
    task = load_task(
        name,
        config.tasks[name],
        data_dir=config.data_dir,
        fewshot_seed=config.fewshot_seed,
        chat=chat,
        fewshot_as_multiturn=config.fewshot_as_multiturn,
        system_instruction=config.system_instruction,
    )
    task.load()
    return task


def _collect(problems: list[str], action: Callable[[], Any]) -> Any:
    try:
        return action()
    except ConfigError as error:
        problems.extend(error.problems)
        return None
