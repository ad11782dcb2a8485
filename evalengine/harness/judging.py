"""A run's answers, scored by a model: the verdicts are a separate run, in the folder `judge/` of the run.

That run has a journal, a digest and receipts as any run has, so that it resumes, reads the cache of answers, and is
checked later. Its rows are the answers, written before it starts; the run whose answers they are takes its scores.
`judging_problems` finds everything that is wrong with it before there is an answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
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
    TaskConfig,
    to_yaml,
)
from evalengine.config.shipped import shipped_model
from evalengine.engine.load.loader import resolve_checkpoint
from evalengine.engine.protocol import EngineProtocol
from evalengine.engine.settings import settings_problems, uses_ray
from evalengine.errors import ConfigError, EvalEngineError, first_of, listed
from evalengine.harness.identity import deferred_llm, engine_identity
from evalengine.harness.requests import Plan
from evalengine.plain_text import warn
from evalengine.records.evidence import CONFIG, open_run
from evalengine.records.folder import DIGEST, IDENTITY, write_text_file
from evalengine.records.lm_eval_file import read_samples, results_files, samples_files
from evalengine.records.schema import Answers, RecordKey
from evalengine.tasks.base import Task
from evalengine.tasks.instance import MADE_UP
from evalengine.tasks.judge import ALIKE, CLS, PAIRED, SINGLE, judge_problems, prompt_names, read_scale
from evalengine.tasks.templates import ENVIRONMENT, Field
from evalengine.util.forked import ForkedTask
from evalengine.util.limits import limited
from evalengine.util.plain_files import file_sha256

SELF = "self"  # as judge.model: the run's own model
SPLIT = "judged"
OF_THE_RUN = (
    *("model", "revision", "api", "think_end_token", "max_model_len"),
    *("apply_chat_template", "chat_template_args", "system_instruction"),
)
NOT_THE_JUDGES = (  # settings of the run that are at their defaults in the judge's
    *("task", "groups", "limit", "score_unfinished_thinking", "logprobs", "resume", "steps", "log_to", "drafts"),
    *("allow_code_execution", "sequential"),
)
SHOWN = 5  # problems of one kind that are listed
FOLDER = "judge"  # within the folder of the run whose answers are judged


@dataclass(frozen=True)
class Judgement:
    """The judge's verdicts on one document's answers."""

    metrics: Mapping[str, float]
    empty: int  # answers without a text
    verdicts: list[str]
    shown: Mapping[str, Any]  # the judge's prompts, and the items of its run that are its verdicts


Rows = dict[int, dict[str, Any]]  # document -> its row in the judge's task
Judgements = Mapping[str, Mapping[int, Judgement]]  # task -> document -> judgement


@dataclass(frozen=True)
class Judge:
    """The judge of a run."""

    config: Config  # that of its own run, less the place of its rows
    settings: Mapping[str, JudgeConfig]  # task -> its judge's settings
    limit: int | None  # of documents
    shares: bool  # whether the run's own engine judges
    engine: EngineProtocol | None  # the run's, or one without weights yet; None for a judge behind an API
    identity: dict[str, Any]  # what a verdict depends on, in addition to prompts and settings: the model, by content

    def judge(
        self, plan: Plan, answers: Answers, denied: Set[RecordKey], folder: Path, perform: Callable[[Config], Path]
    ) -> tuple[Judgements, dict[str, Any]]:
        """(the verdicts on a run's answers, the manifest's facts about them).

        denied: answers that get no credit, whose text is empty for the judge. folder: the run's. perform: makes the
        judge's run; returns its folder.

        Raises what a run raises; the same command then goes on from here.
        """
        place = folder / FOLDER
        config = replace(self.config, output_dir=str(place), data_dir=str(place))
        rows = self.rows(plan, lambda key: "" if key in denied else answers[key].text)
        counts = {name: sum(len(row["responses"]) for row in own.values()) for name, own in rows.items()}
        for name, own in rows.items():
            if empty := sum(map(_empty, own.values())):
                warn(f"tasks.{name}.judge: {empty:,} of {counts[name]:,} answers are empty: they get the lowest value, "
                     "and lose against any text")  # fmt: skip
        changed = [name for name, own in rows.items() if write_rows(place / f"{name}.jsonl", [*own.values()])]
        found = None if changed else _finished(place, config)
        if found is None:
            if config.progress:
                warn(f"{config.model.name} judges {sum(counts.values()):,} answers", "")
            found = perform(config)
        run = f"{FOLDER}/{found.name}"
        judgements = {name: _judgements(found, name, run, [*own]) for name, own in rows.items()}
        facts = {name: _facts(self.settings[name], own, judgements[name]) for name, own in rows.items()}
        model = {"digest": digest_of(found), "model": config.model.name, "api": config.model.api}
        return judgements, {"run": run, **model, "tasks": facts}

    def rows(self, plan: Plan, text_of: Callable[[RecordKey], str]) -> dict[str, Rows]:
        """Task -> a row for each document, in order."""
        rows: dict[str, Rows] = {}
        for task, documents in ((own.task, own.instances) for own in plan.tasks if own.task.name in self.settings):
            judge, of_task = self.settings[task.name], rows.setdefault(task.name, {})
            references = references_of(task, judge, self.limit)
            for instances in documents:
                number = instances[0].doc_id
                doc = task.docs[number]
                label = doc.get(judge.labels) if judge.labels else None
                of_task[number] = {
                    "doc": doc,
                    "target": str(task.target(doc)),
                    "responses": [text_of(one.key) for one in instances],
                    "reference": references[number],
                    "label": None if label is None else str(label),
                    "labelled": doc.get(judge.labelled) if judge.labelled and label is not None else None,
                }
        return rows


def find_judge(config: Config, llm: EngineProtocol | None) -> Judge | None:
    """The judge of a run, if it has one; `judging_problems` found nothing wrong with it. Hashes its weights.

    llm: the run's engine; None where an endpoint answers.
    """
    settings = judged(config)
    if not settings:
        return None
    own = judge_config(config)
    shares = llm is not None and own.model == config.model and own.engine == config.engine
    engine = llm if shares else None
    if engine is None and own.model.api is None:
        engine = deferred_llm(own, resolve_checkpoint(own.model))
    runs = {name: Path(one.against) for name, one in settings.items() if one.against and Path(one.against).is_dir()}
    against = {name: digest_of(run) or file_sha256(results_files(run)[-1]) for name, run in runs.items()}
    identity = {
        **({"api": own.model.api, "model": own.model.name} if engine is None else engine_identity(own, engine)),
        **{name: getattr(own, name) for name in ("apply_chat_template", "system_instruction")},
        **({"against": against} if against else {}),
    }
    return Judge(own, settings, config.limit, shares, engine, identity)


def write_rows(file: Path, rows: list[dict[str, Any]]) -> bool:
    """Writes a judge's rows; whether they were not there already."""
    text = "".join(json.dumps(row, ensure_ascii=True, default=str) + "\n" for row in rows)
    if file.is_file() and file.read_bytes() == text.encode():
        return False
    write_text_file(file, text)
    return True


def _finished(place: Path, config: Config) -> Path | None:
    """The judge's run of these very settings that was finished before the run whose answers it judges was killed."""
    for folder in (file.parent for file in sorted(place.glob(f"*/{CONFIG}"))):
        ended = results_files(folder) and not (folder / IDENTITY).exists()
        if ended and (folder / CONFIG).read_text(encoding="utf-8") == to_yaml(config):
            return folder
    return None


def _judgements(folder: Path, task: str, run: str, documents: Sequence[int]) -> dict[int, Judgement]:
    """The verdicts in a judge's run. run: what the samples of the judged run call it. documents: each row's."""
    found = {}
    for doc, row in sample_rows(folder, task).items():
        arguments = row["arguments"].values()
        shown = {
            "run": run,
            "items": [f"{task}/{doc}/{number}" for number, _ in enumerate(arguments)],
            "prompts": [*dict.fromkeys(one["arg_0"] for one in arguments)],
        }
        metrics = {name: row[name] for name in row["metrics"]}
        labels = [str(label) for label in row["filtered_resps"]]
        found[documents[doc]] = Judgement(metrics, _empty(row["doc"]), labels, shown)
    return found


def _empty(row: Mapping[str, Any]) -> int:
    """How many of a row's answers have no text."""
    return sum(not text.strip() for text in row["responses"])


def _facts(judge: JudgeConfig, rows: Rows, found: Mapping[int, Judgement]) -> dict[str, Any]:
    """One task's verdicts for the manifest, as plain JSON values: how many there are, and how often they and
    the given labels fell together. found: by document; those that the judge's endpoint rejected are missing."""
    counts = {"verdicts": sum(len(rows[number]["responses"]) for number in found)}
    if empty := sum(_empty(rows[number]) for number in found):
        counts["empty"] = empty
    if len(found) < len(rows):
        counts["rejected"] = len(rows) - len(found)
    for metric in ("flipped", "unread"):
        if any(metric in judgement.metrics for judgement in found.values()):
            shares = [one.metrics[metric] * len(rows[number]["responses"]) for number, one in found.items()]
            counts[metric] = round(sum(shares))
    if judge.labels is None:
        return counts
    scale = read_scale(judge.scale)
    labels = scale.categories
    table = [[0] * len(labels) for _ in labels]
    for number, judgement in found.items():
        row = rows[number]
        verdict = judgement.verdicts[-1 if row["labelled"] is not None else 0]
        if row["label"] is not None and verdict in labels:
            table[labels.index(row["label"])][labels.index(verdict)] += 1
    return {**counts, "agreement": {"labels": labels, "ordered": scale.ordered, "table": table}}


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
    default = Config()
    return replace(
        config,
        **{name: getattr(default, name) for name in NOT_THE_JUDGES},
        tasks=tasks,
        model=judge_model(config, judge),
        engine=replace(config.engine, max_model_len=judge.max_model_len or longest),
        apply_chat_template=chat,
        chat_template_args=judge.chat_template_args or (config.chat_template_args if own_model and chat else None),
        enable_thinking=config.enable_thinking if own_model and chat else None,
        system_instruction=judge.system_instruction,
        long_prompts="error",  # one that lost its beginning would be judged by half of the instructions
        cache=config.cache if judge.api is None else CacheConfig(),
        endpoint=replace(config.endpoint, repeats=1) if config.model.api == judge.api else EndpointConfig(),
    )


def judge_model(config: Config, judge: JudgeConfig) -> ModelConfig:
    """The judge's model. Raises ConfigError for a name that means two of them."""
    assert judge.model is not None, "`judging_problems` reports a judge without one"
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
    """Yield a sentence for each problem with the judge's model; those of the run's model are reported elsewhere."""
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
        made = judge_config(config)
    except EvalEngineError as error:
        yield f"judge.model={judge.model}: {' '.join(error.lines)}"
        return
    if checkpoint.tokenizer is None:
        yield f"judge.model={judge.model}: has no tokenizer"
    elif made.apply_chat_template and not checkpoint.tokenizer.chat_template:
        yield f"judge.model={judge.model}: has no chat template; set judge.apply_chat_template=false"
    of_templates = "chat_template_args", "enable_thinking"
    yield from (f"judge.{problem}" for problem in run_problems(made) if problem.startswith(of_templates))
    if judge.system_instruction is not None and not made.apply_chat_template:
        yield "judge.system_instruction: only a chat template shows it; set judge.apply_chat_template=true"
    if judge.model != SELF or made.engine != config.engine:  # else the run reports them for its engine
        for problem in settings_problems(made.engine, made.batch_invariant, made.numerics, checkpoint.spec):
            own = problem.replace("engine.max_model_len", "judge.max_model_len")
            yield f"judge.model={judge.model}: {own if judge.max_model_len else problem}"


def _row_problems(task: Task, judge: JudgeConfig, limit: int | None) -> Iterator[str]:
    """Yield a sentence for each thing that the rows lack for the judge."""
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
