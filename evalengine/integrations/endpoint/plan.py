"""The bodies of an endpoint's requests, one per request of the tasks, fixed before anything is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evalengine.config.check import address_problems
from evalengine.config.schema import Config
from evalengine.errors import ConfigError, first_of
from evalengine.harness.judging import judging_problems
from evalengine.harness.plan import execution_problems, read_tasks, rehearse
from evalengine.harness.requests import HarnessRequest, Plan, TaskPlan
from evalengine.records.sealed import canonical
from evalengine.tasks.instance import Instance

MOST_STOPS = 4  # that OpenAI's interface takes; answers are cut at all of them here


@dataclass(frozen=True)
class EndpointPlan:
    """The tasks' documents, and the body of each request."""

    plan: Plan
    bodies: list[dict[str, Any]]
    url: str  # the whole address

    @property
    def sha256(self) -> str:
        """Over all bodies, in order."""
        return hashlib.sha256(canonical(self.bodies).encode()).hexdigest()


class MessagesAsText:
    """Replaces a chat template: keeps the messages, which the endpoint renders."""

    def __call__(self, messages: list[dict[str, str]]) -> str:
        return json.dumps(messages, ensure_ascii=False)

    def continued(self, messages: list[dict[str, str]]) -> str:
        raise ConfigError("model.api: an endpoint does not continue a partial answer (gen_prefix); "
                          "apply_chat_template=false requests a completion")  # fmt: skip


def endpoint_plan(config: Config) -> EndpointPlan:
    """The plan. Raises one ConfigError with everything that an endpoint cannot do."""
    problems = list(_problems(config))
    chat: Any = MessagesAsText() if config.apply_chat_template else None
    tasks = read_tasks(config, chat, problems)
    scoring = [task.name for task in tasks if task.output_type != "generate_until"]
    problems += [f"tasks.{name}: it scores given texts, and an endpoint only writes" for name in scoring]
    problems += [*execution_problems(config, tasks), *judging_problems(config, tasks)]
    if problems:
        raise ConfigError(first_of(problems, 10))
    plans, requests, warnings = [], [], list[str]()
    for task in tasks:
        instances = task.instances(config.limit, lambda document, text: None)
        rehearse(task, instances)
        plans.append(TaskPlan(task, instances))
        warnings.extend(task.warnings(len(instances)))
        for instance in (one for own in instances for one in own):
            requests.append(HarnessRequest(instance.key, instance, None, 0))  # type: ignore[arg-type]  # for no engine
    bodies = [_body(item.instance, config) for item in requests]
    path = "chat/completions" if config.apply_chat_template else "completions"
    assert config.model.api is not None
    plan = Plan(plans, requests, (*warnings,), sum(task.own_exemplars for task in tasks))
    return EndpointPlan(plan, bodies, f"{config.model.api.rstrip('/')}/{path}")


def _problems(config: Config) -> list[str]:
    named = {"cache.path": config.cache.path, "logprobs": config.logprobs, "sequential.step": config.sequential.step,
             "enable_thinking": config.enable_thinking, "chat_template_args": config.chat_template_args,
             "log_to": config.log_to, "model.adapter": config.model.adapter}  # fmt: skip
    problems = [f"{name}: of no use with model.api; leave it out" for name, value in named.items() if value is not None]
    return [*problems, *address_problems("model.api", config.model.api or "")]


def _body(instance: Instance, config: Config) -> dict[str, Any]:
    """One request. `endpoint.body` adds fields, and takes those away that it has null for."""
    generation = instance.generation
    assert generation is not None
    body: dict[str, Any] = {"model": config.model.name}
    if config.apply_chat_template:
        body["messages"] = json.loads(instance.context)
    else:
        body["prompt"] = instance.context
    body |= {"max_tokens": generation.max_gen_toks, "temperature": generation.temperature,
              "seed": config.seed + instance.repeat}  # fmt: skip
    if generation.until:
        body["stop"] = list(generation.until[:MOST_STOPS])
    if generation.top_p != 1:
        body["top_p"] = generation.top_p
    if generation.top_k:
        body["top_k"] = generation.top_k
    further: Mapping[str, Any] = config.endpoint.body or {}
    return {name: value for name, value in {**body, **further}.items() if value is not None}
