"""The arguments and options of `report`."""

from __future__ import annotations

from typing import Annotated, Literal

from typer import Argument, Option

from evalengine.cli.commands.words import Command
from evalengine.util.command import Namespace


def _words(
    runs: Annotated[list[str], Argument(metavar="RUN", help="a run folder, an experiment's folder (its runs), an "
                    "lm-eval output folder, or the folder that holds runs; of several also baselines")],
    output: Annotated[str | None, Option("-o", "--output", metavar="FILE", help="the file (one run: report.html in its "
                      "folder; several: comparison.html here; a folder of runs: index.html in it)")] = None,
    allow: Annotated[bool, Option("--allow", help="compare unlike runs, different models too, on the requests that "
                                  "they share")] = False,
    table: Annotated[Literal["md", "latex"] | None, Option(help="a table instead, in Markdown or LaTeX (booktabs): "
                     "tasks as rows, runs as columns; to standard output, or to -o")] = None,
    model_index: Annotated[str | None, Option(metavar="FILE", help="a run's results as YAML for the front matter of "
                           "its model card on the Hub (`model-index`)")] = None,
    samples: Annotated[str | None, Option(metavar="FILE", help="a run's samples as CSV: a row for each task, document "
                       "and filter, with prompts, responses, answers and scores")] = None,
    log_to: Annotated[str | None, Option(metavar="TRACKER", help="log each run to wandb or mlflow, as log_to= "
                                         "does")] = None,
) -> Namespace:  # fmt: skip
    """Writes one self-contained HTML file: of one run everything it left, of several their comparison (of different
    models: which is better), of a folder of runs the list of them. Or a table, the samples, the Hub's model index."""
    return Namespace(**locals())


EPILOG = "Exit codes: 0 written, 1 the disk refused, 2 a run cannot be read or compared, or bad usage."
main = Command("report", _words, "evalengine.report.cli.report:main", EPILOG)
