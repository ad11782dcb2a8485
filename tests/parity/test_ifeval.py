"""IFEval against lm-eval's own evaluation: real prompts, and every kind of instruction, followed and not.

Needs lm-eval with its checks (`pip install evalengine[ifeval]`), NLTK's punkt_tab and EVALENGINE_DATA.
"""

from __future__ import annotations

import json
import random
import string
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from evalengine.config import DatasetConfig
from evalengine.errors import ConfigError
from evalengine.task_outline import outline
from evalengine.tasks import ifeval
from evalengine.tasks.base import Task
from evalengine.tasks.ifeval import IFEval
from evalengine.tasks.instance import Response
from evalengine.tasks.registry import load_task
from tests.parity.agreement import check_equal, fake_rng, run_ours, run_theirs
from tests.parity.all_rows import local_rows
from tests.parity.local_tasks import DATA, their_task

for module in ("lm_eval", "langdetect", "immutabledict", "nltk"):
    pytest.importorskip(module, reason="needs lm-eval and what its checks call (pip install evalengine[ifeval])")
needs_data = pytest.mark.skipif(DATA is None, reason="needs EVALENGINE_DATA, the folder with real rows")
try:
    __import__("nltk").data.find(ifeval.SENTENCES)
except LookupError:
    pytest.skip("needs NLTK's punkt_tab (python -m nltk.downloader punkt_tab, or NLTK_DATA)", allow_module_level=True)

DRAWN = (1122, 1129)  # prompts whose check draws a letter: lm-eval's scores depend on the prompts before them
ANSWERS = (
    "",
    " \n ",
    "Yes. No. Maybe so, I think!",
    "my answer is maybe.",
    "My answer is yes.",
    "<<A Title>>\n\nthe first paragraph, with [a place] and [another].\n\n***\n\nthe second one.\n\nP.S. the end.",
    '"all of it is quoted"',
    '{"a": 1}',
    "```json\n[1, 2]\n```",
    "THIS IS WRITTEN IN CAPITAL LETTERS AND IT GOES ON FOR A WHILE.",
    "this is written in small letters and it goes on for a while.",
    "* one\n* two\n* three\n\n*highlighted* and **more of it** and *again*",
    "SECTION 1\nText.\nSECTION 2\nText.\nSECTION 3\nText.",
    "one answer\n******\nanother answer",
    "Das ist ein deutscher Satz, der lang genug ist, um als solcher erkannt zu werden.",
    "यह एक हिंदी वाक्य है जो काफी लंबा है।",
    "word " * 350,
    "[a place] " * 15,
    "A sentence with an end. " * 40 + "Is there anything else I can help with?",
    "first line\nstrict fails here, loose does not\nlast line",
)


@cache
def rows() -> list[dict[str, Any]]:
    assert DATA is not None
    return local_rows(Path(DATA), "ifeval")["train"]


def task_over(file: Path, **changes: Any) -> Task:
    config = outline("ifeval").tasks["ifeval"]
    return load_task("ifeval", replace(config, dataset=DatasetConfig(path=str(file)), **changes))


def written(folder: Path, some: list[dict[str, Any]]) -> Path:
    file = folder / "train.jsonl"
    file.write_text("\n".join(map(json.dumps, some)), encoding="utf-8")
    return file


def speak(prompt: str) -> str:
    """One of the answers; for some prompts with what they ask for in it."""
    rng = fake_rng(prompt)
    said = rng.choice(ANSWERS)
    return f"{prompt}\n{said}" if rng.random() < 0.2 else said + rng.choice(["", " " + prompt.split()[-1].strip('".')])


@needs_data
def test_the_real_prompts_are_lm_eval_s(tmp_path: Path) -> None:
    """Some for each of the 25 instructions."""
    having: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows()):
        for name in row["instruction_id_list"] if row["key"] not in DRAWN else ():
            having[name].append(number)
    assert len(having) == 25
    some = [rows()[number] for number in sorted({number for found in having.values() for number in found[:4]})]
    file = written(tmp_path, some)
    files = dict.fromkeys(("train", "test"), str(file))
    task = task_over(file)
    assert IFEval._checks.__get__(task) is not None  # so that langdetect is seeded for both
    reference = run_theirs(their_task("ifeval", files), 0, speak)
    assert task.version == float(reference["versions"]["ifeval"])
    check_equal(reference, "ifeval", task, run_ours(task, speak))
    assert reference["results"]["ifeval"]["inst_level_strict_acc_stderr,none"] == "N/A"
    scores = reference["samples"]["ifeval"]
    assert 0 < sum(sample["prompt_level_strict_acc"] for sample in scores) < len(some) - 5
    assert any(s["prompt_level_loose_acc"] > s["prompt_level_strict_acc"] for s in scores)


@needs_data
def test_every_instruction_is_followed_by_some_answer_and_not_by_another(tmp_path: Path) -> None:
    """The spread above reaches both sides of every check, so an equal score says something."""
    task = task_over(written(tmp_path, rows()))
    task.load()
    seen: dict[str, set[bool]] = defaultdict(set)
    rng = random.Random(0)
    having = defaultdict(list)
    for doc in task.docs:
        for name in doc["instruction_id_list"]:
            having[name].append(doc)
    few = {name: found[: 15 if name.startswith("language") else 8] for name, found in having.items()}
    for doc in {doc["key"]: doc for found in few.values() for doc in found}.values():
        texts = (*rng.sample(ANSWERS, 3), f"{doc['prompt']} {' '.join(_arguments(doc))}", "a, b.", _paragraphs(doc))
        for text in ANSWERS if "language:response_language" in doc["instruction_id_list"] else texts:
            scores = task.process_results(doc, [Response(text=text)])
            values = scores["inst_level_strict_acc", "none"]
            assert scores["prompt_level_strict_acc", "none"] == float(all(values))
            for name, value in zip(doc["instruction_id_list"], values, strict=True):
                seen[name].add(value)
    assert len(seen) == 25
    assert {name for name, values in seen.items() if len(values) < 2} <= {"combination:repeat_prompt"}


def _arguments(doc: dict[str, Any]) -> list[str]:
    """Texts that the instructions ask for."""
    given = [value for arguments in doc["kwargs"] for value in arguments.values() if value]
    texts = [text for value in given for text in (value if isinstance(value, list) else [value])]
    return [text for text in texts if isinstance(text, str)]


def _paragraphs(doc: dict[str, Any]) -> str:
    """As many as are asked for, each with the word that one of them has to begin with."""
    asked = [given for given in doc["kwargs"] if given["first_word"]] or [{"num_paragraphs": 3, "first_word": "So"}]
    return "\n\n".join([f"{asked[0]['first_word']} it is."] * asked[0]["num_paragraphs"])


@needs_data
def test_a_letter_that_is_drawn_is_the_same_after_any_prompts(tmp_path: Path) -> None:
    some = [row for row in rows() if row["key"] in DRAWN]
    task = task_over(written(tmp_path, some))
    task.load()
    assert isinstance(task, IFEval)
    letters = [Response(text=letter * 12) for letter in string.ascii_lowercase]
    for doc in task.docs:
        first = [task.process_results(doc, [letter]) for letter in letters]
        random.seed(len(first))
        assert [task.process_results(doc, [letter]) for letter in letters] == first
        reference = [task._checks.process_results(doc, [letter.text]) for letter in letters]
        assert [scores["inst_level_strict_acc"] for scores in reference] != [
            scores["inst_level_strict_acc", "none"] for scores in first
        ], "lm-eval's own draws go on from one answer to the next"


def test_languages_do_not_vary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """langdetect draws at random; unseeded, a short text is now of one language and now of another."""
    import langdetect

    asks = {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "es"}]}
    task = task_over(written(tmp_path, [{**ROW, **asks}]))
    task.load()

    def scores(times: int) -> set[float]:
        answer = [Response(text="yes no")]  # Spanish or Turkish
        found = (task.process_results(task.docs[0], answer) for _ in range(times))
        return {values["prompt_level_strict_acc", "none"] for values in found}

    assert len(scores(10)) == 1
    monkeypatch.setattr(langdetect.DetectorFactory, "seed", None)
    assert scores(100) == {0.0, 1.0}


ROW = {"key": 1, "prompt": "Say so.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kwargs": []}, "it has 1 instructions and arguments for 0"),
        ({"instruction_id_list": ["punctuation:none"]}, "'punctuation:none' is none that lm-eval checks"),
        ({"kwargs": [{"surprise": 3}]}, "unexpected keyword argument 'surprise'"),
        ({"kwargs": [7]}, "cannot be checked: AttributeError"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["("]}]}, "cannot be checked: error"),
        ({"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"num_words": "x"}]}, "TypeError"),
        ({"kwargs": None}, "has no 'kwargs'"),
    ],
)
def test_rows_that_cannot_be_scored(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        task_over(written(tmp_path, [ROW, {**ROW, **changes}])).load()
    (problem,) = error.value.problems
    assert "row 1" in problem and said in problem


def test_what_is_missing_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, [ROW])
    with pytest.raises(ConfigError, match=r"tasks.ifeval.version=3.0: lm-eval .* has version 4.0 of this task"):
        task_over(file, version=3.0)
    with pytest.raises(ConfigError, match="repeats: the task's own metrics score one answer a document"):
        task_over(file, repeats=2, generation=replace(outline("ifeval").tasks["ifeval"].generation, temperature=1.0))
    monkeypatch.setattr(ifeval, "SENTENCES", "tokenizers/no_such")
    with pytest.raises(ConfigError, match="needs NLTK's punkt_tab, which is not on this machine: python -m nltk"):
        task_over(file)
    monkeypatch.setattr(ifeval, "PACKAGES", ("no_such_package",))
    with pytest.raises(ConfigError, match=r"no_such_package is not installed: pip install 'evalengine\[ifeval\]'"):
        task_over(file)
