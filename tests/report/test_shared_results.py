"""The Hub's `.eval_results` and Every Eval Ever's records, made of real runs, held against huggingface_hub's own reader
and against Every Eval Ever's schemas (its release 0.3.0, MIT: every_eval_ever/LICENSE)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from uuid import UUID

import huggingface_hub
import pytest
import yaml
from huggingface_hub import eval_result_entries_to_yaml, parse_eval_result_entries

from evalengine.report.read.load import load_run
from evalengine.report.stats.metric_interval import metric_interval
from tests.e2e.command import Run, call, finished
from tests.e2e.test_judge import JUDGE, judged, write_task

SCHEMAS = Path(__file__).parent / "every_eval_ever"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Run:
    folder = tmp_path_factory.mktemp("runs")
    return finished(folder, "task=[gsm8k,arithmetic]", "limit=4", f"data_dir={data_dir}", "task.num_fewshot=0",
                    "task.generation.max_gen_toks=8")  # fmt: skip


def written(run: Run, option: str, file: Path) -> Any:
    done = call("report", str(run.folder), option, str(file))
    assert done.code == 0, done.err
    text = file.read_text(encoding="utf-8")
    return yaml.safe_load(text) if file.suffix == ".yaml" else json.loads(text)


def test_the_hubs_entries_are_those_of_its_own_library(run: Run, tmp_path: Path) -> None:
    """Nothing is written that huggingface_hub's reader would not give back."""
    file = tmp_path / "gsm8k.yaml"
    done = call("report", str(run.folder), "--eval-results", str(file))
    assert done.code == 0 and "eval.yaml cannot be read" in done.err and "task_id main" in done.err, done.err
    entries = yaml.safe_load(file.read_text(encoding="utf-8"))
    (parsed,) = parse_eval_result_entries(entries)  # the made-up rows are on no Hub
    assert eval_result_entries_to_yaml([parsed]) == entries
    facts = run.manifest["datasets"]["gsm8k"]
    assert parsed.dataset_id == facts["dataset"] and "/" in parsed.dataset_id and parsed.task_id == "main"
    assert parsed.dataset_revision is None, "local rows have no revision"
    key = next(key for key in load_run(run.folder).results if key[0] == "gsm8k")
    assert parsed.value == load_run(run.folder).results[key][0]
    assert parsed.notes is not None and f"digest {run.digest}" in parsed.notes
    assert "0-shot; 4 rows" in parsed.notes and "100.0 % cut at the limit" in parsed.notes
    assert parsed.date == run.manifest["started"][:10]


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ([{"id": "gsm8k", "config": "main", "split": "test"}], "gsm8k"),
        ([{"id": "other", "config": "socratic"}, {"id": "gsm8k", "config": "main"}], "gsm8k"),
        ([{"id": "train", "config": "main", "split": "train"}, {"id": "gsm8k", "config": "main"}], "gsm8k"),
        ([{"id": "math"}], "math"),
        ([], "main"),
    ],
)
def test_a_benchmarks_eval_yaml_names_the_task(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               tasks: list[dict[str, str]], said: str) -> None:  # fmt: skip
    file = tmp_path / "eval.yaml"
    file.write_text(yaml.safe_dump({"name": "GSM8K", "tasks": tasks}))
    asked = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **named: asked.append((args, named)) or file)
    (entry,) = written(run, "--eval-results", tmp_path / "gsm8k.yaml")
    assert entry["dataset"]["task_id"] == said
    assert asked == [((entry["dataset"]["id"], "eval.yaml"), {"repo_type": "dataset"})]


def validated(schema: str, value: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    jsonschema.Draft7Validator(json.loads((SCHEMAS / schema).read_text())).validate(value)


def test_every_eval_ever_has_each_result_with_its_interval(run: Run, tmp_path: Path) -> None:
    done = call("report", str(run.folder), "--every-eval", str(tmp_path / "store"))
    assert done.code == 0, done.err
    (file,) = tmp_path.glob("store/data/gsm8k+arithmetic/local/tinymath/*.json")
    record = json.loads(file.read_text(encoding="utf-8"))
    validated("eval.schema.json", record)
    assert UUID(file.stem).version == 4 and str(file) in done.out
    read = load_run(run.folder)
    assert record["source_metadata"]["additional_details"]["digest"] == run.digest
    assert len(record["evaluation_results"]) == len(read.results)
    for result, (key, (value, stderr)) in zip(record["evaluation_results"], read.results.items(), strict=True):
        assert result["evaluation_name"] == key[0] and result["score_details"]["score"] == value
        assert result["metric_config"]["lower_is_better"] is False
        assert result["metric_config"]["score_type"] == "binary"
        assert result["generation_config"]["generation_args"]["max_tokens"] == 8
        assert "cut at the limit" in result["score_details"]["details"]["cut_at_the_limit"]
        told = result["score_details"]["uncertainty"]
        assert told["num_samples"] == 4 and told["standard_error"]["value"] == stderr
        interval = metric_interval(read, key)
        assert interval is not None
        assert (told["confidence_interval"]["lower"], told["confidence_interval"]["upper"]) == interval
    sources = {one["evaluation_name"]: one["source_data"]["source_type"] for one in record["evaluation_results"]}
    assert sources == {"gsm8k": "hf_dataset", "arithmetic": "other"}


def test_a_file_in_the_place_of_the_folder_is_a_sentence(run: Run, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    done = call("report", str(run.folder), "--every-eval", str(tmp_path / "store"))
    assert done.code == 2 and "name another place" in done.err and "Traceback" not in done.err


def test_two_judges_of_the_same_answers_have_records_of_their_own(tmp_path: Path) -> None:
    for scale in ([1, 2, 3], [1, 2]):
        task = write_task(tmp_path / "task", {**JUDGE, "scale": scale})
        run = judged(task, tmp_path / "out")
        assert call("report", str(run.folder), "--every-eval", str(tmp_path / "store")).code == 0
    assert len([*tmp_path.glob("store/data/seats/local/tinymath/*[0-9a-f].json")]) == 2


def test_every_eval_ever_has_each_sample(run: Run, tmp_path: Path) -> None:
    for folder in ("one", "again"):
        assert call("report", str(run.folder), "--every-eval", str(tmp_path / folder)).code == 0
    (file,) = tmp_path.glob("one/data/*/*/*/*_samples.jsonl")
    (again,) = tmp_path.glob("again/data/*/*/*/*_samples.jsonl")
    assert again.name == file.name and again.read_bytes() == file.read_bytes()
    record = json.loads(Path(str(file).replace("_samples.jsonl", ".json")).read_text())
    detailed = record["detailed_evaluation_results"]
    assert tmp_path / "one" / detailed["file_path"] == file
    assert detailed["checksum"] == hashlib.sha256(file.read_bytes()).hexdigest()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    read, records = load_run(run.folder), {one.key: one for one in run.records}
    assert len(lines) == detailed["total_rows"] == sum(map(len, read.scores.values()))
    leaves = {key: leaf.hex() for key, leaf in run.leaves.items()}
    for line in lines:
        validated("instance_level_eval.schema.json", line)
        assert (line["evaluation_id"], line["model_id"]) == (record["evaluation_id"], record["model_info"]["id"])
        key, document = tuple(line["evaluation_result_id"].split("/")), int(line["sample_id"])
        assert line["evaluation"] == {"score": read.scores[key][document],
                                      "is_correct": read.scores[key][document] == 1}  # fmt: skip
        own = records[key[0], document, 0, 0]
        assert line["output"]["raw"] == [own.text]
        assert line["metadata"]["digest"] == run.digest and line["metadata"]["leaves"] == leaves[own.key]
        assert line["metadata"]["endings"] == own.finish_reason
        assert line["token_usage"]["input_tokens"] == len(own.prompt_ids)
        assert line["token_usage"]["output_tokens"] == len(own.output_ids)


def test_choices_and_repeats_are_samples_too(tmp_path: Path, data_dir: Path) -> None:
    choices = finished(tmp_path / "a", "task=arc_easy", "limit=2", f"data_dir={data_dir}", "task.num_fewshot=0")
    several = finished(tmp_path / "b", "limit=2", "task.generation.max_gen_toks=8", "task.repeats=2",
                       "task.generation.temperature=0.7")  # fmt: skip
    for run in (choices, several):
        assert call("report", str(run.folder), "--every-eval", str(run.folder.parent / "store")).code == 0
        (file,) = run.folder.parent.glob("store/data/*/local/*/*_samples.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            validated("instance_level_eval.schema.json", line)
        if run is choices:
            assert all(len(line["input"]["choices"]) == 4 and len(line["output"]["raw"]) == 1 for line in lines)
        else:
            assert all(len(line["output"]["raw"]) == 2 == len(line["metadata"]["leaves"].split()) for line in lines)


def test_what_cannot_be_written_is_said(run: Run, tmp_path: Path) -> None:
    for option, file, said in (("--eval-results", "a.json", "name a file that ends in .yaml"),):
        done = call("report", str(run.folder), option, str(tmp_path / file))
        assert done.code == 2 and said in done.err
    baseline = tmp_path / "baseline.json"
    assert call("baseline", str(run.folder), "-o", str(baseline)).code == 0
    for option, name in (("--eval-results", "a.yaml"), ("--every-eval", "a")):
        done = call("report", str(baseline), option, str(tmp_path / name))
        assert done.code == 2 and "a baseline holds no texts" in done.err
