"""A resumed run keeps only answers of its own; where that changes bits (fast numerics), every reader is told."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from evalengine.cli.run import run_one
from evalengine.config.compose import compose_jobs
from evalengine.config.schema import Config
from evalengine.errors import EvalEngineError
from evalengine.records.journal import Entry, Journal
from tests.e2e.command import Run, call, over, runs

SETTINGS = ("engine.device=cpu", "limit=3", "task.generation.max_gen_toks=3", "progress=false", "engine.max_num_seqs=1")


def config(output_dir: Path, *settings: str) -> Config:
    """The configuration of a short run with SETTINGS and these settings."""
    (job,) = compose_jobs(over(SETTINGS, *settings), False)
    return replace(job.config, output_dir=str(output_dir))


def interrupted(run_config: Config) -> Run:
    """The unfinished folder of a run that was interrupted after its first request."""
    real = Journal.append

    def append(self: Journal, entry: Entry) -> None:
        real(self, entry)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", append)
        with pytest.raises(KeyboardInterrupt):
            run_one(run_config)
    (run,) = runs(Path(run_config.output_dir))
    return run


def test_a_fast_run_that_was_resumed_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = config(tmp_path / "fast", "batch_invariant=false")
    broken = interrupted(fast)
    assert run_one(fast) == 0
    out, err = capsys.readouterr()
    assert (
        "1 of 3 requests were answered by the interrupted run" in err
        and "this run will not be repeatable" in err
        and "resume=never" in err
    )
    assert "the same command may not give these again" in out
    assert broken.manifest["resumed_fast"] is True and broken.manifest["counts"]["resumed_requests"] == 1
    assert "the same command may give other bits" in (broken.folder / "report.html").read_text(encoding="utf-8")
    uninterrupted = replace(fast, output_dir=str(tmp_path / "whole"))
    assert run_one(uninterrupted) == 0
    assert "repeatable" not in capsys.readouterr().err
    (unbroken,) = runs(tmp_path / "whole")
    assert unbroken.manifest["resumed_fast"] is False
    comparison = call("compare", str(unbroken.folder), str(broken.folder), "--level", "answers").out
    assert "B was interrupted and resumed under fast numerics (1 of 3 requests resumed)" in comparison


def test_an_exact_run_that_was_resumed_needs_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exact = config(tmp_path)
    broken = interrupted(exact)
    assert run_one(exact) == 0
    assert capsys.readouterr().err == "" and broken.manifest["resumed_fast"] is False


def test_a_journal_of_another_dtype_is_refused(tmp_path: Path) -> None:
    float32_config = config(tmp_path / "mine", "engine.dtype=float32")
    alien = interrupted(config(tmp_path / "others", "engine.dtype=bfloat16"))
    broken = interrupted(float32_config)
    shutil.copy(alien.folder / "journal.jsonl", broken.folder / "journal.jsonl")
    with pytest.raises(
        EvalEngineError, match=r"journal\.jsonl: line 1 is not of this run: it names the run .*resume=never"
    ):
        run_one(float32_config)
    identities = [json.loads((run.folder / "identity.json").read_text())["dtype"] for run in (broken, alien)]
    assert identities == ["float32", "bfloat16"]
