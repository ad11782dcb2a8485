"""Alternatives of generated tokens: kept on request, through an interruption too, and changing nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from evalengine import LLM, SamplingParams
from evalengine.records.journal import Journal
from tests.e2e.command import Run, call, finished, runs

ONCE = ("progress=false", "limit=3", "task.generation.max_gen_toks=8")


def tables(run: Run) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each record the ids and logprobs of its alternatives, both of the shape (output tokens, 4)."""
    alternatives = []
    for record in run.records:
        assert record.top_ids is not None and record.top_logprobs is not None
        assert record.top_ids.shape == record.top_logprobs.shape == (len(record.output_ids), 4)
        alternatives.append((record.top_ids, record.top_logprobs))
    return alternatives


def test_alternatives_are_the_engines_and_change_nothing(tmp_path: Path) -> None:
    plain = finished(tmp_path / "a", *ONCE)
    run = finished(tmp_path / "b", *ONCE, "logprobs=4")
    assert run.digest == plain.digest and run.manifest["run_id"] != plain.manifest["run_id"]
    assert not {"top_ids", "top_logprobs"} & {*pq.read_schema(plain.folder / "records.parquet").names}
    with LLM("asset:tinymath", num_kv_blocks=64, block_size=16) as llm:
        params = SamplingParams(max_tokens=12, logprobs=4, stop=("\n\n",))
        outputs = llm.generate([[*record.prompt_ids] for record in run.records], params)
    for record, (ids, values), output in zip(run.records, tables(run), outputs, strict=True):
        assert len(ids) == len(record.output_ids) and output.top_logprobs is not None
        count = min(len(ids), len(output.top_logprobs))
        for row in range(count):
            assert dict(zip(ids[row].tolist(), values[row].tolist(), strict=True)) == output.top_logprobs[row]
        assert (ids[:, 0] == record.output_ids).all(), "greedy: the best one was taken"
        assert values[:, 0].tobytes() == record.logprobs.tobytes(), "bit for bit the token's own"
        assert (np.diff(values, axis=1) <= 0).all()


def test_they_are_the_raw_models_whatever_the_temperature(tmp_path: Path) -> None:
    """Logprobs of alternatives and of the sampled token are the model's own, before the temperature divides its
    logits."""
    run = finished(tmp_path, *ONCE, "logprobs=4", "task.generation.temperature=3")
    num_sampled_alternatives = 0
    for record, (ids, values) in zip(run.records, tables(run), strict=True):
        for token, logprob, row, numbers in zip(record.output_ids, record.logprobs, ids, values, strict=True):
            places = np.flatnonzero(row == token)
            assert places.size or logprob <= numbers[-1], "a token that is no alternative is no more probable"
            num_sampled_alternatives += places.size
            assert not places.size or numbers[places[0]] == logprob
    assert num_sampled_alternatives


def test_an_interrupted_run_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted run takes alternatives from its journal: resumed, it has an unbroken run's, bit for bit."""
    settings = (*ONCE, "logprobs=4", "engine.max_num_seqs=1")
    whole = finished(tmp_path / "whole", *settings)
    append = Journal.append

    def stop(self: Journal, entry: Any) -> None:
        append(self, entry)
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "append", stop)
    assert call(f"output_dir={tmp_path}/cut", "engine.device=cpu", *settings).code != 0
    monkeypatch.setattr(Journal, "append", append)
    done = call(f"output_dir={tmp_path}/cut", "engine.device=cpu", *settings)
    assert done.code == 0 and "1 of them answered by the interrupted run" in done.out, done.err
    (cut,) = runs(tmp_path / "cut")
    for (a, b), (c, d) in zip(tables(cut), tables(whole), strict=True):
        assert a.tobytes() == c.tobytes() and b.tobytes() == d.tobytes()


def test_none_is_not_a_number_of_them(tmp_path: Path) -> None:
    """`logprobs=0` is refused: at least one alternative must be asked for."""
    done = call("logprobs=0", f"output_dir={tmp_path}")
    assert done.code == 2 and "logprobs=0: must be greater than or equal to 1" in done.err
