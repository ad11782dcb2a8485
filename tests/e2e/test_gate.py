"""The gate over real runs: a baseline file, an equal run and a changed one, and the snippets for CI, executed."""

from __future__ import annotations

import json
import runpy
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from tests.e2e.command import ROOT, Run, call, finished

SNIPPETS = ROOT / "conf" / "gate" / "ci"


@pytest.fixture(scope="module")
def baseline(reference: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("baseline") / "reference.json"
    done = call("baseline", str(reference.folder), "-o", str(file))
    assert done.code == 0, done.err
    return file


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(tmp_path_factory.mktemp("changed"), "limit=8", "batch_invariant=false")


@pytest.fixture(autouse=True)
def no_github(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)


def test_an_equal_run_passes_and_a_changed_one_fails(baseline: Path, changed: Run, tmp_path: Path) -> None:
    same = finished(tmp_path / "same", "limit=8", "engine.max_num_seqs=3", "engine.block_size=16")
    codes = {}
    for policy in ("bitwise", "tokens", "accuracy"):
        for run in (same, changed):
            done = call("gate", str(baseline), str(run.folder), "--policy", policy, "--json", "-")
            report = json.loads(done.out)
            assert report["exit_code"] == done.code and all(check["detects"] for check in report["checks"])
            codes[policy, run is same] = done.code
    assert codes["bitwise", True] == codes["tokens", True] == codes["accuracy", True] == 0
    assert codes["bitwise", False] == codes["tokens", False] == 1


def test_the_baseline_file_and_its_run_folder_get_one_verdict(baseline: Path, reference: Run, changed: Run) -> None:
    for policy in ("bitwise", "tokens", "accuracy"):
        sides = [
            json.loads(call("gate", str(side), str(changed.folder), "--policy", policy, "--json", "-").out)
            for side in (baseline, reference.folder)
        ]
        shown = [[(check["rule"], check["status"], check["message"]) for check in side["checks"]] for side in sides]
        assert shown[0] == shown[1] != [], policy


def test_what_cannot_be_judged_is_exit_code_2(baseline: Path, reference: Run, tmp_path: Path) -> None:
    fewer = finished(tmp_path / "fewer", "limit=2")
    junit = tmp_path / "gate.xml"
    done = call("gate", str(baseline), str(fewer.folder), "--policy", "accuracy", "--junit", str(junit))
    assert done.code == 2 and "A has 8 requests, B 2" in done.err
    assert ElementTree.parse(junit).findall(".//error")
    text = baseline.read_text(encoding="utf-8")
    for name, damaged in (("cut", text[: len(text) // 2]), ("edited", text.replace(reference.digest, "0" * 64))):
        assert damaged != text
        file = tmp_path / f"{name}.json"
        file.write_text(damaged, encoding="utf-8")
        done = call("gate", str(file), str(reference.folder))
        assert done.code == 2 and str(file) in done.err and "Traceback" not in done.err, name


def commands(snippet: str) -> list[list[str]]:
    """The `python -m evalengine` lines of a CI file, without `python -m evalengine`."""
    jobs: dict[str, Any] = yaml.safe_load((SNIPPETS / f"{snippet}.yaml").read_text(encoding="utf-8"))
    steps = jobs["jobs"]["gate"]["steps"] if snippet == "github" else jobs["gate"]["script"]
    lines = [step.get("run", "") if isinstance(step, dict) else step for step in steps]
    return [shlex.split(line)[3:] for line in lines if line.startswith("python -m evalengine")]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with the baseline that the snippets name."""
    folder = tmp_path_factory.mktemp("project")
    run = finished(folder / "made", "limit=16")
    file = folder / "results" / "reference" / "arithmetic.json"
    file.parent.mkdir(parents=True)
    assert call("baseline", str(run.folder), "-o", str(file)).code == 0
    return folder


def test_ci_snippets_do_what_they_say(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    run, gate = commands("github")
    assert [run, gate] == commands("gitlab"), "so that one pass runs both"
    assert call(*run, "engine.device=cpu").code == 0
    done = call(*gate)
    assert done.code == 0, done.err + done.out
    assert ElementTree.parse("gate.xml").getroot().attrib["tests"] == "1"


def test_the_pytest_snippet(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = tmp_path / "test_gate.py"
    file.write_text((SNIPPETS / "test_gate.py.txt").read_text(encoding="utf-8"), encoding="utf-8")
    test = runpy.run_path(str(file))["test_no_bit_has_changed"]
    test(tmp_path / "run")
    fewer = finished(tmp_path / "fewer", "limit=2")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: None)
    with pytest.raises(AssertionError, match="A has 16 requests, B 2"):
        test(fewer.folder.parent)
