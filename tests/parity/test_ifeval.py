"""IFEval against lm-eval's own evaluation: real prompts, and every kind of instruction, followed or not.

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

from evalengine.config.schema import DatasetConfig
from evalengine.config.shipped import outline
from evalengine.errors import ConfigError
from evalengine.tasks import ifeval
from evalengine.tasks.base import Task
from evalengine.tasks.ifeval import IFEval
from evalengine.tasks.instance import Response
from evalengine.tasks.registry import load_task
from tests.parity.agreement import answer_task, check_equal, evaluate_by_lm_eval, fake_rng
from tests.parity.all_rows import local_rows
from tests.parity.local_tasks import DATA, lm_eval_task_file

for module in ("lm_eval", "langdetect", "immutabledict", "nltk"):
    pytest.importorskip(module, reason="needs lm-eval and what its checks call (pip install evalengine[ifeval])")
needs_data = pytest.mark.skipif(DATA is None, reason="needs EVALENGINE_DATA, the folder with real rows")
try:
    __import__("nltk").data.find(ifeval.SENTENCES)
except LookupError:
    pytest.skip("needs NLTK's punkt_tab (python -m nltk.downloader punkt_tab, or NLTK_DATA)", allow_module_level=True)

# The checks of the prompts with these keys draw a letter, so that lm-eval's scores depend on the prompts before them.
DRAWN = (1122, 1129)
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


def write_rows(folder: Path, chosen: list[dict[str, Any]]) -> Path:
    """Writes the rows to a file of the folder, and returns the file."""
    file = folder / "train.jsonl"
    file.write_text("\n".join(map(json.dumps, chosen)), encoding="utf-8")
    return file


def speak(prompt: str) -> str:
    """Returns one of the answers to a prompt, for some prompts together with the prompt or its last word."""
    rng = fake_rng(prompt)
    text = rng.choice(ANSWERS)
    return f"{prompt}\n{text}" if rng.random() < 0.2 else text + rng.choice(["", " " + prompt.split()[-1].strip('".')])


@needs_data
def test_the_real_prompts_are_lm_eval_s(tmp_path: Path) -> None:
    """Some real prompts for each of the 25 instructions have lm-eval's requests, hashes and scores."""
    by_instruction: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows()):
        for name in row["instruction_id_list"] if row["key"] not in DRAWN else ():
            by_instruction[name].append(number)
    assert len(by_instruction) == 25
    chosen = [
        rows()[number] for number in sorted({number for numbers in by_instruction.values() for number in numbers[:4]})
    ]
    file = write_rows(tmp_path, chosen)
    files = dict.fromkeys(("train", "test"), str(file))
    task = task_over(file)
    assert IFEval._checks.__get__(task) is not None  # loading the checks seeds langdetect for both evaluations
    reference = evaluate_by_lm_eval(lm_eval_task_file("ifeval", files), 0, speak)
    assert task.version == float(reference["versions"]["ifeval"])
    check_equal(reference, "ifeval", task, answer_task(task, speak))
    assert reference["results"]["ifeval"]["inst_level_strict_acc_stderr,none"] == "N/A"
    scores = reference["samples"]["ifeval"]
    assert 0 < sum(sample["prompt_level_strict_acc"] for sample in scores) < len(chosen) - 5
    assert any(s["prompt_level_loose_acc"] > s["prompt_level_strict_acc"] for s in scores)


@needs_data
def test_every_instruction_is_followed_by_some_answer_and_not_by_another(tmp_path: Path) -> None:
    """Every check accepts some answer and rejects another, so that the equality of scores above can fail."""
    task = task_over(write_rows(tmp_path, rows()))
    task.load()
    outcomes: dict[str, set[bool]] = defaultdict(set)
    rng = random.Random(0)
    docs_by_instruction = defaultdict(list)
    for doc in task.docs:
        for name in doc["instruction_id_list"]:
            docs_by_instruction[name].append(doc)
    few = {name: docs[: 15 if name.startswith("language") else 8] for name, docs in docs_by_instruction.items()}
    for doc in {doc["key"]: doc for docs in few.values() for doc in docs}.values():
        texts = (*rng.sample(ANSWERS, 3), f"{doc['prompt']} {' '.join(_arguments(doc))}", "a, b.", _paragraphs(doc))
        for text in ANSWERS if "language:response_language" in doc["instruction_id_list"] else texts:
            scores = task.process_results(doc, [Response(text=text)])
            values = scores["inst_level_strict_acc", "none"]
            assert scores["prompt_level_strict_acc", "none"] == float(all(values))
            for name, value in zip(doc["instruction_id_list"], values, strict=True):
                outcomes[name].add(value)
    assert len(outcomes) == 25
    assert {name for name, values in outcomes.items() if len(values) < 2} <= {"combination:repeat_prompt"}


def _arguments(doc: dict[str, Any]) -> list[str]:
    """Returns the texts among the arguments of the prompt's instructions."""
    given = [value for arguments in doc["kwargs"] for value in arguments.values() if value]
    texts = [text for value in given for text in (value if isinstance(value, list) else [value])]
    return [text for text in texts if isinstance(text, str)]


def _paragraphs(doc: dict[str, Any]) -> str:
    """Returns as many paragraphs as the prompt asks for, each beginning with the word that it asks for."""
    requests = [given for given in doc["kwargs"] if given["first_word"]] or [{"num_paragraphs": 3, "first_word": "So"}]
    return "\n\n".join([f"{requests[0]['first_word']} it is."] * requests[0]["num_paragraphs"])


@needs_data
def test_a_letter_that_is_drawn_is_the_same_after_any_prompts(tmp_path: Path) -> None:
    """A check that draws a letter gives equal scores whatever was drawn before; lm-eval's own does not."""
    chosen = [row for row in rows() if row["key"] in DRAWN]
    task = task_over(write_rows(tmp_path, chosen))
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
    """A short text's language does not vary, as langdetect is seeded; without the seed it varies."""
    import langdetect

    asks = {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "es"}]}
    task = task_over(write_rows(tmp_path, [{**ROW, **asks}]))
    task.load()

    def scores(times: int) -> set[float]:
        answer = [Response(text="yes no")]  # langdetect takes it for Spanish or Turkish
        results = (task.process_results(task.docs[0], answer) for _ in range(times))
        return {values["prompt_level_strict_acc", "none"] for values in results}

    assert len(scores(10)) == 1
    monkeypatch.setattr(langdetect.DetectorFactory, "seed", None)
    assert scores(100) == {0.0, 1.0}


ROW = {"key": 1, "prompt": "Say so.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


@pytest.mark.parametrize(
    ("changes", "message"),
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
def test_rows_that_cannot_be_scored(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A row whose instructions cannot be checked is named, with the reason, when the task is loaded."""
    with pytest.raises(ConfigError) as error:
        task_over(write_rows(tmp_path, [ROW, {**ROW, **changes}])).load()
    (problem,) = error.value.problems
    assert "row 1" in problem and message in problem


def test_what_is_missing_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_rows(tmp_path, [ROW])
    with pytest.raises(ConfigError, match=r"tasks.ifeval.version=3.0: lm-eval .* has version 4.0 of this task"):
        task_over(file, version=3.0)
    monkeypatch.setattr(ifeval, "SENTENCES", "tokenizers/no_such")
    with pytest.raises(ConfigError, match="needs NLTK's punkt_tab, which is not on this machine: python -m nltk"):
        task_over(file)
    monkeypatch.setattr(IFEval, "packages", ("no_such_package",))
    with pytest.raises(ConfigError, match=r"no_such_package is not installed: pip install 'evalengine\[ifeval\]'"):
        task_over(file)
