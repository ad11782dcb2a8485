"""Runs with a cache of answers, and their counts of hits."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.command import Run, call, over, runs

ROWS, TOKENS = 3, 4

SETTINGS = (f"limit={ROWS}", "engine.device=cpu", "engine.max_num_seqs=4", "progress=false", "resume=never",
            f"task.generation.max_gen_toks={TOKENS}")  # fmt: skip


def run(output_dir: Path, *settings: str) -> Run:
    """Runs a few rows of the default task, which must succeed, and returns the new run in `output_dir`."""
    folders_before = {candidate.folder for candidate in runs(output_dir)}
    done = call(f"output_dir={output_dir}", *over(SETTINGS, *settings))
    assert done.code == 0, done.err
    (new,) = (candidate for candidate in runs(output_dir) if candidate.folder not in folders_before)
    return new


def counts(cached_run: Run) -> tuple[int, int]:
    """How many of the run's answers the cache had, and how many it had not: (hits, misses)."""
    return cached_run.manifest["cache"]["hits"], cached_run.manifest["cache"]["misses"]
