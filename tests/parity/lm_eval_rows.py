"""Made-up rows for more of lm-eval's tasks, and a way to have lm-eval load them for tasks given by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity.shipped_rows import MAKERS, THINGS

Row = dict[str, Any]
SPLITS = ("train", "validation", "test", "team_allocation", "dev")


def _cola(n: int, thing: str) -> Row:
    return {"sentence": f"The {thing} {n} are.", "label": n % 2, "idx": n}


def _mrpc(n: int, thing: str) -> Row:
    return {"sentence1": f"A {thing}.", "sentence2": f"It was a {thing} of {n}.", "label": int(n % 3 > 0), "idx": n}


def _cb(n: int, thing: str) -> Row:
    return {"premise": f"{n} {thing}s", "hypothesis": f"a {thing}", "label": n % 3, "idx": n}


def _wikitext(n: int, thing: str) -> Row:
    return {"page": f" = {thing} = \n\n The {thing} , of {n} @,@ 000 parts , is red . \n"}


def _gsm8k(n: int, thing: str) -> Row:
    return {"question": f"{n} {thing}s and 1?", "answer": f"{n} + 1 = {n + 1}.\n#### {n + 1}"}


def _hellaswag(n: int, thing: str) -> Row:
    endings = [f"opens it {i} times" for i in range(4)]
    return {
        "ind": n,
        "activity_label": f"Using a {thing}",
        "ctx_a": f"A man has a {thing}.",
        "ctx_b": "he [header] then",
        "endings": endings,
        "label": str(n % 4),
    }


def _squad_completion(n: int, thing: str) -> Row:
    return {
        "doc_id": str(n),
        "title": thing,
        "context": f"{n}",
        "question": "?",
        "text": f"A {thing} is",
        "value": "red",
    }


def _translation(n: int, thing: str) -> Row:
    return {"translation": {"en": f"The {thing} is {n} years old today", "ar": f"{thing} {n} sana min al umr"}}


MORE: dict[str, Callable[[int, str], Row]] = {
    "cola": _cola,
    "mrpc": _mrpc,
    "cb": _cb,
    "wikitext": _wikitext,
    "gsm8k": _gsm8k,
    "gsm8k_cot_self_consistency": _gsm8k,
    "hellaswag": _hellaswag,
    "squad_completion": _squad_completion,
    "iwslt2017-en-ar": _translation,
    **{name: MAKERS[name] for name in MAKERS},
}


def write_rows(name: str, folder: Path) -> Path:
    """Writes every split that a task may name to FOLDER/<name>/, and returns FOLDER; train and test share rows."""
    rows = [MORE[name](n, THINGS[n % len(THINGS)]) for n in range(2, 26)]
    (folder / name).mkdir(parents=True)
    for split in SPLITS:
        part = rows[8:] if split in ("train", "dev") else rows[:14]
        (folder / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, part)), encoding="utf-8")
    return folder


def feed(monkeypatch: pytest.MonkeyPatch, rows_of: Callable[[Any, Any], Path], cache: Path) -> None:
    """Makes lm-eval's tasks, whatever their class, load local files instead of data sets from the Hub.

    rows_of: (data set's path, configuration) -> the folder with a <split>.jsonl for each split.
    """
    import datasets

    real = datasets.load_dataset

    def load(path: Any = None, name: Any = None, *_: Any, **__: Any) -> Any:
        files = {file.stem: str(file) for file in sorted(rows_of(path, name).glob("*.jsonl"))}
        return real("json", data_files=files, cache_dir=str(cache))

    monkeypatch.setattr(datasets, "load_dataset", load)
