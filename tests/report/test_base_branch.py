"""The baseline of the base branch, and what a first run, a missing file and a failed run are called."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from evalengine.__main__ import main
from evalengine.errors import ConfigError
from evalengine.report.gate import gate as made_run
from evalengine.report.gate.gate import gate, load_from_base
from evalengine.report.read.baseline import write_baseline
from evalengine.report.read.load import load_run
from evalengine.report.read.names import stands_for
from tests.run_double import generated, write_run


def git(folder: Path, *words: str) -> None:
    """Runs git in the folder, with an author and main as the first branch."""
    settings = ("-c", "user.name=x", "-c", "user.email=x@y", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *settings, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of the same prompts that differ in their second generation."""
    paths = []
    for name, seed in (("old", 0), ("new", 1)):
        records = [generated(doc) for doc in range(6)]
        records[1].output_ids[0] += seed
        paths.append(write_run(tmp_path / name, records))
    return paths[0], paths[1]


@pytest.fixture
def project(tmp_path: Path, runs: tuple[Path, Path]) -> Path:
    """The old run's baseline file, in a checkout whose main holds it."""
    folder = tmp_path / "project"
    (folder / "kept").mkdir(parents=True)
    git(folder, "init", "-q")
    write_baseline(load_run(runs[0]), folder / "kept" / "base.json")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "baseline")
    git(folder, "switch", "-qc", "change")
    return folder / "kept" / "base.json"


pytestmark = pytest.mark.usefixtures("no_github")


def test_a_change_cannot_bring_its_own_yardstick(project: Path, runs: tuple[Path, Path], tmp_path: Path) -> None:
    """The new run passes against a baseline of itself; against that of main it fails, and every report says so."""
    write_baseline(load_run(runs[1]), project, force=True)
    assert gate(project, runs[1], "bitwise").verdict == "pass"
    summary, junit = tmp_path / "summary.md", tmp_path / "gate.xml"
    report = gate(project, runs[1], "bitwise", base="main")
    assert report.verdict == "fail" and report.baseline.startswith(f"{project} of main (")
    assert report.warnings[0].startswith(f"baseline changed in this pull request: {project}")
    words = ["gate", str(project), str(runs[1]), "--base", "main", "--summary", str(summary), "--junit", str(junit)]
    assert main(words) == 1
    assert "**⚠️ baseline changed in this pull request" in summary.read_text()
    warnings = ElementTree.parse(junit).findall(".//property[@name='warning']")
    assert [warning.attrib["value"].split(":")[0] for warning in warnings] == ["baseline changed in this pull request"]


def test_a_changed_baseline_is_said_to_the_terminal_and_to_github(
    project: Path, runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_baseline(load_run(runs[1]), project, force=True)
    main(["gate", str(project), str(runs[0]), "--base", "main", "--annotations"])
    out = capsys.readouterr().out
    assert "WARNING baseline changed in this pull request" in out
    assert "\n::warning title=gate bitwise::baseline changed in this pull request" in out


def test_an_unchanged_baseline_is_no_news(project: Path, runs: tuple[Path, Path]) -> None:
    report = gate(project, runs[0], "bitwise", base="main")
    assert (report.verdict, report.warnings) == ("pass", ())


def test_a_removed_baseline_still_counts_and_a_new_one_is_all_there_is(project: Path, runs: tuple[Path, Path]) -> None:
    project.unlink()
    report = gate(project, runs[0], "bitwise", base="main")
    assert report.verdict == "pass" and "baseline removed in this pull request" in report.warnings[0]
    other = project.with_name("other.json")
    write_baseline(load_run(runs[1]), other)
    report = gate(other, runs[1], "bitwise", base="main")
    assert report.verdict == "pass" and report.warnings[0].startswith(
        "the baseline is new in this pull request: main ("
    )


@pytest.mark.parametrize(("base", "message"), [("nowhere", "no such revision"), ("--help", "no such revision")])
def test_an_unknown_revision_is_refused(base: str, message: str, project: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_from_base(project, base)


def test_no_checkout_and_no_file_are_refused(project: Path, tmp_path: Path, runs: tuple[Path, Path]) -> None:
    write_baseline(load_run(runs[0]), tmp_path / "outside.json")
    for file, message in (
        (tmp_path / "outside.json", "no git checkout"),
        (project.with_name("none.json"), "neither here nor in main"),
        (project.parent, "is a folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_from_base(file, "main")


def test_a_first_run_has_no_baseline_and_is_told_so(runs: tuple[Path, Path], tmp_path: Path) -> None:
    report = gate(tmp_path / "none.json", runs[0])
    assert (report.verdict, report.exit_code, report.trouble) == ("error", 2, "no baseline yet")
    assert f"python -m evalengine baseline RUN -o {tmp_path}/none.json" in report.problems[0]
    junit, summary = tmp_path / "gate.xml", tmp_path / "summary.md"
    main(["gate", str(tmp_path / "none.json"), str(runs[0]), "--junit", str(junit), "--summary", str(summary)])
    assert [case.attrib["name"] for case in ElementTree.parse(junit).findall(".//testcase")] == ["no baseline yet"]
    assert "ERROR (no baseline yet)" in summary.read_text()


def test_a_first_run_beside_a_base_without_one_is_told_so_too(project: Path, runs: tuple[Path, Path]) -> None:
    report = gate(project.with_name("none.json"), runs[0], base="main")
    assert report.trouble == "no baseline yet" and "neither here nor in main" in report.problems[0]
    assert main(["gate", str(project.with_name("none.json")), "--base", "main", "--", "limit=1"]) == 2


def test_missing_and_damaged_files_have_titles_of_their_own(runs: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    write_baseline(load_run(runs[0]), file)
    policy = tmp_path / "own.yaml"
    policy.write_text("digest: maybe")
    assert gate(file, tmp_path / "none").trouble == "no run"
    assert gate(tmp_path / "a", tmp_path / "b").trouble == "no baseline yet and no run"
    report = gate(tmp_path / "none.json", f"{runs[0].parent}:latest")  # a name that stands for a run that is there
    assert report.trouble == "no baseline yet" and len(report.problems) == 1
    report = gate(file, f"{tmp_path / 'empty'}:latest")  # and one that stands for none: what is said of it elsewhere
    assert report.trouble == "no run" and "no finished run in" in report.problems[0]
    assert gate(file, runs[0], str(policy)).trouble == "bad policy"
    (runs[1] / "digest.txt").write_text("x")
    assert gate(file, runs[1]).trouble == "the run cannot be read"
    file.write_text(file.read_text()[:300])
    assert gate(file, runs[0]).trouble == "the baseline cannot be read"


def test_two_runs_in_one_folder_are_not_guessed_at(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """A workspace that CI keeps holds several runs: all of them must pass. The shipped snippets make every run in a
    folder of its own."""
    report = gate(runs[0], tmp_path)
    assert report.verdict == "fail" and [one.run for one in report.reports] == [str(runs[1]), str(runs[0])]


def test_the_gate_makes_each_run_in_a_new_folder(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def command(words: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(words)
        folder = Path(words[-1].removeprefix("output_dir="))
        assert folder.is_dir() and not list(folder.iterdir()), "a new, empty folder"
        write_run(folder / "made", [generated(doc) for doc in range(6)])
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(made_run.subprocess, "run", command)
    for _ in range(2):  # the second run finds a workspace that was kept
        assert main(["gate", str(runs[0]), "--keep", str(tmp_path / "kept"), "--", "task=sums", "limit=6"]) == 0
        assert main(["gate", str(runs[0]), str(tmp_path / "kept")]) == 0, "one run, and then each of two"
    assert commands[0][1:-1] == ["-m", "evalengine", "task=sums", "limit=6"] and len(commands) == 2
    assert len(list((tmp_path / "kept").iterdir())) == 2
    second = Path(commands[1][-1].removeprefix("output_dir=")) / "made"
    assert stands_for(f"{tmp_path / 'kept'}:latest") == second, "it found nothing"
    assert main(["gate", str(runs[0]), f"{tmp_path / 'kept'}:latest"]) == 0
    assert main(["gate", str(runs[0]), "--", "limit=6"]) == 0
    assert not Path(commands[2][-1].removeprefix("output_dir=")).exists(), "gone, unless kept"


def test_a_first_run_can_be_left_as_the_baseline_to_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(words: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        write_run(Path(words[-1].removeprefix("output_dir=")) / "made", [generated(doc) for doc in range(6)])
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(made_run.subprocess, "run", command)
    file, left = tmp_path / "baseline.json", tmp_path / "kept" / "baseline.json"
    words = ["gate", str(file), "--keep", str(tmp_path / "kept"), "--bootstrap", str(left)]
    assert main([*words, "--", "limit=6"]) == 2, "nothing was judged"
    assert f"written as one to {left}: if it is good, commit it as {file}" in capsys.readouterr().err
    file.write_bytes(left.read_bytes())
    left.unlink()
    assert main([*words, "--", "limit=6"]) == 0 and not left.exists(), "there is a baseline now"
    assert main(["gate", str(file), str(tmp_path), "--bootstrap", str(left)]) == 2
    assert "--bootstrap is for a run that the gate makes" in capsys.readouterr().err


def test_a_gated_run_says_before_it_what_its_margins_need(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(made_run.subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 1))
    assert main(["gate", str(runs[0]), "--policy", "accuracy", "--", "limit=6"]) == 2
    said = capsys.readouterr().err
    assert "policy accuracy: 2 checks; without a loss it passes with probability 0.00 if 0 % of answers" in said
    assert re.search(r"too few documents for sums \S+, sums \S+; `evalengine plan runs=BASELINE` says how many", said)
    assert main(["gate", str(runs[0]), "--", "limit=6"]) == 2 and "too few" not in capsys.readouterr().err, "bitwise"


def test_a_failed_gate_names_the_command_that_shows_why(
    runs: tuple[Path, Path], project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It named BASELINE and RUN, also where the run was removed with its folder."""

    def command(words: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        shutil.copytree(runs[1], Path(words[-1].removeprefix("output_dir=")) / "made")
        return subprocess.CompletedProcess(words, 0)

    def advice(*words: str) -> str:
        assert main(["gate", *words]) == 1
        (line,) = re.findall("^what differs, and why: (.*)$", capsys.readouterr().out, re.MULTILINE)
        return str(line)

    ours = f"python -m evalengine compare {runs[0]}"
    monkeypatch.chdir(tmp_path)
    assert advice(str(runs[0]), "new") == f"{ours} new"
    assert main(advice(str(runs[0]), "new").split()[3:]) == 1 and "DIFFERENT" in capsys.readouterr().out
    of_base = f"python -m evalengine compare {project} new"
    assert advice(str(project), "new", "--base", "main") == of_base
    write_baseline(load_run(runs[1]), project, force=True)
    assert advice(str(project), "new", "--base", "main") == f"{of_base} ({project} as it is in main)"
    monkeypatch.setattr(made_run.subprocess, "run", command)
    assert advice(str(runs[0]), "--", "limit=6") == f"rerun with --keep FOLDER, then {ours} FOLDER:latest"
    kept = advice(str(runs[0]), "--keep", "kept", "--", "limit=6")
    assert kept == f"{ours} {next(Path('kept').iterdir())}/made"


def test_a_run_that_fails_is_in_the_reports(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(made_run.subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 1))
    assert main(["gate", str(runs[0]), "--json", str(tmp_path / "gate.json"), "--", "task=nope"]) == 2
    content = json.loads((tmp_path / "gate.json").read_text())
    assert content["trouble"] == "the run failed" and "python -m evalengine task=nope" in content["problems"][0]
    monkeypatch.setattr(made_run.subprocess, "run", lambda *_, **__: pytest.fail("a run without a baseline"))
    assert main(["gate", str(tmp_path / "none.json"), "--", "limit=6"]) == 2
    assert "no baseline yet" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"], "give RUN, or -- and the settings"),
        (["a", "b", "--", "limit=1"], "not both"),
        (["a", "b", "--keep", "c"], "--keep is for a run that the gate makes"),
    ],
)
def test_bad_usage_exits_with_2_and_says_why(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gate", *words]) == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("word", ["output_dir=x", "resume=never", "-m"])
def test_settings_that_the_gate_makes_itself_are_refused(
    word: str, runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gate", str(runs[0]), "--json", str(tmp_path / "gate.json"), "--", word]) == 2
    assert f"gate: {word}: " in capsys.readouterr().err
    content = json.loads((tmp_path / "gate.json").read_text())
    assert content["trouble"] == "bad settings" and content["problems"][0].startswith(f"gate: {word}: ")
