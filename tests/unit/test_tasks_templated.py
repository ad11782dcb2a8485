"""Templated tasks beyond what parity with lm-eval can show: refusals, the sandbox, odd rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import DatasetConfig, FewshotTemplates, GenerationConfig, TaskConfig, TemplateConfig
from evalengine.errors import ConfigError
from evalengine.tasks.base import Task
from evalengine.tasks.instance import Response
from evalengine.tasks.registry import load_task

CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}",
    "doc_to_choice": "options",
    "doc_to_target": "gold",
}
ROW = {"q": "Why?", "options": ["so", "no"], "gold": 1}


def templated(folder: Path, rows: list[dict[str, Any]], shots: int = 0, **template: Any) -> Task:
    file = folder / "test.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    generation = template.pop("generation", GenerationConfig())
    config = TaskConfig(
        cls="templated:Templated",
        dataset=DatasetConfig(path=str(folder)),
        split="test",
        fewshot_split="test",
        num_fewshot=shots,
        generation=generation,
        template=TemplateConfig(**{**CHOICE, **template}),
    )
    task = load_task("mine", config)
    task.load()
    return task


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"doc_to_text": "{{nope}}"}, "test.jsonl:1: row 0 is not as expected: doc_to_text: 'nope' is undefined"),
        ({"doc_to_text": "{{q.__class__.__mro__}}"}, "doc_to_text: access to attribute '__class__'"),
        ({"doc_to_text": "{{options|random}}"}, "no two runs would have the same prompts"),
        ({"doc_to_text": "{{lipsum()}}"}, "no two runs would have the same prompts"),
        ({"doc_to_text": "{{options.append('x')}}"}, "doc_to_text: "),
        ({"doc_to_text": "{% for i in range(10**9) %}x{% endfor %}"}, "doc_to_text: "),
        ({"doc_to_text": "options"}, "doc_to_text: gives"),
        ({"doc_to_choice": "{{q}}"}, "doc_to_choice: writes 'Why?', which is no list"),
        ({"doc_to_choice": []}, "doc_to_choice: gives '[]', not a list of answers"),
        ({"doc_to_choice": [1, 2]}, "choice 0 is 1, which is no text"),
        ({"doc_to_target": 2}, "gold answer 2 is not one of 2 choices"),
        ({"doc_to_target": "{{ -1 }}"}, "gold answer '-1' is none of 2 choices"),
        ({"doc_to_target": "{{[]}}"}, "doc_to_target: names no right answer"),
        ({"output_type": "loglikelihood"}, "doc_to_target: gives '1', which is no text to score"),
    ],
)
def test_a_row_that_a_template_cannot_take_is_named(template: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        templated(tmp_path, [ROW], **template)
    assert message in str(error.value) and len(error.value.problems) == 1


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        templated(
            *(tmp_path, [ROW]),
            doc_to_text="{% if %}",
            doc_to_target=None,
            metric_list=[{"metric": "bleu"}],
            filter_list=[{"name": "x", "filter": [{"function": "foo"}]}],
            fewshot_config=FewshotTemplates(sampler="balanced", samples=5),
            generation=GenerationConfig(until=["x"]),
        )
    settings = sorted(problem.split(":")[0].split("=")[0] for problem in error.value.problems)
    assert settings == [
        *("tasks.mine.generation", "tasks.mine.template.doc_to_target", "tasks.mine.template.doc_to_text"),
        *("tasks.mine.template.fewshot_config.sampler", "tasks.mine.template.fewshot_config.samples"),
        *("tasks.mine.template.filter_list.x", "tasks.mine.template.metric_list"),
    ]


def test_templates_of_a_class_that_reads_none_are_refused(tmp_path: Path) -> None:
    config = TaskConfig(cls="gsm8k:GSM8K", split="test", template=TemplateConfig(doc_to_text="x"))
    with pytest.raises(ConfigError, match="cls=gsm8k:GSM8K writes its own prompts"):
        load_task("mine", config)


def test_repeats_are_all_there_for_a_vote_and_the_first_counts_without_one(tmp_path: Path) -> None:
    vote = [{"name": "vote", "filter": [{"function": "majority_vote"}, {"function": "take_first"}]}]
    answers = [Response(text) for text in ("no", "so", "so")]
    for filters, right in ((None, 0.0), (vote, 1.0)):
        task = templated(
            *(tmp_path, [ROW]),
            output_type="generate_until",
            doc_to_choice=None,
            doc_to_target="so",
            filter_list=filters,
            generation=GenerationConfig(repeats=3, temperature=0.5),
        )
        (requests,) = task.instances()
        assert [request.repeat for request in requests] == [0, 1, 2]
        values = task.process_results(task.docs[0], answers)
        assert values["exact_match", task.filters[0]] == right
        assert ("maj@3" in {metric for metric, _ in values}) == (filters is None), "a filter that votes has voted"


def test_where_keeps_the_rows_that_match(tmp_path: Path) -> None:
    rows = [{**ROW, "subject": name, "q": f"Q{number}"} for number, name in enumerate("abab")]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for wanted, kept in (({"subject": "b"}, ["Q1", "Q3"]), ({}, ["Q0", "Q1", "Q2", "Q3"])):
        dataset = DatasetConfig(path=str(tmp_path), where=wanted)
        task = load_task("mine", TaskConfig("templated:Templated", dataset=dataset, split="test", template=template()))
        task.load()
        assert [doc["q"] for doc in task.docs] == kept
    broken = DatasetConfig(path=str(tmp_path), where={"subject": "c"})
    task = load_task("mine", TaskConfig("templated:Templated", dataset=broken, split="test", template=template()))
    with pytest.raises(ConfigError, match=r"has no rows for split 'test' with dataset\.where subject=c"):
        task.load()


def template() -> TemplateConfig:
    return TemplateConfig(**CHOICE)


def test_gated_rows_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (job,) = compose_jobs(["task=gpqa_main_zeroshot"])
    with pytest.raises(ConfigError) as error:
        load_task("gpqa_main_zeroshot", job.config.tasks["gpqa_main_zeroshot"]).load()
    (problem,) = error.value.problems
    assert "only to accounts that accepted its conditions" in problem and "HF_TOKEN" in problem
    (job,) = compose_jobs(["task=piqa"])
    with pytest.raises(ConfigError) as error:
        load_task("piqa", job.config.tasks["piqa"]).load()
    assert "accounts" not in str(error.value)


def test_exemplars_of_other_authors_need_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalengine.tasks.lm_eval_yaml.find_spec", lambda name: None)
    (job,) = compose_jobs(["task=truthfulqa_mc1"])
    with pytest.raises(ConfigError, match=r"which is not installed: pip install 'evalengine\[lm-eval\]'"):
        load_task("truthfulqa_mc1", job.config.tasks["truthfulqa_mc1"])
    own = "tasks.truthfulqa_mc1.template.doc_to_text='Q: {{question}}'"
    (job,) = compose_jobs(["task=truthfulqa_mc1", own, "tasks.truthfulqa_mc1.template.lm_eval_file=null"])
    assert load_task("truthfulqa_mc1", job.config.tasks["truthfulqa_mc1"]).version == 2.0
