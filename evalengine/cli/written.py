"""The arguments and options of `report` and `baseline`, which write what is kept of runs."""

from __future__ import annotations

from typing import Annotated, Literal

from typer import Argument, Option

from evalengine.cli.command import BadUsage, Command
from evalengine.util.command import Namespace


def _report(
    runs: Annotated[list[str], Argument(metavar="RUN", help="a run folder, an experiment's folder (its runs), an "
                    "lm-eval output folder, or the folder that holds runs; of several also baselines")],
    output: Annotated[str | None, Option("-o", "--output", metavar="FILE", help="the page's file (one run: report.html "
                      "in its folder; several: comparison.html here; a folder of runs: index.html in it), or the "
                      "table's")] = None,
    allow: Annotated[bool, Option("--allow", help="compare unlike runs, different models too, on the requests that "
                                  "they share")] = False,
    table: Annotated[Literal["md", "latex"] | None, Option(help="a table in Markdown or LaTeX (booktabs): tasks as "
                     "rows, runs as columns; to standard output, or to -o")] = None,
    model_index: Annotated[str | None, Option(metavar="FILE", help="a run's results as YAML for the front matter of "
                           "its model card on the Hub (`model-index`)")] = None,
    samples: Annotated[str | None, Option(metavar="FILE", help="a run's samples as CSV: a row for each task, document "
                       "and filter, with prompts, responses, answers and scores")] = None,
    inspect_log: Annotated[str | None, Option(metavar="FILE", help="a run as a log of inspect_ai (JSON), a file a "
                           "task")] = None,
    eval_results: Annotated[str | None, Option(metavar="FILE", help="a run as YAML for a model's .eval_results/ on the "
                            "Hub, which shows it on the dataset's leaderboard")] = None,
    every_eval: Annotated[str | None, Option(metavar="FOLDER", help="a run as Every Eval Ever's records: all "
                          "results, and each sample; laid in it as in its datastore")] = None,
    log_to: Annotated[str | None, Option(metavar="TRACKER", help="log each run to wandb or mlflow, as log_to= "
                                         "does")] = None,
) -> Namespace:  # fmt: skip
    """Writes one self-contained HTML file: of one run everything it left, of several their comparison (of different
    models: which is better), of a folder of runs the list of them.

    The other options write what they name instead, several in one call; the page then needs -o. Nothing is written
    unless every path is valid."""
    return Namespace(**locals())


REPORT = "Exit codes: 0 written, 1 the disk refused, 2 a run cannot be read or compared, or bad usage."
report = Command("report", _report, "evalengine.report.cli.report:main", REPORT)


def _baseline(
    run: Annotated[str | None, Argument(metavar="RUN", help="a finished run's folder, or an lm-eval output folder "
                                        "(scores only: it has no digests)")] = None,
    output: Annotated[str | None, Option("-o", "--output", metavar="FILE.json", help="the file to write")] = None,
    force: Annotated[bool, Option("--force", help="replace that file if it exists")] = False,
) -> Namespace:  # fmt: skip
    """Writes the run's digests, scores and manifest as one small file (0.2 MB for gsm8k) that lives in git, for
    `compare FILE RUN` and `gate FILE RUN`."""
    if not run or not output:
        raise BadUsage("give a run and -o FILE.json")
    return Namespace(run=run, output=output, force=force)


BASELINE = "Exit codes: 0 written, 1 the disk refused, 2 bad usage, or RUN is unfinished, damaged or edited."
baseline = Command("baseline", _baseline, "evalengine.report.cli.report:baseline", BASELINE)
