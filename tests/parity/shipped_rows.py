"""Made-up rows in the shape of each public data set, for tasks whose rows nobody may redistribute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
THINGS = ("jar", "door", "tin", "book", "lamp", "bag", "box", "case", "tent", "kite", "boat", "hat", "coat", "cup")


def _piqa(n: int, thing: str) -> Row:
    return {"goal": f"Open the {thing}", "sol1": f"Pull {n} times.", "sol2": f"Push it  {n}.", "label": n % 2}


def _boolq(n: int, thing: str) -> Row:
    return {"question": f"is a {thing} red", "passage": f"A {thing} is blue.\nNot red.", "idx": n, "label": n % 2}


def _openbookqa(n: int, thing: str) -> Row:
    choices = {"text": [f"a {thing}", f"{n}", "salt", "the sun"], "label": ["A", "B", "C", "D"]}
    return {"id": f"{n}", "question_stem": f"What is no {thing}", "choices": choices, "answerKey": f" {'ABCD'[n % 4]}"}


def _sciq(n: int, thing: str) -> Row:
    wrong = {f"distractor{i}": f"{thing} {i}" for i in (1, 2, 3)}
    return {
        "question": f"What is {n}?",
        **wrong,
        "correct_answer": str(n),
        "support": "" if n % 3 else f"  {n} is {n}. ",
    }


def _lambada(n: int, thing: str) -> Row:
    return {"text": f"He had {n} of them.\n\nIt was a {thing}, said he, and no {thing}"}


def _truthfulqa(n: int, thing: str) -> Row:
    return {
        "question": f"Is a {thing} alive?",
        "mc1_targets": {"choices": ["No", "Yes", f"Every {n} days"][: 2 + n % 2], "labels": [1, 0, 0][: 2 + n % 2]},
        "mc2_targets": {"choices": ["No", f"It is a {thing}", "Yes"], "labels": [1, 1, 0] if n % 2 else [1, 0, 0]},
    }


def _triviaqa(n: int, thing: str) -> Row:
    return {
        "question": f"Which {thing} has {n} sides",
        "question_id": f"t{n}",
        "answer": {"aliases": [f"The {thing}", str(n), f"{thing}'s"], "value": f"The {thing}", "type": "W"},
    }


def _nq_open(n: int, thing: str) -> Row:
    return {"question": f"who has the {thing}", "answer": [f"the {thing}", f'He of "{n}"'][: 1 + n % 2]}


def _winogrande(n: int, thing: str) -> Row:
    sentence = f"Ann gave Bob the {thing} as _ had {n} of them."
    return {"sentence": sentence, "option1": "Ann", "option2": "Bob", "answer": str(1 + n % 2)}


def _mmlu_pro(n: int, thing: str) -> Row:
    return {
        "question": f"Which is a {thing}?",
        "options": [f" {thing} {i} " for i in range(3 + n % 9)],
        "answer": "ABC"[n % 3],
        "cot_content": f"A: Let's think step by step. It is {n}. The answer is ({'ABC'[n % 3]}).",
        "category": "computer science" if n % 2 else "math",
    }


def _gpqa(n: int, thing: str) -> Row:
    wrong = {f"Incorrect Answer {i}": f" {thing} {i}\n" for i in (1, 2, 3)}
    return {"Question": f"Which  is {n}?", **wrong, "Correct Answer": f"A [title] {thing}  of {n}"}


def _musr(n: int, thing: str) -> Row:
    choices = [f"the {thing}", f"no {thing}", "it's {n}"][: 2 + n % 2]
    return {
        "narrative": f"Ann has a {thing}.\n\nShe hides it.",
        "question": f"Where is the {thing}?",
        "choices": str(choices),
        "answer_index": n % 2,
        "answer_choice": choices[n % 2],
    }


def _bbh(n: int, thing: str) -> Row:
    return {"input": f"Does a {thing} turn {n} times?\nOptions:\n- Yes\n- No", "target": "Yes" if n % 2 else "(B)"}


def _drop(n: int, thing: str) -> Row:
    none = {"day": "", "month": "", "year": ""}
    date = {"day": str(n), "month": "May", "year": "1990"}
    spans = [[f"the {thing}", "Ann's hat"], [f"a {thing}-{n}"], []][n % 3]
    kinds = [(str(n), none, []), ("", none, spans or ["x"]), ("", date, [])]
    gold, *others = kinds[n % 3 :] + kinds[: n % 3]
    return {
        "section_id": f"s{n}",
        "passage": f"Ann has {n} {thing}s.",
        "question": f"How many {thing}s?",
        "query_id": f"q{n}",
        "answer": {"number": gold[0], "date": gold[1], "spans": gold[2]},
        "validated_answers": {
            "number": [other[0] for other in others],
            "date": [other[1] for other in others],
            "spans": [other[2] for other in others],
        },
    }


def _aime24(n: int, thing: str) -> Row:
    return {"ID": f"2024-I-{n}", "Problem": f"How many {thing}s are {n}?", "Solution": f"So {n}.", "Answer": n % 5}


def _aime25(n: int, thing: str) -> Row:
    return {"problem": f"How many {thing}s are ${n}$?", "answer": str(n % 5), "id": str(n)}


def _mgsm(n: int, thing: str) -> Row:
    """Makes a row; every second one has a worked answer, as in the training split."""
    worked = f"Step-by-Step Answer: {n} + 1 = {n + 1}. The answer is {n + 1}." if n % 2 else None
    return {
        "question": f"Ann has {n} {thing}s ?",
        "answer": worked,
        "answer_number": n + 1,
        "equation_solution": worked and f"{n} + 1 = {n + 1}.",
    }


def _minerva(n: int, thing: str) -> Row:
    answer = [f"{n}", f"\\frac{{{n}}}7", "[2,5)", f"{n}\\text{{ {thing}s}}", f"x={n}", f"{n},000", "(1,2)"][n % 7]
    return {
        "problem": f"What is ${n}$ of a {thing}?",
        "level": f"Level {n % 5}",
        "type": "Algebra",
        "solution": f"It is $\\boxed{{{answer}}}$.",
    }


MAKERS: dict[str, Callable[[int, str], Row]] = {
    "piqa": _piqa,
    "boolq": _boolq,
    "openbookqa": _openbookqa,
    "sciq": _sciq,
    "lambada_openai": _lambada,
    "truthfulqa_mc1": _truthfulqa,
    "truthfulqa_mc2": _truthfulqa,
    "triviaqa": _triviaqa,
    "nq_open": _nq_open,
    "winogrande": _winogrande,
    "mmlu_pro_computer_science": _mmlu_pro,
    "gpqa_main_zeroshot": _gpqa,
    "gpqa_main_cot_zeroshot": _gpqa,
    "leaderboard_musr_team_allocation": _musr,
    "bbh_cot_fewshot_navigate": _bbh,
    "drop": _drop,
    "aime24": _aime24,
    "aime25": _aime25,
    "mgsm_direct_de": _mgsm,
    "mgsm_native_cot_te": _mgsm,
    "mgsm_en_cot_zh": _mgsm,
}


def minerva_rows() -> list[Row]:
    """Returns 24 rows with MATH's columns. `MAKERS` lacks them, as lm-eval's own scorer does not run beside Hydra."""
    return [_minerva(n, THINGS[n % len(THINGS)]) for n in range(2, 26)]


def member_rows(name: str, family: str) -> list[Row]:
    """Returns 24 rows for one member of a family of `MAKERS`, as in the member's part of the data set."""
    rows = rows_of(family)
    if family == "mmlu_pro_computer_science":
        return [{**row, "category": name.removeprefix("mmlu_pro_").replace("_", " ")} for row in rows]
    return rows


def rows_of(name: str) -> list[Row]:
    """Returns 24 rows for the task of that name."""
    return [MAKERS[name](n, THINGS[n % len(THINGS)]) for n in range(2, 26)]
