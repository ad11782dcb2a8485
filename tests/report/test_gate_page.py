"""A gate over several runs, and a gate's page: what each form says of every run, whatever names and answers hold."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import evalengine
from evalengine.__main__ import main
from evalengine.errors import ConfigError
from evalengine.report.gate.gate import gate
from evalengine.report.gate.page import gate_page
from evalengine.report.gate.report import (
    ANNOTATIONS,
    OUTCOMES,
    Check,
    Report,
    headline,
    junit,
    markdown,
    report_lines,
    to_json,
    together,
    workflow_commands,
)
from evalengine.report.read.names import SWEEP_FORMAT
from tests.report.gate_runs import RIGHT, judge, make_run
from tests.report.page_content import content, nodes, words
from tests.report.test_ci import HOSTILE, hostile_checks
from tests.report.test_gate_verdicts import checked
from tests.run_double import generated, write_run

pytestmark = pytest.mark.usefixtures("no_github")


def one(verdict: str, name: str, checks: Sequence[Check] = ()) -> Report:
    """A report of one run; of verdict "error" with two problems."""
    why = (
        {"problems": ("A has 4 requests, B 2", "rows differ"), "trouble": "not comparable"}
        if verdict == "error"
        else {}
    )
    about = ("own", "no metric worse", "base.json", name)
    notes = ("may differ: A is x, B is y", "A is the baseline, B the run")
    return Report(verdict, *about, checks=tuple(checks), notes=notes, warnings=("the baseline is new",), **why)  # type: ignore[arg-type]


CHECKS = checked({"margin": 2.0}, large=(2000, 20, 20), small=(100, 1, 1), worse=(2000, 90, 20))
RUNS = {
    "pass": one("pass", "sweep/1", [CHECKS["large"]]),
    "inconclusive": one("inconclusive", "sweep/2", [CHECKS["small"], CHECKS["large"]]),
    "fail": replace(one("fail", "sweep/3", [*CHECKS.values(), Check("accuracy", "left", "acc", "skip", "left out")]),
                    compare="compare base.json sweep/3"),
    "error": one("error", "sweep/4"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("verdicts", "said", "code"),
    [
        (("pass", "pass"), "PASS (2 of 2 runs)", 0),
        (("pass", "inconclusive"), "INCONCLUSIVE: 1 of 2 runs inconclusive (2); 1 passed", 3),
        (("inconclusive", "fail", "pass"), "FAIL: 1 of 3 runs failed (3); 1 inconclusive; 1 passed", 1),
        (("fail", "error"), "ERROR: 1 of 2 runs could not be judged (4); 1 failed", 2),
        (("fail",) * 5, "FAIL: 5 of 5 runs failed (3; 3; 3; ... and 2 more)", 1),
    ],
)
def test_the_worst_run_decides(verdicts: Sequence[str], said: str, code: int) -> None:
    report = together("sweep", [RUNS[verdict] for verdict in verdicts])
    assert headline(report) == f"gate own: {said}" and report.exit_code == code
    loaded = json.loads(to_json(report))
    assert loaded["exit_code"] == code
    assert [own["verdict"] for own in loaded["reports"]] == sorted(verdicts, key=[*OUTCOMES].index), "failed first"
    assert "reports" not in json.loads(to_json(RUNS["pass"])), "the JSON of one run stays as it was"
    mixed = together("sweep", [RUNS["pass"], replace(RUNS["fail"], run="/far/run")])
    assert mixed.names == ["/far/run", "sweep/1"]


def test_every_form_holds_every_run() -> None:
    report = together("sweep", [*{**RUNS, "error": replace(RUNS["error"], warnings=())}.values()])
    lines = [line.plain for line in report_lines(report)]
    assert [re.split(r"[:( ]+", line)[:2] for line in lines[1:5]] == [
        ["ERROR", "4"], ["FAIL", "3"], ["INCONCLUSIVE", "2"], ["PASS", "1"],
    ]  # fmt: skip
    assert lines[3].endswith("1 of 2 have too few documents (largest need: about 463)")
    assert lines[1].endswith("(not comparable): A has 4 requests, B 2; ... and 1 more")
    assert lines.count("WARNING the baseline is new") == 1 and len(lines) == 8
    assert "what differs, and why: compare base.json sweep/3" in lines
    verbose = [line.plain for line in report_lines(report, verbose=True)]
    assert sum(line.startswith("FAIL      accuracy worse") for line in verbose) == 1 < len(verbose) - len(lines)
    assert any(line.endswith("(not comparable): A has 4 requests, B 2; rows differ") for line in verbose)
    suites = ElementTree.fromstring(junit(report).encode()).findall("testsuite")
    assert [suite.attrib["tests"] for suite in suites] == ["2", "4", "2", "1"]
    names = [(case.attrib["classname"], case.attrib["name"]) for suite in suites for case in suite.iter("testcase")]
    assert len({*names}) == len(names) == 9, "GitLab takes two tests of one name for one"
    root = ElementTree.fromstring(junit(report).encode())
    assert [root.attrib[name] for name in ("tests", "failures", "errors", "skipped")] == ["9", "1", "2", "3"]
    text = markdown(report)
    assert [line.split()[2] for line in text.splitlines() if line.startswith("#### ")] == [
        *map(str.upper, ("error", "fail", "inconclusive", "pass"))
    ]
    commands = [*workflow_commands(report)]
    assert [line.split()[0] for line in commands] == ["::warning", *["::error"] * 3, *["::warning"] * 2]
    assert "gate own%3A 3%3A accuracy worse" in commands[3], "problems first"
    page = content(gate_page(report))
    anchors = [f"run-{number}" for number in range(1, 5)]
    assert [node["href"] for node in nodes(page, is_="a")] == [f"#{name}" for name in anchors]
    assert [section["name"] for section in page["sections"][1:]] == anchors


def test_many_runs_stay_within_githubs_limits() -> None:
    long = "\u4e2d" * 400
    run = replace(one("fail", long, [Check("digest", long, long, "fail", long, (long,) * 6)] * 3), problems=(long,) * 9)
    report = together("sweep", [run] * 400)
    assert len(markdown(report).encode()) < 1024 * 1024 and "more lines are not shown" in markdown(report)
    assert len([*workflow_commands(report)]) == ANNOTATIONS + 1


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished experiment of two runs, the second of which changed a token."""
    monkeypatch.chdir(tmp_path)
    folder = Path("results/noise_floor-sums-m-20260102T030405Z-00000000")
    for number in (1, 2):
        records = [generated(doc) for doc in range(4)]
        records[1].output_ids[0] += number - 1
        write_run(folder / f"{number}-max_num_seqs_{number}" / "run", records)
    sources = [{"source": f"{number}-max_num_seqs_{number}/run"} for number in (1, 2)]
    (folder / "noise_floor.json").write_text(json.dumps({"format": SWEEP_FORMAT, "runs": sources}))
    write_run(Path("base"), [generated(doc) for doc in range(4)])
    return folder


def test_each_run_of_an_experiment_is_judged(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("noise_floor", str(sweep)):
        assert main(["gate", "base", name, "--html", "new/gate.html"]) == 1
        out = capsys.readouterr().out.splitlines()
        assert out[0] == "gate bitwise: FAIL: 1 of 2 runs failed (2-max_num_seqs_2/run); 1 passed"
        assert [line.split()[:2] for line in out[1:3]] == [
            ["FAIL", "2-max_num_seqs_2/run:"], ["PASS", "1-max_num_seqs_1/run"]
        ]  # fmt: skip
        assert out[-1] == f"what differs, and why: python -m evalengine compare base {sweep}/2-max_num_seqs_2/run"
        assert "Gate bitwise" in Path("new/gate.html").read_text()
    assert gate("base", "noise_floor:1").reports == () and gate("base", sweep / "1-max_num_seqs_1").verdict == "pass"
    gated = evalengine.gate("base", "noise_floor")
    assert (gated.verdict, gated.passed) == ("fail", False) and [own.verdict for own in gated.runs] == ["fail", "pass"]
    assert [*gated.checks["run"]] == [own.report.run for own in gated.runs] and str(gated).startswith(
        "gate bitwise: FAIL"
    )
    assert "run" not in evalengine.gate("base", "noise_floor:1").checks.columns


def test_what_concerns_all_runs_is_said_once(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = gate("none.json", sweep)
    assert report.trouble == "no baseline yet" and report.reports == () and report.run == str(sweep)
    for file in (sweep / "2-max_num_seqs_2" / "run").glob("*.parquet"):
        file.unlink()
    assert main(["gate", "base", str(sweep)]) == 2, "a run that cannot be judged is the worst"
    out = capsys.readouterr().out
    assert "ERROR        2-max_num_seqs_2/run (the run cannot be read): records.parquet: missing" in out
    assert str(sweep) not in out, "the folder's name was repeated"
    with pytest.raises(ConfigError, match="2-max_num_seqs_2/run: the run cannot be read"):
        evalengine.gate("base", sweep)
    (sweep / "noise_floor.json").unlink()
    assert gate("base", sweep).trouble == "the run cannot be read", "an experiment that is not finished"


def test_the_page_says_verdict_and_reason_first_and_shows_losses_bounds_and_margins() -> None:
    page = gate_page(RUNS["fail"])
    text = words(page)
    parts = ("gate own: FAIL: 1 of 3 checks failed", "The policy requires: no metric worse", "the baseline is new",
             "0.7500 -> 0.7150", "about 463 documents", "Excluded at 95 %", "What 3 checks saw; 1 not judged",
             "A is the baseline")  # fmt: skip
    places = [text.index(part) for part in parts]
    assert places == sorted(places), "failed checks first, details below"
    (table,) = nodes(page, is_="sheet")
    assert [row[2:5] for row in (table["rows"][0], table["rows"][-1])] == [
        ["3.50 points", "4.44 points", "2.00 points"], ["0.00 points", "0.61 points", "2.00 points"]
    ]  # fmt: skip
    drawn = [*nodes(table, is_="interval")]
    assert [one["rule"] for one in drawn] == [2.0] * 3 and [one["bounds"] for one in drawn] == [[-4.0, 4.0]] * 3
    assert drawn[0]["value"] == pytest.approx(3.5) and drawn[0]["low"] == drawn[0]["value"]
    (folded,) = nodes(page, is_="details")
    assert "left out" in words(folded) and "left out" not in text[: text.index("What 3 checks saw")]


@pytest.mark.parametrize("verdict", OUTCOMES)
def test_no_hostile_text_is_markup_on_the_page(verdict: str) -> None:
    checks = [replace(check, loss=1.0, bound=2.0, margin=1.5, unit=HOSTILE) for check in hostile_checks()]
    names = (HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    own = Report(verdict, *names, None, HOSTILE, tuple(checks), (HOSTILE,), (HOSTILE,), (HOSTILE,), HOSTILE)  # type: ignore[arg-type]
    for report in (own, together(HOSTILE, [own, own])):
        text = gate_page(report).render()
        assert "<script>alert" not in text and "</failure>" not in text and "\\u003cscript\\u003ealert(1)" in text
        assert not set(text) & {"\x00", "\x1b", "\u202e", "\ud800", "\u2028"}
        assert not re.search(r'(?:href|src)="(?!#)', text), "no link leaves the page"
        assert text.count("<script") == 5, "the page's own"


def test_a_page_that_cannot_be_written_is_no_failed_gate(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "base", "base", "--html", "results"]) == 2
    assert "gate: --html results: a folder" in capsys.readouterr().err


def test_a_run_that_is_missing_or_unfinished_is_reported(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep with an empty folder instead of a run passed without a word."""
    for name in ("runs/a", "runs/b"):
        write_run(Path(name), [generated(doc) for doc in range(4)])
    Path("runs/twin").symlink_to("a")
    for name in ("c", "gate-20260101T000000-x", ".hidden"):
        Path("runs", name).mkdir()
    report = gate("base", "runs")
    assert report.verdict == "pass" and headline(report).endswith("PASS (2 of 2 runs)"), "a link is no third run"
    skipped = "runs: skipped subfolders without a run: c, gate-20260101T000000-x"
    assert report.warnings == (skipped,)
    assert all("without a run" in form(report).replace("\\", "") for form in (junit, markdown, to_json))
    for command in ("compare runs", "plan runs=runs"):
        main(command.split())
        assert f"evalengine: {skipped}\n" in capsys.readouterr().err, command
    for path in Path("runs/b").iterdir():
        path.unlink()
    single = gate("base", "runs")
    assert single.reports == () and single.notes[-1] == "runs: the only run in it was judged: a"
    assert "without a run: b, c, gate-" in single.warnings[0]
    for mark in (".lock", "journal.jsonl", "manifest.json"):  # killed at its birth, later, or damaged
        Path("runs/b", mark).write_text("{}")
        assert main(["gate", "base", "runs"]) == 2
        out = capsys.readouterr().out
        assert out.startswith("gate bitwise: ERROR: 1 of 2 runs could not be judged (b); 1 passed\n"), mark
        assert "ERROR        b (the run cannot be read): this run is not finished" in out
        Path("runs/b", mark).unlink()


def test_description_and_notes_are_explained_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under INCONCLUSIVE the description read like a verdict, what may differ was "not judged", and JUnit held no
    notes."""
    a, b = make_run({"sums": RIGHT}), make_run({"sums": RIGHT}, total=-1.6, weights="v", numerics="fast")
    report = judge(monkeypatch, a, b, "accuracy")
    assert report.verdict == "inconclusive"
    forms = ["\n".join(map(str, report_lines(report))), markdown(report), junit(report), words(gate_page(report))]
    for text in map(html.unescape, forms):
        assert text.count("no metric worse") == text.count("The policy requires: no metric worse")
        assert "A is the baseline, B the run" in text and "not judged" not in text
        assert "may differ: The model weights differ" in text and "may differ: numerics is" in text
    notes = json.loads(to_json(report))["notes"]
    assert len(notes) == 3 and notes[-1] == "A is the baseline, B the run"


@pytest.mark.parametrize("limits", [{}, {"max_regression": 3}, {"max_regression": 3, "margin": 5}])
def test_no_failed_check_ends_with_the_losses_that_it_excludes(limits: dict[str, float]) -> None:
    """It read "Excluded at 95 %: losses above 94.3 points" below a failure; with max_regression it still did."""
    (check,) = checked({"margin": 2.0, **limits}, worse=(2000, 90, 20)).values()
    report = one("fail", "r", [check])
    texts = ["\n".join(map(str, report_lines(report, verbose=True))), markdown(report), junit(report), to_json(report),
             gate_page(report).render()]  # fmt: skip
    assert check.status == "fail" and not any("Excluded" in text for text in texts)
