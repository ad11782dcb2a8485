"""`python -m benchmarks statistics`: draws and counts the figures, and writes them as Markdown and JSON."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
from benchmarks.statistics import figures
from evalengine.bench.environment import provenance
from evalengine.records.folder import write_whole
from evalengine.records.manifest import code_version
from evalengine.util.command import Namespace


def main(arguments: Namespace) -> int:
    """Runs `benchmarks statistics` with its words; returns the exit code."""
    start, drawn = time.perf_counter(), []
    for figure in figures(arguments.draws, arguments.seed):
        drawn.append(figure)
        print(_said(figure), flush=True)
    seconds = time.perf_counter() - start
    about = {
        "command": f"python -m benchmarks statistics --draws {arguments.draws} --seed {arguments.seed}",
        "code": asdict(code_version()), "python": platform.python_version(), **_versions(), "draws": arguments.draws,
        "seed": arguments.seed, "seconds": round(seconds, 1),
    }  # fmt: skip
    for file in write(drawn, about, arguments.output):
        print(file)
    wrong = [figure for figure in drawn if figure.holds is False]
    claims = sum(figure.holds is not None for figure in drawn)
    print(f"{claims - len(wrong)} of {claims} claims hold")
    return 1 if wrong else 0


def write(drawn: Sequence[Figure], about: Mapping[str, Any], folder: Path) -> tuple[Path, Path]:
    """Writes `statistics.md` and `statistics.json` into `folder`, which is made; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{**asdict(figure), "holds": figure.holds} for figure in drawn]
    content = json.dumps({"about": dict(about), "figures": lines}, indent=1, ensure_ascii=False) + "\n"
    texts = {"statistics.md": markdown(drawn, about), "statistics.json": content}
    for name, text in texts.items():
        write_whole(folder / name, lambda path, text=text: path.write_text(text, encoding="utf-8"))  # type: ignore[misc]
    return folder / "statistics.md", folder / "statistics.json"


def markdown(drawn: Sequence[Figure], about: Mapping[str, Any]) -> str:
    """A table for each group, with the command and the environment above them."""
    lines = [
        "# Statistics of gate and compare", "",
        f"{provenance(about)}; Python {about['python']}, SciPy {about['scipy']}, NumPy {about['numpy']};",
        f"seed {about['seed']}, {about['seconds']} s.",
        f"Each share is of {about['draws']} draws, with three standard errors of chance, or counted over all outcomes.",
        "A line without a claim is there for comparison.",
    ]  # fmt: skip
    for group, members in groupby(drawn, key=lambda figure: figure.group):
        lines += ["", f"## {group}", "", "| what | case | share | claim |", "|---|---|---:|---|"]
        lines += [f"| {f.what} | {f.case} | {_share(f)} | {_claim(f)} |" for f in members]
    return "\n".join(lines) + "\n"


def _versions() -> dict[str, str]:
    import numpy
    import scipy

    return {"numpy": numpy.__version__, "scipy": scipy.__version__}


def _share(figure: Figure) -> str:
    return f"{figure.share:.4f}" + ("" if figure.draws is None else f" ± {figure.error:.4f}")


def _claim(figure: Figure) -> str:
    if figure.holds is None:
        return ""
    limits = [
        f"{word} {limit:g}" for word, limit in (("≥", figure.at_least), ("≤", figure.at_most)) if limit is not None
    ]
    return f"{' and '.join(limits)}: {'holds' if figure.holds else 'DOES NOT HOLD'}"


def _said(figure: Figure) -> str:
    return f"{_share(figure)}  {figure.what}: {figure.case}  {_claim(figure)}".rstrip()
