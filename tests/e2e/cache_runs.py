"""Runs with a cache of answers, and their counts of hits."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.command import Run, call, runs

ROWS = 3

SETTINGS = (f"limit={ROWS}", "engine.device=cpu", "engine.max_num_seqs=4", "progress=false", "resume=never",
            "task.generation.max_gen_toks=20")  # fmt: skip


def run(output_dir: Path, *settings: str) -> Run:
    before = {found.folder for found in runs(output_dir)}
    done = call(f"output_dir={output_dir}", *SETTINGS, *settings)
    assert done.code == 0, done.err
    (new,) = (found for found in runs(output_dir) if found.folder not in before)
    return new


def counts(found: Run) -> tuple[int, int]:
    """(hits, misses)."""
    return found.manifest["cache"]["hits"], found.manifest["cache"]["misses"]
