"""A benchmark's results: lines with their comparison and target, written as JSON and as a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from evalengine.bench.environment import provenance, slug
from evalengine.records.folder import write_text_file

COLUMNS = ("what", "case", "ours", "reference", "theirs", "ratio", "target", "verdict")


@dataclass(frozen=True)
class Timing:
    """One measured line: how long ours took, and how long the comparison took for the same work in the same run.

    Seconds are medians. `work` is bytes moved (unit "TB/s") or floating-point operations (unit "TFLOP/s"), 0 if the
    line has no rate. With measure "speed" the ratio is ours over theirs and must be at least `target`; with "time" it
    is our time over theirs and must be at most `target`. A line without a target is reported only.
    """

    what: str
    case: str
    seconds: float
    reference: str
    reference_seconds: float
    measure: Literal["speed", "time"] = "speed"
    target: float | None = None
    work: float = 0
    unit: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        fraction = self.reference_seconds / self.seconds
        return fraction if self.measure == "speed" else 1 / fraction

    @property
    def passed(self) -> bool | None:
        """Whether the ratio reaches the target; None without a target."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.measure == "speed" else self.ratio <= self.target

    @property
    def verdict(self) -> str:
        """`reached`, or how far the ratio is from the target, relative to the target."""
        if self.target is None or self.passed:
            return "reported" if self.target is None else "reached"
        return f"missed by {abs(self.ratio / self.target - 1):.1%}"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "passed": self.passed, "verdict": self.verdict}


@dataclass(frozen=True)
class Failure:
    """A line without a time: its result was wrong, or it could not run."""

    what: str
    case: str
    reason: str
    wrong: bool = True  # False: the line could not be measured, which says nothing against the result


Line = Timing | Failure


@dataclass
class Measurements:
    """One run's lines, in order, and whatever explains them (profiles, backends), by name."""

    lines: list[Line] = field(default_factory=list)
    explanations: dict[str, Any] = field(default_factory=dict)

    @property
    def failures(self) -> list[Failure]:
        return [line for line in self.lines if isinstance(line, Failure)]

    @property
    def missed(self) -> list[Timing]:
        return [line for line in self.lines if isinstance(line, Timing) and line.passed is False]


def write(report: Measurements, about: Mapping[str, Any], folder: Path, stem: str) -> tuple[Path, Path]:
    """Writes `<stem>-<gpu>.json` and `.md` into `folder`, which is made; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{stem}-{slug(about['gpu'])}"
    json_file, table_file = folder / f"{name}.json", folder / f"{name}.md"
    lines = [line.as_json() if isinstance(line, Timing) else asdict(line) for line in report.lines]
    content = {"environment": dict(about), "lines": lines, "explanations": report.explanations}
    json_file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    table_file.write_text(markdown(report, about), encoding="utf-8")
    return json_file, table_file


def write_page(
    folder: Path, stem: str, content: Mapping[str, Any], title: str, method: str, table: Sequence[str]
) -> None:
    """Writes figures that have no comparison: `<stem>.json`, and `<stem>.md`, which says how they were found. Each is
    written whole or not at all; raises `EvalEngineError` if the disk refuses."""
    write_text_file(folder / f"{stem}.json", json.dumps(content, indent=1) + "\n")
    write_text_file(folder / f"{stem}.md", "\n".join([f"# {title}", "", method, "", *table, ""]))


def markdown(report: Measurements, about: Mapping[str, Any]) -> str:
    """The table, the environment above it, and the count of targets reached below."""
    libraries = ", ".join(f"{name} {version or 'absent'}" for name, version in about["libraries"].items())
    heading = [
        f"# Speed on {about['gpu']}",
        "",
        f"{provenance(about)};",
        f"driver {about['driver']}, CUDA {about['cuda']}, {libraries}.",
        "Times are medians; ours and its comparison ran in this one run.",
        "",
    ]
    return "\n".join([*heading, *table(report.lines), "", summary(report), ""])


def table(lines: Iterable[Line]) -> list[str]:
    """A Markdown table with a row for each line."""
    rows = [list(COLUMNS), ["---", "---", "---:", "---", "---:", "---:", "---:", "---"]]
    rows += [_row(line) for line in lines]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]


def summary(report: Measurements) -> str:
    """One sentence: how many targets were reached, and how many lines have no time."""
    judged = [line for line in report.lines if isinstance(line, Timing) and line.target is not None]
    reached = len(judged) - len(report.missed)
    failed = f"; {len(report.failures)} lines without a time" if report.failures else ""
    return f"{reached} of {len(judged)} targets reached{failed}."


def _row(line: Line) -> list[str]:
    if isinstance(line, Failure):
        verdict = f"{'WRONG RESULT' if line.wrong else 'not measured'}: {line.reason}"
        return [line.what, line.case, "", "", "", "", "", verdict]
    sign = "≥" if line.measure == "speed" else "≤"
    target = "" if line.target is None else f"{sign} {line.target:g}"
    ours, theirs = (_quantity(line, seconds) for seconds in (line.seconds, line.reference_seconds))
    return [line.what, line.case, ours, line.reference, theirs, f"{line.ratio:.3f}", target, line.verdict]


def _quantity(line: Timing, seconds: float) -> str:
    time = f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
    if not line.work:
        return time
    rate = line.work / seconds / 1e12
    return f"{time}, {rate:.2f} {line.unit}" if rate < 100 else f"{time}, {rate:.0f} {line.unit}"
