"""A baseline file says what its run said, is small, and shows every harm done to it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalengine.__main__ import main
from evalengine.errors import ConfigError
from evalengine.records.sealed import content_sha256
from evalengine.report.compare.item_differences import differing_leaves
from evalengine.report.read import baseline as packing
from evalengine.report.read.baseline import FORMAT
from evalengine.report.read.load import load_run
from evalengine.report.read.run import Run
from tests.bitwise import check_that_a_cut_is_found, check_that_edits_are_found
from tests.run_double import generated, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [generated(doc, task=task) for task in ("sums", "more") for doc in range(7)])


@pytest.fixture
def file(tmp_path: Path, run: Path) -> Path:
    assert main(["baseline", str(run), "-o", str(tmp_path / "deep" / "x.json")]) == 0
    return tmp_path / "deep" / "x.json"


def evidence(run: Run) -> list[Any]:
    """All that a run says, without its name and place."""
    items = [
        (i.key, i.kind, i.leaf, i.prompt_sha256, i.output_sha256, i.sum_logprob, i.truncated)
        for i in run.items.values()
    ]
    parts = [run.digest, run.task_digests, run.identity, run.manifest, run.scores, run.results, run.answers]
    return [items, *parts, run.higher_is_better]


def test_a_baseline_says_what_its_run_said(run: Path, file: Path) -> None:
    a, b = load_run(run), load_run(file)
    assert (b.kind, b.name) == ("baseline", "x")
    assert evidence(a) == evidence(b) and len(b.items) == 14
    assert list(b.items) == sorted(b.items)
    assert differing_leaves(a, b) == []
    assert all(item.output_ids is None and item.logprobs is None and item.text is None for item in b.items.values())


def test_a_changed_run_differs_from_its_baseline(tmp_path: Path, file: Path) -> None:
    records = [generated(doc, task=task) for task in ("sums", "more") for doc in range(7)]
    records[3] = generated(3, seed=1)
    other = load_run(write_run(tmp_path / "other", records))
    assert differing_leaves(load_run(file), other) == [("sums", 3, 0, 0)]


def test_every_flipped_character_is_found(file: Path) -> None:
    whole = file.read_text(encoding="utf-8")
    check_that_edits_are_found(file, 400, load_run)
    file.write_text(whole.replace("\n", "\r\n"), encoding="utf-8")  # git may check the file out so: not a change
    assert len(load_run(file).items) == 14


@pytest.mark.parametrize("part", [0.0, 0.3, 0.99, -2])
def test_a_truncated_file_is_found(file: Path, part: float) -> None:
    check_that_a_cut_is_found(file, part, load_run, r"truncated.*--force")


def edit(file: Path, change: Any, rehash: bool) -> None:
    """Changes the content of the file; rehash: whether its sha256 is made anew."""
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    if rehash:
        del content["sha256"]
        content["sha256"] = content_sha256(content)
    file.write_text(json.dumps(content), encoding="utf-8")


def flip_score(content: dict[str, Any]) -> None:
    scores = content["scores"][0][-1]
    scores[0] = 1 - scores[0]


def test_an_edited_score_is_found(file: Path) -> None:
    edit(file, flip_score, rehash=False)
    with pytest.raises(ConfigError, match="edited or damaged; take it from git again"):
        load_run(file)


def test_another_layout_and_a_renewed_hash_are_accepted(file: Path) -> None:
    edit(file, lambda content: None, rehash=False)  # the same content is laid out differently
    assert load_run(file).digest
    edit(file, flip_score, rehash=True)  # the hash is no signature: an edit may renew it
    assert load_run(file).digest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["items"]["sums"].update(leaf=packing.pack_hashes(["ab" * 32] * 7)), "leaves do not give"),
        (lambda c: c.update(digest="ab" * 32), "leaves do not give"),
        (lambda c: c["task_digests"].update(sums="ab" * 32), "leaves do not give"),
        (lambda c: c["items"]["sums"].update(count=8), "contradict"),
        (lambda c: c["items"].pop("sums"), "leaves do not give"),
        (lambda c: c.pop("scores"), "contradict"),
        (lambda c: c.update(version=FORMAT.version + 1), "update evalengine"),
        (lambda c: c.update(format="other"), FORMAT.format),
    ],
)
def test_edits_that_renew_the_hash_still_meet_the_leaves(file: Path, change: Any, words: str) -> None:
    edit(file, change, rehash=True)
    with pytest.raises(ConfigError, match=words):
        load_run(file)


def test_a_baseline_of_gsm8k_has_150_to_205_kb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(0).random(1319)  # like a real run's scores, these do not compress
    run = write_run(tmp_path / "run", [generated(doc) for doc in range(1319)], lambda doc: float(draw[doc] < 0.5))
    assert main(["baseline", str(run), "-o", str(tmp_path / "gsm8k.json")]) == 0
    assert 150_000 < (tmp_path / "gsm8k.json").stat().st_size < 205_000
    back, size = load_run(tmp_path / "gsm8k.json"), (tmp_path / "gsm8k.json").stat().st_size
    assert len(back.items) == 1319
    assert capsys.readouterr().out == (
        f"{tmp_path / 'gsm8k.json'}: 1319 items, {size / 1000:.1f} kB, digest {back.digest}\n"
    )


def test_bad_usage_is_refused_and_leaves_files_as_they_were(
    run: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = file.read_bytes()
    for words, message in [
        ([str(run), "-o", str(file)], "--force"),
        ([str(run), "-o", str(tmp_path)], "a folder"),
        ([str(file), "-o", str(tmp_path / "y.json")], "already a baseline"),
        ([str(run)], "-o FILE.json"),
        ([str(run), "--bogus"], "--bogus"),
        ([str(tmp_path / "absent"), "-o", str(tmp_path / "y.json")], "no such file"),
    ]:
        assert main(["baseline", *words]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.out == ""
    assert file.read_bytes() == before and not (tmp_path / "y.json").exists()
    assert main(["baseline", "--help"]) == 0 and "Usage: python -m evalengine baseline" in capsys.readouterr().out
    file.write_text("old")
    assert main(["baseline", str(run), "-o", str(file), "--force"]) == 0
    assert file.read_bytes() == before and [f.name for f in file.parent.iterdir()] == ["x.json"]


def test_a_disk_that_refuses_is_exit_code_1(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blocked").write_text("a file, not a folder")
    assert main(["baseline", str(run), "-o", str(tmp_path / "blocked" / "x.json")]) == 2, "bad usage"
    assert "blocked is not a writable folder" in capsys.readouterr().err

    def refuse(*paths: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", refuse)
    assert main(["baseline", str(run), "-o", str(tmp_path / "x.json")]) == 1
    assert "could not write" in capsys.readouterr().err


HASH = st.binary(min_size=32, max_size=32).map(bytes.hex)


@given(st.one_of(st.lists(HASH), st.lists(st.sampled_from(["", "ab" * 32, "x"]))))
def test_hashes_round_trip(values: list[str]) -> None:
    packed = json.loads(json.dumps(packing.pack_hashes(values)))
    assert packing.unpack_hashes(packed, len(values)) == values


@given(st.lists(st.one_of(st.none(), st.floats())))
def test_floats_round_trip(values: list[float | None]) -> None:
    back = packing.unpack_floats(json.loads(json.dumps(packing.pack_floats(values))), len(values))
    assert list(map(repr, back)) == list(map(repr, values))


@given(st.one_of(st.lists(st.integers()), st.integers().map(lambda n: list(range(n, n + 4))), st.lists(st.text())))
def test_columns_round_trip(values: list[Any]) -> None:
    assert packing.unfold(json.loads(json.dumps(packing.fold(values))), len(values)) == values
