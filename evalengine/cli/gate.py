"""The arguments and options of `gate`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from evalengine.cli.command import Command
from evalengine.util.command import Namespace


def _words(
    baseline: Annotated[str, Argument(metavar="BASELINE", help="a run's folder, or a file of `baseline`")],
    run: Annotated[str | None, Argument(metavar="RUN", help="the run that is judged; a folder of runs, such as a "
                                        "sweep's, each of which is judged; or -- and the settings of one to "
                                        "make")] = None,
    policy: Annotated[str, Option(metavar="NAME|FILE", help="bitwise, tokens, accuracy, or a file")] = "bitwise",
    base: Annotated[str | None, Option(metavar="REVISION", help="take BASELINE from this git revision (origin/main), "
                                       "and say if it has changed here")] = None,
    keep: Annotated[Path | None, Option(metavar="FOLDER", help="where a run of `-- SETTINGS` stays (a new folder in "
                                        "it)")] = None,
    step: Annotated[int | None, Option(metavar="N", min=1, help="with `-- SETTINGS`: ask N documents of each task at a "
                                       "time, in a random order, and stop once it is decided")] = None,
    noise: Annotated[str | None, Option(metavar="RUN", help="of a baseline in fast mode: a run of its configuration "
                                        "under another schedule, whose flips are set beside RUN's")] = None,
    bootstrap: Annotated[Path | None, Option(metavar="FILE", help="where there is no baseline yet, make the run of "
                                             "`-- SETTINGS` all the same and write it as FILE, to commit")] = None,
    junit: Annotated[Path | None, Option(metavar="FILE", help="JUnit XML")] = None,
    summary: Annotated[Path | None, Option(metavar="FILE", help="Markdown, appended")] = None,
    json: Annotated[str | None, Option(metavar="FILE", help="JSON; - for standard output, which then holds nothing "
                                       "else")] = None,
    html: Annotated[Path | None, Option(metavar="FILE", help="a page: one file that needs nothing else")] = None,
    risk: Annotated[bool, Option("--risk", help="say P(loss > margin) of each check, too")] = False,
    verbose: Annotated[bool, Option("--verbose", help="say all that each check saw")] = False,
    annotations: Annotated[bool | None, Option(help="::error lines for GitHub")] = None,
) -> Namespace:  # fmt: skip
    """Judges RUN against BASELINE: may this change be merged?"""
    arguments = Namespace(**locals())
    if annotations is None:
        arguments.annotations = os.environ.get("GITHUB_ACTIONS") == "true"
    if summary is None and os.environ.get("GITHUB_STEP_SUMMARY"):
        arguments.summary = Path(os.environ["GITHUB_STEP_SUMMARY"])
    return arguments


class _Gate(Command):
    """`gate BASELINE -- SETTINGS`: the words after the two dashes are settings of the run, not options of the gate."""

    def parse(self, argv: Sequence[str]) -> Any:
        words, settings = list(argv), None
        if "--" in words:
            words, settings = words[: words.index("--")], words[words.index("--") + 1 :]
        arguments = super().parse(words)
        if isinstance(arguments, Namespace):
            arguments.settings = settings
            self.check(arguments)
        return arguments

    def check(self, arguments: Namespace) -> None:
        """Raises `ConfigError` unless there is one run to judge: RUN, or the settings of one to make."""
        if (arguments.run is None) == (arguments.settings is None):
            raise self.bad_usage("give RUN, or -- and the settings of a run to make; not both")
        for name in ("keep", "step", "bootstrap"):
            if getattr(arguments, name) is not None and arguments.settings is None:
                raise self.bad_usage(f"--{name} is for a run that the gate makes: gate BASELINE -- SETTINGS")


EPILOG = """\
Policies: bitwise   every bit as in the baseline: for changes that mean to touch no arithmetic
          tokens    the same tokens, logprobs within epsilon
          accuracy  no metric worse by more than a margin, as far as the documents can show (non-inferiority)
          FILE      your own, which may say `extends: accuracy`; conf/gate/accuracy.yaml shows every setting

`gate BASELINE -- SETTINGS` makes the run first, as `python -m evalengine SETTINGS` would, in a new folder.
`gate BASELINE SWEEP` judges each run of an experiment or of a folder of runs on its own; the worst verdict counts.

On GitHub Actions (GITHUB_ACTIONS=true) annotations are on, and the summary goes to $GITHUB_STEP_SUMMARY, unless
--no-annotations or --summary say otherwise. A summary is appended to its file.

Exit codes: 0 the policy holds, 1 it does not, 2 not comparable, no baseline, bad policy or bad usage, 3 inconclusive:
nothing failed, but a check could not see the loss that the policy names (`inconclusive: fail` or `pass` in the policy
make that 1 or 0)."""
main = _Gate("gate", _words, "evalengine.report.cli.gate:main", EPILOG)
