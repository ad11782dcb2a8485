"""Our own scorers and filters agree with lm-eval's on made-up answers of every kind, and score several samples."""

from __future__ import annotations

import importlib.util
import json
import random
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from evalengine.config.schema import DatasetConfig
from evalengine.config.shipped import outline
from evalengine.harness.metrics import summarize
from evalengine.tasks import aime, drop, ifeval
from evalengine.tasks.base import Task
from evalengine.tasks.filters import ExactMatch, pipelines
from evalengine.tasks.instance import Response
from evalengine.tasks.lm_eval_yaml import installed_file
from evalengine.tasks.registry import load_task

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")
PIECES = (
    *("\\boxed", "{", "}", "$", "\\boxed{", "\\boxed ", "\\fbox{", "4", "2", "=", "k", "x ", "\\frac", "\\sqrt", "/"),
    *("\\text{ ", "0.5", ".", "\\dfrac", "\\left", "\\right", "\\%", " ", "\n", "^\\circ", "-", "12", "\\!", "\\\\"),
    *("\\$", "1/2", "٣"),
)
GOLDS = ("4", "12", "2", "\\frac{1}{2}", "", "\\sqrt{4}", "x", "-4", "42", "0.5")
WORDS = (
    *("the", "a", "an", "3", "4.0", "-5", "1,000", "Ann", "ann's", "(two)", "2-1", "1e5", "nan", "inf", "_", "1_000"),
    *("$5", "5%", "", "  ", "I.", "No.", "…", "É"),
)


def lm_eval_module(name: str) -> Any:
    """Loads a module of lm-eval's tasks by its file."""
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), installed_file(name))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_aime_s_answers_are_read_and_compared_as_lm_eval_does() -> None:
    """20,000 random answers get lm-eval's verdicts, among them many that a plain comparison gets wrong."""
    reference, rng, right, naive = lm_eval_module("aime/utils.py"), random.Random(1), 0, 0
    for _ in range(20_000):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(9)))
        gold = rng.choice([*GOLDS, "".join(rng.choice(PIECES) for _ in range(rng.randrange(4)))])
        expected = reference.process_results({"Answer": gold}, [text])["exact_match"]
        assert aime.same_answer(aime.answer_in(text), gold) == bool(expected), (text, gold)
        right += expected
        naive += (text == gold) != bool(expected)
    assert 500 < right < 5_000 and naive > 200, "right and wrong ones, and such as a plain comparison gets wrong"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("\\boxed{3} then \\boxed{4}", "4"),
        ("\\boxed 7$ is", "7"),
        ("\\boxed{3", "\\boxed{3"),
        ("$a$ or $b$", "a$ or $b"),
        ("5$", "5$"),
        ("", ""),
    ],
)
def test_what_is_taken_as_aime_s_answer(text: str, answer: str) -> None:
    assert aime.answer_in(text) == answer


def test_aime_is_sampled_several_times(tmp_path: Path) -> None:
    """pass@k, maj@k and avg@k, as AIME is usually reported, judge an answer as exact_match does."""
    (tmp_path / "rows.jsonl").write_text('{"problem": "2 + 2?", "answer": "4", "id": "0"}\n')
    config = outline("aime25").tasks["aime25"]
    changes = {"dataset": DatasetConfig(path=str(tmp_path / "rows.jsonl")), "repeats": 4, "pass_at": [1]}
    task = load_task("aime25", replace(config, **changes, generation=replace(config.generation, temperature=1.0)))
    task.load()
    assert len(task.instances()[0]) == 4
    texts = ("\\boxed{4}", "it is $k = 4$", "5", "\\boxed{5}")
    values = task.process_results(task.docs[0], [Response(text=text) for text in texts])
    assert {name: value for (name, _), value in values.items()} == {
        "exact_match": 1.0, "pass@1": 0.5, "pass@4": 1.0, "maj@4": 1.0, "avg@4": 0.5,
    }  # fmt: skip


def sampled(name: str, row: dict[str, Any], folder: Path, *texts: str) -> tuple[Task, dict[str, Any]]:
    """The task over one row with a sample for each of the texts, and the values that these have."""
    (folder / "rows.jsonl").write_text(json.dumps(row))
    config = outline(name).tasks[name]
    generation = replace(config.generation, temperature=1.0)
    dataset = DatasetConfig(path=str(folder / "rows.jsonl"))
    task = load_task(name, replace(config, dataset=dataset, repeats=len(texts), generation=generation))
    task.load()
    assert len(task.instances()[0]) == len(texts)
    values = task.process_results(task.docs[0], [Response(text=text) for text in texts])
    assert {metric for metric, _ in values} == {*task.metrics} == {*task.higher_is_better()}
    return task, {metric: value for (metric, _), value in values.items()}


def test_drop_is_sampled_several_times(tmp_path: Path) -> None:
    """pass@k asks for a sample that is right in full; avg@k is the mean of each metric."""
    date = {"day": "", "month": "", "year": ""}
    gold = {"number": "", "date": date, "spans": ["red hat"]}
    none: dict[str, Any] = {"number": [], "date": [], "spans": []}
    row = {"query_id": "a", "passage": "Ann has a red hat.", "question": "What?", "answer": gold}
    _, values = sampled("drop", {**row, "validated_answers": none}, tmp_path, "hat", "a red hat", "x", "y")
    assert values == {
        "em": 0.0, "f1": pytest.approx(0.67),
        "em pass@4": 1.0, "em avg@4": 0.25, "f1 pass@4": 1.0, "f1 avg@4": pytest.approx(1.67 / 4),
    }  # fmt: skip


def test_ifeval_is_sampled_several_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of all instructions that are followed counts the instructions of all samples."""
    for module in ("langdetect", "immutabledict", "nltk"):
        pytest.importorskip(module, reason="needs what lm-eval's checks call (pip install evalengine[ifeval])")
    monkeypatch.setattr(ifeval, "_data_problems", list)  # no sentences are counted here
    monkeypatch.setattr("nltk.data.find", lambda name: None)
    names = ["punctuation:no_comma", "startend:end_checker"]
    row = {"key": 1, "prompt": "Say so.", "instruction_id_list": names, "kwargs": [{}, {"end_phrase": "so."}]}
    task, values = sampled("ifeval", row, tmp_path, "So it is.", "It is so.")
    assert values == {
        "prompt_level_strict_acc": 0.0, "inst_level_strict_acc": [True, False],
        "prompt_level_loose_acc": 0.0, "inst_level_loose_acc": [True, False],
        "prompt_level_strict_acc pass@2": 1.0, "prompt_level_strict_acc avg@2": 0.5,
        "inst_level_strict_acc avg@2": [True, False, True, True],
        "prompt_level_loose_acc pass@2": 1.0, "prompt_level_loose_acc avg@2": 0.5,
        "inst_level_loose_acc avg@2": [True, False, True, True],
    }  # fmt: skip
    results = summarize(task, [{(name, "none"): value for name, value in values.items()}] * 2)
    assert (results["inst_level_strict_acc avg@2,none"], results["prompt_level_loose_acc avg@2,none"]) == (0.75, 0.5)
    assert results["inst_level_strict_acc avg@2_stderr,none"] == "N/A"


LETTERS = ("(A)", "(B)", "(Z)", "B", ": C", ":D", "red", "Red car", "car", "red-car", "«ß»", ".", "\n", " ", "(")
WAYS: tuple[dict[str, Any], ...] = (  # a table of all punctuation that lm-eval makes each time takes half a second
    {"regex_pattern": r"(\([A-Z]\))", "group_select": -1, "ignore_case": True, "ignore_punctuation": True},
    {"regex_pattern": r"(Z)|(\([A-Z]\))|()", "ignore_case": True, "regexes_to_ignore": ["e", "^r"]},
    {"regex_pattern": "x", "fallback": "none", "group_select": -1},
)


@pytest.mark.parametrize("options", WAYS)
def test_letters_are_read_as_by_lm_eval(options: dict[str, Any]) -> None:
    """Random texts and choices have the letters of lm-eval's multi_choice_regex, found in each of its ways."""
    from lm_eval.filters.extraction import MultiChoiceRegexFilter

    rng = random.Random(1)
    choices = ("red", "Red car ", "a. car", "ß", "b", "(B)")
    docs = [{"choices": [rng.choice(choices) for _ in range(4)]} for _ in range(1_000)]
    texts = [["".join(rng.choice(LETTERS) for _ in range(rng.randrange(6))) for _ in range(2)] for _ in docs]
    expected = MultiChoiceRegexFilter(**options).apply(texts, docs)
    (pipeline,) = pipelines([{"name": "letter", "filter": [{"function": "multi_choice_regex", **options}]}])
    assert [pipeline(own, doc) for own, doc in zip(texts, docs, strict=True)] == expected
    found = Counter(answer for answers in expected for answer in answers)
    assert min(found[answer] for answer in ("(A)", "(C)", "(D)", options.get("fallback", "[invalid]"))) > 20


def test_texts_are_compared_as_lm_eval_does() -> None:
    """ "İ" grows when it is lowered, which costs lm-eval's arrays the last letter: such texts are equal there, too."""
    from lm_eval.api.metrics import exact_match_hf_evaluate

    texts, differing = ("İ", "i", "i̇", "İstanbul", "i̇stanbu", "istanbul", "ISTANBUL", "ẞ", "ß", "SS"), 0
    for a, b in product(texts, texts):
        expected = exact_match_hf_evaluate([a], [b], ignore_case=True)["exact_match"]
        assert ExactMatch(ignore_case=True)(a, b) == expected, (a, b)
        differing += expected != float(a.lower() == b.lower())
    assert differing > 3, "a plain comparison says otherwise"


def _gold(rng: random.Random) -> dict[str, Any]:
    date = {"day": rng.choice(["", "5"]), "month": rng.choice(["", "May"]), "year": rng.choice(["", "1990"])}
    spans = [_text(rng) for _ in range(rng.randrange(4))]
    return {"number": rng.choice(["", "", "3", "1000"]), "date": date, "spans": spans}


def _text(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(4)))


def test_drop_s_answers_are_scored_as_lm_eval_does() -> None:
    """3,000 random rows have lm-eval's gold answers, exact matches and F1 scores."""
    reference, rng, exact, partial = lm_eval_module("drop/utils.py"), random.Random(1), 0, 0
    for _ in range(3_000):
        others = [_gold(rng) for _ in range(rng.randrange(3))]
        validated = {key: [other[key] for other in others] for key in ("number", "date", "spans")}
        row = {"answer": _gold(rng), "validated_answers": validated}
        golds = [[*spans] for spans in drop.gold_answers(row)]
        assert golds == [[*spans] for spans in reference.get_answers(row)]
        text = rng.choice([_text(rng), rng.choice(rng.choice(golds)), f"{_text(rng)} {rng.choice(rng.choice(golds))}"])
        expected = reference.process_results({"answers": golds}, [text])
        scores = drop.DROP.score(None, {"answers": golds}, [text])  # type: ignore[arg-type]
        assert scores == {"em": expected["em"], "f1": float(expected["f1"])}, (text, golds)
        exact += int(scores["em"] == 1)
        partial += int(0 < scores["f1"] < 1)
    assert exact > 300 and partial > 300
