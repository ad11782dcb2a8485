"""`python -m benchmarks harness`: the time of a full run, compared with its engine's time.

Two processes are timed by turns. One is the run: `python -m evalengine SETTINGS`, from its start to its end: settings,
rows, prompts, the engine, records, results, digest, page. The other is the engine alone: a process that imports the
engine, reads the same requests as token ids from a file, loads the model and answers them.
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.whole_run import planned, timed, without_places
from evalengine.records.evidence import PAGE
from evalengine.util.command import Namespace

COLUMNS = ("requests", "whole run, s", "engine alone, s", "ratio", "its start, s", "its steps, s", "page, MB")
ENGINE_ALONE = "benchmarks.engine_alone"
WARM_UP = 1_000  # requests that are answered untimed, first of all


def main(arguments: Namespace) -> int:
    """Runs `benchmarks harness` with its words; returns the exit code."""
    from evalengine.bench.environment import environment

    with tempfile.TemporaryDirectory(prefix="evalengine-bench-") as scratch:
        settings = [*arguments.settings, "progress=false", "resume=never"]
        file = Path(scratch) / "requests.pickle"
        requests = _write_requests(settings, file)
        print("bench: some requests, untimed, for kernels to be compiled", file=sys.stderr, flush=True)
        timed("benchmarks harness", ["-m", ENGINE_ALONE, str(file), str(WARM_UP)])
        rounds = []
        for number in range(arguments.rounds):
            rounds.append(_round(settings, file, Path(scratch) / str(number)))
            print(f"bench: {rounds[-1]}", file=sys.stderr, flush=True)
    about = environment(["python", "-m", "benchmarks", "harness", *without_places(arguments.settings)])
    _write(requests, rounds, about, arguments.output)
    print("\n".join(_table(requests, rounds)))
    return 0


def _write_requests(settings: Sequence[str], file: Path) -> int:
    """Writes the run's configuration and its requests; returns how many these are."""
    config, plan, _ = planned(settings)
    requests = [item.request for item in plan.requests]
    file.write_bytes(pickle.dumps((config, requests), protocol=pickle.HIGHEST_PROTOCOL))
    return len(requests)


def _round(settings: Sequence[str], file: Path, output: Path) -> dict[str, Any]:
    whole = timed("benchmarks harness", ["-m", "evalengine", *settings, f"output_dir={output}"])
    alone = timed("benchmarks harness", ["-m", ENGINE_ALONE, str(file)])
    (page,) = output.glob(f"*-*/{PAGE}")
    parts: dict[str, float] = json.loads(alone.out.splitlines()[-1])
    return {
        "whole_s": round(whole.seconds, 2),
        "alone_s": round(alone.seconds, 2),
        **parts,
        "whole_cpu_s": round(whole.cpu_seconds, 2),
        "page_bytes": page.stat().st_size,
        "load_before": round(whole.load_before, 2),
    }


def _table(requests: int, rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    middle = {name: median(taken[name] for taken in rounds) for name in rounds[0]}
    cells = [f"{requests:,}", f"{middle['whole_s']:.1f}", f"{middle['alone_s']:.1f}"]
    cells += [f"{middle['whole_s'] / middle['alone_s']:.2f}", f"{middle['start_s']:.1f}", f"{middle['steps_s']:.1f}"]
    lines = [list(COLUMNS), ["---:"] * len(COLUMNS), [*cells, f"{middle['page_bytes'] / 1e6:.1f}"]]
    return [f"| {' | '.join(line)} |" for line in lines]


def _write(requests: int, rounds: Sequence[Mapping[str, Any]], about: Mapping[str, Any], folder: Path) -> None:
    from benchmarks.report import write_page
    from evalengine.bench.environment import slug

    where = str(about["cpu"] if about["driver"] is None else about["gpu"])
    method = (
        f"`{about['command']}`, {about['date']}, commit {about['code']['commit']}. Whole processes by turns, median of "
        f"{len(rounds)}; the engine alone reads the run's requests as token ids from a file."
    )
    content = {"environment": about, "requests": requests, "rounds": list(rounds)}
    title = f"A full run and its engine, on {where}"
    write_page(folder, f"harness-{slug(where)}", content, title, method, _table(requests, rounds))
