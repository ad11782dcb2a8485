"""What machines read of a gate: valid whatever a task's name or a model's answer holds."""

from __future__ import annotations

import errno
import json
import os
import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from evalengine.__main__ import main
from evalengine.report.cli import gate as gate_cli
from evalengine.report.gate.report import (
    ANNOTATIONS,
    Check,
    Report,
    headline,
    junit,
    markdown,
    plain,
    to_json,
    workflow_commands,
)

HOSTILE = (
    "</failure><script>alert(1)</script>]]>&'\"|`*_[x](javascript:1)![i](http://e.vil/a.png) @org www.e.vil #1\n"
    "::error title=x::y\r\n##[add-mask]z\x00\x1b[31m\u202e\ud800\ufffe\u2028"
)


def report(*checks: Check, verdict: str = "fail", problems: tuple[str, ...] = ()) -> Report:
    """A report of these checks, with hostile names."""
    names = (HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    return Report(verdict, *names, None, "ab" * 32, checks, problems, (HOSTILE,))  # type: ignore[arg-type]


def hostile_checks() -> list[Check]:
    """One check per status, with hostile text in every field."""
    statuses = ("fail", "pass", "skip", "excused", "undecided")
    return [Check("tokens", HOSTILE, HOSTILE, status, HOSTILE, (HOSTILE,), HOSTILE) for status in statuses]  # type: ignore[arg-type]


def test_junit_is_xml_whatever_it_holds() -> None:
    text = junit(report(*hostile_checks(), problems=(HOSTILE,)))
    root = ElementTree.fromstring(text.encode("utf-8"))
    (suite,) = root
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": 6, "failures": 1, "errors": 1, "skipped": 3}
    cases = suite.findall("testcase")
    assert [[child.tag for child in case] for case in cases] == [
        ["failure"], ["system-out"], ["skipped"], ["skipped"], ["skipped"], ["error"],
    ]  # fmt: skip
    failure = cases[0].find("failure")
    assert failure is not None and failure.attrib["message"] == plain(HOSTILE)
    assert not root.findall(".//script")


def test_markdown_renders_hostile_text_as_itself() -> None:
    text = markdown(report(*hostile_checks(), problems=(HOSTILE,)))
    assert "<" not in text
    unbolded = text.replace("**", "")  # the report's own bold marks are no hostile text
    for mark in ("`", "*", "[", "](", "![", "://", "@", "www.", "~", "$", "_["):
        assert mark not in unbolded, mark
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 7 and {row.count("|") for row in rows} == {6}
    assert plain(HOSTILE) in unescape(text)
    assert len([line for line in text.splitlines() if line.startswith("#")]) == 1


def test_annotations_are_one_line_and_one_command_each() -> None:
    lines = list(workflow_commands(report(*hostile_checks(), problems=(HOSTILE,))))
    assert [line.split()[0] for line in lines] == ["::error", "::error", "::warning"]
    for line in lines:
        match = re.fullmatch(r"::(?:error|warning) title=([^:,\n\r]*)::([^\n\r]*)", line)
        assert match, line
        assert "##[" not in line and not set(line) & {"\x00", "\x1b", "\u202e", "\u2028"}
    assert "100%25 sure" in next(workflow_commands(report(Check("digest", "t", "", "fail", "100% sure"))))


def test_annotations_say_how_many_are_left_out() -> None:
    many = [Check("digest", f"t{number}", "", "fail", "differs") for number in range(25)]
    lines = list(workflow_commands(report(*many)))
    assert len(lines) == ANNOTATIONS and lines[-1].endswith("::and 16 more failed checks")
    assert len(list(workflow_commands(report(*many[:ANNOTATIONS])))) == ANNOTATIONS


def test_a_summary_stays_below_githubs_limit() -> None:
    long = "\u4e2d" * 5000
    many = [Check("digest", f"{long}{number}", long, "fail", long, (long,) * 6, long) for number in range(1000)]
    text = markdown(report(*many))
    assert len(text.encode()) < 1024 * 1024 and "more lines are not shown" in text


def test_json_holds_every_check() -> None:
    loaded = json.loads(to_json(report(*hostile_checks())))
    assert loaded["verdict"] == "fail" and loaded["exit_code"] == 1
    assert [check["status"] for check in loaded["checks"]] == ["fail", "pass", "skip", "excused", "undecided"]
    assert loaded["checks"][0]["message"] == HOSTILE and to_json(report()).isascii()


def test_the_headline_says_policy_verdict_and_count() -> None:
    assert headline(Report("pass", "p", "", "a", "b", checks=(Check("digest", "t", "", "pass", ""),))).endswith(
        "gate p: PASS (1 of 1 checks)"
    )
    assert (
        headline(Report("error", "p", "", "a", "b", problems=("x",), trouble="not comparable"))
        == "gate p: ERROR (not comparable)"
    )


@pytest.fixture
def hostile_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the command `gate` report hostile checks, outside of GitHub."""
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    hostile_report = report(*hostile_checks(), problems=(HOSTILE,))
    monkeypatch.setattr(gate_cli, "gate", lambda *_: hostile_report)


@pytest.mark.usefixtures("hostile_gate")
def test_no_line_of_the_terminal_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "a", "b"]) == 1
    for line in "".join(capsys.readouterr()).splitlines():
        assert not line.lstrip().startswith("::") and "##[" not in line and "\x1b" not in line


@pytest.mark.usefixtures("hostile_gate")
def test_github_is_honoured_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, own = tmp_path / "summary.md", tmp_path / "own.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    summary.write_text("before\n")
    main(["gate", "a", "b"])
    assert capsys.readouterr().out.count("\n::error") == 2
    assert summary.read_text().startswith("before\n###"), "appended"
    size = summary.stat().st_size
    main(["gate", "a", "b", "--no-annotations", "--summary", str(own)])
    assert "\n::error" not in capsys.readouterr().out
    assert own.exists() and summary.stat().st_size == size
    for elsewhere in ("false", "", "of another forge"):
        monkeypatch.setenv("GITHUB_ACTIONS", elsewhere)
        assert main(["gate", "a", "b"]) == 1
        assert "\n::error" not in capsys.readouterr().out


@pytest.mark.usefixtures("hostile_gate")
def test_json_has_standard_output_to_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "a", "b", "--json", "-", "--annotations", "--junit", str(tmp_path / "new" / "gate.xml")]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"] == "fail" and "\n::error" in err
    assert ElementTree.parse(tmp_path / "new" / "gate.xml").getroot().tag == "testsuites"


def test_bad_usage_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "a"]) == 2 and main(["gate", "a", "b", "--polcy", "x"]) == 2
    assert main(["gate", str(tmp_path / "none"), str(tmp_path), "--policy", "bitwise"]) == 2
    assert main(["gate", str(tmp_path), str(tmp_path), "--policy", "bitwize"]) == 2
    assert "did you mean bitwise?" in capsys.readouterr().err


def test_all_paths_are_checked_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were checked after minutes of a run, and the first that was wrong stopped the reports after it."""
    monkeypatch.setattr(gate_cli, "unready", lambda *_: pytest.fail("something ran"))
    words = ["--junit", str(tmp_path), "--summary", str(tmp_path / "s.md"), "--json", "/dev/null/x"]
    assert main(["gate", "a", *words, "--", "limit=1"]) == 2
    out, err = capsys.readouterr()
    assert f"gate: --junit {tmp_path}: a folder" in err and "gate: --json /dev/null/x: " in err
    assert not out and not (tmp_path / "s.md").exists()


@pytest.mark.usefixtures("hostile_gate")
def test_a_disk_that_refuses_one_report_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left half a file, named it "None", and the reports after it were not written."""
    replace = os.replace

    def refuse(old: Path, new: Path) -> None:
        if new.name in ("junit", "html"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(old, new)

    monkeypatch.setattr(os, "replace", refuse)
    files = {option: tmp_path / option for option in ("junit", "summary", "json", "html")}
    files["summary"].write_text("before")
    assert main(["gate", "a", "b", *(word for pair in files.items() for word in (f"--{pair[0]}", str(pair[1])))]) == 2
    err = capsys.readouterr().err
    for option in ("junit", "html"):
        assert f"gate: --{option}: could not write {tmp_path}/{option}: No space left on device" in err
    assert (
        json.loads(files["json"].read_text())["verdict"] == "fail" and files["summary"].read_text()[:9] == "before###"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["json", "summary"]


@pytest.mark.usefixtures("hostile_gate")
def test_a_full_standard_output_costs_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gate_cli, "report_lines", full)
    assert main(["gate", "a", "b", "--json", str(tmp_path / "gate.json")]) == 2
    assert "gate: standard output cannot be written (No space left on device)" in capsys.readouterr().err
    assert json.loads((tmp_path / "gate.json").read_text())["verdict"] == "fail"
