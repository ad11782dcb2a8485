"""The run of a judge, before there is an answer: its configuration, and everything that is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from evalengine.config.check import address_problems, name_of_path, run_problems
from evalengine.config.schema import (
    CacheConfig,
    Config,
    DatasetConfig,
    EndpointConfig,
    JudgeConfig,
    ModelConfig,
    SequentialConfig,
    TaskConfig,
)
from evalengine.config.shipped import shipped_model
from evalengine.engine.load.loader import resolve_checkpoint
from evalengine.engine.settings import settings_problems, uses_ray
from evalengine.errors import ConfigError, EvalEngineError, first_of, listed
from evalengine.records.evidence import open_run
from evalengine.records.folder import DIGEST
from evalengine.records.lm_eval_file import read_samples, results_files, samples_files
from evalengine.tasks.base import Task
from evalengine.tasks.instance import MADE_UP
from evalengine.tasks.judge import ALIKE, CLS, PAIRED, SINGLE, judge_problems, prompt_names, read_scale
from evalengine.tasks.templates import ENVIRONMENT, Field
from evalengine.util.forked import ForkedTask
from evalengine.util.limits import limited

SELF = "self"  # as judge.model: the run's own model
SPLIT = "judged"
OF_THE_RUN = (
    *("model", "revision", "api", "think_end_token", "max_model_len"),
    *("apply_chat_template", "chat_template_args", "system_instruction"),
)
SHOWN = 5  # problems of one kind that are listed


def judged(config: Config) -> dict[str, JudgeConfig]:
    """The tasks whose answers a judge scores. A judge's own run has none."""
    none = JudgeConfig()
    return {name: task.judge for name, task in config.tasks.items() if task.judge != none and task.cls != CLS}


def judge_config(config: Config) -> Config:
    """The configuration of the judge's run, less the place of its rows. Raises ConfigError for a name of two models."""
    own = judged(config)
    judge = next(iter(own.values()))
    tasks = {
        name: TaskConfig(
            cls=CLS,
            version=1.0,
            dataset=DatasetConfig(files={SPLIT: f"{name}.jsonl"}),
            split=SPLIT,
            generation=replace(one.generation, until=one.generation.until or ([] if one.extract else None)),
            judge=JudgeConfig(template=one.template, scale=one.scale, extract=one.extract),
        )
        for name, one in own.items()
    }
    chat = config.apply_chat_template if judge.apply_chat_template is None else judge.apply_chat_template
    own_model = judge.model == SELF
    longest = config.engine.max_model_len if own_model else None
    return replace(
        config,
        task=TaskConfig(),
        tasks=tasks,
        groups={},
        model=judge_model(config, judge),
        engine=replace(config.engine, max_model_len=judge.max_model_len or longest),
        limit=None,
        apply_chat_template=chat,
        chat_template_args=judge.chat_template_args or (config.chat_template_args if own_model and chat else None),
        enable_thinking=config.enable_thinking if own_model and chat else None,
        score_unfinished_thinking=False,
        system_instruction=judge.system_instruction,
        logprobs=None,
        long_prompts="error",  # one that lost its beginning would be judged by half of the instructions
        resume="auto",
        steps=None,
        log_to=None,
        drafts=None,
        allow_code_execution=False,
        sequential=SequentialConfig(),
        cache=config.cache if judge.api is None else CacheConfig(),
        endpoint=replace(config.endpoint, repeats=1) if config.model.api == judge.api else EndpointConfig(),
    )


def judge_model(config: Config, judge: JudgeConfig) -> ModelConfig:
    """The judge's model. Raises ConfigError for a name that means two of them."""
    assert judge.model is not None, "`judging_problems` refuses a judge without one"
    if judge.api is not None:
        return ModelConfig(name=judge.model, api=judge.api, think_end_token=judge.think_end_token)
    if judge.model == SELF:
        return config.model
    model = ModelConfig(**(shipped_model(judge.model) or {"name": name_of_path(judge.model), "path": judge.model}))
    own: dict[str, Any] = {"revision": judge.revision, "think_end_token": judge.think_end_token}
    return replace(model, **{name: value for name, value in own.items() if value is not None})


def judging_problems(config: Config, tasks: Sequence[Task]) -> Iterator[str]:
    """Yields what is wrong with a run's judge, a sentence each; its model is found, and every row is tried.

    tasks: those that could be read.
    """
    own, loaded = judged(config), {task.name: task for task in tasks}
    for name in OF_THE_RUN if len(own) > 1 else ():
        if len(values := {str(getattr(judge, name)) for judge in own.values()}) > 1:
            yield f"judge.{name}: a run has one judge, and its tasks name {listed(sorted(values), 3)}; make two runs"
    if own and config.sequential.step is not None:
        yield "judge: a run in steps (gate --step) has no judge; leave --step out"
    alone = {name: judge_problems(judge) for name, judge in own.items()}
    for name, judge in own.items():
        yield from (f"tasks.{name}.judge.{problem}" for problem in alone[name])
        task = loaded.get(name)
        if task is not None and task.output_type != "generate_until":
            yield f"tasks.{name}.judge: scores answers that were written; this task scores given texts, so leave it out"
        elif task is not None and not alone[name]:
            work: Callable[[], list[str]] = partial(list, _row_problems(task, judge, config.limit))
            with ForkedTask(work, limited=True) as tried:
                yield from (f"tasks.{name}.judge.{problem}" for problem in tried.result())
    if own and all(judge.model is not None for judge in own.values()):
        yield from _model_problems(config)


def _model_problems(config: Config) -> Iterator[str]:
    """What is wrong with the judge's model; with the run's own, it is said where that is found."""
    judge = next(iter(judged(config).values()))
    if judge.api is not None:
        yield from address_problems("judge.api", judge.api)
        return
    if judge.model == SELF and config.model.api is not None:
        yield f"judge.model={SELF}: the model is behind an API; name one that runs here, or set judge.api, too"
        return
    if judge.model != SELF and uses_ray(config):
        yield f"judge.model={judge.model}: replicas on Ray have one model; set judge.model={SELF}, or cluster=local"
    try:
        checkpoint = resolve_checkpoint(judge_model(config, judge))
        asked = judge_config(config)
    except EvalEngineError as error:
        yield f"judge.model={judge.model}: {' '.join(error.lines)}"
        return
    if checkpoint.tokenizer is None:
        yield f"judge.model={judge.model}: has no tokenizer"
    elif asked.apply_chat_template and not checkpoint.tokenizer.chat_template:
        yield f"judge.model={judge.model}: has no chat template; set judge.apply_chat_template=false"
    of_templates = "chat_template_args", "enable_thinking"
    yield from (f"judge.{problem}" for problem in run_problems(asked) if problem.startswith(of_templates))
    if judge.system_instruction is not None and not asked.apply_chat_template:
        yield "judge.system_instruction: is told by a chat template; set judge.apply_chat_template=true"
    if judge.model != SELF or asked.engine != config.engine:  # else the run says it of its own engine
        for problem in settings_problems(asked.engine, asked.batch_invariant, asked.numerics, checkpoint.spec):
            own = problem.replace("engine.max_model_len", "judge.max_model_len")
            yield f"judge.model={judge.model}: {own if judge.max_model_len else problem}"


def _row_problems(task: Task, judge: JudgeConfig, limit: int | None) -> Iterator[str]:
    """What the rows do not have for the judge."""
    docs, scale = task.docs[:limit], read_scale(judge.scale)
    template = Field("template", judge.template)
    own = PAIRED if scale.pairs else SINGLE
    if unused := [name for name in own if name not in template.names]:
        yield f"template: does not show {' and '.join(unused)}, the text that is judged; write {{{{{unused[0]}}}}}"
    for name in sorted(template.names - {*own, *ALIKE, *ENVIRONMENT.globals}):
        yield from _lacking("template", name, docs, (*own, *ALIKE))
    for setting in ("labels", "labelled"):
        if (column := getattr(judge, setting)) is not None and not any(doc.get(column) is not None for doc in docs):
            yield from _lacking(setting, column, [doc for doc in docs if column not in doc] or docs)
    given = {str(label) for doc in docs if judge.labels and (label := doc.get(judge.labels)) is not None}
    if unknown := sorted(given - {*scale.categories}):
        shown = ", ".join(scale.categories)
        yield f"labels={judge.labels}: the scale ({shown}) has no {listed(unknown, SHOWN)}"
    try:
        references = references_of(task, judge, limit)
    except ConfigError as error:
        yield from (f"against={judge.against}: {problem}" for problem in error.problems)
        return
    failed = []
    for number, doc in limited(enumerate(docs)):
        row = {"doc": doc, "target": str(task.target(doc)), "responses": [MADE_UP], "reference": references[number]}
        try:
            [template.render(names) for names in prompt_names(row, scale.pairs)]
        except ValueError as error:
            failed.append(f"{error} (document {number})")
    if failed and {*docs[0]} >= template.names - {*own, *ALIKE, *ENVIRONMENT.globals}:
        yield from first_of(failed, SHOWN, "more documents")


def _lacking(setting: str, name: str, docs: Sequence[dict[str, Any]], others: Sequence[str] = ()) -> Iterator[str]:
    """A sentence if documents lack a column."""
    if without := [number for number, doc in enumerate(docs) if name not in doc]:
        has = listed(sorted({*docs[without[0]], *others}), 12)
        yield f"{setting}: there is no column {name} in document {without[0]}, which has {has}"


def references_of(task: Task, judge: JudgeConfig, limit: int | None) -> list[str | None]:
    """The other answer of each document's pair: a column's, or another run's. None each where answers are graded.

    Raises ConfigError for a column with something else than texts, and a run that has not answered these documents.
    """
    docs = task.docs[:limit]
    if judge.against is None:
        return [None] * len(docs)
    if any(judge.against in doc for doc in docs):
        texts = [doc.get(judge.against) for doc in docs]
        if odd := [number for number, text in enumerate(texts) if not isinstance(text, str)]:
            raise ConfigError(f"the column is no text in document {odd[0]}")
        return texts
    folder = Path(judge.against)
    if not folder.is_dir():
        raise ConfigError(f"neither a column ({', '.join(docs[0])}) nor the folder of a run")
    digest_of(folder)
    rows = sample_rows(folder, task.name)
    texts = []
    for number, doc in enumerate(docs):
        row = rows.get(number)
        if row is None or row.get("doc") != json.loads(json.dumps(doc, default=str)):
            raise ConfigError(f"that run has not answered document {number} of {task.name}, or another document there")
        texts.append(row["resps"][0][0])
    return texts


def digest_of(folder: Path) -> str | None:
    """The digest of a run, whose files are checked; None for one through an endpoint, which has none. Raises
    ConfigError."""
    through_endpoint = results_files(folder) and not (folder / DIGEST).exists()
    return None if through_endpoint else open_run(folder, page=False, judge=False).digest


def sample_rows(folder: Path, task: str) -> dict[int, dict[str, Any]]:
    """Document -> its row among a run's samples, under the first filter. Raises ConfigError for a damaged file."""
    rows: dict[int, dict[str, Any]] = {}
    for results in results_files(folder)[-1:]:
        file = samples_files(results).get(task)
        for row in read_samples(file) if file is not None else ():
            rows.setdefault(row["doc_id"], row)
    return rows
