"""The gate over real runs: a baseline file, an equal run and a changed one, and the snippets for CI, executed."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from evalengine.config.compose import compose_jobs
from evalengine.errors import ConfigError
from evalengine.harness import runner
from evalengine.harness.runner import Gate
from evalengine.util.document_order import first_of_order, in_order
from tests.e2e.command import LIMIT, ROOT, SHORT, Run, call, finished

SNIPPETS = ROOT / "conf" / "gate" / "ci"
ROWS, FEWER = "limit=16", f"limit=4 {SHORT}"  # What the snippets ask for, and what they ask for here.


@pytest.fixture(scope="module")
def baseline(short_reference: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The baseline file of the reference run."""
    file = tmp_path_factory.mktemp("baseline") / "reference.json"
    done = call("baseline", str(short_reference.folder), "-o", str(file))
    assert done.code == 0, done.err
    return file


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The reference run's requests in fast numerics, which gives other bits."""
    return finished(tmp_path_factory.mktemp("changed"), f"limit={LIMIT}", SHORT, "batch_invariant=false")


pytestmark = pytest.mark.usefixtures("no_github")


def test_an_equal_run_passes_and_a_changed_one_fails(baseline: Path, changed: Run, tmp_path: Path) -> None:
    same = finished(tmp_path / "same", f"limit={LIMIT}", SHORT, "engine.max_num_seqs=3", "engine.block_size=16")
    codes = {}
    for policy in ("bitwise", "tokens", "accuracy"):
        for run in (same, changed):
            done = call("gate", str(baseline), str(run.folder), "--policy", policy, "--json", "-")
            report = json.loads(done.out)
            assert report["exit_code"] == done.code and all(check["detects"] for check in report["checks"])
            codes[policy, run is same] = done.code
    assert codes["bitwise", True] == codes["tokens", True] == 0
    assert codes["bitwise", False] == codes["tokens", False] == 1
    assert codes["accuracy", True] == 0, "equal bits: so few documents could exclude no loss of two points otherwise"
    assert codes["accuracy", False] == 3


def test_the_baseline_file_and_its_run_folder_get_one_verdict(
    baseline: Path, short_reference: Run, changed: Run
) -> None:
    for policy in ("bitwise", "tokens", "accuracy"):
        sides = [
            json.loads(call("gate", str(side), str(changed.folder), "--policy", policy, "--json", "-").out)
            for side in (baseline, short_reference.folder)
        ]
        verdicts = [[(check["rule"], check["status"], check["message"]) for check in side["checks"]] for side in sides]
        assert verdicts[0] == verdicts[1] != [], policy


def test_what_cannot_be_judged_is_exit_code_2(baseline: Path, short_reference: Run, tmp_path: Path) -> None:
    fewer = finished(tmp_path / "fewer", "limit=2", SHORT)
    junit = tmp_path / "gate.xml"
    done = call("gate", str(baseline), str(fewer.folder), "--policy", "accuracy", "--junit", str(junit))
    assert done.code == 2 and f"A has {LIMIT} requests, B 2" in done.err
    assert ElementTree.parse(junit).findall(".//error")
    text = baseline.read_text(encoding="utf-8")
    for name, damaged in (("cut", text[: len(text) // 2]), ("edited", text.replace(short_reference.digest, "0" * 64))):
        assert damaged != text
        file = tmp_path / f"{name}.json"
        file.write_text(damaged, encoding="utf-8")
        done = call("gate", str(file), str(short_reference.folder))
        assert done.code == 2 and str(file) in done.err and "Traceback" not in done.err, name


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of a repository whose main has the baseline that the snippets name."""
    folder = tmp_path_factory.mktemp("project")
    run = finished(folder / "made", *FEWER.split())
    origin, clone = folder / "origin", folder / "clone"
    file = origin / "results" / "reference" / "arithmetic.json"
    file.parent.mkdir(parents=True)
    assert call("baseline", str(run.folder), "-o", str(file)).code == 0
    git = ("git", "-c", "user.name=x", "-c", "user.email=x@y", "-c", "init.defaultBranch=main")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "baseline"]):
        subprocess.run([*git, *words], cwd=origin, check=True)
    subprocess.run(["git", "clone", "-q", str(origin), str(clone)], check=True)
    return clone


def shell(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a CI step's script as a runner would, with this checkout in place of an installed package."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(["bash", "-eo", "pipefail", "-c", script], cwd=folder, env={**environment, "PATH": path},
                          capture_output=True, text=True, check=False)  # fmt: skip


def snippet(name: str) -> Any:
    """A file of conf/gate/ci, parsed as YAML."""
    return yaml.safe_load((SNIPPETS / name).read_text(encoding="utf-8"))


def with_fewer_rows(text: str) -> str:
    """The snippet's text with FEWER in place of ROWS, which it must hold."""
    assert ROWS in text
    return text.replace(ROWS, FEWER)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Makes `python -m evalengine ...` run in this process, as the GitLab job shows that it runs in one of its own;
    returns the commands that were run so."""
    commands: list[list[str]] = []
    real = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        if command[:3] != [sys.executable, "-m", "evalengine"]:
            return real(command, **options)
        commands.append(command)
        done = call(*command[3:])
        assert done.code == 0, done.err
        return subprocess.CompletedProcess(command, done.code)

    monkeypatch.setattr("subprocess.run", run)
    return commands


@pytest.mark.slow  # three processes; the GitLab job, which fetches and gates by the same commands, stays quick
def test_the_github_action_gates_twice_in_one_workspace(project: Path) -> None:
    """The action takes its snippet's inputs, and passes twice in a workspace that a self-hosted runner keeps."""
    steps = {step["name"]: step for step in snippet("action.yml")["runs"]["steps"] if "name" in step}
    use = snippet("github.yaml")["jobs"]["gate"]["steps"][1]
    assert use["uses"].partition("@")[0].endswith("/conf/gate/ci") and (SNIPPETS / "action.yml").is_file()
    inputs = {name.upper(): value for name, value in use["with"].items()} | {"BASE": "main"}
    inputs["SETTINGS"] = with_fewer_rows(inputs["SETTINGS"]).replace(" ", "\n")
    assert inputs.keys() >= steps["gate"]["env"].keys()
    for run in (1, 2):
        for name in ("fetch the base branch", "gate"):
            done = shell(steps[name]["run"], project, **inputs)
            assert done.returncode == 0, done.stderr + done.stdout
        assert "gate bitwise: PASS (1 of 1 checks)" in done.stdout
        assert len(list((project / "gate-runs").iterdir())) == run
        assert ElementTree.parse(project / "gate.xml").getroot().attrib["tests"] == "1"
    baseline = project / inputs["BASELINE"]
    text = baseline.read_text(encoding="utf-8")
    baseline.write_text(text.replace("arithmetic", "arithmetics"), encoding="utf-8")
    done = shell(steps["gate"]["run"], project, **inputs, GITHUB_ACTIONS="true")
    baseline.write_text(text, encoding="utf-8")
    assert done.returncode == 0 and "::warning title=gate bitwise::baseline changed in this pull request" in done.stdout


def test_the_action_takes_the_base_branch_as_it_is_now_or_as_the_checkout_brought_it(tmp_path: Path) -> None:
    """A private repository refuses a fetch without credentials, which the checkout does not leave behind."""
    steps = {step["name"]: step for step in snippet("action.yml")["runs"]["steps"] if "name" in step}
    checkout = snippet("github.yaml")["jobs"]["gate"]["steps"][0]
    assert checkout["with"] == {"persist-credentials": False, "fetch-depth": 0}
    git = "git -c user.name=x -c user.email=x@y -c init.defaultBranch=main"
    commit = f"{git} -C origin commit -q --allow-empty -m"
    made = shell(f"{git} init -q origin && {commit} 1 && {git} clone -q origin here && {commit} 2", tmp_path)
    assert made.returncode == 0, made.stderr

    def fetched(branch: str) -> int:
        return shell(steps["fetch the base branch"]["run"], tmp_path / "here", BASE=branch).returncode

    assert fetched("main") == 0
    assert shell("git log -1 --format=%s origin/main", tmp_path / "here").stdout == "2\n"
    (tmp_path / "origin").rename(tmp_path / "private")
    assert fetched("main") == 0 and fetched("") == 0 and fetched("other") != 0


def test_the_gitlab_job(project: Path) -> None:
    """The job's script passes on an equal run, and its exit code for too few documents is allowed."""
    job = snippet("gitlab.yaml")["gate"]
    variables = {**job["variables"], "BASE": "main"}
    install_lines, gate_lines = job["script"][:2], job["script"][2:]
    assert all(line.startswith("python -m ") and "pip install" in line for line in install_lines)
    done = shell(with_fewer_rows("\n".join(gate_lines)), project, **variables)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "PASS (1 of 1 checks)" in done.stdout
    assert job["allow_failure"]["exit_codes"] == 3


def test_the_pre_commit_hook(project: Path, in_this_process: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook's command passes on an equal run, and installs nothing."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    (use,) = snippet("pre-commit.yaml")["repos"][0]["hooks"]
    assert use["id"] == hook["id"] and hook["language"] == "system", "nothing is installed"
    python, *words = shlex.split(hook["entry"])
    assert [python, *words[:2]] == ["python", "-m", "evalengine"]
    monkeypatch.chdir(project)
    done = call(*words[2:], *with_fewer_rows(" ".join(use["args"])).split())
    assert done.code == 0 and "PASS (1 of 1 checks)" in done.out, done.err
    assert len(in_this_process) == 1


def test_what_ci_installs_brings_no_cuda() -> None:
    """uv takes torch from the index of its backend; a plain name would bring gigabytes of CUDA."""
    steps = {step["name"]: step for step in snippet("action.yml")["runs"]["steps"] if "name" in step}
    job = snippet("gitlab.yaml")["gate"]
    assert snippet("action.yml")["inputs"]["torch-backend"]["default"] == job["variables"]["UV_TORCH_BACKEND"] == "cpu"
    assert "UV_TORCH_BACKEND" in steps["install"]["env"]
    for script in (steps["install"]["run"], "\n".join(job["script"])):
        (line,) = (line for line in script.splitlines() if "torch" in line)
        assert line.startswith("python -m uv pip install --system torch==2.13.0 "), line
    root = SNIPPETS.resolve().parents[2]
    assert "$GITHUB_ACTION_PATH/../../.." in steps["install"]["run"] and (root / "pyproject.toml").is_file()


def test_the_pytest_snippet(
    project: Path, in_this_process: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snippet's test passes on an equal run, and fails on a run that cannot be compared."""
    monkeypatch.chdir(project)
    file = tmp_path / "test_gate.py"
    text = (SNIPPETS / "test_gate.py.txt").read_text(encoding="utf-8")
    file.write_text(with_fewer_rows(text).replace(FEWER, FEWER.replace(" ", '", "')), encoding="utf-8")
    test = runpy.run_path(str(file))["test_no_bit_has_changed"]
    test(tmp_path / "run")
    assert len(in_this_process) == 1
    fewer = finished(tmp_path / "fewer", "limit=2", SHORT)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="A has 4 requests, B 2"):
        test(fewer.folder.parent)


def test_a_gate_in_steps_asks_until_it_is_decided(tmp_path: Path) -> None:
    """16 documents of a weak model in fast numerics, 4 at a time: a margin of 60 points is decided before the last."""
    base = finished(tmp_path / "base", "limit=16", SHORT)
    policy = tmp_path / "own.yaml"
    policy.write_text("extends: accuracy\naccuracy: {margin: 60}\n")
    words = ("--keep", str(tmp_path / "kept"), "--json", "-", "--", "limit=16", SHORT, "batch_invariant=false")
    done = call("gate", str(base.folder), "--policy", str(policy), "--step", "4", *words)
    assert re.search(r"evalengine: the baseline's 16 documents took \d+ s, [\d.e-]+ s a document", done.err)
    (folder,) = (tmp_path / "kept").glob("*/arithmetic-*")
    own = Run(folder)
    assert done.code == 0 and own.manifest["identity"]["sequential"] == {"baseline": base.digest, "step": 4}
    samples = own.samples("arithmetic")
    first = first_of_order(in_order(base.digest, "arithmetic", range(16), None), len(samples))
    assert 4 <= len(samples) < 16 and len(samples) % 4 == 0
    assert (
        sorted(sample["doc_id"] for sample in samples)
        == sorted(first)
        == sorted({record.doc_id for record in own.records})
    )
    assert own.manifest["counts"]["documents"] == len(samples) and own.manifest["counts"]["resumed_requests"] == 0
    assert f"{len(samples)} documents (of 16, evaluated in steps)" in json.loads(done.out)["checks"][0]["message"]
    again = call("gate", str(base.folder), str(folder), "--policy", str(policy), "--json", "-")
    assert json.loads(again.out)["checks"] == json.loads(done.out)["checks"]
    assert call("gate", "a", "b", "--step", "4").code == 2


def test_a_run_in_steps_that_was_stopped_goes_on(tmp_path: Path) -> None:
    settings = (f"output_dir={tmp_path}", "limit=6", SHORT, "sequential.step=2", "sequential.baseline=none.json")
    (job,) = compose_jobs([*settings, "progress=false"])
    seen = []

    def killed(scores: Any) -> bool:
        seen.append(len(next(iter(scores.values()))))
        if len(seen) == 2:
            raise RuntimeError("killed")
        return False

    with pytest.raises(RuntimeError, match="killed"):
        runner.run(job.config, gate=Gate("b", killed))
    result = runner.run(job.config, gate=Gate("b", lambda scores: len(next(iter(scores.values()))) == 4))
    manifest = Run(result).manifest
    assert seen == [2, 4]
    assert (manifest["counts"]["documents"], manifest["counts"]["resumed_requests"]) == (4, 4)
    whole = runner.run(replace(job.config, output_dir=str(tmp_path / "whole")), gate=Gate("b", lambda scores: False))
    plain = finished(tmp_path / "plain", "limit=6", SHORT)
    assert Run(whole).digest == plain.digest, "the order of asking changes no bit"
    assert call(f"output_dir={tmp_path}", "sequential.step=2").code == 2
