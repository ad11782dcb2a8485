"""Every member of the shipped groups equals lm-eval's task of that name: documents, requests, filters, scores.

lm-eval loads each by its own file; only its rows, by `datasets`, are made up. Aggregation is compared for one member of
each family (tests/parity/test_shipped.py), and is the same code for all.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalengine.config.schema import DatasetConfig
from evalengine.config.shipped import outline
from evalengine.tasks.base import Task
from evalengine.tasks.lm_eval_quiet import quiet
from evalengine.tasks.registry import load_task
from tests.parity.agreement import answer_task, as_json, fake_loglikelihood
from tests.parity.local_tasks import task_manager
from tests.parity.shipped_rows import THINGS, Row, member_rows
from tests.parity.test_shipped import speak

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")

FAMILIES = {  # group -> the task whose rows its members have
    "mmlu": "mmlu",
    "mmlu_pro": "mmlu_pro_computer_science",
    "bbh_cot_fewshot": "bbh_cot_fewshot_navigate",
    "leaderboard_musr": "leaderboard_musr_team_allocation",
    "gpqa_main_zeroshot": "gpqa_main_zeroshot",
    "gpqa_diamond_zeroshot": "gpqa_main_zeroshot",
    "gpqa_extended_zeroshot": "gpqa_main_zeroshot",
    "gpqa_main_cot_zeroshot": "gpqa_main_cot_zeroshot",
    "gpqa_diamond_cot_zeroshot": "gpqa_main_cot_zeroshot",
    "gpqa_extended_cot_zeroshot": "gpqa_main_cot_zeroshot",
    "mgsm": "mgsm_direct_de",
}
OWN_SHOTS = ("gpqa", "bbh")  # the number of exemplars is part of these tasks
MEMBERS = [(name, group) for group in FAMILIES for name in outline(group).tasks]
# Quick are each group's first member and every seventh of all, with every kind of exemplars that mgsm has. The
# others are the same code over another file, and test_groups.py compares the definitions of them all.
QUICK = {next(name for name, of in MEMBERS if of == group) for group in FAMILIES} | {name for name, _ in MEMBERS[::7]}
ASKED = [
    pytest.param(*member, id=member[0], marks=() if member[0] in QUICK else pytest.mark.slow) for member in MEMBERS
]


def test_members_are_all_there() -> None:
    """Every group has as many members as lm-eval's, so that none is left out below."""
    sizes = {group: sum(member_of == group for _, member_of in MEMBERS) for group in FAMILIES}
    expected = {"mmlu": 57, "mmlu_pro": 14, "bbh_cot_fewshot": 27, "leaderboard_musr": 3, "mgsm": 33}
    assert sizes == {**dict.fromkeys(FAMILIES, 1), **expected}


def rows_for(name: str, group: str) -> list[Row]:
    if group != "mmlu":
        return member_rows(name, FAMILIES[group])
    subject = {"subject": name.removeprefix("mmlu_")}
    return [{"question": f" {n} {THINGS[n % 14]}? ", **subject, "choices": [f"{n}", "b", "c", "d"], "answer": n % 4}
            for n in range(24)]  # fmt: skip


def lm_eval_task(
    name: str, splits: dict[str, list[Row]], shots: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Returns lm-eval's own task over these rows, with its requests built."""
    import datasets

    def load(*_: Any, **__: Any) -> Any:
        loaded = datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in splits.items()})
        if name.startswith("gpqa"):  # its rows are shuffled anew at each access, unless they have a file
            loaded.save_to_disk(str(folder / "theirs"))
            loaded = datasets.load_from_disk(str(folder / "theirs"))
        return loaded

    monkeypatch.setattr(datasets, "load_dataset", load)
    random.seed(0)  # as lm-eval's evaluator does before it loads a task, for GPQA shuffles
    with quiet():
        task = task_manager().load(name)["tasks"][name]
        if shots is not None:
            task.set_config(key="num_fewshot", value=shots)
        task.set_fewshot_seed(1234)
        task.build_all_requests(rank=0, world_size=1)
    return task


def our_task(name: str, group: str, splits: dict[str, list[Row]], shots: int | None, folder: Path) -> Task:
    files = {split: str(folder / f"{split}.jsonl") for split in splits}
    for split, rows in splits.items():
        Path(files[split]).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = outline(group).tasks[name]
    dataset = DatasetConfig(path="none/none", files=files, where=config.dataset.where)
    return load_task(name, replace(config, dataset=dataset, num_fewshot=config.num_fewshot if shots is None else shots))


def lm_eval_answers(task: Any, speak: Callable[[str], str]) -> dict[int, list[Any]]:
    """Returns the instances of lm-eval's task by document, answered by the made-up model and filtered."""
    by_doc: dict[int, list[Any]] = {}
    for instance in task.instances:
        arguments = instance.args
        instance.resps.append(
            speak(arguments[0]) if instance.request_type == "generate_until" else fake_loglikelihood(*arguments)
        )
        by_doc.setdefault(instance.doc_id, []).append(instance)
    task.apply_filters()
    return {doc_id: sorted(instances, key=lambda instance: instance.idx) for doc_id, instances in by_doc.items()}


@pytest.mark.parametrize(("name", "group"), ASKED)
def test_a_member_is_lm_eval_s(name: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member's documents, requests, filtered answers and scores equal those of lm-eval's task."""
    rows, config = rows_for(name, group), outline(group).tasks[name]
    splits = {split: rows[8:] for split in (config.fewshot_split,) if split is not None}
    splits[config.split or ""] = rows[:10]  # some tasks have one split for documents and exemplars
    shots = None if name.startswith(OWN_SHOTS) else 2
    task = our_task(name, group, splits, shots, tmp_path)
    answered = answer_task(task, speak)
    reference = lm_eval_task(name, splits, shots, tmp_path, monkeypatch)
    assert task.version == reference.VERSION
    dataset = (reference.config.dataset_path, reference.config.dataset_name)
    assert (config.dataset.path, config.dataset.name) == dataset
    instances_of = lm_eval_answers(reference, speak)
    assert len(instances_of) == len(answered) == 10
    differing = 0
    for doc_id, (doc, instances, responses) in enumerate(answered):
        expected = instances_of[doc_id]
        requests = [(i.context, i.continuation) if i.kind == "loglikelihood" else (i.context,) for i in instances]
        assert [tuple(instance.args)[: len(requests[0])] for instance in expected] == requests
        assert json.dumps(expected[0].doc) == json.dumps(doc), "its hash is over the document's text"
        assert reference.doc_to_target(doc) == task.target(doc)
        if (generation := instances[0].generation) is not None:
            assert expected[0].args[1]["until"] == [*generation.until]
            assert expected[0].args[1].get("max_gen_toks", 256) == generation.max_gen_toks
        values = task.process_results(doc, responses)
        for filter_name in task.filters:
            filtered = [instance.filtered_resps[filter_name] for instance in expected]
            assert as_json(filtered) == as_json(task.filtered(doc, responses)[filter_name])
            scored = {(metric, filter_name): v for metric, v in reference.process_results(doc, filtered).items()}
            assert scored == {key: value for key, value in values.items() if key[1] == filter_name}
        differing += requests != [(i.context[1:], *i.continuation) for i in instances]
    assert differing == 10, "a comparison that a changed prompt would not fail shows nothing"


def test_another_member_s_prompts_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: prompts differ from lm-eval's of another language, task or number of exemplars."""
    rows = rows_for("mgsm_en_cot_de", "mgsm")
    splits = {"train": rows[8:], "test": rows[:10]}
    for name, shots in (("mgsm_en_cot_fr", 2), ("mgsm_native_cot_de", 2), ("mgsm_en_cot_de", 1)):
        answered = answer_task(our_task("mgsm_en_cot_de", "mgsm", splits, 2, tmp_path), speak)
        reference = lm_eval_task(name, splits, shots, tmp_path, monkeypatch)
        prompts = [instance.args[0] for instance in reference.instances]
        assert prompts != [instances[0].context for _, instances, _ in answered]
