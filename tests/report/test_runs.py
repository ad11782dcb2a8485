"""Runs read back from disk: what they say, what is refused and why, and which items two of them do not share."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalengine.errors import ConfigError
from evalengine.records.digest import leaf_hash, merkle_root
from evalengine.records.evidence import file_sha256
from evalengine.records.schema import RequestRecord, ids_sha256, read_records, write_records
from evalengine.records.sealed import content_sha256
from evalengine.report.compare.item_differences import differing_leaves
from evalengine.report.read.load import load_run
from evalengine.report.read.names import SWEEP_FORMAT, named_runs
from evalengine.report.read.run import Item, Run
from tests.run_double import ISO, generated, sha, write_run


@pytest.fixture
def records() -> list[RequestRecord]:
    return [generated(doc, task=task) for task in ("more", "sums") for doc in range(5)]


@pytest.fixture
def folder(tmp_path: Path, records: list[RequestRecord]) -> Path:
    return write_run(tmp_path / "results" / "run", records)


@pytest.fixture
def unbound(tmp_path: Path, records: list[RequestRecord]) -> Path:
    """A run as runs were written before manifests listed files."""
    return write_run(tmp_path / "old" / "run", records, bound=False)


# -- our folders -----------------------------------------------------------------------------------------------------


def test_a_run_folder_is_read_as_it_was_written(folder: Path, records: list[RequestRecord]) -> None:
    run = load_run(folder)
    assert (run.kind, run.name, run.source) == ("run", "run", folder)
    assert run.digest == (folder / "digest.txt").read_text().strip()
    assert run.task_digests == run.manifest.task_digests and run.identity == {"weights": "w"}
    assert list(run.items) == [record.key for record in records]
    for record, item in zip(records, run.items.values(), strict=True):
        assert item.key == record.key and item.leaf == leaf_hash(record).hex() and item.text == record.text
        assert item.output_ids == record.output_ids and item.output_sha256 == ids_sha256(record.output_ids)
        assert item.logprobs is not None and item.logprobs.tobytes() == record.logprobs.tobytes()
        assert item.sum_logprob == math.fsum(float(value) for value in record.logprobs)
    assert run.scores["sums", "exact_match", "strict"] == {0: 1.0, 1: 0.0, 2: 0.0, 3: 1.0, 4: 0.0}
    assert run.results["sums", "exact_match", "strict"] == (pytest.approx(0.4), None)
    assert set(run.higher_is_better.values()) == {True} and len(run.higher_is_better) == 4
    assert run.answers["more", "flexible"] == {doc: str(doc) for doc in range(5)}
    assert run.hashes["sums"][2] == (sha("sums", 2, "doc"), sha("sums", 2, "prompt"), sha("sums", 2, "target"))


def test_the_only_run_of_a_folder_is_meant(folder: Path) -> None:
    assert load_run(folder.parent).digest == load_run(str(folder)).digest
    shutil.copytree(folder, folder.parent / "second")
    with pytest.raises(ConfigError, match=r"holds 2 runs \(run, second\)"):
        load_run(folder.parent)


def drop_last_line(file: Path) -> None:
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])


def swap_logprob(file: Path) -> None:
    rows = read_records(file)
    changed = np.nextafter(rows[0].logprobs, np.float32(0))
    write_records(file, [RequestRecord(**{**vars(rows[0]), "logprobs": changed}), *rows[1:]])


def swap_prompt_hash(file: Path) -> None:
    rows = read_records(file)
    write_records(file, [RequestRecord(**{**vars(rows[0]), "prompt_sha256": "0" * 64}), *rows[1:]])


def double_row(file: Path) -> None:
    rows = read_records(file)
    write_records(file, [*rows, rows[0]])


def foreign_digest(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "digest": "ab" * 32}))


def raise_result(file: Path) -> None:
    content = json.loads(file.read_text())
    content["results"]["sums"]["exact_match,strict"] += 0.2
    file.write_text(json.dumps(content))


HARMS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("digest.txt", Path.unlink, "not finished.*run its command again"),
    ("digest.txt", lambda f: f.write_text("ab" * 32), "digest.txt: it says abab.*but the records give"),
    ("digest.txt", lambda f: f.write_text("half"), "digest.txt: not a digest"),
    ("records.parquet", Path.unlink, "records.parquet: missing"),
    ("records.parquet", cut, "records.parquet: damaged"),
    ("records.parquet", swap_logprob, "but the records give"),
    ("records.parquet", swap_prompt_hash, "its columns contradict"),
    ("records.parquet", double_row, "its columns contradict"),
    ("manifest.json", Path.unlink, "manifest.json: missing or damaged"),
    ("manifest.json", cut, "manifest.json: missing or damaged"),
    ("manifest.json", lambda f: f.write_text("[]"), "manifest.json: not the manifest"),
    ("manifest.json", foreign_digest, "manifest.json: its digests are not those"),
    (f"results_{ISO}.json", Path.unlink, "results_.* is missing"),
    (f"results_{ISO}.json", cut, "results_.*damaged"),
    (f"results_{ISO}.json", lambda f: f.write_text("{}"), "results_.*no results of lm-eval"),
    (f"results_{ISO}.json", raise_result, "exact_match,strict of sums at 0.6.*mean is 0.4: one of the two"),
    (f"samples_sums_{ISO}.jsonl", Path.unlink, "samples_sums_.*missing"),
    (f"samples_sums_{ISO}.jsonl", cut, "samples_sums_.*, line .*cut short"),
    (f"samples_sums_{ISO}.jsonl", drop_last_line, "samples_sums_.*lines are missing"),
    (f"samples_sums_{ISO}.jsonl", lambda f: f.write_text(f"\n{f.read_text() * 2}"), "jsonl: document 0 a second time"),
    (f"samples_sums_{ISO}.jsonl", lambda f: f.write_text('{"doc_id": 0}\n'), "line 1.*filter, metrics"),
]


@pytest.mark.parametrize(("name", "harm", "message"), HARMS)
def test_harm_is_named_with_its_cure(
    unbound: Path, folder: Path, name: str, harm: Callable[[Path], Any], message: str
) -> None:
    """Harm shows by what unbound files contradict, and by the hashes of files that the manifest lists."""
    for run, words in ((unbound, message), (folder, re.escape(name if (folder / name).exists() else str(folder)))):
        load_run(run)
        harm(run / name)
        with pytest.raises(ConfigError, match=words) as caught:
            load_run(run)
        assert str(run) in str(caught.value)


def test_samples_of_other_documents_are_refused(unbound: Path, tmp_path: Path) -> None:
    folder = unbound
    other = write_run(tmp_path / "other", [generated(doc, task=task) for task in ("more", "sums") for doc in range(4)])
    for file in [*folder.glob("results_*"), *folder.glob("samples_*")]:
        shutil.copy(other / file.name, file)
    with pytest.raises(ConfigError, match=r"samples_more_\*.jsonl and records.parquet differ from document 4 on"):
        load_run(folder)


def test_paths_that_are_no_run_are_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.json").write_text("{}")
    for path, message in [
        (tmp_path / "absent", "no such file or folder"),
        (tmp_path / "empty", "no run in this folder"),
        (tmp_path / "a.json", "not a baseline"),
        (folder / "manifest.json", f"give the folder: {re.escape(str(folder))}"),
        (folder / "records.parquet", "give the folder"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_run(path)


def test_paths_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusals are the file system's own words, said by a double of it."""
    for use in (load_run, lambda path: named_runs([path])):
        with pytest.raises(ConfigError, match="x: File name too long; name another path"):
            use(str(tmp_path / ("x" * 300)))
    (tmp_path / "closed").mkdir()
    (tmp_path / "baseline.json").write_text("{}")

    def refuse(path: Path, *args: object) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    for name in ("closed", "baseline.json"):
        with pytest.raises(ConfigError, match=rf"{name}: Permission denied; .* mend its permissions"):
            load_run(tmp_path / name)


def test_an_experiment_is_its_runs_once_it_is_finished(tmp_path: Path, records: list[RequestRecord]) -> None:
    sweep = tmp_path / "sweep"
    runs = [write_run(sweep / f"{number}-max_num_seqs_{number}" / "run", records) for number in (1, 2)]
    for use in (lambda: named_runs([str(sweep)]), lambda: load_run(sweep)):
        with pytest.raises(ConfigError, match=r"not finished \(2 of its runs were started\); rerun its command"):
            use()
    sources = [{"source": str(run.relative_to(sweep))} for run in runs]
    (sweep / "noise_floor.json").write_text(json.dumps({"format": SWEEP_FORMAT, "runs": sources}))
    assert named_runs([str(sweep), "other"]) == [*map(str, runs), "other"]
    with pytest.raises(ConfigError, match=f"experiment of 2 runs; name one of them, such as {re.escape(str(runs[0]))}"):
        load_run(sweep)
    assert named_runs([str(runs[0].parent)]) == [str(runs[0].parent)] and load_run(runs[0].parent).name == "run"


def test_an_edited_experiment_is_refused(tmp_path: Path, records: list[RequestRecord]) -> None:
    sweep = tmp_path / "sweep"
    places = [write_run(sweep / f"{number}-max_num_seqs_{number}" / "run", records) for number in (1, 2)]
    runs = [{"source": str(run.relative_to(sweep)), "digest": load_run(run).digest} for run in places]
    (sweep / "x.svg").write_text("<svg/>")
    whole: dict[str, Any] = {"format": SWEEP_FORMAT, "runs": runs, "picture_sha256": file_sha256(sweep / "x.svg")}
    whole["sha256"] = content_sha256(whole)
    file = sweep / "x.json"
    file.write_text(json.dumps(whole, indent=2))
    assert named_runs([str(sweep)]) == [*map(str, places)]
    for edited, why in [
        ({**whole, "verdict": "better"}, "its sha256 is not that of its content"),
        ({**whole, "runs": [{"source": None}]}, r"runs\[0\]\.source=None: must be a valid string"),
        ({**whole, "runs": 5}, "runs=5: must be a valid list"),
    ]:
        file.write_text(json.dumps(edited))
        with pytest.raises(ConfigError, match=rf"x\.json: .*{why}.*it was edited"):
            named_runs([str(sweep)])
    file.write_text(json.dumps(whole))
    (sweep / "x.svg").write_text("<svg>better</svg>")
    with pytest.raises(ConfigError, match=r"x\.svg next to it is not the picture"):
        named_runs([str(sweep)])
    (sweep / "x.svg").unlink()
    shutil.rmtree(places[1])
    write_run(places[1], records[:5])
    with pytest.raises(ConfigError, match=r"another digest for 2-max_num_seqs_2/run"):
        named_runs([str(sweep)])


# -- which items differ ------------------------------------------------------------------------------------------------


def run_of(contents: dict[int, int]) -> Run:
    """A run of documents; as in a real one, a leaf depends on its document and on its content."""
    hexes = {doc: sha(doc, content) for doc, content in sorted(contents.items())}
    items = {
        ("t", doc, 0, 0): Item("t", doc, 0, 0, "generate_until", leaf, "", "", None, None, None, None, 0)
        for doc, leaf in hexes.items()
    }
    digest = merkle_root([bytes.fromhex(leaf) for leaf in hexes.values()]).hex()
    return Run(Path("x"), "run", "x", digest, {}, {}, {}, items, {}, {}, {}, {}, {})


CONTENTS = st.dictionaries(st.integers(0, 70), st.integers(0, 2), max_size=70)


@settings(max_examples=300)
@given(CONTENTS, CONTENTS, st.booleans())
def test_differing_leaves_are_all_differences(a: dict[int, int], b: dict[int, int], near: bool) -> None:
    b = {**a, **dict(list(b.items())[:2])} if near else b
    brute = [("t", doc, 0, 0) for doc in sorted({*a, *b}) if a.get(doc) != b.get(doc)]
    assert differing_leaves(run_of(a), run_of(b)) == brute
