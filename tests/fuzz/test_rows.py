"""Mutated rows for every family of tasks: refused where they stand, or a run whose plan, outcome and files work."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evalengine.config.schema import Config, DatasetConfig, GenerationConfig, TaskConfig, TemplateConfig
from evalengine.engine.submission import RequestLimits
from evalengine.errors import ConfigError
from evalengine.harness.outcome import Findings, records, task_results
from evalengine.harness.plan import build_plan
from evalengine.harness.requests import Plan
from evalengine.records.lm_eval import sample_row
from evalengine.records.schema import Answer
from evalengine.tasks.code import CodeTask, first_block
from evalengine.tasks.filters import ExactMatch
from evalengine.tasks.multiple_choice import clean_wikihow
from evalengine.tasks.registry import load_task
from evalengine.tasks.wikitext import detokenise
from tests.fuzz.cases import Case, cases
from tests.unit.test_tasks_filters import FLEXIBLE, STRICT, match

MATHS = [{"question": f"How many are {i} + {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"} for i in range(4)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k:GSM8K": MATHS,
    "gsm8k:GSM8KCoT": [{**row, "target": "The answer is 2."} for row in MATHS],
    "arithmetic:Arithmetic": MATHS,
    "wikitext:WikiText": [{"page": f" = P{i} = \n \n It is , so to say , page ( {i} ) . \n"} for i in range(4)],
    "multiple_choice:HellaSwag": [
        {"activity_label": "A", "ctx_a": f"He {i}.", "ctx_b": "he", "endings": ["a", "b [x] c"], "label": str(i % 2)}
        for i in range(4)
    ],
    "multiple_choice:ARC": [
        {"question": f"Why {i}?", "choices": {"text": ["so", "no"], "label": ["A", "B"]}, "answerKey": "AB"[i % 2]}
        for i in range(4)
    ],
    "winogrande:WinoGrande": [
        {"sentence": f"It is {i} as _ is.", "option1": "a", "option2": "b", "answer": str(1 + i % 2)} for i in range(4)
    ],
}
KINDS = ("multiple_choice", "generate_until", "loglikelihood", "loglikelihood_rolling")
TEMPLATES = {  # a key is the class's name, with "/" and the output type for Templated
    f"templated:Templated/{kind}": TemplateConfig(
        output_type=kind,
        doc_to_text="{{q}} of {{options|join(', ')}}?",
        doc_to_choice="options" if kind == "multiple_choice" else None,
        doc_to_target="gold" if kind == "multiple_choice" else "{{options[gold]}}",
    )
    for kind in KINDS
}
TEMPLATES["musr:MuSR"] = TemplateConfig(
    output_type="multiple_choice", doc_to_choice="{{choices}}", doc_to_target="{{answer_choice}}"
)
TEMPLATES["gpqa:GPQA"] = TemplateConfig(
    output_type="multiple_choice",
    doc_to_text="{{Question}} {{choice1}} {{choice4}}",
    doc_to_choice=["(A)", "(B)", "(C)", "(D)"],
    doc_to_target="answer",
)
TEMPLATES["gpqa:GPQAInWords"] = TemplateConfig(
    output_type="generate_until",
    doc_to_text="{{Question}} {{choice1}} {{choice4}}",
    doc_to_target="answer",
    filter_list=[{"name": "letter", "filter": [{"function": "multi_choice_regex"}, {"function": "take_first"}]}],
)
TEMPLATES["truthfulqa:TruthfulQAMC2"] = TemplateConfig(
    output_type="multiple_choice",
    doc_to_text="{{question}}",
    doc_to_choice="{{mc2_targets.choices}}",
    doc_to_target=0,
)
DATE = {"day": "", "month": "", "year": ""}
ROWS["musr:MuSR"] = [
    {"narrative": f"A {i}.", "question": "Who?", "choices": "['a', 'b']", "answer_choice": "ab"[i % 2]}
    for i in range(4)
]
ROWS["gpqa:GPQA"] = [
    {"Question": f"{i}?", "Correct Answer": f"{i}", **{f"Incorrect Answer {n}": f"{n} x" for n in (1, 2, 3)}}
    for i in range(4)
]
ROWS["gpqa:GPQAInWords"] = ROWS["gpqa:GPQA"]
ROWS["truthfulqa:TruthfulQAMC2"] = [
    {"question": f"Is {i}?", "mc2_targets": {"choices": ["yes", "no"], "labels": [1, i % 2]}} for i in range(4)
]
TEMPLATES["code:HumanEvalInstruct"] = TemplateConfig(
    output_type="generate_until", doc_to_text="{{prompt}}", doc_to_target="{{test}}\ncheck({{entry_point}})"
)
TEMPLATES["code:MBPPInstruct"] = TemplateConfig(
    output_type="generate_until",
    doc_to_text="{{text}} {{test_list[0]}}",
    doc_to_target="{{test_list[0]}}\n{{test_list[1]}}",
)
ROWS["code:HumanEvalInstruct"] = [
    {"prompt": f"def f{i}():\n", "test": f"def check(f):\n    assert f() == {i}\n", "entry_point": f"f{i}"}
    for i in range(4)
]
ROWS["code:MBPPInstruct"] = [
    {"text": f"Write f{i}.", "code": f"def f{i}(): ...", "test_list": [f"assert f{i}()", f"assert not f{i}"]}
    for i in range(4)
]
TEMPLATES["drop:DROP"] = TemplateConfig(doc_to_text="{{passage}} {{question}}", doc_to_target="{{answer|join(',')}}")
ROWS["drop:DROP"] = [
    {"query_id": f"q{i}", "passage": "Ann ran 3 miles.", "question": "How far?",
     "answer": {"number": "3", "date": DATE, "spans": []},
     "validated_answers": {"number": ["", ""], "date": [{**DATE, "year": "1990"}, DATE], "spans": [[], ["3 miles"]]}}
    for i in range(4)
]  # fmt: skip
TEMPLATES["aime:AIME"] = TemplateConfig(doc_to_text="Question: {{problem}}\nAnswer:", doc_to_target="{{answer}}")
ROWS["aime:AIME"] = [{"id": f"{i}", "problem": f"What is {i}?", "answer": f"{i}"} for i in range(4)]
for cls in sorted(TEMPLATES.keys() - ROWS.keys()):
    ROWS[cls] = [{"q": f"Which {i}", "options": ["a", "b c"], "gold": i % 2} for i in range(4)]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 7, 2**63, 10**400, 1.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", " ", "\n", "\0", "\ud800", "a\udfffb", "<|endoftext|>", "<|im_end|>x", "_", "#### "),
    *("1", "2", "A", "\u2028", "é" * 9),
    *([], {}, [[]], [None], ["a"], {"text": []}, {"a": {"b": [1]}}, {"text": ["a"], "label": ["A"]}, [1, "x"]),
]


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(files("evalengine.assets") / "tinymath"))


def engine() -> Any:
    """The parts of an engine that a plan reads."""
    limits = RequestLimits(
        max_model_len=1024, vocab_size=len(tokenizer()), block_size=64, num_kv_blocks=10_000, has_tokenizer=True
    )
    facts = SimpleNamespace(settings=SimpleNamespace(max_model_len=1024), limits=limits)
    return SimpleNamespace(checkpoint=SimpleNamespace(tokenizer=tokenizer()), facts=lambda: facts)


def mutated(case: Case, value: Any) -> Any:
    """The row with one thing in it changed."""
    if isinstance(value, dict) and value and case.random() < 0.8:
        name = case.choice([*value])
        if case.random() < 0.15:
            return {key: inner for key, inner in value.items() if key != name}
        if case.random() < 0.1:
            return {**value, case.choice(["more", "\ud83d", "", "choices"]): case.choice(ODD)}
        return {**value, name: mutated(case, value[name])}
    if isinstance(value, list) and value and case.random() < 0.6:
        place = case.randrange(len(value))
        return [*value[:place], mutated(case, value[place]), *value[place + 1 :]]
    if isinstance(value, str) and case.random() < 0.3:
        place = case.randint(0, len(value))
        return value[:place] + case.choice([odd for odd in ODD if isinstance(odd, str)]) + value[place:]
    if case.random() < 0.05:
        return case.choice([nested(20), nested(150), nested(800)])
    return case.choice(ODD)


def nested(levels: int) -> Any:
    """Lists in lists, so many levels deep."""
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


def planned(cls: str, file: Path, shots: int, tmp_path: Path) -> Plan:
    """The plan of a task of the class over the file's rows, with `shots` rows of train.jsonl before each."""
    generates = cls.startswith(("gsm8k", "arith", "code")) or cls.endswith("generate_until")
    config = TaskConfig(
        cls=cls.partition("/")[0],
        template=TEMPLATES.get(cls, TemplateConfig()),
        dataset=DatasetConfig(path=str(tmp_path)),
        split=file.stem,
        fewshot_split="train",
        num_fewshot=0 if cls.startswith("wiki") or cls.endswith("rolling") else shots,
        generation=GenerationConfig(max_gen_toks=9) if generates else GenerationConfig(),
    )
    task = load_task("mine", config)
    task.load()
    return build_plan(replace(Config(), tasks={"mine": config}), [task], engine())


def answered(plan: Plan) -> list[str]:
    """Does what a run does with its answers until they are written, and returns the lines of its samples."""
    entries = {}
    for item in plan.requests:
        ids = getattr(item.request, "continuation_ids", [1, 2])
        logprobs = -np.ones(len(ids), dtype=np.float32)
        entries[item.key] = Answer(ids, logprobs, "stop", "#### 4", False)
    assert len(records(plan, entries, Findings())) == len(plan.requests)
    (result,) = task_results(plan, entries)
    assert all(not isinstance(value, float) or value == value for value in result.metrics.values())
    lines = [json.dumps(sample_row(sample), ensure_ascii=False, default=str) for sample in result.samples]
    for line in lines:
        json.loads(line.encode("utf-8"))
    task = plan.tasks[0].task
    if isinstance(task, CodeTask):
        assert all(task.program(doc, "```x```").endswith(task.target(doc)) for doc in task.docs)
    assert plan.tasks[0].task.fingerprint()["rows"] == len(plan.tasks[0].instances)
    assert len(plan.prompts_sha256) == 64
    return lines


def write(file: Path, rows: list[Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("cls", ROWS)
def test_a_mutated_row_is_refused_by_its_place_or_the_run_works(cls: str, tmp_path: Path) -> None:
    good = ROWS[cls]
    write(tmp_path / "train.jsonl", good)
    write(tmp_path / "good.jsonl", good)
    plain = {shots: planned(cls, tmp_path / "good.jsonl", shots, tmp_path) for shots in (0, 2)}
    assert len(answered(plain[0])) in (4, 8)
    refused = 0
    for case in cases(f"rows/{cls}", 60):
        row, shots = mutated(case, good[1]), case.choice([0, 0, 2])
        for _ in range(case.choice([0, 0, 1, 3])):
            row = mutated(case, row) if isinstance(row, dict) else row
        broken = tmp_path / case.choice(["broken.jsonl", "train.jsonl"])
        for file in (tmp_path / "broken.jsonl", tmp_path / "train.jsonl"):
            write(file, [good[0], row if file == broken else good[1], *good[2:]])
        with case.named(row):
            try:
                plan = planned(cls, tmp_path / "broken.jsonl", shots, tmp_path)
            except ConfigError as error:
                text = str(error)
                assert f"{broken}:2: row 1" in text or f"{broken}:2:" in text or "document 1" in text, text
                assert "Traceback" not in text and len(text) < 2000
                text.encode("utf-8")
                refused += 1
                continue
            answered(plan)
            if broken.stem == "train" and shots:
                continue
            for requests, expected in zip(plan.tasks[0].instances, plain[shots].tasks[0].instances, strict=True):
                if requests[0].doc_id != 1:
                    assert requests == expected, "another document's requests changed"
    assert refused > 3


def old_detokenise(text: str) -> str:
    """The rules as lm-eval writes them."""
    text = text.replace("s '", "s'")
    text = re.sub(r"/' [0-9]/", r"/'[0-9]/", text)
    for old, new in ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")):
        text = text.replace(old, new)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    text = re.sub(r"\(\s*([^\)]*?)\s*\)", r"(\1)", text)
    text = re.sub(r"\[\s*([^\]]*?)\s*\]", r"[\1]", text)
    text = re.sub(r"{\s*([^}]*?)\s*}", r"{\1}", text)
    text = re.sub(r"\"\s*([^\"]*?)\s*\"", r'"\1"', text)
    text = re.sub(r"'\s*([^']*?)\s*'", r"'\1'", text)
    for old, new in (("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°"), (" \n", "\n"), ("\n ", "\n")):
        text = text.replace(old, new)
    return text.replace(" N ", " 1 ").replace(" 's", "'s")


def test_linear_rules_give_what_the_backtracking_ones_gave() -> None:
    pieces = [*" ()[]{}\"'=@-,.N s\n°:;a\t\r\u00a0\u2028\x1c\x85\u200b", " ( ", " ' ", "][", "##", "#### "]
    maths = [r"(?s).*#### ", r"(?s)\A.*#### "]
    for case in cases("rules", 3000):
        text = "".join(case.choices(pieces, k=case.randint(0, 40)))
        with case.named(text):
            assert detokenise(text) == old_detokenise(text)
            tags = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")
            assert clean_wikihow(text) == tags
            fences = text.replace("##", "```")
            blocks = re.findall(r"```(?:\w+)?\n?(.*?)\n?```", fences, re.DOTALL)  # lm-eval finds blocks so
            assert first_block(fences) == (blocks[0] if blocks else None)
            assert len({ExactMatch(ignore=(pattern,))._normalise(text) for pattern in maths}) == 1


@pytest.mark.parametrize(
    "piece", ["( ", "(", "[ ", "{ ", '" ', "' ", "= ", " \n", "[", "((  ", "\t(", "## ", "$,", "w"]
)
def test_long_rows_of_marks_take_no_time(piece: str) -> None:
    text = piece * (200_000 // len(piece))
    begin = time.process_time()
    detokenise(text)
    clean_wikihow(text)
    first_block(f"```{text}")
    match(text, text[:-1])
    for extract in (STRICT, FLEXIBLE):
        extract(text)
    assert time.process_time() - begin < 5
