"""The subject of a certificate: a model and its tasks, in the words of the run command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from evalengine.certify.cases import EFFORTS, Case, Effort, build_cases
from evalengine.certify.model import SHAPE, open_checkpoint
from evalengine.config.compose import compose_jobs, experiment_name
from evalengine.config.schema import OUTPUT_FIELDS, SCHEDULE_FIELDS, Config, EngineConfig
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import GenerateRequest
from evalengine.errors import ConfigError
from evalengine.harness.plan import prepare
from evalengine.harness.requests import RequestBuilder
from evalengine.tasks.base import Task

VARIED = tuple(name for name in SCHEDULE_FIELDS if name not in ("device", "tensor_parallel_size", "self_test"))


@dataclass(frozen=True)
class Subject:
    """The subject of a certificate, in words from which another process makes the same one."""

    words: tuple[str, ...]  # settings of a run: task=, model=, limit=, engine.device=, numerics=, ...
    effort: str  # a key of EFFORTS
    layers: int | None = None  # the depth to which a shape is cut; None: not cut

    @cached_property
    def config(self) -> Config:
        return read_settings(self.words)

    @property
    def task_names(self) -> list[str]:
        """The tasks' names; a shape has none, since it has no tokenizer."""
        return [] if self.config.model.path.startswith(SHAPE) or self.layers is not None else list(self.config.tasks)

    @property
    def whole_answers(self) -> bool:
        """Whether the caller says how long answers may be; else the effort cuts them."""
        return any(word.partition("=")[0].endswith("max_gen_toks") for word in self.words)

    def cases(self, checkpoint: Checkpoint, tasks: Sequence[Task]) -> list[Case]:
        """Requests with lengths on both sides of every border, mixed with those of the tasks' first documents."""
        room = self.config.engine.max_model_len or checkpoint.spec.max_position_embeddings
        effort = EFFORTS[self.effort]
        return build_cases(effort, checkpoint, room, list(self._asked(effort, checkpoint, tasks, room)))

    def _asked(self, effort: Effort, checkpoint: Checkpoint, tasks: Sequence[Task], room: int) -> Iterator[Case]:
        builder = RequestBuilder(checkpoint.tokenizer, room, self.config.seed, self.config.long_prompts)
        documents = chain.from_iterable(task.instances(self.config.limit or effort.documents) for task in tasks)
        for item in builder.build(chain.from_iterable(documents)):
            request = item.request
            if isinstance(request, GenerateRequest) and not self.whole_answers:
                tokens = min(request.params.max_tokens, effort.answer_tokens)
                request = replace(request, params=replace(request.params, max_tokens=tokens))
            yield Case(None, request, f"{item.key[0]}, document {item.key[1]}: ")

    def engine(
        self,
        checkpoint: Checkpoint,
        cases: Sequence[Case],
        batch_invariant: bool = True,
        ranks: int | None = None,
        **changed: Any,
    ) -> LLM:
        """The loaded engine, with room for the longest case and a pool of one page, as every schedule makes its own
        pool.

        ranks: the degree of tensor parallelism; None: as configured. changed: other settings of the engine.
        """
        longest = max(case.room for case in cases)
        settings = replace(self.config.engine, max_model_len=longest, num_kv_blocks=1, **changed)
        settings = replace(settings, tensor_parallel_size=ranks or settings.tensor_parallel_size)
        numerics = self.config.numerics if batch_invariant else "auto"
        return LLM(checkpoint, batch_invariant=batch_invariant, numerics=numerics, engine=settings)


def read_settings(words: Sequence[str]) -> Config:
    """The configuration that the words describe.

    Raises `ConfigError` for settings that no run accepts, and for those of the schedule, which verify varies itself.
    """
    if name := experiment_name(words):
        raise ConfigError(f"verify: experiment={name}: is several runs; name the settings of the one to certify")
    config = compose_jobs(words)[0].config
    plain, usual = EngineConfig(), Config()
    set_here = [f"engine.{name}" for name in VARIED if getattr(config.engine, name) != getattr(plain, name)]
    problems = [f"{name}: verify varies the schedule itself; leave it out" for name in set_here]
    if not config.batch_invariant:
        problems.append("batch_invariant=false: promises no equal bits to verify; it runs as the negative control")
    for name in OUTPUT_FIELDS:
        if name != "data_dir" and getattr(config, name) != getattr(usual, name):
            problems.append(f"{name}: verify leaves no run; leave it out (--out names the certificate)")
    if config.model.path.startswith(SHAPE) and any(word.startswith(("task", "limit=")) for word in words):
        problems.append(f"model.path={config.model.path}: a shape has no tokenizer; leave task and limit out")
    if problems:
        raise ConfigError([f"verify: {problem}" for problem in problems])
    return config


def open_subject(config: Config, layers: int | None) -> tuple[Checkpoint, list[Task]]:
    """The model, and the tasks with their rows; a shape has none. Raises `ConfigError` with everything wrong."""
    if config.model.path.startswith(SHAPE) or layers is not None:
        return open_checkpoint(config.model, layers), []
    return prepare(config, scores=False)
