"""`python -m evalengine bench statistics`: draws and counts the figures, and writes them as Markdown and JSON."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from evalengine.bench.statistics import Figure, figures
from evalengine.command import Parser
from evalengine.errors import ConfigError
from evalengine.records.folder import write_whole
from evalengine.records.manifest import code_version

DRAWS, SEED = 1000, 0
HELP = f"""\
usage: python -m evalengine bench statistics [--draws N] [--seed N] [--output FOLDER]

Draws runs whose truth is known, and counts how often the statistics of gate and compare are wrong: false alarms, losses
as large as the margin that pass, intervals that miss, losses that are seen. No GPU and no model; minutes.
Writes FOLDER/statistics.md and .json (default results/reference).

  --draws   of each simulated figure (default {DRAWS}); figures without draws are counted over all outcomes
  --seed    of all draws (default {SEED})

Exit codes: 0 every claim holds (but for three standard errors of chance), 1 one does not, 2 bad usage."""


def main(argv: Sequence[str]) -> int:
    """Runs it with the words after `statistics`; returns the exit code."""
    parser = Parser("bench statistics", text=HELP)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--output", type=Path, default=Path("results/reference"))
    arguments = parser.parse_args(list(argv))
    if arguments.draws < 1 or arguments.seed < 0:
        raise ConfigError(f"bench statistics: --draws {arguments.draws} --seed {arguments.seed}: 1 and 0 are the least")
    start, found = time.perf_counter(), []
    for figure in figures(arguments.draws, arguments.seed):
        found.append(figure)
        print(_said(figure), flush=True)
    seconds = time.perf_counter() - start
    about = {
        "command": f"python -m evalengine bench statistics --draws {arguments.draws} --seed {arguments.seed}",
        "code": code_version(), "python": platform.python_version(), **_versions(), "draws": arguments.draws,
        "seed": arguments.seed, "seconds": round(seconds, 1),
    }  # fmt: skip
    for file in write(found, about, arguments.output):
        print(file)
    wrong = [figure for figure in found if figure.holds is False]
    claims = sum(figure.holds is not None for figure in found)
    print(f"{claims - len(wrong)} of {claims} claims hold")
    return 1 if wrong else 0


def write(found: Sequence[Figure], about: Mapping[str, Any], folder: Path) -> tuple[Path, Path]:
    """`statistics.md` and `statistics.json` in `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{**asdict(figure), "holds": figure.holds} for figure in found]
    content = json.dumps({"about": dict(about), "figures": lines}, indent=1, ensure_ascii=False) + "\n"
    texts = {"statistics.md": markdown(found, about), "statistics.json": content}
    for name, text in texts.items():
        write_whole(folder / name, lambda path, text=text: path.write_text(text, encoding="utf-8"))  # type: ignore[misc]
    return folder / "statistics.md", folder / "statistics.json"


def markdown(found: Sequence[Figure], about: Mapping[str, Any]) -> str:
    """A table a group, with what it was made by above it."""
    commit = f"commit {about['code']['commit'] or 'unknown'}{' (with changes)' if about['code']['dirty'] else ''}"
    lines = [
        "# Statistics of gate and compare", "",
        f"`{about['command']}`, {commit}; Python {about['python']}, SciPy {about['scipy']}, NumPy {about['numpy']};",
        f"seed {about['seed']}, {about['seconds']} s.",
        f"Each share is of {about['draws']} draws, with three standard errors of chance, or counted over all outcomes.",
        "A line without a claim is there for comparison.",
    ]  # fmt: skip
    for group, members in groupby(found, key=lambda figure: figure.group):
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
