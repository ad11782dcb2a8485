"""The command `compare`: exit codes, the last line, JSON, and what untrusted text cannot do."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from evalengine.__main__ import main
from evalengine.report.cli import compare as compare_cli
from evalengine.report.compare.as_json import comparison_json
from evalengine.report.compare.compare import compare
from evalengine.report.read.run import Run
from tests.report.compared_runs import BASE, BIT, TOKEN, run
from tests.run_double import generated, write_run


def test_json_is_strict_complete_and_stable() -> None:
    odd = {**BASE, 0: ([5, 6, 7], [float("nan"), -0.25, -1.0])}
    a, b = run(BASE), run({**odd, 1: ([8, 3], [-0.125, float("-inf")])}, scores={1: 0.0})
    text = json.dumps(comparison_json(compare(a, b)), allow_nan=False)
    assert text == json.dumps(comparison_json(compare(a, b)), allow_nan=False)
    content = json.loads(text)
    assert content["verdict"] == "DIFFERENT" and content["within"] == dict.fromkeys(
        ("bitwise", "tokens", "answers"), False
    )
    assert content["requests"] == {"common": 3, "only_a": 0, "only_b": 0, "differing": 2}
    assert content["divergences"][0]["logprob_b"] is None and content["divergences"][0]["position"] == 1
    assert content["flips"][0]["doc_id"] == 1 and content["metrics"][0]["paired"]["losses"] == 1


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Run]:
    """The runs that the command loads by these names, instead of folders."""
    known = {"base": run(BASE), "bit": run(BIT), "token": run(TOKEN), "short": run({0: BASE[0]}, limit=1)}
    monkeypatch.setattr(compare_cli, "load_run", lambda path: known[path])
    return known


@pytest.mark.parametrize("words", [["base", "token"], ["base", "bit", "token"]])
def test_80_columns_cut_no_name_and_no_value(
    words: list[str], runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["compare", *words])
    whole = capsys.readouterr().out
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "80", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    main(["compare", *words])
    narrow = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert "…" not in narrow
    assert {*re.findall(r"[\w.+-]*\d[\w.+-]*", whole)} <= {*re.findall(r"[\w.+-]*\d[\w.+-]*", narrow)}


@pytest.mark.parametrize(
    ("words", "code", "last"),
    [
        (["base", "base"], 0, "verdict: IDENTICAL"),
        (["base", "bit"], 1, "verdict: SAME TOKENS"),
        (["base", "bit", "--level", "tokens"], 0, "verdict: SAME TOKENS"),
        (["base", "token", "--level", "tokens"], 1, "verdict: DIFFERENT"),
        (["base", "token", "--level=answers"], 0, "verdict: DIFFERENT"),
        (["base", "short", "--allow"], 0, "verdict: IDENTICAL on the 1 requests of both"),
        (["base", "base", "base"], 0, "verdict: IDENTICAL (3 of 3 pairs identical, 1 digests)"),
        (["base", "bit", "--matrix"], 1, "verdict: SAME TOKENS (0 of 1 pairs identical, 2 digests)"),
        (["base", "base", "short"], 2, "verdict: IDENTICAL where compared (1 of 3 pairs identical, 2 digests, 2 not c"),
        (["base", "base", "short", "--allow"], 0, "verdict: IDENTICAL where compared (1 of 3 pairs identical, 2 ident"),
    ],
)
def test_exit_codes_and_the_last_line_tell_the_verdict(
    words: list[str], code: int, last: str, runs: dict[str, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *words]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(last)
    asked = "--level" in " ".join(words)
    assert (f": {'failed' if code else 'passed'}" in lines[-2] and lines[-2].startswith("--level ")) == asked


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["base", "short"], "they share 1 (limit is none in A and 1 in B)"),
        (["base"], "one run alone cannot be compared"),
        (["base", "bit", "--level", "bits"], "'bits' is not one of"),
        (["base", "bit", "--json", "/nowhere/x.json"], "--json /nowhere/x.json: there is no folder /nowhere"),
    ],
)
def test_bad_usage_says_nothing_on_standard_output(
    words: list[str], message: str, runs: dict[str, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("evalengine: ")


def test_a_folder_of_runs_stands_for_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a sweep leaves them in its output_dir."""
    for number in range(3):
        write_run(tmp_path / "sweep" / f"run{number}", [generated(0, [1, 2])])
        assert main(["compare", str(tmp_path / "sweep")]) == (0 if number else 2)
    out, err = capsys.readouterr()
    assert "3 of 3 pairs identical" in out and "one run alone" in err
    (tmp_path / "none" / "deep").mkdir(parents=True)
    assert main(["compare", str(tmp_path / "none")]) == main(["compare", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("no run in this folder") == 2, "it said that one run cannot be compared"
    for number in range(3):  # outputs of lm-eval
        for name in ("digest.txt", "manifest.json", "records.parquet"):
            (tmp_path / "sweep" / f"run{number}" / name).unlink()
    assert main(["compare", str(tmp_path / "sweep")]) == 1, "no digests"
    assert "verdict: SAME TOKENS (0 of 3 pairs identical" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "code"), [([], 1), (["--level", "tokens"], 0), (["--matrix"], 1)])
def test_runs_of_different_contracts_are_compared_by_tokens_answers_and_scores(
    words: list[str], code: int, runs: dict[str, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    runs["next"] = run(BIT, contract_version=2)
    assert main(["compare", "base", "next", *words]) == code
    out = capsys.readouterr().out
    assert "contracts differ (contract_version is 1 in A and 2 in B): bits are not comparable; tokens, answers" in out
    assert "for a new baseline: python -m evalengine baseline RUN -o FILE" in out and "verdict: SAME TOKENS" in out
    assert list(compare(runs["base"], runs["next"]).causes) == ["contract version"]


@pytest.mark.parametrize("command", ["compare", "report"])
def test_a_refusal_names_no_other_command(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`report A B` compares, too: its refusal began with the name of `compare`."""
    documents = {"a": (0, 1), "b": (2,)}
    paths = [write_run(tmp_path / name, [generated(doc) for doc in docs]) for name, docs in documents.items()]
    assert main([command, *map(str, paths)]) == 2
    assert capsys.readouterr().err.startswith(f"evalengine: {paths[0]} (A) and {paths[1]} (B) are not comparable")


def test_runs_without_a_common_request_are_refused_even_if_allowed(
    runs: dict[str, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    runs["other"] = run({7: BASE[0]})
    assert main(["compare", "base", "other", "--allow"]) == 2
    assert "no request in common" in capsys.readouterr().err
    runs["empty"] = run({})
    assert main(["compare", "empty", "empty"]) == 2
    assert capsys.readouterr().err.count("no request in common") == 1


def test_json_goes_to_a_file_or_alone_to_standard_output(
    runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "base", "bit", "--json", "-"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert main(["compare", "base", "bit", "--json", str(tmp_path / "c.json")]) == 1
    assert json.loads((tmp_path / "c.json").read_text(encoding="utf-8")) == printed
    assert capsys.readouterr().out.splitlines()[-1].startswith("verdict: ")
    assert main(["compare", "base", "bit", "token", "--json", "-"]) == 1
    assert [pair["pair"] for pair in json.loads(capsys.readouterr().out)["pairs"]] == [[1, 2], [1, 3], [2, 3]]


def test_model_output_cannot_reach_the_terminal_or_break_the_json(
    runs: dict[str, Run], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hostile = "\x1b[2J\x1b]0;owned\x07[bold]x[/bold]\r\nnext\u202e\ud800"
    bad = run(TOKEN, answers={0: hostile}, scores={0: 0.0})
    items = {key: replace(i, text=hostile) if key[1] == 0 else i for key, i in bad.items.items()}
    runs["bad"] = replace(bad, items=items)
    assert main(["compare", "base", "bad", "--json", str(tmp_path / "c.json")]) == 1
    out = capsys.readouterr().out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e\ud800]", out)
    assert "[bold]x" in out and "\\x1b[2J" in out
    assert json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))["flips"][0]["answer_b"] == hostile
