"""lm-eval's evaluations by its hf model and by evalengine's, over the same small rows of tasks of every kind."""

from __future__ import annotations

import functools
import io
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import Outcome, call
from tests.parity.local_tasks import DATA, lm_eval_task_file, rows_for, task_manager

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no row is on the Hub; a look-up offline takes minutes
TINYMATH = Path(__file__).parents[2] / "evalengine" / "assets" / "tinymath"
REAL = ("arc_easy", "hellaswag", "lambada_openai", "gsm8k", "wikitext")  # tasks whose rows lie in EVALENGINE_DATA
WINDOW = 320  # tokens: the model length that evaluations share; long prompts are cut to it, a page needs two windows
LETTERS = 900  # the length of a wikitext page: more tokens of tinymath than WINDOW
TOLERANCE = 1e-3  # the difference allowed to a log-likelihood, in nats


def shaped_rows() -> dict[str, list[dict[str, Any]]]:
    """Returns made-up rows by task, for tasks of other kinds, in their data sets' schemas."""
    names = ["Ann", "Bob", "Carla", "Dan"]
    pairs = [(a, b) for a in names for b in names if a != b]
    return {
        "winogrande": [
            {"sentence": f"{a} lent {b} {n} books because _ had many.", "option1": a, "option2": b, "answer": "1"}
            for n, (a, b) in enumerate(pairs)
        ],
        "piqa": [
            {"goal": f"count to {n}", "sol1": f"say one to {n}", "sol2": "say nothing ", "label": n % 2}
            for n in range(2, 10)
        ],
        "boolq": [
            {"passage": f"{a} met {b} \n", "question": f"did {a} meet {b}", "label": n % 2}
            for n, (a, b) in enumerate(pairs)
        ],
        "triviaqa": [
            {"question": f"How many are {n} and 1?", "answer": {"value": str(n + 1), "aliases": [str(n + 1)]}}
            for n in range(8)
        ],
    }


def task_files(folder: Path, names: tuple[str, ...] = ()) -> list[str]:
    """Writes a task file for each name (default: all) beside its rows; returns the files' paths."""
    configs, shaped = [], shaped_rows()
    for name in names or (*REAL, *shaped):
        if name in REAL and DATA is None:
            pytest.skip("needs EVALENGINE_DATA, the folder with real rows")
        (folder / name).mkdir()
        files = _shaped_files(shaped[name], folder / name) if name in shaped else rows_for(name, folder / name)
        if name == "wikitext":
            for file in files.values():
                shorten_pages(Path(file))
        configs.append(str(lm_eval_task_file(name, files)))
    return configs


def command_line(*words: str) -> Outcome:
    """Runs `evalengine lm_eval WORDS` in this process, which has imported lm-eval already; `err` has its log as well.

    Tasks that are named by their files' paths need no index of lm-eval's 13,000, and none is made here."""
    import lm_eval.tasks

    with pytest.MonkeyPatch.context() as patch, _log() as log:
        patch.setattr("lm_eval.utils._LOGGING_CONFIGURED", True)  # else its log keeps this process's standard error
        patch.setattr(
            lm_eval.tasks, "TaskManager", functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
        )
        done = call("lm_eval", *words)
    return Outcome(done.code, done.out, done.err + log.getvalue())


@contextmanager
def _log() -> Iterator[io.StringIO]:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger().addHandler(handler)
    try:
        yield text
    finally:
        logging.getLogger().removeHandler(handler)


def evaluate(model: Any, tasks: list[str], limit: int, **settings: Any) -> dict[str, Any]:
    """Returns lm-eval's results, including samples."""
    import lm_eval

    result = lm_eval.simple_evaluate(
        model=model, tasks=tasks, limit=limit, task_manager=task_manager(), bootstrap_iters=10, **settings
    )
    assert isinstance(result, dict)
    return result


def hf_model(pretrained: Any, dtype: str = "float32", **settings: Any) -> Any:
    """Returns lm-eval's hf model on the CPU."""
    pytest.importorskip("accelerate", reason="needs lm-eval's hf model (pip install lm-eval[hf])")
    from lm_eval.models.huggingface import HFLM

    location = str(pretrained) if isinstance(pretrained, Path) else pretrained
    return HFLM(pretrained=location, device="cpu", dtype=dtype, **settings)


def our_model(**arguments: Any) -> Any:
    """Returns evalengine's model for lm-eval on the CPU; it writes records only where `arguments` ask for them."""
    from evalengine.integrations.lm_eval.model import EvalEngineLM

    return EvalEngineLM(**{"pretrained": str(TINYMATH), "device": "cpu", **arguments})


def responses(result: dict[str, Any]) -> dict[tuple[str, int, int, int], Any]:
    """Returns the model's responses by (task, document, request, repeat)."""
    return {
        (task, sample["doc_id"], index, repeat): response
        for task, samples in result["samples"].items()
        for sample in samples
        for index, repeats in enumerate(sample["resps"])
        for repeat, response in enumerate(repeats)
    }


def largest_difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Returns the largest difference of log-likelihoods, in nats; asserts that all else is equal.

    That is: texts, whether a continuation is greedy, and the hashes of documents and prompts."""
    assert hashes(a) == hashes(b)
    x, y = responses(a), responses(b)
    assert x.keys() == y.keys() and x
    worst = 0.0
    for key, left in x.items():
        right = y[key]
        if isinstance(left, str):
            assert left == right, key
            continue
        pairs = [left, right] if isinstance(left, tuple) else [(left, None), (right, None)]
        assert pairs[0][1] == pairs[1][1], key
        worst = max(worst, abs(pairs[0][0] - pairs[1][0]))
    return worst


def hashes(result: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    return {task: [(s["doc_hash"], s["prompt_hash"]) for s in rows] for task, rows in result["samples"].items()}


def check_metrics(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Asserts that metrics are equal, and perplexities within what differing log-likelihoods can cause."""
    assert a["results"].keys() == b["results"].keys()
    for task, values in a["results"].items():
        for name, value in values.items():
            if isinstance(value, str) or value is None:
                assert b["results"][task][name] == value
            else:
                loose = "perplexity" in name or "bits_per_byte" in name
                assert b["results"][task][name] == pytest.approx(value, rel=1e-4 if loose else 0, abs=0), (task, name)


def _shaped_files(rows: list[dict[str, Any]], folder: Path) -> dict[str, str]:
    files = {split: str(folder / f"{split}.jsonl") for split in ("train", "validation", "test")}
    for file in files.values():
        Path(file).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return files


def shorten_pages(file: Path) -> None:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")]
    file.write_text("\n".join(json.dumps({**row, "page": row["page"][:LETTERS]}) for row in rows), encoding="utf-8")
