"""`experiment=NAME`: makes the runs of conf/experiment/NAME.yaml and reports on them together.

    <output_dir>/<experiment>-<tasks>-<model>-<time>-<id>/
      1-batch_invariant_True_max_num_seqs_1/<run folder>    one for each run
      <experiment>.html, <experiment>.svg, <experiment>.json  written last: without them the sweep is unfinished

The same command resumes an unfinished sweep: finished runs stay, the interrupted one resumes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from evalengine.config.compose import Job
from evalengine.config.schema import OUTPUT_FIELDS, Config, selection
from evalengine.errors import ConfigError
from evalengine.plain_text import warn
from evalengine.records.folder import DIGEST, IDENTITY, sanitise, write_failed
from evalengine.util.command import exit_code
from evalengine.util.progress import duration

CHECKPOINTS = "checkpoints"  # one model at several steps of its training, each metric against the step
PROMPTS = "prompts"  # one model and the same documents under several prompts: the variance that they cause
# What writes a prompt. Anything else that is swept would be mistaken for the prompt's part.
OF_PROMPTS = ("fewshot_seed", "num_fewshot", "description", "choice_order", "system_instruction", "apply_chat_template",
              "fewshot_as_multiturn", "gen_prefix", "doc_to_text", "fewshot_file", "fewshot_split",
              "target_delimiter", "fewshot_delimiter", "enable_thinking", "chat_template_args")  # fmt: skip
SWEEPS: dict[str, tuple[str, tuple[str, ...], str]] = {  # -> what one run is, what it sweeps, how to give several
    CHECKPOINTS: ("checkpoint", ("model.path",), "name several folders, as in model.path=out/checkpoint-1000,"
                  "out/checkpoint-2000, or a pattern: \"model.path=glob('out/checkpoint-*')\""),
    PROMPTS: ("prompt", OF_PROMPTS, 'give fewshot_seed=1,2,3 or \'task.description="a","b"\''),
}  # fmt: skip
SAME_ROWS = ("engine", "batch_invariant", "numerics", "seed", *OUTPUT_FIELDS)  # they change neither model nor rows


def run_experiment(name: str, jobs: Sequence[Job], run: Callable[[Config], int]) -> int:
    """Runs the jobs by `run` and reports on them; returns the exit code: 0, or 1 if a run failed, or if runs that must
    have equal bits differ.

    Raises `ConfigError`, before the first run starts, for anything that a job's settings, model or rows lack.
    """
    _check(name, jobs)
    name = sanitise(name)  # it names files below; experiment=mine/short holds a slash
    folder = _open(name, jobs)
    places = [folder / sanitise(f"{number}-{label(job)}") for number, job in enumerate(jobs, 1)]
    codes: list[int] = []
    left = sum(finished_run(place) is None for place in places)
    begin, status = time.monotonic(), ""
    for number, (job, place) in enumerate(zip(jobs, places, strict=True), 1):
        finished = finished_run(place) is not None
        if codes:
            seconds = (time.monotonic() - begin) / len(codes) * left
            status = f" (about {duration(seconds)} left for {left} run{'' if left == 1 else 's'})"
        warn(f"[{number}/{len(jobs)}] {' '.join(job.overrides)}{': finished before' if finished else status}", "")
        if not finished:
            codes.append(exit_code(partial(run, replace(job.config, output_dir=str(place)))))
            left -= 1
    if failed := sum(code != 0 for code in codes):
        warn(f"{failed} of {len(jobs)} runs failed; the same command runs those again")
        return max(codes)
    return _report(name, folder, jobs, places)


def label(job: Job) -> str:
    """The settings that set a job apart, in short: `batch_invariant=True,max_num_seqs=8`."""
    return ",".join(f"{name}={value}" for name, value in _settings(job).items())


def finished_run(place: Path) -> Path | None:
    """The newest finished run below a job's folder. A run that was killed before it left its page does not count."""
    finished = [path.parent for path in place.glob(f"*/{DIGEST}") if not (path.parent / IDENTITY).exists()]
    return max(finished, key=lambda folder: ((folder / DIGEST).stat().st_mtime_ns, folder.name), default=None)


def _check(name: str, jobs: Sequence[Job]) -> None:
    """Check every job before a weight is loaded: a long sweep must not end in its middle for a
    misspelt path. Raises ConfigError."""
    problems = [*_sweep_problems(name, jobs)]
    if jobs[0].config.resume not in ("auto", "never"):
        problems.append(f"resume={jobs[0].config.resume}: names one run; an experiment takes auto or never")
    if problems:
        raise ConfigError(problems)
    from evalengine.harness.plan import engine_problems, prepare

    specs = {}
    for job in jobs:
        rows = json.dumps({key: value for key, value in asdict(job.config).items() if key not in SAME_ROWS})
        config = job.config
        if rows not in specs:
            specs[rows] = prepare(config)[0].spec
        problems += [f"{label(job)}: {problem}" for problem in engine_problems(config, specs[rows])]
    if problems:
        raise ConfigError(problems)


def _open(name: str, jobs: Sequence[Job]) -> Path:
    """The newest unfinished folder of these very jobs, or a new one. Raises `EvalEngineError` if the disk refuses."""
    settings = [{key: value for key, value in asdict(job.config).items() if key not in OUTPUT_FIELDS} for job in jobs]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    config = jobs[0].config
    root, stem = Path(config.output_dir), sanitise(f"{name}-{selection(config)}-{config.model.name}")
    earlier = [path for path in root.glob(f"{stem}-*-{digest}") if path.is_dir()]
    unfinished = [path for path in earlier if not (path / f"{name}.json").exists()]
    if unfinished and config.resume == "auto":
        return max(unfinished, key=lambda path: path.stat().st_mtime_ns)
    folder = root / f"{stem}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_failed(folder, error) from error
    return folder


def _report(name: str, folder: Path, jobs: Sequence[Job], places: Sequence[Path]) -> int:
    """Writes what the runs show together to the terminal and into the folder; returns the exit code."""
    from evalengine.report.html.on_complete import write_page
    from evalengine.report.leaderboard.compose import board
    from evalengine.report.leaderboard.formats import board_lines
    from evalengine.report.leaderboard.page import write_history
    from evalengine.report.read.load import load_run
    from evalengine.report.sweep.prompts import prompt_lines, sensitivities, write_prompts
    from evalengine.report.sweep.sweep import Cell, print_sweep, sweep
    from evalengine.report.sweep.write import write_sweep
    from evalengine.util.tables import print_lines

    folders = [path for place in places if (path := finished_run(place)) is not None]
    settings, runs = [*map(_settings, jobs)], [*map(load_run, folders)]
    if name == CHECKPOINTS:
        steps = jobs[0].config.steps or _named_steps(jobs)
        assert steps is not None, "_sweep_problems() lists what has none"
        ordered = sorted(zip(steps, range(len(runs)), strict=True))
        curves = replace(board([runs[place] for _, place in ordered]), steps=[step for step, _ in ordered])
        print_lines([*board_lines(curves), *map(str, write_history(curves, name, folder))])
        return 0
    if name == PROMPTS:
        labels = [", ".join(f"{key} {value}" for key, value in own.items()) for own in settings]
        found = sensitivities(runs)
        files = write_prompts(name, folder, runs, labels, found)
        print_lines([*prompt_lines(found, labels), *map(str, files)])
        return 0
    result = sweep(name, [Cell(own, run) for own, run in zip(settings, runs, strict=True)])
    written = write_sweep(result, folder)
    for path in folders:
        write_page(path)  # the first pages lack the noise floor, which needs a run in the other mode
    print_sweep(result, written)
    return 0 if result.promise_kept else 1


def _settings(job: Job) -> dict[str, str]:
    """The swept settings by the last part of their names, or by the whole name where two end alike."""
    whole = dict(override.split("=", 1) for override in job.overrides)
    ends = Counter(name.rpartition(".")[2] for name in whole)
    return {end if ends[end := name.rpartition(".")[2]] == 1 else name: value for name, value in whole.items()}


def _sweep_problems(name: str, jobs: Sequence[Job]) -> Iterator[str]:
    """Yields what is wrong with what an experiment sweeps, a sentence each."""
    swept = {override.partition("=")[0] for job in jobs for override in job.overrides}
    config, paths = jobs[0].config, [job.config.model.path for job in jobs]
    kind, allowed, how = SWEEPS.get(name, ("run", (), "give a setting several values (a=1,2)"))
    others = sorted(setting for setting in swept if not {setting, setting.rpartition(".")[2]} & {*allowed})
    if len(jobs) < 2:
        yield f"experiment={name}: one {kind} is no sweep; {how}"
    elif allowed and others:
        yield f"{', '.join(others)}: experiment={name} sweeps only {', '.join(allowed)}; give one value"
    elif name == CHECKPOINTS:
        if (steps := config.steps) is None and _named_steps(jobs) is None:
            yield (
                f"model.path={','.join(paths)}: these names contain no different steps, as checkpoint-1000 or "
                "step_2000; give them: 'steps=[1000,2000]'"
            )
        elif steps is not None and (len(steps) != len(jobs) or len(set(steps)) < len(steps) or min(steps) < 0):
            yield f"steps={steps}: must be {len(jobs)} different numbers from 0 on, one for each of {', '.join(paths)}"
    for task, own in config.tasks.items() if name == PROMPTS and swept == {"fewshot_seed"} else ():
        if not (config.task.num_fewshot if own.num_fewshot is None else own.num_fewshot):
            yield (
                f"experiment={name}: {task} shows no exemplars, so fewshot_seed changes no prompt; set "
                'task.num_fewshot=4, or sweep another setting: fewshot_seed=1234 \'task.description="a","b"\''
            )


def _named_steps(jobs: Sequence[Job]) -> list[int] | None:
    """The steps in the folders' names; None unless every name has one and all differ."""
    from evalengine.report.leaderboard.models import named_steps

    return named_steps([Path(job.config.model.path).name for job in jobs])
