"""`experiment=checkpoints`: one model at several steps of its training, each metric against the step.

<output_dir>/checkpoints-<tasks>-<model>-<time>-<id>/
  1-path_out_checkpoint-1000/<run folder>                   one for each checkpoint
  checkpoints.html, checkpoints.svg, checkpoints.json       the page, its curves, and the list of the runs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from evalengine.config.compose import Job

NAME = "checkpoints"


def checkpoint_problems(jobs: Sequence[Job]) -> Iterator[str]:
    """Yields what is wrong with a sweep over checkpoints, a sentence each."""
    swept = {override.partition("=")[0] for job in jobs for override in job.overrides}
    if len(jobs) < 2:
        yield (
            f"experiment={NAME}: one checkpoint is no sweep; name several folders, as in "
            "model.path=out/checkpoint-1000,out/checkpoint-2000, or a pattern: \"model.path=glob('out/checkpoint-*')\""
        )
        return
    if others := sorted(swept - {"model.path"}):
        yield f"{', '.join(others)}: experiment={NAME} sweeps model.path alone; give one value"
    steps, paths = jobs[0].config.steps, [job.config.model.path for job in jobs]
    if steps is not None and (len(steps) != len(jobs) or len(set(steps)) < len(steps) or min(steps) < 0):
        yield f"steps={steps}: must be {len(jobs)} different numbers from 0 on, one for each of {', '.join(paths)}"
    if steps is None and not others and _named_steps(jobs) is None:
        yield (
            f"model.path={','.join(paths)}: these names do not say different steps, as checkpoint-1000 or step_2000; "
            "give them: 'steps=[1000,2000]'"
        )


def _named_steps(jobs: Sequence[Job]) -> list[int] | None:
    """The steps in the folders' names; None unless every name has one and all differ."""
    from evalengine.report.leaderboard.models import step_of

    steps = [step_of(Path(job.config.model.path).name) for job in jobs]
    return [step for step in steps if step is not None] if None not in steps and len({*steps}) == len(steps) else None


def report_checkpoints(name: str, folder: Path, jobs: Sequence[Job], runs: Sequence[Path]) -> int:
    """Writes the curves to the terminal and into the folder; returns the exit code 0."""
    from evalengine.report.leaderboard.compose import board
    from evalengine.report.leaderboard.formats import board_lines
    from evalengine.report.leaderboard.page import write_history
    from evalengine.report.read.load import load_run
    from evalengine.report.terminal.tables import print_lines

    steps = jobs[0].config.steps or _named_steps(jobs)
    assert steps is not None, "checkpoint_problems() refuses what has none"
    ordered = sorted(zip(steps, runs, strict=True))
    curves = replace(board([load_run(run) for _, run in ordered]), steps=[step for step, _ in ordered])
    files = write_history(curves, name, folder)
    print_lines([*board_lines(curves), *map(str, files)])
    return 0
