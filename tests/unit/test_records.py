"""records.parquet, identity, manifest, lm-eval's files, and the report that reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import Config
from evalengine.errors import EvalEngineError
from evalengine.records import schema
from evalengine.records.digest import digests
from evalengine.records.folder import RunFolder
from evalengine.records.lm_eval import (
    ModelInfo,
    Sample,
    TaskResult,
    remove_results,
    results_dict,
    sample_row,
    write_results,
    write_samples,
)
from evalengine.records.manifest import build_manifest, code_version, run_identity
from evalengine.records.manifest_data import Code, Manifest, Model, RunCounts, RunTimings, read_part
from evalengine.records.schema import RequestRecord, ids_sha256, read_records, write_records
from evalengine.report.run_table import print_report
from tests.run_double import bind_again

EXTRA: dict[str, Any] = {
    "contract_version": 1,
    "weights": "w",
    "model_spec": {"rms_norm_eps": 1e-6},
    "tokenizer": {"sha256": "t"},
    "chat_template": None,
    "datasets": {},
    "prompts": "p",
    "numerics": "exact",
    "dtype": "bfloat16",
}
BITS = np.array([0x80000000, 0, 0x7FC00001, 0x7FC00000, 0xFFC0DEAD, 0x7F800001, 0xFF800000], dtype=np.uint32)


@lru_cache(None)
def config(*overrides: str) -> Config:
    return compose_jobs(overrides)[0].config


def record(doc: int, output: list[int], logprobs: np.ndarray, **more: Any) -> RequestRecord:
    prompt = list(range(doc))
    fields = {"text": "tëxt\n\0", "finish_reason": "stop", "is_greedy": doc % 2 == 0, **more}
    fields |= {"task": "t/ask", "doc_id": doc, "request_index": 0, "repeat": 0, "kind": "generate_until"}
    fields |= {"prompt_ids": prompt, "prompt_sha256": ids_sha256(prompt), "truncated": doc}
    return RequestRecord(output, logprobs, **fields)


# -- records.parquet -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 1031])
def test_parquet_round_trip_is_bitwise(tmp_path: Path, count: int) -> None:
    rows = []
    for doc in range(count):
        logprobs = np.roll(BITS, doc)[: doc % 8].view(np.float32)
        rows.append(record(doc, list(range(len(logprobs))), logprobs))
    write_records(tmp_path / "r", rows[::-1])
    read_rows = read_records(tmp_path / "r")
    assert digests(read_rows).run == digests(rows).run
    for written, read in zip(rows, read_rows, strict=True):
        expected, fields = vars(written).copy(), vars(read).copy()
        assert expected.pop("logprobs").tobytes() == fields.pop("logprobs").tobytes()
        assert fields == expected


@pytest.mark.parametrize("change", ["drop", "rename", "retype", "add"])
def test_another_files_columns_are_no_records(change: str, tmp_path: Path) -> None:
    write_records(tmp_path / "r", [record(0, [1], np.zeros(1, np.float32))])
    table = pq.read_table(tmp_path / "r")
    changed = {
        "drop": lambda: table.drop_columns(["prompt_ids"]),
        "rename": lambda: table.rename_columns(["id" if n == "prompt_ids" else n for n in table.column_names]),
        "retype": lambda: table.set_column(table.column_names.index("prompt_ids"), "prompt_ids", table.column("text")),
        "add": lambda: table.append_column("mine", table.column("text")),
    }
    pq.write_table(changed[change](), tmp_path / "r")
    with pytest.raises(ValueError, match=r"not a file of records: it lacks a column or has one .*: (prompt_ids|mine)"):
        read_records(tmp_path / "r")


def test_records_are_written_and_read_without_pandas(tmp_path: Path) -> None:
    """Importing it takes a third of a second, in every run."""
    program = (
        "import sys; from pathlib import Path; import numpy; "
        "from evalengine.records.schema import RequestRecord, read_records, write_records; "
        "record = RequestRecord([2], numpy.ones(1, 'f'), 'stop', 'x', True, 't', 0, 0, 0, 'k', [1], '', 0); "
        "write_records(Path(sys.argv[1]), [record]); assert read_records(Path(sys.argv[1]))[0].text == 'x'; "
        "assert 'pyarrow' in sys.modules and 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "r")], check=True, cwd=Path(__file__).parents[2])


def test_texts_beyond_one_array_are_written_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "_LONGEST", 3)
    rows = [record(doc, [], np.empty(0, dtype=np.float32), text="ab" * doc) for doc in range(4)]
    write_records(tmp_path / "r", rows)
    assert [row.text for row in read_records(tmp_path / "r")] == ["", "ab", "abab", "ababab"]


def test_pandas_reads_the_parquet_file(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    write_records(tmp_path / "r", [record(3, [1, 2], np.array([-1, -2], dtype=np.float32))])
    frame = pandas.read_parquet(tmp_path / "r")
    assert frame.prompt_ids[0].tolist() == [0, 1, 2] and frame.logprobs[0].dtype == np.float32


# -- identity --------------------------------------------------------------------------------------------------------


SAME = [
    ("engine.max_num_seqs=1", "engine.block_size=16", "engine.enable_prefix_caching=false", "engine.num_threads=1"),
    ("output_dir=elsewhere", "progress=false", "resume=never", "data_dir=."),
    ("numerics=exact",),  # EXTRA has the level in force
    ("model.path=elsewhere/copy", "task.dataset.path=elsewhere/copy"),  # EXTRA has the content's hash
]
OTHER = [
    ("limit=3",),
    ("seed=1",),
    ("fewshot_seed=1",),
    ("task.num_fewshot=2",),
    ("task.generation.temperature=0.5",),
    ("engine.max_model_len=512",),
    ("long_prompts=error",),
    ("task=gsm8k",),
    ("system_instruction=hello",),
]


@pytest.mark.parametrize("overrides", SAME, ids=lambda overrides: overrides[0])
def test_schedule_and_places_leave_the_id(overrides: tuple[str, ...]) -> None:
    assert run_identity(config(*overrides), EXTRA) == run_identity(config(), EXTRA)


@pytest.mark.parametrize("overrides", OTHER, ids=lambda overrides: overrides[0])
def test_what_can_change_a_result_changes_the_id(overrides: tuple[str, ...]) -> None:
    assert run_identity(config(*overrides), EXTRA) != run_identity(config(), EXTRA)


@pytest.mark.parametrize("name", EXTRA)
def test_contents_change_the_id(name: str) -> None:
    assert run_identity(config(), {**EXTRA, name: "other"}) != run_identity(config(), EXTRA)
    with pytest.raises(AssertionError, match=name):
        run_identity(config(), {key: value for key, value in EXTRA.items() if key != name})


def test_one_setting_written_two_ways_is_one_run() -> None:
    one, other = config("task.num_fewshot=3"), config("tasks.arithmetic.num_fewshot=3")
    assert run_identity(one, EXTRA) == run_identity(other, EXTRA)


# -- lm-eval's files, the manifest, the report ------------------------------------------------------------------------


def open_folder(root: Path) -> RunFolder:
    return RunFolder.open(root, "arc_easy-m", "auto", {})


SAMPLE = Sample(
    doc_id=0,
    doc={"question": "ü?", "choices": ["a", "b"]},
    target=1,
    arguments=[("ctx", " a"), ("ctx", " b")],
    resps=[[(-1.5, True)], [(-2.25, False)]],
    filtered_resps=[(-1.5, True), (-2.25, False)],
    filter="none",
    metrics={"acc": 1.0, "acc_norm": np.float32(0.0)},
    doc_hash="d",
    prompt_hash="p",
    target_hash="t",
)
TASK = TaskResult(
    name="arc_easy",
    version=1.0,
    num_fewshot=2,
    metrics={
        "acc,none": 0.5,
        "acc_stderr,none": 0.25,
        "word_perplexity,none": 7.0,
        "word_perplexity_stderr,none": "N/A",
    },
    higher_is_better={"acc": True, "word_perplexity": False},
    config={"task": "arc_easy"},
    original=10,
    effective=1,
    task_hash="h",
    samples=[SAMPLE],
)
TOKENIZER = SimpleNamespace(eos_token="</s>", eos_token_id=2)
MODEL = ModelInfo("org/m", "org/m", "torch.bfloat16", None, "w", 7, 64, "cpu", TOKENIZER)
CONFIG = Config(limit=1, numerics="exact")


def test_sample_row_is_lm_evals() -> None:
    row = json.loads(json.dumps(sample_row(SAMPLE), default=float))
    assert row == {
        "doc_id": 0,
        "doc": {"question": "ü?", "choices": ["a", "b"]},
        "target": "1",
        "arguments": {"gen_args_0": {"arg_0": "ctx", "arg_1": " a"}, "gen_args_1": {"arg_0": "ctx", "arg_1": " b"}},
        "resps": [[["-1.5", "True"]], [["-2.25", "False"]]],
        "filtered_resps": [["-1.5", "True"], ["-2.25", "False"]],
        "filter": "none",
        "metrics": ["acc", "acc_norm"],
        "doc_hash": "d",
        "prompt_hash": "p",
        "target_hash": "t",
        "acc": 1.0,
        "acc_norm": 0.0,
    }


def manifest(resumed: int = 0, truncated: int = 0) -> Manifest:
    model, identity = read_part(Model, {"name": "m"}), run_identity(config(), EXTRA)
    return build_manifest(
        identity,
        model=model,
        tokenizer={},
        datasets={},
        digests=replace(digests([]), run="ab" * 32),
        counts=RunCounts(1, 2, resumed, truncated, prompt_tokens=30, output_tokens=10),
        timings=RunTimings(1.0, 4.0, 5.0),
        engine={"max_num_seqs": 1},
        device="cpu",
        started=1767323045.9,
        command=["limit=2"],
    )


def test_manifest_tells_what_ran_and_keeps_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_sEcReT")
    data = manifest().content
    text = json.dumps(data)
    assert "hf_sEcReT" not in text and "HF_TOKEN" not in text
    assert data["libraries"]["torch"] and data["hardware"]["cpu"] and data["hardware"]["gpus"] == []
    assert data["identity"]["contract_version"] == data["contract_version"]
    assert set(data["code"]) == {"version", "commit", "dirty"} and manifest().code == Code(**data["code"])
    assert (data["started"], data["command"]) == ("2026-01-02T03:04:05Z", ["limit=2"])


def test_code_version_ignores_a_checkout_that_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr("evalengine.records.manifest.__file__", str(tmp_path / "site/evalengine/records/manifest.py"))
    (tmp_path / "site" / "evalengine").mkdir(parents=True)
    monkeypatch.delenv("EVALENGINE_COMMIT", raising=False)
    assert code_version().commit is None
    monkeypatch.setenv("EVALENGINE_COMMIT", "abc")  # set in a copy without its git folder
    assert code_version().commit == "abc"


def test_a_checkout_knows_its_own_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALENGINE_COMMIT", "abc")
    commit = code_version().commit
    in_checkout = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert commit == (in_checkout.stdout.strip() if in_checkout.returncode == 0 else "abc")


def test_a_finished_run_reads_back_as_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_folder(tmp_path) as folder:
        (folder.path / "results_old.json").write_text("{}")  # an attempt died between results and digest
        remove_results(folder)
        write_samples(folder, TASK, datetime(2026, 1, 2, 3, 4, 5))
        write_results(folder, [TASK], results_dict([TASK], MODEL, CONFIG), datetime(2026, 1, 2, 3, 4, 5))
        folder.write_text("manifest.json", manifest(resumed=1, truncated=1).file_text())
        with pytest.raises(EvalEngineError, match="not finished"):
            print_report(folder.path)
        folder.write_with("records.parquet", lambda path: write_records(path, []))
        folder.finish("ab" * 32)
    bind_again(folder.path)
    assert [p.name for p in folder.path.glob("results_*")] == ["results_2026-01-02T03-04-05.json"]
    (line,) = (folder.path / "samples_arc_easy_2026-01-02T03-04-05.jsonl").read_text().splitlines()
    assert json.loads(line)["acc_norm"] == 0.0
    print_report(folder.path)
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]
    assert ["Tasks", "Version", "Filter", "n-shot", "Metric", "Value", "Stderr"] in rows
    assert ["arc_easy", "1.0", "none", "2", "acc", "↑", "0.5000", "±", "0.2500"] in rows
    assert ["none", "2", "word_perplexity", "↓", "7.0000", "±", "N/A"] in rows
    assert "2 requests of 1 documents, 1 of them answered by the interrupted run; numerics exact on cpu" in lines
    assert "4.0 s: 0.25 requests/s, 7.5 prompt tokens/s, 2.5 output tokens/s" in lines
    assert any(line.startswith("1 prompts were truncated") for line in lines)
    assert lines[-2:] == [str(folder.path), "digest: " + "ab" * 32]


def test_results_have_lm_evals_keys(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        path = write_results(
            folder,
            [TASK, replace(TASK, name="a")],
            results_dict([TASK, replace(TASK, name="a")], MODEL, CONFIG),
            datetime(2026, 1, 2),
        )
    results = json.loads(path.read_text())
    assert results["results"]["arc_easy"] == {"name": "arc_easy", "alias": "arc_easy", "sample_len": 1, **TASK.metrics}
    assert list(results["results"]) == ["arc_easy", "a"]
    with open_folder(tmp_path / "named") as folder:
        path = write_results(
            folder,
            [replace(TASK, alias="easy")],
            results_dict([replace(TASK, alias="easy")], MODEL, CONFIG),
            datetime(2026, 1, 2),
        )
    assert json.loads(path.read_text())["results"]["arc_easy"]["alias"] == "easy"
    assert results["n-samples"]["a"] == {"original": 10, "effective": 1}
    assert results["n-shot"] == {"a": 2, "arc_easy": 2} and results["versions"] == {"a": 1.0, "arc_easy": 1.0}
    assert results["task_hashes"] == {"arc_easy": "h", "a": "h"} and results["model_name_sanitized"] == "org__m"
    assert results["config"]["limit"] == 1 and results["config"]["model_dtype"] == "torch.bfloat16"
    assert results["tokenizer_eos_token"] == ["</s>", "2"] and results["tokenizer_pad_token"] == [None, "None"]


def test_keys_are_those_of_an_installed_lm_eval(tmp_path: Path) -> None:
    schema = pytest.importorskip("lm_eval.result_schema", reason="needs lm-eval 0.4.13 (the extra lm-eval)")
    with open_folder(tmp_path) as folder:
        path = write_results(folder, [TASK], results_dict([TASK], MODEL, CONFIG), datetime(2026, 1, 2))
    results = json.loads(path.read_text())
    known = set(schema.EvalResults.__annotations__) | {"evalengine_version"}
    assert set(results) <= known
    assert set(results["config"]) <= set(schema._EvalConfig.__annotations__)
    assert set(schema.SampleResult.__annotations__) <= set(sample_row(SAMPLE))
