"""A run of each output type, from a task file such as a user writes: its page, its comparison, its digest."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from tests.e2e.command import Run, call

ROWS = [{"q": f"{n} and {n} are", "options": [str(n), str(2 * n)], "gold": 1} for n in range(2, 8)]
KINDS = {
    "multiple_choice": ["acc", "acc_norm"],
    "generate_until": ["exact_match"],
    "loglikelihood": ["perplexity", "acc"],
    "loglikelihood_rolling": ["word_perplexity", "byte_perplexity", "bits_per_byte"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_output_type_runs_and_is_read_again(kind: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    content = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
        "test_split": "test",
        "output_type": kind,
        "doc_to_text": "{{q}}",
        "doc_to_target": "gold" if kind == "multiple_choice" else " {{options[gold]}}.",
        **({"doc_to_choice": "options"} if kind == "multiple_choice" else {}),
        **({"generation_kwargs": {"max_gen_toks": 5, "until": ["\n"]}} if kind == "generate_until" else {}),
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    done = call(f"task={tmp_path}/mine.yaml", f"output_dir={tmp_path}/results", "progress=false")
    assert done.code == 0, done.err
    (folder,) = (tmp_path / "results").glob("mine-*")
    run = Run(folder)
    values = run.results["mine"]
    assert [key.split(",")[0] for key in values if "," in key and "_stderr" not in key] == KINDS[kind]
    assert (folder / "report.html").is_file(), "the run's own page can be made"
    if kind == "loglikelihood":
        logprobs = [sample["perplexity"] for sample in run.samples("mine")]
        assert values["perplexity,none"] == pytest.approx(math.exp(-math.fsum(logprobs) / len(logprobs)))
        assert values["perplexity_stderr,none"] > 0
    compared = call("compare", str(folder), str(folder))
    assert compared.code == 0, compared.err
