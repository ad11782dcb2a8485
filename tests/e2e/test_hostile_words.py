"""Command lines, names and files that nobody means: a sentence each, no traceback, no hang, no terminal command."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.e2e.command import ROOT, Run, call, over

LONG = "x" * 300


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (f"output_dir=/tmp/{LONG}", "File name too long; name another folder"),
        (f"data_dir=/tmp/{LONG}", "no such folder"),
        (f"resume={LONG}", "must be auto, never, or an existing run folder"),
        (f"task.dataset.path=/tmp/{LONG}", "File name too long"),
        ("seed=" + "1" * 5_001, "Exceeds the limit (4300 digits)"),
        ("task.version=nan", "task.version=nan: must be a finite number"),
        ("task=a\x1b[31mb", "\\x1b[31mb"),
    ],
    ids=lambda text: text[:24],
)
def test_settings_that_cannot_be_meant(setting: str, message: str, tmp_path: Path) -> None:
    done = call("engine.device=cpu", *over((f"output_dir={tmp_path}",), setting))
    assert done.code == 2 and message in done.err and "Traceback" not in done.err and "\x1b" not in done.err


def test_a_number_beyond_float64_in_a_models_configuration(tmp_path: Path) -> None:
    model = Path(shutil.copytree(ROOT / "evalengine" / "assets" / "tinymath", tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rope_theta": 10**400}))
    done = call("engine.device=cpu", f"output_dir={tmp_path / 'out'}", f"model.path={model}")
    assert done.code == 2 and "rope_parameters.rope_theta=1000" in done.err and "Traceback" not in done.err


def test_a_pipe_in_the_journals_place_is_not_waited_for(reference: Run, tmp_path: Path) -> None:
    from evalengine.errors import EvalEngineError
    from evalengine.records.journal import Journal

    os.mkfifo(tmp_path / "journal.jsonl")
    with pytest.raises(EvalEngineError, match="not a regular file; delete this file"):
        Journal.open(tmp_path / "journal.jsonl", "0" * 64, {}.get)


def test_a_journal_in_a_finished_folder_is_reported(reference: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(reference.folder, tmp_path / "run")))
    (run.folder / "journal.jsonl").write_text("{}\n")
    done = call("compare", str(run.folder), str(reference.folder))
    assert done.code == 2 and f"{run.folder / 'journal.jsonl'}: not a file of a finished run; take it out" in done.err


def test_a_run_stripped_of_its_hashes_is_refused(reference: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(reference.folder, tmp_path / "run")))
    manifest = run.manifest
    del manifest["files"], manifest["sha256"]
    (run.folder / "manifest.json").write_text(json.dumps(manifest))
    (run.folder / "report.html").unlink(missing_ok=True)
    for words in (("compare", run.folder, reference.folder), ("baseline", run.folder, "-o", tmp_path / "b.json")):
        done = call(*map(str, words))
        assert done.code == 2 and "the hashes of the run's files were taken out of it" in done.err


def test_an_old_run_without_hashes_is_read_and_says_so(reference: Run, tmp_path: Path) -> None:
    """A run of an evalengine that wrote neither hashes nor the model's spec is read, with a warning about edits."""
    run = Run(Path(shutil.copytree(reference.folder, tmp_path / "run")))
    manifest = run.manifest
    del manifest["files"], manifest["sha256"], manifest["identity"]["model_spec"]
    (run.folder / "manifest.json").write_text(json.dumps(manifest))
    (run.folder / "report.html").unlink(missing_ok=True)
    done = call("baseline", str(run.folder), "-o", str(tmp_path / "b.json"))
    assert done.code == 0 and "edits would pass unseen" in done.err
    gated = call("gate", str(reference.folder), str(run.folder), "--policy", "accuracy")
    assert gated.code == 0 and "edits would pass unseen" in gated.out, "equal bits pass, with a warning"
    manifest["timings"]["run_seconds"] = float("nan")
    (run.folder / "manifest.json").write_text(json.dumps(manifest))
    done = call("baseline", str(run.folder), "-o", str(tmp_path / "c.json"))
    assert done.code == 2 and "timings.run_seconds" in done.err


def test_a_key_that_stands_twice_in_a_policy_is_refused(reference: Run, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("tokens:\n  epsilon: 0\n  epsilon: 1000\n")
    done = call("gate", str(reference.folder), str(reference.folder), "--policy", str(policy))
    assert done.code == 2 and "'epsilon' stands twice" in done.out + done.err


def test_the_committed_baseline_accepts_todays_run(tmp_path: Path) -> None:
    """The committed baseline, by which the snippets of conf/gate/ci gate, has today's bits."""
    done = call("limit=16", "engine.device=cpu", f"output_dir={tmp_path}", "progress=false")
    assert done.code == 0, done.err
    (run,) = (path for path in tmp_path.glob("*") if path.is_dir())
    gated = call("gate", str(ROOT / "results" / "reference" / "arithmetic.json"), str(run), "--policy", "bitwise")
    assert gated.code == 0, gated.out + gated.err
