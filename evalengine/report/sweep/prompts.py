"""One model under several prompts: how much of a score's variance is the documents, the prompts, and both together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from evalengine.errors import ConfigError
from evalengine.report.compare.as_json import run_json
from evalengine.report.html.page import Page
from evalengine.report.html.parts import facts, sheet_table, tiles, verdict
from evalengine.report.numbers import LARGEST
from evalengine.report.read.names import SWEEP_FORMAT
from evalengine.report.read.run import Run, ScoreKey, key_name
from evalengine.report.stats.clusters import cluster_names
from evalengine.report.stats.intervals import Floats
from evalengine.report.stats.measured import TwoWay, two_way
from evalengine.report.stats.metric_interval import mean_interval
from evalengine.report.stats.paired import cluster_codes
from evalengine.report.stats.significance import ALPHA, holm
from evalengine.report.sweep.write import VERSION, write_list
from evalengine.util.sheet import Interval, Line, Sheet


@dataclass(frozen=True)
class Sensitivity:
    """A metric of one task under all prompts. Values in the metric's units."""

    key: ScoreKey
    documents: int  # or clusters of related ones
    means: tuple[float, ...]  # a prompt's score each
    intervals: tuple[tuple[float, float] | None, ...]  # over documents
    parts: TwoWay
    p_holm: float = 1.0  # `parts.p_value`, adjusted for all metrics

    @property
    def by_prompt(self) -> float:
        """Standard deviation of a score by the choice of the prompt alone."""
        return self.parts.prompts**0.5

    @property
    def of_a_score(self) -> float:
        """Which share of the variance of one prompt's score, a mean over these documents, is the prompt's choice."""
        whole = self.parts.stderr(self.documents, 1) ** 2
        return self.parts.prompts / whole if whole else 0.0


def sensitivities(runs: Sequence[Run]) -> list[Sensitivity]:
    """Every metric that has a score per document in all runs, two or more. Raises ConfigError for runs of other
    documents, and for equal prompts."""
    _check(runs)
    found = []
    for key in sorted(set.intersection(*({*run.scores} for run in runs))):
        documents = sorted(runs[0].scores[key])
        if len(documents) < 2 or any(sorted(run.scores[key]) != documents for run in runs):
            continue
        scores = np.array([[run.scores[key][doc] for run in runs] for doc in documents], dtype=np.float64)
        if not (np.abs(scores) < LARGEST).all():
            continue
        names = cluster_names(runs[0], runs[0], key[0], documents)
        of_groups = _cluster_means(scores, names)
        if len(of_groups) > 1:
            bounds = tuple(mean_interval(column.tolist(), clusters=names) for column in scores.T)
            means = tuple(float(mean) for mean in scores.mean(axis=0))
            found.append(Sensitivity(key, len(of_groups), means, bounds, two_way(of_groups)))
    adjusted = holm([one.parts.p_value for one in found])
    return [replace(one, p_holm=p) for one, p in zip(found, adjusted, strict=True)]


def prompt_lines(found: Sequence[Sensitivity], labels: Sequence[str]) -> Iterator[Line]:
    """A table of the prompts' scores, one of the components, and a sentence for each metric as the verdict."""
    yield scores_sheet(found, labels)
    yield parts_sheet(found)
    for one in found:
        yield f"verdict: {sentence(one)}"


def sentence(one: Sensitivity) -> str:
    """The prompts' effect on a metric, in one sentence."""
    low, high = min(one.means), max(one.means)
    verdict = "significant" if one.p_holm < ALPHA else f"not significant over {one.documents} documents"
    return (
        f"{key_name(one.key)}: {len(one.means)} prompts give {low:.4f} to {high:.4f} ({verdict}: p = "
        f"{one.p_holm:.2g} after Holm); the prompt alone moves a score by {one.by_prompt:.4f} (standard deviation), "
        f"which is {100 * one.of_a_score:.0f} % of the variance of one prompt's score over {one.documents} documents"
    )


def write_prompts(
    name: str, folder: Path, runs: Sequence[Run], labels: Sequence[str], found: Sequence[Sensitivity]
) -> list[Path]:
    """Writes the page, then the list of the runs, which makes the folder a finished experiment's. Raises
    `EvalEngineError` if the disk refuses."""
    page = folder / f"{name}.html"
    prompts_page(runs, labels, found).write(page)
    listed = [{**run_json(run), "source": os.path.relpath(run.source, folder), "prompt": label}
              for run, label in zip(runs, labels, strict=True)]  # fmt: skip
    metrics = [{**asdict(one), "of_a_score": one.of_a_score, "said": sentence(one)} for one in found]
    content = {"format": SWEEP_FORMAT, "version": VERSION, "experiment": name, "runs": listed, "metrics": metrics}
    return [page, write_list(name, folder, content)]


def prompts_page(runs: Sequence[Run], labels: Sequence[str], found: Sequence[Sensitivity]) -> Page:
    """The experiment as a page: what the prompts do, each prompt's score, and the components."""
    page = Page(
        f"{len(runs)} prompts on {', '.join(sorted({one.key[0] for one in found}))}", eyebrow="Prompts compared"
    )
    shown = any(one.p_holm < ALPHA for one in found)
    page.lead(
        verdict(
            "The prompts differ" if shown else "No difference between the prompts is shown",
            " ".join(f"{sentence(one)}." for one in found[:3]),
            None,
        ),
        tiles((key_name(one.key), f"{100 * one.of_a_score:.0f} %", SHARE) for one in found[:3]),
    )
    for sheet in (scores_sheet(found, labels), parts_sheet(found)):
        page.section(sheet.title.split()[0].lower(), sheet.title, sheet_table(sheet), note=sheet.note)
    page.section("runs", "Runs", facts((label, run.source.name) for label, run in zip(labels, runs, strict=True)))
    return page


SHARE = "of a score's variance: the prompt"
HEAD = ("Metric", "Documents", "Variance by document", "By prompt", "Both", "Prompt's sd", "Of a score", "p")
NOTE = (
    "Two-way random effects by the method of moments: some documents are harder under every prompt, some prompts are "
    "better on every document, and what is left is a document that one prompt solves and another does not. Of a score: "
    "the prompt's share of the variance of one prompt's mean over these documents. p: of so large differences between "
    "prompts if there are none (F test), of each metric alone. Few prompts tell little of others."
)


def scores_sheet(found: Sequence[Sensitivity], labels: Sequence[str]) -> Sheet:
    """A row for each prompt: its score by each metric."""
    columns = [
        [
            Interval(f"{mean:.4f}", (mean, *(own or (mean, mean))))
            for mean, own in zip(one.means, one.intervals, strict=True)
        ]
        for one in found
    ]
    rows = [*zip(labels, *columns, strict=True)]
    note = "On a page, lines are 95 % intervals over documents."
    return Sheet("Scores", ("Prompt", *(key_name(one.key) for one in found)), rows, (0,), note=note)


def parts_sheet(found: Sequence[Sensitivity]) -> Sheet:
    """A row for each metric: the parts of its variance."""
    rows = []
    for one in found:
        parts, whole = one.parts, one.parts.total or 1.0
        shares = [f"{part:.4f} ({100 * part / whole:.0f} %)" for part in (parts.documents, parts.prompts, parts.both)]
        last = (f"{one.by_prompt:.4f}", f"{100 * one.of_a_score:.0f} %", f"{parts.p_value:.2g}")
        rows.append([key_name(one.key), f"{one.documents}", *shares, *last])
    return Sheet("Variance components", HEAD, rows, (0,), note=NOTE)


def _cluster_means(scores: Floats, names: Sequence[str] | None) -> Floats:
    """[G, p]: each cluster's mean under each prompt."""
    codes = cluster_codes(names, len(scores))
    sizes = np.bincount(codes)
    return np.stack([np.bincount(codes, weights=column) / sizes for column in scores.T], axis=1)


def _check(runs: Sequence[Run]) -> None:
    rows = [{task: own.get("sha256") for task, own in run.identity.get("datasets", {}).items()} for run in runs]
    if any(other != rows[0] for other in rows):
        raise ConfigError("experiment=prompts: the runs have different documents; give one task and one limit")
    prompts = [run.identity.get("prompts") for run in runs]
    if len(set(prompts)) < len(prompts) and None not in prompts:
        raise ConfigError("experiment=prompts: two of the runs have equal prompts; sweep a setting that changes them")
