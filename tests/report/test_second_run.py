"""A setting and a schedule that changed together are told apart by a run of the one without the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalengine.records.schema import RequestRecord
from evalengine.report.compare.beside import second_run
from evalengine.report.compare.compare import compare
from evalengine.report.read.load import load_run
from tests.run_double import bind_again, generated, write_run

DOCS = range(6)


def write(folder: Path, name: str, seed: int, dtype: str, max_num_seqs: int) -> Path:
    """A run in the ordinary mode; its outputs depend on the seed alone."""
    path = write_run(folder / name, records(seed))
    identity: dict[str, Any] = {"weights": "w", "numerics": "fast", "dtype": dtype}
    bind_again(path, identity=identity, engine={"max_num_seqs": max_num_seqs, "stats": {"seconds": float(seed)}})
    return path


def records(seed: int) -> list[RequestRecord]:
    """The same prompts, whatever the seed."""
    pairs = ((generated(doc), generated(doc, seed)) for doc in DOCS)
    return [replace(asked, output_ids=given.output_ids, logprobs=given.logprobs) for asked, given in pairs]


@pytest.mark.parametrize(
    ("seed", "cause"), [(None, "dtype or schedule max_num_seqs"), (1, "schedule max_num_seqs"), (2, "dtype")]
)
def test_a_run_of_the_new_setting_under_the_old_schedule_tells(seed: int | None, cause: str, tmp_path: Path) -> None:
    a = write(tmp_path, "a", 1, "bfloat16", 8)
    b = write(tmp_path, "b", 2, "float32", 64)
    write(tmp_path, "other", 2, "float16", 8)  # another setting tells nothing
    if seed is not None:
        write(tmp_path, "c", seed, "float32", 8)
    comparison = compare(load_run(a), load_run(b))
    assert comparison.causes == {cause: len(DOCS)}
    either = any("either alone can do this" in text for text in comparison.why[cause])
    assert either == (seed is None)


def test_a_damaged_second_run_is_passed_over(tmp_path: Path) -> None:
    a, b = (load_run(write(tmp_path, name, 1, dtype, n)) for name, dtype, n in (("a", "bfloat16", 8), ("b", "f", 64)))
    damaged = write(tmp_path, "c", 1, "f", 8)
    assert second_run(a, b) is not None
    (damaged / "records.parquet").write_bytes(b"")
    assert second_run(a, b) is None
