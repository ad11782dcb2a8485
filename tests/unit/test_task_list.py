"""`python -m evalengine tasks`: the table, the documents, and bad usage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from evalengine.__main__ import main
from evalengine.config.compose import compose_jobs
from evalengine.config.shipped import available, outline
from evalengine.tasks.registry import load_task

ROWS = [{"question": f"What is {n}?", "answer": f"So.\n#### {n}"} for n in range(5)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data_dir with five rows of gsm8k in either split."""
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return tmp_path


def test_every_shipped_task_is_listed_with_its_commit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"]) == 0
    out = capsys.readouterr().out
    assert "mmlu (57 tasks)" in out and "14,042" in out and "mmlu_anatomy" not in out
    assert "open_llm (62 tasks)" in out
    (line,) = [line for line in out.splitlines() if line.split()[:1] == ["gpqa_main_zeroshot"]]
    assert "access to the rows on the Hub" in line
    for name in available("task"):
        config = outline(name)
        if config.groups:
            continue
        task = config.tasks[name]
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [name]]
        assert task.dataset.rows is not None and f"{task.dataset.rows:,}" in line, "its size is known"
        assert task.dataset.revision is None or (f"{task.dataset.path}" in line and task.dataset.revision[:8] in line)
        assert "…" not in line and "?" not in line
    (line,) = [line for line in out.splitlines() if line.split()[:1] == ["gsm8k_cot"]]
    assert "task.fewshot_file=FILE" in line and "exact_match" in line


def test_documents_are_shown_as_the_model_sees_them(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [f"data_dir={data}", "task.num_fewshot=2"]
    assert main(["tasks", "gsm8k", "--show", "2", *settings]) == 0
    out = capsys.readouterr().out
    (job,) = compose_jobs(["task=gsm8k", *settings])
    task = load_task("gsm8k", job.config.tasks["gsm8k"], data_dir=str(data))
    task.load()
    for (request,), doc in zip(task.instances(2), task.docs[:2], strict=True):
        shown = "".join(f"  | {line}\n" for line in request.context.split("\n"))
        assert shown in out and json.dumps(doc) in out
        assert "  target\n  | So.\n  | #### " in out
    assert "document 1 of 5" in out and "document 2 of 5" not in out


def test_the_chat_template_is_the_model_s(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tasks", "gsm8k", "--show", "1", f"data_dir={data}", "task.num_fewshot=0", "apply_chat_template=true"]
    assert main(words) == 0
    assert "  | <|im_start|>user\n  | Question: What is 0?\n  | Answer:<|im_end|>\n" in capsys.readouterr().out


def test_a_file_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its documents are shown without the control characters in them, and its metrics are listed."""
    (tmp_path / "rows.jsonl").write_text('{"a": "x\\u001b[2J", "b": " y"}\n')
    content = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{a}}",
        "doc_to_target": "b",
    }
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(content))
    assert main(["tasks", str(file), "--show", "3"]) == 0
    out = capsys.readouterr().out
    assert "  prompt\n  | x\\x1b[2J\n  continuation 0\n  |  y\n" in out, "no command of the terminal's own gets through"
    assert main(["tasks", str(file)]) == 0
    assert "perplexity, acc" in capsys.readouterr().out
    content |= {"doc_to_target": "{{b.split()[0]}}"}
    file.write_text(yaml.safe_dump(content))
    with (tmp_path / "rows.jsonl").open("a") as rows:
        rows.write('{"a": "x", "b": " "}\n')
    assert main(["tasks", str(file), "--show", "1"]) == 0
    assert main(["tasks", str(file), "--show", "2", "limit=1"]) == 2, "what is shown is checked"
    assert "rows.jsonl:2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--show", "3"], "tasks: --show needs a task"),
        (["gsm8k", "--show", "0"], "tasks: Invalid value for '--show': Input should be greater than or equal to 1"),
        (["gsm8k", "--show", "x"], "tasks: Invalid value for '--show'"),
        (["gsm8k", "arc_easy"], "tasks: gsm8k arc_easy: name one task"),
        (["gsm9k"], "task=gsm9k: no such task; did you mean gsm8k"),
        (["task=gsm8k"], "tasks: task=gsm8k: name the task as it is"),
        (["gsm8k", "limits=3"], "limits: no such setting; did you mean limit?"),
        (["./nowhere.yaml"], "task=./nowhere.yaml: no such file"),
    ],
)
def test_bad_usage_is_one_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"evalengine: {message}") and captured.err.count("\n") == 1
