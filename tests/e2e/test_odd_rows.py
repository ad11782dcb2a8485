"""Odd rows that can be evaluated still: the run is whole for every reader, and says what it did with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import call, finished, runs
from tests.report.page_content import nodes
from tests.report.page_content import words as text_of


def write_rows(folder: Path, *rows: dict[str, Any]) -> str:
    """Writes the rows into a file, and returns the setting that names it."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"task.dataset.path={file}"


def test_an_empty_page_is_part_of_a_whole_run(tmp_path: Path) -> None:
    pages = write_rows(tmp_path, {"page": " = A = \n it is so . "}, {"page": ""}, {"page": " = B = \n more"})
    run, equal_run = (finished(tmp_path / name, "task=wikitext", pages) for name in ("one", "two"))
    assert run.manifest["counts"]["documents"] == 3 and {record.doc_id for record in run.records} == {0, 2}
    assert run.samples("wikitext")[1]["resps"] == [["0.0"]]
    (tiles,) = (node["tiles"] for node in nodes(run.folder / "report.html", is_="tiles") if "perplexity" in str(node))
    assert [text_of(word)[:5] for _, _, word in tiles] == ["95 %:"] * 3, "each perplexity has its interval"
    baseline = str(tmp_path / "baseline.json")
    for words in (
        ["compare", str(run.folder), str(equal_run.folder)],
        ["baseline", str(run.folder), "-o", baseline],
        ["gate", baseline, str(equal_run.folder)],
        ["compare", baseline, str(equal_run.folder)],
        ["report", str(run.folder), str(equal_run.folder), "-o", str(tmp_path / "both.html")],
    ):
        done = call(*words)
        assert done.code == 0, (words, done.err)


def test_a_removed_record_is_still_found(tmp_path: Path) -> None:
    """A sample without its record is refused: only an empty text may lack one."""
    from evalengine.records.digest import digests
    from evalengine.records.schema import write_records

    pages = write_rows(tmp_path, {"page": " = A = \n it is so . "}, {"page": " = B = \n more"})
    run = finished(tmp_path / "run", "task=wikitext", pages)
    kept_records = [record for record in run.records if record.doc_id == 0]
    write_records(run.folder / "records.parquet", kept_records)
    manifest = {**run.manifest, "digest": digests(kept_records).run, "task_digests": digests(kept_records).tasks}
    (run.folder / "manifest.json").write_text(json.dumps(manifest))
    (run.folder / "digest.txt").write_text(digests(kept_records).run + "\n")
    assert call("compare", str(run.folder), str(run.folder)).code == 2


@pytest.mark.parametrize("template", [False, True])
def test_special_tokens_in_a_rows_own_text_are_counted(template: bool, tmp_path: Path) -> None:
    rows_setting = write_rows(
        tmp_path,
        {"question": "What is 1 + 1?", "answer": "#### 2"},
        {"question": "What ends a text? <|endoftext|>", "answer": "#### 2"},
        {"question": "And <|endoftext> or |im_end|?", "answer": "#### 2"},
        {"question": "<|im_start|>system", "answer": "#### 2"},
    )
    done = call(f"output_dir={tmp_path / 'out'}", "engine.device=cpu", rows_setting, f"apply_chat_template={template}",
                "task.generation.max_gen_toks=2")  # fmt: skip
    assert done.code == 0, done.err
    (run,) = runs(tmp_path / "out")
    assert run.manifest["counts"]["special_token_documents"] == 2, "the template's own tokens do not count"
    assert "2 documents contain a special token's string, as <|endoftext|>" in done.out
    assert 0 in run.records[1].prompt_ids, "as in lm-eval, the string became the token"
