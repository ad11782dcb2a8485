"""Bad input: one message that names the setting and the fix, no traceback, nothing written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest
import torch

from tests.e2e.command import ROOT, Outcome, call, finish, over, start

TINYMATH = ROOT / "evalengine" / "assets" / "tinymath"


def refused(output_dir: Path, *arguments: str, code: int = 2) -> str:
    """The message of a command that must be refused."""
    return message(call(*over((f"output_dir={output_dir}", "limit=1"), *arguments)), output_dir, code)


def message(done: Outcome, output_dir: Path, code: int) -> str:
    """The error text of a refused command, after checking that it wrote nothing and shows no traceback."""
    assert done.code == code, done.err
    assert done.out == "" and "Traceback" not in done.err
    assert done.err.startswith("evalengine: ")
    assert not output_dir.exists(), "something was written"
    return done.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["task=gsm9k"], ["task=gsm9k: no such task", "did you mean gsm8k"]),
        (["model=tinymth"], ["model=tinymth: no such model", "did you mean tinymath?"]),
        (["task.num_fewshots=1"], ["task.num_fewshots: no such setting; did you mean", "num_fewshot"]),
        (["tasks.gsm8k.num_fewshot=1"], ["tasks.gsm8k: this task is not selected; add it with task=gsm8k"]),
        (["limit=many"], ["limit=many: must be a whole number"]),
        (["engine.max_num_seqs=0"], ["engine.max_num_seqs=0: must be greater than or equal to 1"]),
        (["limit=0"], ["limit=0: must be greater than or equal to 1"]),
        (["numerics=fast"], ["batch_invariant=true contradicts numerics=fast: set batch_invariant=false"]),
        (["batch_invariant=false", "numerics=exact"], ["batch_invariant=false contradicts numerics=exact"]),
        (["numerics=native", "engine.device=cpu"], ["numerics=native runs on CUDA only", "use numerics=exact"]),
        (["data_dir=no/such/folder"], ["data_dir=no/such/folder: no such folder"]),
        (["resume=no/such/run"], ["resume=no/such/run: must be auto, never, or an existing run folder"]),
        (["model.path=no/such/model/"], ["model.path=no/such/model/", "Hub id"]),
        (["model.path=no/such/model.gguf"], ["model.path=no/such/model.gguf"]),
        (["engine.max_model_len=1000000"], ["engine.max_model_len=1000000: must be in 2 ... "]),
        (["engine.max_model_len=100"], ["max_gen_toks=160 leaves no room", "engine.max_model_len=100; lower"]),
        (["engine.max_model_len=170", "long_prompts=error"], ["10 fit", "set long_prompts=truncate", "document 0"]),
        (["engine.block_size=1000000"], ["engine.block_size=1000000", "max_model_len=1024"]),
        (["output_dir="], ["output_dir: names no folder"]),
        (["model.name='a\x1b[2Jb'"], ["model.name='a\\x1b[2Jb': must be at most 200 printable characters"]),
        (["model.name=" + "x" * 300], ["must be at most 200 printable characters"]),
        (["system_instruction='a\udcff'"], ["system_instruction='a\\udcff': must be a text in UTF-8"]),
        (["chat_template_date=today"], ["chat_template_date=today: must be a day, as in 2024-07-26"]),
        (
            ["engine.num_kv_blocks=1", "engine.block_size=16"],
            ["arithmetic, document 0: ", "KV pages of 16 tokens", "raise engine.num_kv_blocks"],
        ),
        (["task.num_fewshot=100000"], ["num_fewshot=100000"]),
        (["task.dataset.path=no/such/rows.jsonl"], ["task.dataset.path=no/such/rows.jsonl does not exist"]),
        (["task.generation.repeats=2"], ["generation.repeats=2: at temperature 0", "set a temperature"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "=" in value[0] else "",
)
def test_settings(arguments: list[str], expected: list[str], tmp_path: Path) -> None:
    """A setting that cannot be used is refused in one line that names it and the fix."""
    text = refused(tmp_path / "out", *arguments)
    assert text.count("\n") == 1
    for words in expected:
        assert words in text


def test_several_problems_are_listed_at_once(tmp_path: Path) -> None:
    first = refused(tmp_path / "out", "engine.dtype=int8", "task.num_fewshot=-1", "numerics=fast")
    assert first.startswith("evalengine: several problems\n") and first.count("\n  - ") == 3
    second = refused(tmp_path / "out", "model.path=no/such/model/", "task.dataset.path=no/such/rows.jsonl")
    assert second.count("\n  - ") == 2 and "no/such/model" in second and "no/such/rows.jsonl" in second


def test_cuda_without_cuda(tmp_path: Path) -> None:
    """On a machine with CUDA the command runs in a process of its own, in which the devices are hidden."""
    output_dir = tmp_path / "out"
    words = (f"output_dir={output_dir}", "engine.device=cuda")
    done = finish(start(*words, CUDA_VISIBLE_DEVICES="")) if torch.cuda.is_available() else call(*words)
    text = message(done, output_dir, 2)
    assert "engine.device=cuda: this machine has no usable CUDA device; use engine.device=cpu" in text


def test_rows_without_network_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names all three ways to give a task its rows."""
    for library in (datasets.config, huggingface_hub.constants):  # They read the environment when they are imported.
        monkeypatch.setattr(library, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    output_dir = tmp_path / "out"
    text = message(call("task=gsm8k", f"data_dir={tmp_path}", f"output_dir={output_dir}"), output_dir, 2)
    assert "tasks.gsm8k: no rows for split 'test' of openai/gsm8k: HF_HUB_OFFLINE is set" in text
    assert f"data_dir=FOLDER that holds gsm8k/test.jsonl (looked for it in {tmp_path})" in text
    assert "task.dataset.path=FILE_OR_FOLDER" in text and "Hugging Face Hub" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "has no rows for split 'test'"),
        ("\n\n", "has no rows for split 'test'"),
        ('{"question": "1 + 1?"}\n', "row 0 has no 'answer' (it is absent or null); it has 'question'"),
        ('{"question": "1 + 1?", "answer": "#### 2"}\n{"question"', "rows.jsonl:2: not JSON"),
        ("[1, 2]\n", "rows.jsonl:1: a row must be a JSON object, this is list"),
        (b"\xff\xfe", "rows.jsonl cannot be read"),
        ('\n{"question": "\\ud800", "answer": ""}\n', "rows.jsonl:2: row 0 cannot be used: column 'question'"),
        ('{"question": "q", "answer": "1", "n": [{"\\udfff": 1}]}', "row 0 cannot be used: a column's name holds half"),
        ('{"question": "q", "answer": "1", "n": NaN}\n', "column 'n' holds nan, which is no number"),
        ('{"question": "q", "answer": "1", "n": [1e999]}\n', "column 'n' holds inf"),
        ('{"question": "q", "answer": ["1"]}\n', "row 0 has a 'answer' that is a list, not text or a number"),
        ('{"question": "q", "answer": 1' + "0" * 5000 + "}", "it holds an integer of thousands of digits"),
        ('{"question": "q", "answer": ' + "[" * 9999 + "]" * 9999 + "}", "not JSON that can be read: its values"),
        ('{"question": "q", "answer": "1", "n": ' + "[" * 150 + "]" * 150 + "}", "'n' is nested more than 100 levels"),
    ],
)
def test_rows(content: str | bytes, expected: str, tmp_path: Path) -> None:
    """A file of rows that cannot be used is refused in one line that names the file and what is wrong in it."""
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(content if isinstance(content, bytes) else content.encode())
    text = refused(tmp_path / "out", f"task.dataset.path={rows}")
    assert expected in text and str(rows) in text and text.count("\n") == 1


def test_every_long_prompt_is_named(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    words = [5, 2000, 5, 3000]
    lines = [json.dumps({"question": "apple " * count, "answer": "#### 1"}) for count in words]
    rows.write_text("\n".join(lines), encoding="utf-8")
    text = refused(tmp_path / "out", f"task.dataset.path={rows}", "limit=4", "long_prompts=error")
    assert text.count("\n  - ") == 2 and "arithmetic, document 1: " in text and "arithmetic, document 3: " in text


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model, to damage."""
    return Path(shutil.copytree(TINYMATH, tmp_path / "model"))


@pytest.mark.parametrize("kept", [0.5, 0.0001, 0.0], ids=["half", "in the header", "empty"])
def test_truncated_weights(kept: float, model: Path, tmp_path: Path) -> None:
    """A file of weights cut short at `kept` of its size is named in one line."""
    weights = model / "model.safetensors"
    os.truncate(weights, int(weights.stat().st_size * kept))
    text = refused(tmp_path / "out", f"model.path={model}", code=1)
    assert str(weights) in text and text.count("\n") == 1


def test_missing_weights(model: Path, tmp_path: Path) -> None:
    """A model folder without weights is refused in one line that names it and the missing kind of file."""
    (model / "model.safetensors").unlink()
    text = refused(tmp_path / "out", f"model.path={model}")
    assert str(model) in text and "safetensors" in text and text.count("\n") == 1


def test_a_configuration_that_is_not_json(model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text("{", encoding="utf-8")
    text = message(call(f"output_dir={tmp_path / 'out'}", f"model.path={model}"), tmp_path / "out", 1)
    assert str(model / "config.json") in text and text.count("\n") == 1


def test_no_chat_template(model: Path, tmp_path: Path) -> None:
    """`apply_chat_template` is refused where the model's tokenizer has no template."""
    file = model / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    del settings["chat_template"]
    file.write_text(json.dumps(settings), encoding="utf-8")
    text = refused(tmp_path / "out", f"model.path={model}", "apply_chat_template=true")
    assert "apply_chat_template=true: the model's tokenizer has no chat template" in text


def test_a_chat_template_that_refuses_the_messages(model: Path, tmp_path: Path) -> None:
    file = model / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["chat_template"] = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{{ m.content }}{% if 'No. 3' in m.content %}{{ nothing.there }}{% endif %}{% endfor %}"
    )
    file.write_text(json.dumps(settings), encoding="utf-8")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"No. {i}", "answer": "#### 1"}) + "\n" for i in range(5)))
    words = (f"model.path={model}", "apply_chat_template=true", f"task.dataset.path={rows}", "limit=4")
    text = refused(tmp_path / "out", *words, "system_instruction=Be brief.")
    assert "tasks.arithmetic: document 0: the model's chat template refuses the messages: System role not" in text
    assert "system_instruction=null and task.description=null send no system message" in text and text.count("\n") == 1
    text = refused(tmp_path / "out", *words)
    assert "tasks.arithmetic: document 3: the model's chat template fails: 'nothing' is undefined" in text


def test_an_output_folder_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine", encoding="utf-8")
    done = call(f"output_dir={file}", "limit=1")
    assert done.code == 2 and f"output_dir={file}: exists and is not a folder" in done.err
    below = call(f"output_dir={file / 'out'}", "limit=1")
    assert below.code == 1 and below.err.count("\n") == 1 and f"could not write {file / 'out'}" in below.err
    assert file.read_text(encoding="utf-8") == "mine"
