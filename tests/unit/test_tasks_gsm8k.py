"""gsm8k, gsm8k_cot and arithmetic: the shipped configurations, on the real rows where they are needed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from evalengine.config.compose import compose_jobs
from evalengine.config.shipped import outline
from evalengine.errors import ConfigError
from evalengine.harness.outcome import sample_hashes, task_hash
from evalengine.tasks.base import Task
from evalengine.tasks.instance import Generation, Response
from evalengine.tasks.registry import load_task

# The 5-shot task hash that lm-eval 0.4.12 records: all 1319 prompts are byte-identical to its own.
TASK_HASH = "2330f4ebfcccaf66a892922df2819cdb1f118e448d076d3f42bdde4177678ac7"
FIRST_DRAWS = [
    [6374, 3610, 957, 61, 742],
    [7462, 6610, 4769, 286, 5501],
    [5677, 687, 806, 6279, 2905],
    [1939, 142, 252, 6461, 129],
]
LIMITED = {
    10: "8c3b9298b43c56ab",
    100: "7c175e6eeec4b64c",
    200: "bb508db0ec2a4180",
    250: "f1817d404cfe3c54",
    500: "bed5c91c1e241a91",
    1000: "dc220188b753ab8d",
    1319: TASK_HASH[:16],
}


def shipped(name: str, *overrides: str, data_dir: Path | None = None) -> Task:
    config = compose_jobs([f"task={name}", *overrides])[0].config if overrides else outline(name)
    task = load_task(name, config.tasks[name], data_dir=str(data_dir) if data_dir else None)
    task.load()
    return task


def hashes(task: Task) -> list[tuple[str, str, str]]:
    return [
        sample_hashes(doc, requests, task.target(doc))
        for doc, requests in zip(task.docs, task.instances(), strict=True)
    ]


def test_gsm8k_is_lm_evals(data_dir: Path) -> None:
    task = shipped("gsm8k", data_dir=data_dir)
    samples = hashes(task)
    assert samples[0][0] == "986c19252f3c7f6eaeff2229e9a5777f96a85c0ceea931a92d2289084dfd518c"
    assert samples[0][1] == "32680f263ba83280e98a8a24ceefed10a722a4cdcd9f4d78e93c45d43143ca66"
    assert len(task.instances(1)[0][0].context) == 3187
    assert task_hash(samples, len(task.filters)) == TASK_HASH
    assert {n: task_hash(samples[:n], 2)[:16] for n in LIMITED} == LIMITED
    stops = ("Question:", "</s>", "<|im_end|>")
    assert task.instances(1)[0][0].generation == Generation(stops, max_gen_toks=256, temperature=0.0)
    assert (task.version, task.num_fewshot, task.filters) == (3.0, 5, ("strict-match", "flexible-extract"))


def test_gsm8k_draws_the_same_exemplars(data_dir: Path) -> None:
    train = [json.loads(line) for line in (data_dir / "gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()]
    for (instance,), indices in zip(shipped("gsm8k", data_dir=data_dir).instances(4), FIRST_DRAWS, strict=True):
        shots = [f"Question: {train[i]['question']}\nAnswer: {train[i]['answer']}\n\n" for i in indices]
        assert instance.context.startswith("".join(shots) + "Question: ")


def test_another_seed_or_number_of_shots_is_another_task_hash(data_dir: Path) -> None:
    task = shipped("gsm8k", "task.num_fewshot=4", data_dir=data_dir)
    assert task_hash(hashes(task), 2) != TASK_HASH
    assert task.instances(1)[0][0].context.count("Question:") == 5


def test_gsm8k_scores_per_filter(data_dir: Path) -> None:
    task = shipped("gsm8k", "task.num_fewshot=0", data_dir=data_dir)
    doc = task.docs[0]  # its answer is 18
    responses = [Response("16 - 3 - 4 = 9.\n9 * 2 = 18.\n#### 18.\n\nNext 5")]
    assert task.filtered(doc, responses) == {"strict-match": ["18."], "flexible-extract": ["5"]}
    assert list(task.process_results(doc, responses).items()) == [
        (("exact_match", "strict-match"), 1.0),
        (("exact_match", "flexible-extract"), 0.0),
    ]


def test_gsm8k_cot_takes_the_users_exemplars(data_dir: Path, tmp_path: Path) -> None:
    rows = [{"question": f"Exemplar {i}?", "target": f"It is {i}. The answer is {i}."} for i in range(9)]
    file = tmp_path / "exemplars.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    task = shipped("gsm8k_cot", f"task.fewshot_file={file}", data_dir=data_dir)
    (instance,) = task.instances(1)[0]
    shots = "".join(f"Q: Exemplar {i}?\nA: It is {i}. The answer is {i}.\n\n" for i in range(8))
    assert instance.context == f"{shots}Q: {task.docs[0]['question']}\nA:"
    assert task.target(task.docs[0]) == "18"
    assert task.process_results(task.docs[0], [Response("9 * 2 = 18. The answer is 18.")]) == {
        ("exact_match", "strict-match"): 1.0,
        ("exact_match", "flexible-extract"): 1.0,
    }


def test_gsm8k_cot_without_exemplars_says_how_to_give_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no exemplars .*tasks\.gsm8k_cot\.fewshot_file=.*question, target"):
        shipped("gsm8k_cot")
    (tmp_path / "e.yaml").write_text("[{question: a, answer: b}]")
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text('{"question": "q", "answer": "#### 1"}')
    with pytest.raises(ConfigError, match=r"e\.yaml: row 0 has no 'target'"):
        shipped("gsm8k_cot", f"task.fewshot_file={tmp_path / 'e.yaml'}", data_dir=tmp_path)


def test_arithmetic_is_bundled() -> None:
    task = shipped("arithmetic")
    assert len(task.docs) == 200
    (instance,) = task.instances(1)[0]
    assert instance.context == f"Question: {task.docs[0]['question']}\nAnswer:"
    assert instance.generation == Generation(("Question:", "\n\n"), max_gen_toks=160)
    assert len({doc["question"] for doc in task.docs}) == 200
    for doc in task.docs:
        assert task.process_results(doc, [Response(doc["answer"])]) == {("exact_match", "strict-match"): 1.0}
        wrong = int(doc["answer"].split("#### ")[1]) + 1
        assert task.process_results(doc, [Response(f"#### {wrong}")]) == {("exact_match", "strict-match"): 0.0}
    assert shipped("arithmetic", "task.num_fewshot=2").instances(1)[0][0].context.count("Question:") == 3


def test_task_hash_counts_every_filter() -> None:
    sample = ("a", "b", "c")
    other = ("d", "e", "f")
    assert task_hash([sample, other], 2) == hashlib.sha256(b"abcdefabcdef").hexdigest()
    assert task_hash([sample, other]) != task_hash([other, sample])
