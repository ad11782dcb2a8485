"""Finished runs: what they print and leave, several tasks at once, sweeps, chat templates, sampling, real datasets."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalengine import CONTRACT_VERSION
from evalengine.errors import EvalEngineError
from evalengine.harness import finish, outcome, plan, runner
from evalengine.kernels.shapes import Shapes
from evalengine.layers.exact import ExactOps
from evalengine.records import digest
from evalengine.records.digest import digests
from evalengine.records.tokens import read_tokens, token_texts
from evalengine.report.html import page, samples
from evalengine.report.html.run_page import run_page
from evalengine.report.read import load as run_reader
from evalengine.report.read.load import load_run_data
from evalengine.util import forked
from tests.e2e.command import SHORT, Run, call, check_output, finished, runs, write_tasks


def test_a_run_does_not_fail_with_its_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run whose page cannot be written is whole, and `evalengine report` can write the page later."""

    def refuse(*_: object) -> None:
        raise EvalEngineError("could not write report.html: no room")

    for place in ("cli.report", "html.run_page"):  # the command's own name of it first, which its import binds
        monkeypatch.setattr(f"evalengine.report.{place}.write_run_report", refuse)
    done = call("limit=2", SHORT, f"output_dir={tmp_path}", "engine.device=cpu")
    (run,) = runs(tmp_path)
    check_output(done, run)
    assert done.code == 0 and "no report.html (could not write report.html: no room); the run is whole" in done.err
    assert not (run.folder / "report.html").exists()
    report = call("report", str(run.folder))  # `evalengine report` itself does fail.
    assert report.code == 1 and "no room" in report.err
    monkeypatch.undo()
    assert call("report", str(run.folder)).code == 0 and (run.folder / "report.html").stat().st_size > 10_000


def test_the_report_that_a_run_leaves_says_what_the_table_says(reference: Run) -> None:
    page = (reference.folder / "report.html").read_text(encoding="utf-8")
    value = reference.results["arithmetic"]["exact_match,strict-match"]
    assert reference.digest in page and f"{value:.4f}" in page and f"{value + 0.0001:.4f}" not in page


def test_the_tokens_of_an_output_are_its_text(reference: Run) -> None:
    pieces = read_tokens(reference.folder / "tokens.json")
    for record in reference.records:
        joined = "".join(token_texts(record.output_ids, pieces))
        assert joined.startswith(record.text) and len(joined) < len(record.text) + 20
    assert set(pieces) == {token for record in reference.records for token in record.output_ids}


def test_progress_goes_to_standard_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("LINE_SECONDS", "SHOWN_SECONDS"):
        monkeypatch.setattr(f"evalengine.util.progress.{name}", 0.0)
    done = call("limit=2", SHORT, f"output_dir={tmp_path}", "engine.device=cpu", "engine.max_num_seqs=1")
    line = r"^arithmetic: 1/2 requests, [\d,]+ tokens/s, estimating, [\d,]+ tokens generated$"
    assert re.search(line, done.err, re.MULTILINE)
    assert "1/2 requests" not in done.out


def test_the_digest_is_that_of_the_records(reference: Run) -> None:
    records = reference.records
    assert digests(records).run == reference.digest == reference.manifest["digest"]
    bits = records[0].logprobs.view(np.int32) ^ np.eye(1, len(records[0].logprobs), dtype=np.int32)[0]
    records[0] = replace(records[0], logprobs=bits.view(np.float32))  # The last bit of one logprob flips.
    assert digests(records).run != reference.digest


def test_the_files_agree(reference: Run) -> None:
    """Records, samples, results and manifest say the same of the run."""
    records, manifest, samples = reference.records, reference.manifest, reference.samples("arithmetic")
    assert [sample["resps"] for sample in samples] == [[[record.text]] for record in records]
    scores = [sample["exact_match"] for sample in samples]
    assert reference.results["arithmetic"]["exact_match,strict-match"] == sum(scores) / len(scores)
    assert 0 < sum(scores) < len(scores)
    assert manifest["counts"] == {
        "documents": len(records),
        "requests": len(records),
        "resumed_requests": 0,
        "cached_requests": 0,
        "truncated_prompts": 0,
        "truncated_thinking": 0,
        "unended_thinking": 0,
        "length_limited": 0,
        "own_exemplar_prompts": 0,
        "special_token_documents": 0,
        "prompt_tokens": sum(len(record.prompt_ids) for record in records),
        "output_tokens": sum(len(record.output_ids) for record in records),
    }
    assert manifest["contract_version"] == CONTRACT_VERSION and manifest["numerics"] == "exact"
    assert reference.folder.name.endswith(manifest["run_id"])
    assert all(record.logprobs.max() <= 0 and record.is_greedy for record in records)


def test_several_processes_leave_what_one_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A large run's prompts, samples, records and page are written, and its leaves hashed, by several processes."""
    tasks = ",".join(["arithmetic", *write_tasks(tmp_path, "two", "three")])
    in_a_child: list[bool] = []
    monkeypatch.setattr(forked, "cores", lambda: 3)
    monkeypatch.setattr(
        forked.ForkedTask, "result", lambda self, real=forked.ForkedTask.result: _noted(in_a_child, self, real)
    )
    alone = finished(tmp_path / "alone", f"task=[{tasks}]", "limit=3", SHORT)
    assert True not in in_a_child
    whole = _page(alone, monkeypatch)
    for module, name in SIZES:
        monkeypatch.setattr(module, name, 1)
    in_a_child.clear()
    run = finished(tmp_path / "run", f"task=[{tasks}]", "limit=3", SHORT)
    prompts, records, leaves = 3, 1, 2  # rows and scores are the work of a process with limits
    leaves_read, compared, blocks = 2, 1, 0  # all of the page's samples are one block here
    written = prompts + records + leaves
    told = leaves_read + compared  # the run is read once more to say what its cut answers score
    assert in_a_child.count(True) == written + leaves_read + compared + blocks + told
    for name in ("digest.txt", "records.parquet", "tokens.json"):
        assert (run.folder / name).read_bytes() == (alone.folder / name).read_bytes(), name
    assert run.results == alone.results
    assert [run.samples(task) for task in run.results] == [alone.samples(task) for task in run.results]
    assert _page(alone, monkeypatch) == whole


SIZES = [(plan, "MANY_DOCUMENTS"), (outcome, "MANY_DOCUMENTS"), (finish, "MANY"),
         (digest, "MANY"), (run_reader, "MANY"), (run_reader, "MANY_SAMPLES"),
         (page, "LEAST"), (samples, "LEAST")]  # fmt: skip


def _page(run: Run, monkeypatch: pytest.MonkeyPatch) -> str:
    """The run's page, a block a sample."""
    with monkeypatch.context() as small:
        small.setattr(page, "BLOCK", 1)
        return run_page(load_run_data(run.folder)).render()


def test_a_task_that_fails_to_score_in_another_process_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tasks = ",".join(["arithmetic", *write_tasks(tmp_path, "two", "three")])
    monkeypatch.setattr(forked, "cores", lambda: 3)
    monkeypatch.setattr(outcome, "MANY_DOCUMENTS", 1)
    write = runner.write_samples

    def full_disk(folder: Any, task: Any, finished: Any) -> Path:
        if task.name == "three":
            raise EvalEngineError("the disk is full")
        return write(folder, task, finished)

    with monkeypatch.context() as broken:
        broken.setattr(runner, "write_samples", full_disk)
        done = call(f"output_dir={tmp_path / 'out'}", "engine.device=cpu", f"task=[{tasks}]", "limit=2", SHORT)
    assert done.code == 1 and "the disk is full" in done.err
    finished(tmp_path / "out", f"task=[{tasks}]", "limit=2", SHORT)


def _noted(in_a_child: list[bool], work: forked.ForkedTask[Any], result: Any) -> Any:
    if not work._limited:  # a process with limits is started for templates, however few there are
        in_a_child.append(work._process != 0)
    return result(work)


def test_the_manifest_names_the_attention_that_ran(reference: Run, tmp_path: Path) -> None:
    fast = finished(tmp_path, "limit=1", "batch_invariant=false", "task.generation.max_gen_toks=4").manifest
    assert fast["engine"]["attention_backend"] == fast["identity"]["attention_backend"] == "sdpa"
    exact = reference.manifest
    assert exact["engine"]["attention_backend"] == "exact" and "attention_backend" not in exact["identity"]


def test_the_verdict_on_the_kernels_is_in_the_manifest(
    reference: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def verify_kernels(self: ExactOps, shapes: Shapes, *, block_size: int) -> dict[str, Any]:
        return {"schedules": 3, "dropped": [{"kernel": "matmul", "where": f"pages of {block_size}"}], "failed": []}

    monkeypatch.setattr(ExactOps, "verify_kernels", verify_kernels)
    run = finished(tmp_path, "limit=1", "engine.block_size=32", "task.generation.max_gen_toks=4")
    dropped = [{"kernel": "matmul", "where": "pages of 32"}]
    assert run.manifest["engine"]["kernels"] == {"schedules": 3, "dropped": dropped, "failed": []}
    assert reference.manifest["engine"]["kernels"] is None, "exact has no schedule to choose"


def test_a_sweep_is_a_run_a_value(tmp_path: Path) -> None:
    """A sweep over a setting makes one run for each value."""
    done = call("-m", "engine.max_num_seqs=1,8", "limit=2", SHORT, "engine.device=cpu", f"output_dir={tmp_path}")
    assert done.code == 0, done.err
    first, second = runs(tmp_path)
    assert first.digest == second.digest
    assert done.out.count(f"digest: {first.digest}\n") == 2
    assert done.out.endswith(f"\nbatch_invariant=true: all 2 runs agree, digest {first.digest[:12]}\n")
    assert "[1/2] engine.max_num_seqs=1\n" in done.err and "[2/2] engine.max_num_seqs=8\n" in done.err
    assert {run.manifest["engine"]["max_num_seqs"] for run in (first, second)} == {1, 8}


def test_the_chat_template_changes_the_prompts(reference: Run, tmp_path: Path) -> None:
    run = finished(tmp_path, "limit=2", SHORT, "apply_chat_template=true", "system_instruction=Be brief.")
    plain, chat = reference.samples("arithmetic")[0], run.samples("arithmetic")[0]
    (plain_prompt,), (chat_prompt,) = ([sample["arguments"]["gen_args_0"]["arg_0"]] for sample in (plain, chat))
    assert plain_prompt != chat_prompt and plain_prompt in chat_prompt and "Be brief." in chat_prompt
    assert run.records[0].prompt_ids != reference.records[0].prompt_ids


def test_samples_depend_on_the_seed_and_not_on_the_schedule(tmp_path: Path) -> None:
    sampled = ("task.generation.temperature=1.5", "task.generation.repeats=2", "task.generation.max_gen_toks=10")
    settings = ("limit=2", *sampled)
    run = finished(tmp_path / "one", *settings, "seed=1")
    rescheduled = finished(tmp_path / "same", *settings, "seed=1", "engine.max_num_seqs=3", "engine.block_size=16")
    reseeded = finished(tmp_path / "other", *settings, "seed=2")
    assert run.digest == rescheduled.digest != reseeded.digest
    texts = [record.text for record in run.records]
    assert [record.key[1:] for record in run.records] == [(doc, 0, sample) for doc in range(2) for sample in range(2)]
    assert any(a != b for a, b in zip(texts[::2], texts[1::2], strict=True)), "repeats draw their own noise"
    assert not all(record.is_greedy for record in run.records)


def test_long_prompts_are_cut_counted_and_told(tmp_path: Path) -> None:
    settings = ("limit=2", "engine.max_model_len=64", "task.generation.max_gen_toks=40")
    done = call(f"output_dir={tmp_path}", "engine.device=cpu", *settings)
    assert done.code == 0, done.err
    (run,) = runs(tmp_path)
    assert run.manifest["counts"]["truncated_prompts"] == 2
    assert "2 prompts were truncated from the left to fit max_model_len" in done.out
    assert all(record.truncated > 0 and len(record.prompt_ids) == 64 - 40 for record in run.records)
    limited = sum(record.finish_reason == "length" for record in run.records)
    assert run.manifest["counts"]["length_limited"] == limited
    assert (f"{limited} generations reached the length limit" in done.out) == (limited > 0)


def test_two_tasks_share_a_folder(data_dir: Path, tmp_path: Path) -> None:
    rows = (f"data_dir={data_dir}", "limit=2")
    run = finished(tmp_path, "task=[arithmetic,arc_easy]", *rows, "tasks.arithmetic.generation.max_gen_toks=16")
    assert run.folder.name.startswith("arithmetic+arc_easy-tinymath-")
    assert list(run.results) == ["arithmetic", "arc_easy"]
    assert len(run.samples("arithmetic")) == len(run.samples("arc_easy")) == 2
    alone = finished(tmp_path / "alone", "task=arc_easy", *rows)
    assert alone.digest == run.manifest["task_digests"]["arc_easy"], "what runs beside a task changes none of its bits"


@pytest.mark.parametrize("task", ["arc_easy", "arc_challenge", "hellaswag"])
def test_multiple_choice(task: str, data_dir: Path, tmp_path: Path) -> None:
    """acc and acc_norm are those worked out by hand from the records' logprobs."""
    run = finished(tmp_path, f"task={task}", f"data_dir={data_dir}", "limit=2")
    right = {"acc": 0, "acc_norm": 0}
    for sample in run.samples(task):
        choices = sample["doc"]["choices"] if task == "hellaswag" else sample["doc"]["choices"]["text"]
        records = [record for record in run.records if record.doc_id == sample["doc_id"]]
        assert [record.request_index for record in records] == list(range(len(choices)))
        sums = [math.fsum(record.logprobs.tolist()) for record in records]
        normed = [value / len(choice) for value, choice in zip(sums, choices, strict=True)]
        right["acc"] += sums.index(max(sums)) == int(sample["target"])
        right["acc_norm"] += normed.index(max(normed)) == int(sample["target"])
        assert [float(response[0][0]) for response in sample["resps"]] == sums
    assert {name: run.results[task][f"{name},none"] for name in right} == {name: n / 2 for name, n in right.items()}


def test_wikitext(data_dir: Path, tmp_path: Path) -> None:
    """The three metrics are those worked out by hand from the records' logprobs; a page longer than the context is
    scored in windows."""
    run = finished(tmp_path, "task=wikitext", f"data_dir={data_dir}", "limit=1", "engine.max_model_len=512")
    (sample,), records, results = run.samples("wikitext"), run.records, run.results["wikitext"]
    page = sample["doc"]["page"]
    nats = -math.fsum(value for record in records for value in record.logprobs.tolist())
    words, size = len(re.split(r"\s+", page)), len(page.encode())
    assert len(records) > 1 and all(len(record.output_ids) == 512 for record in records[:-1])
    assert results["bits_per_byte,none"] == pytest.approx(nats / size / math.log(2), rel=1e-12)
    assert results["byte_perplexity,none"] == pytest.approx(math.exp(nats / size), rel=1e-12)
    assert results["word_perplexity,none"] == pytest.approx(math.exp(nats / words), rel=1e-12)
    assert results["word_perplexity_stderr,none"] == "N/A"


def test_gsm8k(data_dir: Path, tmp_path: Path) -> None:
    """Two filters score each answer, the prompt has the asked-for example, and the manifest names both splits' rows."""
    settings = ("task=gsm8k", "limit=2", "task.num_fewshot=1", "task.generation.max_gen_toks=8")
    run = finished(tmp_path, f"data_dir={data_dir}", *settings)
    results = run.results["gsm8k"]
    assert [key for key in results if "," in key] == [
        f"exact_match{part},{name}" for name in ("strict-match", "flexible-extract") for part in ("", "_stderr")
    ]
    rows = run.samples("gsm8k")
    assert [(row["doc_id"], row["filter"]) for row in rows] == [
        (doc, name) for name in ("strict-match", "flexible-extract") for doc in range(2)
    ]
    assert all(row["arguments"]["gen_args_0"]["arg_0"].count("Question: ") == 2 for row in rows)
    assert all(len(record.output_ids) <= 8 for record in run.records)
    datasets = run.manifest["identity"]["datasets"]["gsm8k"]
    assert len(datasets["sha256"]) == len(datasets["fewshot_sha256"]) == 64
