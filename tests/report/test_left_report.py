"""The page that every run leaves at its end: it is there if it can be written, and no run fails without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evalengine.cli import run as command
from evalengine.harness import runner
from evalengine.report.html import run_page
from evalengine.report.html.on_complete import write_page
from tests.report.written_run import Doc, write_generations


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_generations(tmp_path / "run", [Doc("a"), Doc("b", score=0.0)])


def test_a_run_leaves_its_page_and_ends_with_its_digest(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "run", lambda config, done, *rest: done(folder) or folder)
    assert command.command()([]) == 0
    out, err = capsys.readouterr()
    digest = json.loads((folder / "manifest.json").read_text())["digest"]
    assert digest in (folder / "report.html").read_text(encoding="utf-8")
    assert out.splitlines()[-1] == f"digest: {digest}" and "report.html" not in err


def test_a_page_that_fails_is_said_and_passes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "report.html").mkdir()  # the disk refuses
    monkeypatch.setattr(runner, "run", lambda config, done, *rest: done(folder) or folder)
    assert command.command()([]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("digest: ")
    assert "no report.html (could not write" in err and f"python -m evalengine report {folder}" in err
    assert sorted(path.name for path in folder.iterdir() if "report" in path.name) == ["report.html"], "no scratch file"

    def broken(folder: Path) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(run_page, "write_run_report", broken)
    write_page(folder)
    err = capsys.readouterr().err
    assert "RuntimeError: planted" in err and "a bug in the report, shown above" in err
