"""`latest`, `FOLDER:latest` and `SWEEP:3`: which run they are, and what is said where there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from evalengine.__main__ import main
from evalengine.errors import ConfigError
from evalengine.report.read.load import load_run
from evalengine.report.read.names import SWEEP_FORMAT, named_runs, newest_run, root_of, runs_below, stands_for
from evalengine.report.read.run import command_line, parsed, provenance
from tests.run_double import generated, write_run

RECORDS = [generated(doc) for doc in range(4)]


def finished_run(path: Path, age: int) -> Path:
    """A finished run whose digest was written `age` seconds before the others'."""
    write_run(path, RECORDS)
    os.utime(path / "digest.txt", (2e9 - age, 2e9 - age))
    return path


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """results/ with two runs and a finished experiment of two, in the working directory."""
    monkeypatch.chdir(tmp_path)
    root = Path("results")
    finished_run(root / "old", 50), finished_run(root / "new", 10)
    sweep = root / "noise_floor-sums-m-20260102T030405Z-00000000"
    places = [finished_run(sweep / f"{number}-max_num_seqs_{number}" / "run", 90 - number) for number in (1, 2)]
    sources = [{"source": str(place.relative_to(sweep))} for place in reversed(places)]
    (sweep / "noise_floor.json").write_text(json.dumps({"format": SWEEP_FORMAT, "runs": sources}))
    return root


def test_latest_is_the_run_that_finished_last(results: Path) -> None:
    assert stands_for("latest") == results / "new" == newest_run(results)
    assert load_run("latest").source == results / "new"
    os.utime(results / "old" / "digest.txt", (2e9 + 5, 2e9 + 5))
    assert stands_for("latest") == stands_for("results:latest") == results / "old"
    (results / "unfinished").mkdir()
    (results / "unfinished" / "journal.jsonl").write_text("")
    assert stands_for("latest") == results / "old" and len(runs_below(results)) == 5


def test_links_to_a_run_are_that_run(results: Path) -> None:
    for name, target in {"a_link": "new", "z_link": "new", "latest": "old"}.items():
        (results / name).symlink_to(target)
    assert {*runs_below(results)} > {results / "new", results / "old"} and len(runs_below(results)) == 4
    (results / "elsewhere").symlink_to((results / "new").rename(results.parent / "moved").resolve())
    assert results / "elsewhere" in runs_below(results), "a link to a run outside is one of the folder's runs"


def test_the_newest_may_be_an_experiments(results: Path) -> None:
    sweep = next(results.glob("noise_floor-*"))
    newest = sweep / "2-max_num_seqs_2" / "run"
    os.utime(newest / "digest.txt", (2.1e9, 2.1e9))
    assert stands_for("latest") == stands_for(f"{sweep}:latest") == newest
    assert root_of(newest) == results.resolve() == root_of(results / "old")


def test_an_experiments_file_with_a_lone_surrogate_is_edited(results: Path) -> None:
    (file,) = results.glob("noise_floor-*/noise_floor.json")
    content = json.loads(file.read_text())
    content["runs"][0]["digest"] = "\ud800"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"digest=.*must be text without lone surrogates: it was edited"):
        named_runs([str(file.parent)])


def test_runs_of_an_experiment_are_numbered_as_in_its_report(results: Path) -> None:
    sweep = next(results.glob("noise_floor-*"))
    second, first = (str(sweep / f"{n}-max_num_seqs_{n}" / "run") for n in (1, 2))  # the file lists them the other way
    assert stands_for(f"{sweep}:1") == stands_for("noise_floor:1") == first
    assert named_runs(["noise_floor"]) == named_runs([str(sweep)]) == [first, second]
    assert named_runs(["noise_floor:2", "latest", str(sweep)]) == [second, str(results / "new"), first, second]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("noise_floor:3", "has runs 1 to 2"),
        ("noise_floor:0", "has runs 1 to 2"),
        ("results/new:1", "is no experiment's folder, so its runs have no numbers"),
        ("nothing:1", "neither an experiment's folder nor the name of one in results/"),
        ("nowhere:latest", "no finished run in nowhere/"),
    ],
)
def test_names_that_stand_for_nothing_are_refused(name: str, message: str, results: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run(name)


def test_without_a_run_latest_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="latest: no finished run in results/; name its folder"):
        load_run("latest")


def test_a_path_that_is_really_called_so_goes_first(results: Path) -> None:
    finished_run(Path("latest"), 99), Path("noise_floor:1").mkdir()
    assert stands_for("latest") == "latest" and load_run("latest").source == Path("latest")
    assert stands_for("noise_floor:1") == "noise_floor:1"


def test_the_index_among_runs_is_no_run(results: Path) -> None:
    (results / "index.html").write_text("<!doctype html>")
    assert named_runs([str(results / "new"), str(results / "index.html")]) == [str(results / "new")]
    assert named_runs([str(results / "index.html")]) == [str(results / "index.html")], "alone it is an error to come"


def test_what_a_run_says_of_its_making(results: Path) -> None:
    """Dates and commands from outside: what is none is left out, never an error."""
    assert provenance(load_run("latest")).date == "", "neither the manifest nor the results say"
    assert (
        f"{parsed('2026-01-02T03:04:05Z'):%Y-%m-%d %H:%M}"
        == "2026-01-02 03:04"
        == (f"{parsed(1767323045.5):%Y-%m-%d %H:%M}")
    )
    for odd in ("yesterday", "", -5, 0, 1e30, float("nan"), True, None, [1], {"a": 1}):
        assert parsed(odd) is None, odd
    assert command_line(["limit=2", "model.path=my model"]) == "python -m evalengine limit=2 'model.path=my model'"
    assert command_line([]) == "python -m evalengine" and command_line(None) is None and command_line([1]) is None


def test_every_command_takes_such_names(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "latest", "noise_floor:1"]) == 0
    assert f"A: {results / 'new'}" in capsys.readouterr().out
    assert main(["baseline", "latest", "-o", "baseline.json"]) == 0
    assert main(["gate", "baseline.json", "noise_floor:2"]) == 0
    assert "gate bitwise: PASS" in capsys.readouterr().out
    assert main(["report", "latest", "noise_floor:1", "-o", "c.html"]) == 0
    assert main(["explain", "latest", "--item", "99", "--write", "x.json"]) == 2
    assert "99" in capsys.readouterr().err
