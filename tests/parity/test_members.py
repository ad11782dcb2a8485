"""Every member of the shipped groups against lm-eval's task of that name: documents, requests, filters, scores.

lm-eval loads each by its own file; only `datasets` gives it rows of ours. Its aggregation is compared for one member of
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

from evalengine.config import DatasetConfig
from evalengine.task_outline import outline
from evalengine.tasks.base import Task
from evalengine.tasks.lm_eval_quiet import quiet
from evalengine.tasks.registry import load_task
from tests.parity.agreement import answer_task, as_json, fake_loglikelihood
from tests.parity.local_tasks import task_manager
from tests.parity.shipped_rows import THINGS, Row, member_rows
from tests.parity.test_shipped import speak

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")

FAMILIES = {  # what is chosen -> whose rows its members have
    "mmlu": "mmlu",
    "mmlu_pro": "mmlu_pro_computer_science",
    "bbh_cot_fewshot": "bbh_cot_fewshot_navigate",
    "leaderboard_musr": "leaderboard_musr_team_allocation",
    "gpqa_main_zeroshot": "gpqa_main_zeroshot",
    "gpqa_diamond_zeroshot": "gpqa_main_zeroshot",
    "gpqa_extended_zeroshot": "gpqa_main_zeroshot",
    "mgsm": "mgsm_direct_de",
}
OWN_SHOTS = ("gpqa", "bbh")  # the number is part of the task
MEMBERS = [(name, group) for group in FAMILIES for name in outline(group).tasks]


def test_members_are_all_there() -> None:
    sizes = {group: sum(found == group for _, found in MEMBERS) for group in FAMILIES}
    expected = {"mmlu": 57, "mmlu_pro": 14, "bbh_cot_fewshot": 27, "leaderboard_musr": 3, "mgsm": 33}
    assert sizes == {**dict.fromkeys(FAMILIES, 1), **expected}


def rows_for(name: str, group: str) -> list[Row]:
    if group != "mmlu":
        return member_rows(name, FAMILIES[group])
    subject = {"subject": name.removeprefix("mmlu_")}
    return [{"question": f" {n} {THINGS[n % 14]}? ", **subject, "choices": [f"{n}", "b", "c", "d"], "answer": n % 4}
            for n in range(24)]  # fmt: skip


def theirs(
    name: str, splits: dict[str, list[Row]], shots: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """lm-eval's own task with its requests."""
    import datasets

    def load(*_: Any, **__: Any) -> Any:
        found = datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in splits.items()})
        if name.startswith("gpqa"):  # it shuffles anew at each access to what has no file
            found.save_to_disk(str(folder / "theirs"))
            found = datasets.load_from_disk(str(folder / "theirs"))
        return found

    monkeypatch.setattr(datasets, "load_dataset", load)
    random.seed(0)  # as its evaluator does before it loads a task: GPQA shuffles
    with quiet():
        task = task_manager().load(name)["tasks"][name]
        if shots is not None:
            task.set_config(key="num_fewshot", value=shots)
        task.set_fewshot_seed(1234)
        task.build_all_requests(rank=0, world_size=1)
    return task


def ours(name: str, group: str, splits: dict[str, list[Row]], shots: int | None, folder: Path) -> Task:
    files = {split: str(folder / f"{split}.jsonl") for split in splits}
    for split, rows in splits.items():
        Path(files[split]).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = outline(group).tasks[name]
    dataset = DatasetConfig(path="none/none", files=files, where=config.dataset.where)
    return load_task(name, replace(config, dataset=dataset, num_fewshot=config.num_fewshot if shots is None else shots))


def their_answers(task: Any, speak: Callable[[str], str]) -> dict[int, list[Any]]:
    """Their instances of each document, answered by the made-up model and filtered."""
    found: dict[int, list[Any]] = {}
    for instance in task.instances:
        asked = instance.args
        instance.resps.append(
            speak(asked[0]) if instance.request_type == "generate_until" else fake_loglikelihood(*asked)
        )
        found.setdefault(instance.doc_id, []).append(instance)
    task.apply_filters()
    return {doc_id: sorted(asked, key=lambda instance: instance.idx) for doc_id, asked in found.items()}


@pytest.mark.parametrize(("name", "group"), MEMBERS, ids=[name for name, _ in MEMBERS])
def test_a_member_is_lm_eval_s(name: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, config = rows_for(name, group), outline(group).tasks[name]
    splits = {split: rows[8:] for split in (config.fewshot_split,) if split is not None}
    splits[config.split or ""] = rows[:10]  # one split for both, in some
    shots = None if name.startswith(OWN_SHOTS) else 2
    task = ours(name, group, splits, shots, tmp_path)
    answered = answer_task(task, speak)
    reference = theirs(name, splits, shots, tmp_path, monkeypatch)
    assert task.version == reference.VERSION
    theirs_from = (reference.config.dataset_path, reference.config.dataset_name)
    assert (config.dataset.path, config.dataset.name) == theirs_from
    asked = their_answers(reference, speak)
    assert len(asked) == len(answered) == 10
    different = 0
    for doc_id, (doc, instances, responses) in enumerate(answered):
        theirs_of_doc = asked[doc_id]
        sent = [(i.context, i.continuation) if i.kind == "loglikelihood" else (i.context,) for i in instances]
        assert [tuple(instance.args)[: len(sent[0])] for instance in theirs_of_doc] == sent
        assert json.dumps(theirs_of_doc[0].doc) == json.dumps(doc), "its hash is over the document's text"
        assert reference.doc_to_target(doc) == task.target(doc)
        if (generation := instances[0].generation) is not None:
            assert theirs_of_doc[0].args[1]["until"] == [*generation.until]
            assert theirs_of_doc[0].args[1].get("max_gen_toks", 256) == generation.max_gen_toks
        values = task.process_results(doc, responses)
        for filter_name in task.filters:
            filtered = [instance.filtered_resps[filter_name] for instance in theirs_of_doc]
            assert as_json(filtered) == as_json(task.filtered(doc, responses)[filter_name])
            scored = {(metric, filter_name): v for metric, v in reference.process_results(doc, filtered).items()}
            assert scored == {key: value for key, value in values.items() if key[1] == filter_name}
        different += sent != [(i.context[1:], *i.continuation) for i in instances]
    assert different == 10, "a comparison that a changed prompt would not fail shows nothing"


def test_another_member_s_prompts_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above with lm-eval's task of another language, of another subject, with another exemplar."""
    rows = rows_for("mgsm_en_cot_de", "mgsm")
    splits = {"train": rows[8:], "test": rows[:10]}
    for name, shots in (("mgsm_en_cot_fr", 2), ("mgsm_native_cot_de", 2), ("mgsm_en_cot_de", 1)):
        mine = answer_task(ours("mgsm_en_cot_de", "mgsm", splits, 2, tmp_path), speak)
        reference = theirs(name, splits, shots, tmp_path, monkeypatch)
        sent = [instance.args[0] for instance in reference.instances]
        assert sent != [instances[0].context for _, instances, _ in mine]
