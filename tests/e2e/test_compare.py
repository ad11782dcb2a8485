"""`compare` on real runs: the batch changes nothing in exact; fast arithmetic is told apart, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import SHORT, Outcome, Run, call, finished
from tests.report.page_content import content, nodes, words
from tests.run_double import bind_again

DOCUMENTS = 6
SETTINGS = (f"limit={DOCUMENTS}", SHORT)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs of the same requests: one at a time and in a batch in exact arithmetic, and in a batch in PyTorch's."""
    folder = tmp_path_factory.mktemp("cells")
    return {
        "alone": finished(folder / "alone", *SETTINGS, "engine.max_num_seqs=1"),
        "batch": finished(folder / "batch", *SETTINGS, "engine.max_num_seqs=8"),
        "fast": finished(
            folder / "fast", *SETTINGS, "engine.max_num_seqs=8", "engine.dtype=bfloat16", "batch_invariant=false"
        ),
    }


def compared(*arguments: str | Path) -> Outcome:
    """Runs `evalengine compare` in this process."""
    return call("compare", *map(str, arguments))


def test_the_batch_changes_no_bit(cells: dict[str, Run]) -> None:
    done = compared(cells["alone"].folder, cells["batch"].folder)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == f"verdict: IDENTICAL (every bit of {DOCUMENTS} outputs and their logprobs)"


def test_fast_arithmetic_is_told_apart_and_why(cells: dict[str, Run]) -> None:
    done = compared(cells["batch"].folder, cells["fast"].folder, "--json", "-")
    assert done.code == 1
    report = json.loads(done.out)
    assert report["verdict"] in ("SAME TOKENS", "DIFFERENT") and report["causes"] == {"numerics level": DOCUMENTS}
    assert report["settings"] == [
        'attention_backend is none in A and "sdpa" in B',
        'numerics is "exact" in A and "fast" in B',
    ]
    leaves = [cells[name].leaves for name in ("batch", "fast")]
    differing = [list(key) for key in leaves[0] if leaves[0][key] != leaves[1][key]]
    assert [[d["task"], d["doc_id"], d["request_index"], d["repeat"]] for d in report["differences"]] == differing
    assert report["logprobs"]["differing"] > 0 and 0 < report["logprobs"]["max_abs"] < 1
    assert "verdict: " in compared(cells["batch"].folder, cells["fast"].folder).out.splitlines()[-1]


def test_the_page_says_the_same(cells: dict[str, Run], tmp_path: Path) -> None:
    """The HTML page has the verdict that is printed, and a map of logprobs only where some differ."""
    page = tmp_path / "comparison.html"
    done = compared(cells["batch"].folder, cells["fast"].folder, "--html", page)
    verdict = done.out.splitlines()[-1].removeprefix("verdict: ").partition(" (")[0]
    (shown,) = nodes(page, is_="verdict")
    assert done.code == 1 and shown["word"] == done.out.splitlines()[0]
    assert words(shown["sentence"]).startswith(f"{verdict}: ")
    assert all(str(cells[name].digest) in words(page) for name in ("batch", "fast"))
    assert "map" in content(page)["data"]  # The map of logprobs is drawn, because some differ.
    assert compared(cells["alone"].folder, cells["batch"].folder, "--html", page).code == 0
    (shown,) = nodes(page, is_="verdict")
    assert shown["word"] == "A and B are the same, bit for bit." and words(shown["sentence"]).startswith("IDENTICAL: ")
    assert "map" not in content(page)["data"]


def test_a_matrix_groups_the_invariant_cells(cells: dict[str, Run]) -> None:
    done = compared(*(cell.folder for cell in cells.values()), "--json", "-")
    assert done.code == 1
    matrix = json.loads(done.out)
    assert [group["runs"] for group in matrix["groups"]] == [[1, 2], [3]]
    assert [pair["verdict"] == "IDENTICAL" for pair in matrix["pairs"]] == [True, False, False]


def test_a_baseline_file_compares_like_its_run(cells: dict[str, Run], tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    assert call("baseline", str(cells["alone"].folder), "-o", str(file)).code == 0
    assert compared(file, cells["batch"].folder).code == 0
    assert compared(file, cells["fast"].folder).code == 1


def test_another_length_is_refused_or_compared_on_what_is_shared(cells: dict[str, Run], tmp_path: Path) -> None:
    short = finished(tmp_path / "short", "limit=3", SETTINGS[1])
    refused = compared(cells["batch"].folder, short.folder)
    assert refused.code == 2 and refused.out == ""
    assert f"A has {DOCUMENTS} requests, B 3, and they share 3" in refused.err
    allowed = compared(cells["batch"].folder, short.folder, "--allow")
    assert allowed.code == 0 and allowed.out.splitlines()[-1].startswith("verdict: IDENTICAL on the 3 requests of both")


def test_an_edited_scorer_is_named(cells: dict[str, Run], tmp_path: Path) -> None:
    """Runs of equal records, one with a score turned in its samples and results, differ by their scorer."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in cells["batch"].folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (samples,) = copy.glob("samples_*.jsonl")
    first, *rest = samples.read_text(encoding="utf-8").splitlines()
    row = json.loads(first)
    row["exact_match"] = 1.0 - row["exact_match"]
    samples.write_text("\n".join([json.dumps(row), *rest]) + "\n", encoding="utf-8")
    scores = [r["exact_match"] for r in (row, *map(json.loads, rest)) if r["filter"] == row["filter"]]
    (results,) = copy.glob("results_*.json")
    content = json.loads(results.read_text(encoding="utf-8"))
    content["results"]["arithmetic"][f"exact_match,{row['filter']}"] = sum(scores) / len(scores)
    results.write_text(json.dumps(content), encoding="utf-8")
    edited = compared(cells["batch"].folder, copy)
    assert edited.code == 2 and all(f"{file.name}: not the file that the run wrote" in edited.err
                                    for file in (samples, results))  # fmt: skip
    bind_again(copy)  # The edited files are now as another version of the scorer would have written them.
    done = compared(cells["batch"].folder, copy, "--json", "-")
    report = json.loads(done.out)
    assert (done.code, report["verdict"], report["causes"]) == (1, "DIFFERENT", {"scorer": 1})
    assert report["digests_equal"] is True
