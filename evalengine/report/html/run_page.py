"""`report.html`: everything that one run left, on one page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evalengine.records.evidence import PAGE
from evalengine.report.compare.beside import sibling
from evalengine.report.html.distributions import distributions_section, likelihood_section
from evalengine.report.html.metrics import metrics_section
from evalengine.report.html.noise_floor import noise_floor, noise_floor_section
from evalengine.report.html.page import Page, Section
from evalengine.report.html.samples import sample_blocks, samples_section
from evalengine.report.html.summary import cost_section, manifest_section, summary_lead
from evalengine.report.read.groups import roots_of
from evalengine.report.read.load import RunData, load_run_data
from evalengine.report.read.run import Run
from evalengine.report.stats.pass_at_k import with_pass_at_k
from evalengine.util.forked import ForkedTask

TASKS = 4  # most tasks that the title names
MANY = 5_000  # requests that earn a process for their plots: some 0.05 s of drawing


def write_run_report(folder: str | Path, target: Path | None = None) -> tuple[Path, int]:
    """Writes the page of a finished run (default: into its folder); returns (file, bytes).

    Raises `ConfigError` for a run that cannot be read, `EvalEngineError` if the disk refuses.
    """
    data = load_run_data(folder, page=target is not None)  # an edited page may be written anew
    path = target or data.run.folder / PAGE
    return path, run_page(data, sibling(data.run)).write(path, data.run.manifest)


def run_page(data: RunData, other: Run | None = None) -> Page:
    """The page of one run. other: the run in the other kind of numerics that its noise floor is measured against."""
    page = Page(_title(data), scripts=("samples.js",))
    with ForkedTask(lambda: _plots(data), len(data.run.items) >= MANY) as plots:
        blocks = sample_blocks(data)
        scored = replace(data, run=with_pass_at_k(data.run))
        summary_lead(page, scored)
        metrics_section(page, scored)
        if other is not None:
            noise_floor_section(page, noise_floor(data.run, other))
        page.add(plots.result())
    samples_section(page, data, blocks)
    cost_section(page, data, other)
    manifest_section(page, data)
    return page


def _plots(data: RunData) -> list[Section]:
    """The sections of plots, which need none of the page's others."""
    page = Page("")
    distributions_section(page, data)
    likelihood_section(page, data)
    return page.sections


def _title(data: RunData) -> str:
    model = data.run.manifest.model.name or data.results.get("model_name") or data.run.name
    names = roots_of(data.run.groups, [*dict.fromkeys(key[0] for key in data.run.results)]) or data.tasks
    title = ", ".join(names) if len(names) <= TASKS else f"{len(data.tasks)} tasks"
    return f"{title} on {model}"
