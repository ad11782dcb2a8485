"""The gate: judge a run against its baseline by a policy.

The baseline may be the base branch's, since a change must not bring its own yardstick unseen, and the run may be one
that the gate makes itself.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime
from functools import cache, partial
from pathlib import Path

from evalengine.config.schema import SequentialConfig
from evalengine.errors import ConfigError, EvalEngineError, first_of, listed, readable
from evalengine.records.manifest_data import not_run
from evalengine.report.compare.comparability import CONTRACT, findings, incomparable
from evalengine.report.gate.planned import accuracy_rules, plan_of
from evalengine.report.gate.policies import AllOf, Policy, load_policy
from evalengine.report.gate.report import DECIDED, Check, Report, Verdict, together
from evalengine.report.gate.rules import evaluate, level, standing
from evalengine.report.gate.steps import SEQUENTIAL, ordered_by, steps_of
from evalengine.report.numbers import counted
from evalengine.report.read.groups import members_of_both
from evalengine.report.read.load import load_run
from evalengine.report.read.names import all_runs, runs_below, skipped_note, stands_for
from evalengine.report.read.run import UNBOUND, Run, ScoreKey
from evalengine.report.stats.significance import mcnemar
from evalengine.util.endings import hold_back

SHOWN_PROBLEMS = 20
HINTED = (0.0, 0.02)  # shares of changed answers for which a hint before a run gives the need
NO_BASELINE = "no baseline yet"
BAD_POLICY, BAD_BASELINE, BAD_RUN = "bad policy", "the baseline cannot be read", "the run cannot be read"
VERDICTS: dict[str, Verdict] = {"pass": "pass", "fail": "fail", "undecided": "inconclusive"}
Scores = Mapping[ScoreKey, Mapping[int, float]]
NEW_FOLDER = "the gate makes one new run in a new folder; --keep FOLDER keeps it"
OURS = {  # settings that a gate's run cannot have -> what to do instead
    "cache": "answers of earlier code would be judged; leave the cache out",
    **dict.fromkeys(("output_dir", "resume", "-m", "--multirun"), NEW_FOLDER),
    "sequential": "the gate sets it; use --step N, whose order follows from the baseline",
}


class NoBaseline(ConfigError):
    """Neither the checkout nor the base has a baseline: a first run."""


def beside_noise(checks: Iterable[Check], a: Run, b: Run, noise: Run) -> Iterator[Check]:
    """Add to each metric's check how many scores flip in the run, and how many with another schedule of the baseline.
    A change that flips no more than a schedule in fast mode may have changed nothing.

    Only scores of 0 or 1 flip: a log-likelihood or a probability changes with every schedule. Both count the same
    documents. The one-sided test is therefore McNemar's, exact, on documents that flip in one only.
    Raises `ConfigError` unless `noise` has the baseline's configuration, in fast mode.
    """
    if a.source == noise.source:
        raise ConfigError(f"--noise {noise.source}: is the baseline itself; name another run of its configuration, "
                          "with a different schedule (engine.max_num_seqs=8)")  # fmt: skip
    if a.identity != noise.identity or noise.identity.get("numerics") != "fast":
        raise ConfigError(f"--noise {noise.source}: must be a run of the baseline's configuration, both with "
                          "batch_invariant=false, and with a different schedule (engine.max_num_seqs=8)")  # fmt: skip
    for check in checks:
        key = (check.task, *check.name.partition(",")[::2])
        parts = [part for part, _ in members_of_both(a, b, key)] or [key]
        if check.rule != "accuracy" or any(part not in run.scores for run in (a, b, noise) for part in parts):
            yield check
            continue
        old, new, other = (
            {(part, doc): value for part in parts for doc, value in run.scores[part].items()} for run in (a, b, noise)
        )
        if not {*old.values(), *new.values(), *other.values()} <= {0.0, 1.0}:
            yield check
            continue
        shared = old.keys() & new.keys() & other.keys()
        flipped, alone = ({doc for doc in shared if old[doc] != scores[doc]} for scores in (new, other))
        p = mcnemar(len(alone - flipped), len(flipped - alone))[1]
        flips = f"{len(flipped)} scores flip, {len(alone)} with another schedule of the baseline"
        flips += f" (one-sided p of no more flips than that: {p:.2g})"
        yield replace(check, message=f"{check.message}; {flips}", brief=check.brief and f"{check.brief}; {flips}")


def gate(
    baseline: str | Path,
    run: str | Path,
    policy: str = "bitwise",
    base: str | None = None,
    noise: str | Path | None = None,
) -> Report:
    """Judge `run` against `baseline` (run folders, lm-eval folders or baseline files) by a policy's name or file.

    run: also an experiment's folder, or a folder of several runs that a sweep wrote. Each run is judged separately; the
    report has their `reports`, and the worst verdict.
    base: a git revision, usually the branch to merge into. The baseline file is read from it, and the report warns if
    the change modifies that file. noise: a run of the baseline's configuration in fast mode with a different schedule,
    with which the run's flips are compared.

    Never raises for a bad policy, baseline or run: the report then has `problems`, their title `trouble`, and exit code
    2.
    """
    warnings, notes = [], []
    try:
        runs: Sequence[str | Path] = all_runs([str(run)])
        place = Path(stands_for(run))
        if skipped := skipped_note(run):
            warnings.append(skipped)
        if len(runs) == 1 and Path(runs[0]) != place:
            notes.append(f"{run}: the only run in it was judged: {os.path.relpath(runs[0], place)}")
    except ConfigError:  # it is raised again, and reported, where the run is read
        runs = [run]
    read = cache(partial(baseline_of, baseline, base))
    if len(runs) > 1 and (problem := _attempt(baseline, None, policy, base, read=read)) is not None:
        return replace(problem, run=str(run))
    reports = [_attempt(baseline, one, policy, base, noise, read) for one in runs]
    found = [report for report in reports if report is not None]
    report = found[0] if len(found) == 1 else together(str(run), found)
    return replace(report, warnings=(*report.warnings, *warnings), notes=(*report.notes, *notes))


def unready(baseline: str | Path, policy: str, base: str | None = None) -> Report | None:
    """Return the report of why no run can be judged, before a run is made; None if one can be."""
    return _attempt(baseline, None, policy, base)


def _attempt(
    baseline: str | Path,
    run: str | Path | None,
    policy: str,
    base: str | None,
    noise: str | Path | None = None,
    read: Callable[[], tuple[Run, tuple[str, ...]]] | None = None,
) -> Report | None:
    """Return the verdict's report, or the report of why there is none; None if `run` is None and one could be judged.
    read: reads the baseline, once for several runs."""
    chosen, trouble = Policy(Path(policy).stem, AllOf(())), BAD_POLICY
    try:
        chosen, trouble = load_policy(policy), BAD_BASELINE
        (a, warnings), trouble = read() if read else baseline_of(baseline, base), BAD_RUN
        if run is None:
            return None
        b, trouble = load_run(run), "not comparable"
        steps = steps_of(chosen, a, b)
        part = a if steps is None else steps.part
        notes, trouble = _comparable(chosen, part, b), "the policy does not fit the baseline"
        checks = evaluate(chosen.rule, part, b, steps)
        if not any(check.status in DECIDED for check in checks):
            raise ConfigError(f"policy {chosen.name}: {a.source} contains nothing that it tests")
        verdict, trouble = VERDICTS[standing(checks)], "the noise cannot be judged"
        if noise is not None:
            checks = [*beside_noise(checks, a, b, load_run(noise))]
        changed = base if warnings and a.source != Path(baseline) else None  # a new file is read from here
        return Report(
            verdict, chosen.name, chosen.description, str(a.source), str(b.source), a.digest, b.digest, tuple(checks),
            notes=tuple(notes), warnings=warnings, inconclusive=chosen.inconclusive,
            compare=_compare_command(baseline, changed, a, b) if verdict == "fail" else "",
        )  # fmt: skip
    except NoBaseline as error:
        why = NO_BASELINE, error.problems
    except EvalEngineError as error:
        missing = _missing(baseline, run, base) if trouble in (BAD_BASELINE, BAD_RUN) else None
        why = missing or (trouble, problems_of(error))
    return could_not_judge(chosen, baseline, "not made" if run is None else run, *why)


def needs(baseline: str | Path, policy: str, base: str | None = None) -> list[str]:
    """Return how likely the gate passes without a loss, the checks with too few documents at the highest rate of
    `HINTED`, and how long the baseline took."""
    run, chosen = baseline_of(baseline, base)[0], load_policy(policy)
    if not accuracy_rules(chosen.rule):
        return []
    try:
        plan = plan_of(chosen, run, HINTED)
    except ConfigError as error:  # the gate reports it after the run
        return error.problems
    known = [check for check in plan.checks if not check.why]
    if not known:
        return []
    chances = " and ".join(f"{plan.chance(n)} if {100 * rate:g} % of answers change" for n, rate in enumerate(HINTED))
    others = f" of {len(plan.checks)} (`evalengine plan` explains the others)" * (len(known) < len(plan.checks))
    passes = "its accuracy rules pass" if plan.partial else "it passes"
    said = [f"policy {chosen.name}: {counted(len(known), 'check')}{others}; without a loss {passes} with probability "
            f"{chances}; equal bits always pass"]  # fmt: skip
    few = [check.label for check in known if check.needs[-1] is None or check.needs[-1] > (check.documents or 0)]
    if few:
        said.append(f"too few documents for {listed(few, 3)}; `evalengine plan runs=BASELINE` says how many they need")
    counts, seconds = run.manifest.counts, run.manifest.timings.run_seconds
    if counts.documents and seconds > 0 and not not_run(counts):
        each = f"{seconds / counts.documents:.3g} s a document"
        said.append(f"the baseline's {counts.documents:,} documents took {seconds:,.0f} s, {each}")
    return said


def problems_of(error: EvalEngineError) -> list[str]:
    return error.problems if isinstance(error, ConfigError) else [str(error)]


def baseline_of(baseline: str | Path, base: str | None) -> tuple[Run, tuple[str, ...]]:
    """Return the baseline, and warnings for a reviewer. Raises `ConfigError`."""
    return (load_run(baseline), ()) if base is None else load_from_base(Path(baseline), base)


def could_not_judge(policy: Policy, baseline: str | Path, run: str | Path, trouble: str, problems: list[str]) -> Report:
    """Return a report without a verdict on the run."""
    names = (policy.name, policy.description, str(baseline), str(run))
    return Report("error", *names, problems=tuple(problems), trouble=trouble, inconclusive=policy.inconclusive)


def _missing(baseline: str | Path, run: str | Path | None, base: str | None) -> tuple[str, list[str]] | None:
    """Return (title, problems) if the baseline or the run does not exist."""
    fix = f"write one from a good run, and commit it: python -m evalengine baseline RUN -o {baseline}"
    named = [] if base is not None else [(NO_BASELINE, baseline, f"there is no such baseline; {fix}")]
    if run is not None:
        named.append(("no run", run, "there is no such run; its command may have failed: see its output"))
    problems = {}
    for title, name, problem in named:
        try:
            if not os.path.exists(stands_for(name)):
                problems[title] = f"{name}: {problem}"
        except ConfigError as error:
            problems[title] = str(error)
    return (" and ".join(problems), list(problems.values())) if problems else None


def _comparable(policy: Policy, a: Run, b: Run) -> list[str]:
    """Return notes on allowed differences. Raises `ConfigError` with all differences that the policy does not allow."""
    if read := b.manifest.from_cache:
        raise ConfigError(
            f"{b.source}: {read} of its answers were read from a cache, so they do not test the code; rerun it without "
            "cache="
        )
    levelled = level(policy, a, b)
    problems = incomparable(a, levelled)
    if problems:
        problems = first_of(problems, SHOWN_PROBLEMS, "more differences")
        hint = f"A is the baseline, B the run; policy {policy.name} allows: {', '.join(policy.allow) or 'nothing'}"
        raise ConfigError([*problems, hint])
    remaining = {finding.text for finding in findings(a, levelled)}
    notes = [f"may differ: {finding.text}" for finding in findings(a, b) if finding.text not in remaining]
    if any(re.search(r"\b[AB]\b", note) for note in notes):
        notes.append("A is the baseline, B the run")
    if resumed := b.manifest.counts.resumed_requests:
        notes.append(f"{b.source}: {resumed} of its answers are from before an interruption and were not recomputed")
    notes += [f"{run.source}: it is {run.files}, without logprob bits, so its answers cannot be verified"
              for run in (a, b) if run.by_lm_eval]  # fmt: skip
    return notes + [f"{run.source}: {UNBOUND}" for run in (a, b) if run.unbound]


def _compare_command(baseline: str | Path, base: str | None, a: Run, b: Run) -> str:
    """The command that shows what differs between the runs, and why. base: the revision that has the baseline; None if
    the file here is the same."""
    command = shlex.join(["python", "-m", "evalengine", "compare", str(baseline), str(b.source)])
    refused = any(finding.refused and finding.names != CONTRACT for finding in findings(a, b))
    return command + " --allow" * refused + (f" ({baseline} as it is in {base})" if base else "")


def decider(settings: SequentialConfig) -> tuple[str, Callable[[Scores], bool]]:
    """Return (the text that orders the documents, a function that tells whether a run's scores so far decide the gate)
    for the gate that a run's settings name."""
    assert settings.baseline is not None
    policy = load_policy(settings.policy)
    a, _ = baseline_of(settings.baseline, settings.base)
    order = ordered_by(a)
    identity = {**a.identity, SEQUENTIAL: {"step": settings.step, "baseline": order}}

    def decided(scores: Scores) -> bool:
        if not a.scores.keys() <= scores.keys():  # a metric that only a finished run has
            return False
        own = {key: dict(values) for key, values in scores.items() if key in a.scores}
        b = replace(a, digest=None, task_digests={}, identity=identity, items={}, scores=own, results={}, answers={},
                    choices={}, weighted={})  # fmt: skip
        steps = steps_of(policy, a, b)
        assert steps is not None
        return standing(evaluate(policy.rule, steps.part, b, steps)) != "undecided"

    return order, decided


def load_from_base(file: Path, revision: str) -> tuple[Run, tuple[str, ...]]:
    """(the baseline, what a reviewer must know of it) for a baseline file in a git checkout.

    The base's file counts, and a change of it here is reported. Where the base has none, the file here counts, and that
    is reported: the first change that brings one cannot be held to anything else.

    Raises `ConfigError` without a checkout, without the revision in it, and for what cannot be read.
    """
    if file.is_dir():
        raise ConfigError(f"--base {revision}: {file} is a folder; a baseline file in git is needed")
    folder = file.parent if file.parent.is_dir() else Path()
    commit = _git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if commit is None:
        raise ConfigError(
            f"--base {revision}: no such revision in this checkout, or no git checkout; fetch it first (git fetch "
            "origin BRANCH; with actions/checkout: fetch-depth: 0)"
        )
    name, short = f"{commit.decode().strip()}:./{file.name}", commit.decode()[:12]
    base_content = _git(folder, "cat-file", "blob", name)
    if base_content is None:
        if not file.exists():
            raise NoBaseline(f"{file}: neither here nor in {revision} ({short}); write one from a run that is good, "
                              f"and commit it: python -m evalengine baseline RUN -o {file}")  # fmt: skip
        return load_run(file), (f"the baseline is new in this pull request: {revision} ({short}) has no {file}",)
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / file.name
        copy.write_bytes(base_content)
        run = load_run(copy)
    run = replace(run, source=Path(f"{file} of {revision} ({short})"))
    if file.exists() and file.read_bytes() == base_content:
        return run, ()
    change = "changed" if file.exists() else "removed"
    warning = f"baseline {change} in this pull request: {file}; the run is held to that of {revision} ({short})"
    return run, (warning,)


def _git(folder: Path, *words: str) -> bytes | None:
    """Return the output of git; None if git fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


@contextmanager
def made_run(settings: Sequence[str], keep: Path | None, more: Mapping[str, str] | None = None) -> Iterator[Path]:
    """The folder of a run with these settings: a new one below `keep`, or one that is removed afterwards. What earlier
    runs left is never judged. more: settings of the gate's own, as texts.

    Raises `ConfigError` for the settings `OURS`, `EvalEngineError` if the run fails.
    """
    for given in settings:
        name = re.split("[=.]", given.lstrip("+~"))[0]
        if (instead := OURS.get(name)) is not None:
            raise ConfigError(f"gate: {given}: {instead}")
    from evalengine.config.overrides import word  # it loads Hydra

    command = ["-m", "evalengine", *settings, *(word(name, value) for name, value in (more or {}).items())]
    place: AbstractContextManager[str]
    if keep is None:
        place = tempfile.TemporaryDirectory(prefix="evalengine-gate-")
    else:
        with readable(f"gate: --keep {keep}"):
            keep.mkdir(parents=True, exist_ok=True)
            place = nullcontext(tempfile.mkdtemp(prefix=f"gate-{datetime.now():%Y%m%dT%H%M%S}-", dir=keep))
    with place as folder:
        done = subprocess.run(  # 2 is stderr
            [sys.executable, *command, f"output_dir={folder}"], stdout=2, check=False, preexec_fn=hold_back
        )
        if done.returncode != 0:
            shown = shlex.join(["python", *command])
            raise EvalEngineError(f"{shown}: the run failed with exit code {done.returncode}; what it printed says why")
        runs = runs_below(Path(folder))
        yield runs[0] if len(runs) == 1 else Path(folder)
