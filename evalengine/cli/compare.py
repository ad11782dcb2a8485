"""The arguments and options of `compare`."""

from __future__ import annotations

from typing import Annotated, Literal

from typer import Argument, Option

from evalengine.cli.command import BadUsage, Command
from evalengine.util.command import Namespace


def _words(
    runs: Annotated[list[str], Argument(metavar="RUN", help="a run folder, an experiment's folder (its runs), an "
                                        "lm-eval output folder or a baseline; or one folder of runs, such as a sweep's "
                                        "output_dir")],
    level: Annotated[Literal["bitwise", "tokens", "answers"] | None, Option(help="what must be the same for exit code "
                     "0: every bit (default), every output token, or every answer and 0/1 score")] = None,
    allow: Annotated[bool, Option("--allow", help="compare unlike runs, different models too, on the requests that "
                                  "they share")] = False,
    json: Annotated[str | None, Option(metavar="FILE", help="write what was found there; - for standard "
                                       "output")] = None,
    html: Annotated[str | None, Option(metavar="FILE", help="write it as a page: one file that needs nothing "
                                       "else")] = None,
    matrix: Annotated[bool, Option("--matrix", help="a table of all pairs (always so for more than two runs)")] = False,
    models: Annotated[bool, Option("--models", help="compare as models whatever the weights are")] = False,
    as_runs: Annotated[bool, Option("--runs", help="compare as runs, which must be the same")] = False,
    output: Annotated[list[str] | None, Option("-o", "--output", metavar="FILE", help="of models: write the tables "
                      "there: .md, .tex, .csv or .html, or the curve over checkpoints: .svg; may be given several "
                      "times")] = None,
    format: Annotated[Literal["csv", "latex", "markdown"] | None, Option(help="of models: print the tables so, and "
                      "nothing else")] = None,
    names: Annotated[str | None, Option(metavar="A,B,...", help="what to call the models, in their order")] = None,
    by: Annotated[str | None, Option(metavar="FIELD", help="of models: split tasks by a field of their documents "
                                     "(default: subject)")] = None,
    history: Annotated[bool, Option("--history", help="checkpoints of one training: in the order of the steps in their "
                                    "names, else as given; pages show the curve")] = False,
) -> Namespace:  # fmt: skip
    """Says whether runs are the same; if not, where they differ, why, and whether it matters.

    Runs whose weights differ are compared as models, document by document: metrics with intervals, ranks, paired tests.
    No --allow is needed: documents are paired by hash, and prompts may differ.
    """
    arguments = Namespace(**locals())
    if models and as_runs:
        raise BadUsage("--models and --runs contradict each other: give one of them")
    return arguments


EPILOG = """\
Exit codes: 0 the same at --level, or a comparison of models that an option asked for; 1 different, as models with
other weights are; 2 not comparable or bad usage."""
main = Command("compare", _words, "evalengine.report.cli.compare:main", EPILOG)
