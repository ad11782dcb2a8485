"""`task=lm_eval/NAME` from the command line: a run, its digest beside our own task's, a kill, and what is refused.

It stands here because lm-eval's index of its tasks takes ten seconds, which this folder's tests share.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from tests.e2e.command import Run, after_entries, call, finished, interrupt, runs

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")
DATA = os.environ.get("EVALENGINE_DATA")
SETTINGS = ("task=lm_eval/nq_open", "limit=6", "task.generation.max_gen_toks=6", "task.num_fewshot=1")


def write_rows(folder: Path, rows: int = 8) -> str:
    """Writes rows of nq_open's shape, and returns the setting that names their folder."""
    (folder / "nq_open").mkdir(parents=True)
    for split in ("train", "validation"):
        lines = [json.dumps({"question": f"what is {n} and 1", "answer": [str(n + 1)]}) for n in range(rows)]
        (folder / "nq_open" / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return f"data_dir={folder}"


@pytest.mark.skipif(DATA is None, reason="needs EVALENGINE_DATA, the folder with real rows")
def test_a_run_has_the_digest_of_our_own_task(tmp_path: Path) -> None:
    """lm-eval's gsm8k and arc_easy give the digest, results and samples of the tasks that we ship under these names."""
    shared = (f"data_dir={DATA}", "limit=2", "tasks.gsm8k.num_fewshot=1", "tasks.gsm8k.generation.max_gen_toks=8")
    by_lm_eval = finished(tmp_path / "theirs", "task=[lm_eval/gsm8k,lm_eval/arc_easy]", *shared)
    by_us = finished(tmp_path / "ours", "task=[gsm8k,arc_easy]", *shared)
    assert by_lm_eval.digest == by_us.digest
    assert by_lm_eval.results == by_us.results
    for task in ("gsm8k", "arc_easy"):
        for a, b in zip(by_lm_eval.samples(task), by_us.samples(task), strict=True):
            assert [a[key] for key in ("doc_hash", "prompt_hash", "target_hash", "filtered_resps")] == [
                b[key] for key in ("doc_hash", "prompt_hash", "target_hash", "filtered_resps")
            ]
    reseeded = finished(tmp_path / "other", "task=[lm_eval/gsm8k,lm_eval/arc_easy]", *shared, "fewshot_seed=7")
    assert reseeded.digest != by_lm_eval.digest
    identity = by_lm_eval.manifest["datasets"]["gsm8k"]["definition"]
    assert identity["task"] == "gsm8k" and len(identity["sha256"]) == 64 and identity["lm_eval"]
    assert call("compare", str(by_lm_eval.folder), str(by_us.folder), "--allow").code == 0


def test_an_unfinished_run_goes_on_with_the_same_lm_eval_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_rows(tmp_path / "data")
    reference = finished(tmp_path / "whole", *SETTINGS, data, "engine.max_num_seqs=2")
    settings = (f"output_dir={tmp_path / 'unfinished'}", "engine.device=cpu", "progress=false", *SETTINGS, data)
    with monkeypatch.context() as patch:  # A process of its own would index lm-eval's tasks for ten seconds again.
        after_entries(patch, 2, interrupt)
        assert call(*settings, "engine.max_num_seqs=2").code == 130
    (broken,) = runs(tmp_path / "unfinished")
    kept = (broken.folder / "journal.jsonl").read_bytes().count(b"\n")
    monkeypatch.setattr("evalengine.integrations.lm_eval_tasks.task.lm_eval_version", lambda: "0.0.0")
    new_run = call(*settings, "engine.max_num_seqs=2")
    assert new_run.code == 0 and "answered by the interrupted run" not in new_run.out  # It is a run of its own.
    monkeypatch.undo()
    done = call(*settings, "engine.max_num_seqs=2")
    assert done.code == 0, done.err
    assert 0 < kept < 6 and f"{kept} of them answered by the interrupted run" in done.out
    assert Run(broken.folder).digest == reference.digest


def test_a_chat_template_writes_the_prompts(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data")
    plain = call("tasks", "lm_eval/nq_open", "--show", "1", "task.num_fewshot=1", data)
    chat = call("tasks", "lm_eval/nq_open", "--show", "1", "task.num_fewshot=1", data, "apply_chat_template=true")
    assert plain.code == chat.code == 0
    assert "| Q: what is 0 and 1?\n" in plain.out and "<|im_start|>" not in plain.out
    assert "<|im_start|>assistant\n  | A:" not in chat.out and chat.out.count("<|im_start|>assistant") == 2


def test_what_a_scorer_lacks_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of IFEval's that counts sentences by NLTK's punkt_tab does so for an answer, not for an empty one."""
    nltk = pytest.importorskip("nltk", reason="needs what IFEval's checks call (pip install evalengine[ifeval])")
    pytest.importorskip("langdetect", reason="needs what IFEval's checks call (pip install evalengine[ifeval])")
    monkeypatch.setattr(nltk, "download", lambda name: False)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nowhere")])
    row = {"key": 1, "prompt": "Now.", "instruction_id_list": ["change_case:capital_word_frequency"]}
    (tmp_path / "ifeval").mkdir()
    arguments = [{"capital_frequency": 1, "capital_relation": "at least"}]
    (tmp_path / "ifeval" / "train.jsonl").write_text(json.dumps({**row, "kwargs": arguments}))
    short = "task.generation.max_gen_toks=8"
    done = call("task=lm_eval/ifeval", short, f"data_dir={tmp_path}", f"output_dir={tmp_path / 'out'}")
    assert done.code == 2 and "tasks.ifeval: document 0 cannot be scored or written (LookupError: " in done.err
    assert "nltk.download('punkt_tab')" in done.err and not runs(tmp_path / "out")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("lm_eval/gsm9k", "did you mean lm_eval/gsm8k"),
        ("[lm_eval/gsm8k,gsm8k]", "its name is gsm8k, as is task=gsm8k's"),
        ("[lm_eval/mmlu_stem,lm_eval/mmlu_anatomy]", "its name is mmlu_anatomy"),
    ],
)
def test_a_name_that_cannot_be_used_is_one_sentence(task: str, message: str) -> None:
    done = call(f"task={task}")
    assert done.code == 2 and message in done.err and "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_without_lm_eval_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from evalengine.integrations.lm_eval_tasks import index as lm_eval_index

    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    for name in ("chosen", "lm_eval_tasks"):  # what other tests have cached stays cached
        monkeypatch.setattr(lm_eval_index, name, getattr(lm_eval_index, name).__wrapped__)
    monkeypatch.setattr(lm_eval_index, "version", absent)
    done = call("task=lm_eval/gsm8k")
    assert done.code == 2 and "pip install 'evalengine[lm-eval]'" in done.err
    assert len(done.err.strip().splitlines()) == 1
