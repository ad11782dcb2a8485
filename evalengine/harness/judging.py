"""A run's answers, scored by a model: the verdicts are a run of their own, in the folder `judge/` of the run.

That run has a journal, a digest and receipts as any run has, so that it resumes, reads the cache of answers, and is
checked later. Its rows are the answers, written before it starts; the run whose answers they are takes its scores.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evalengine.config.schema import Config, JudgeConfig, to_yaml
from evalengine.engine.load.loader import resolve_checkpoint
from evalengine.engine.protocol import EngineProtocol
from evalengine.harness.identity import deferred_llm, engine_identity
from evalengine.harness.judge_run import digest_of, judge_config, judged, references_of, sample_rows
from evalengine.harness.plan import Plan, build_plan, prepare
from evalengine.plain_text import warn
from evalengine.records.evidence import CONFIG
from evalengine.records.folder import IDENTITY, write_text_file
from evalengine.records.lm_eval_file import results_files
from evalengine.records.schema import Answers, RecordKey
from evalengine.tasks.base import named_errors
from evalengine.tasks.instance import MADE_UP
from evalengine.tasks.judge import read_scale
from evalengine.util.plain_files import file_sha256

REHEARSED = 50  # documents that are planned with made-up answers before the first is answered
FOLDER = "judge"  # within the folder of the run whose answers are judged
Ask = Callable[[Config], Path]  # makes a judge's run; returns its folder


@dataclass(frozen=True)
class Judgement:
    """What the judge said of one document's answers."""

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
    identity: dict[str, Any]  # what a verdict depends on besides prompts and settings: the model, by content

    def judge(self, plan: Plan, answers: Answers, folder: Path, ask: Ask) -> tuple[Judgements, dict[str, Any]]:
        """(the verdicts on a run's answers, the manifest's facts about them). folder: the run's.

        Raises what a run raises; the same command then goes on from here.
        """
        place = folder / FOLDER
        config = replace(self.config, output_dir=str(place), data_dir=str(place))
        rows = self._rows(plan, lambda key: answers[key].text)
        counts = {name: sum(len(row["responses"]) for row in own.values()) for name, own in rows.items()}
        for name, own in rows.items():
            if empty := sum(map(_empty, own.values())):
                warn(f"tasks.{name}.judge: {empty:,} of {counts[name]:,} answers are empty: they get the lowest value, "
                     "and lose against any text")  # fmt: skip
        changed = [name for name, own in rows.items() if _write(place / f"{name}.jsonl", [*own.values()])]
        found = None if changed else _finished(place, config)
        if found is None:
            if config.progress:
                warn(f"{config.model.name} judges {sum(counts.values()):,} answers", "")
            found = ask(config)
        run = f"{FOLDER}/{found.name}"
        judgements = {name: _judgements(found, name, run, [*own]) for name, own in rows.items()}
        facts = {name: _facts(self.settings[name], own, judgements[name]) for name, own in rows.items()}
        model = {"digest": digest_of(found), "model": config.model.name, "api": config.model.api}
        return judgements, {"run": run, **model, "tasks": facts}

    def rehearse(self, plan: Plan, engine: EngineProtocol) -> None:
        """Raises ConfigError for what the judge could not be asked: a conversation that its chat template refuses, say.

        The first documents are planned with made-up answers. engine: the judge's, which needs no weights yet.
        """
        with TemporaryDirectory() as place, named_errors("judge"):
            for name, rows in self._rows(plan, lambda key: MADE_UP).items():
                _write(Path(place) / f"{name}.jsonl", [*rows.values()][:REHEARSED])
            config = replace(self.config, data_dir=place)
            build_plan(config, prepare(config, engine.checkpoint)[1], engine)

    def _rows(self, plan: Plan, text_of: Callable[[RecordKey], str]) -> dict[str, Rows]:
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


def find_judge(config: Config, plan: Plan, llm: EngineProtocol | None) -> Judge | None:
    """The judge of a run, if it has one; `judge_run.judging_problems` found nothing wrong with it. Hashes its weights.

    llm: the run's engine; None where an endpoint answers. Raises ConfigError as `Judge.rehearse`.
    """
    asked = judged(config)
    if not asked:
        return None
    own = judge_config(config)
    shares = llm is not None and own.model == config.model and own.engine == config.engine
    engine = llm if shares else None
    if engine is None and own.model.api is None:
        engine = deferred_llm(own, resolve_checkpoint(own.model))
    runs = {name: Path(one.against) for name, one in asked.items() if one.against and Path(one.against).is_dir()}
    identity = {
        **({"api": own.model.api, "model": own.model.name} if engine is None else engine_identity(own, engine)),
        **{name: getattr(own, name) for name in ("apply_chat_template", "system_instruction")},
    }
    if runs:
        identity["against"] = {
            name: digest_of(run) or file_sha256(results_files(run)[-1]) for name, run in runs.items()
        }
    judge = Judge(own, asked, config.limit, shares, identity)
    if engine is not None:
        judge.rehearse(plan, engine)
    return judge


def _write(file: Path, rows: list[dict[str, Any]]) -> bool:
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
    """What the manifest says of one task's verdicts, as plain JSON values: how many there are, and how often they and
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
