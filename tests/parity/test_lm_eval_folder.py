"""compare, baseline and gate read output folders as `lm_eval run --log_samples` leaves them.

lm-eval's `dummy` model draws log-likelihoods from Python's generator (so its seed moves them) and always generates
"lol". Needs lm-eval (`pip install evalengine[lm-eval]`) and EVALENGINE_DATA, the folder with the tasks' rows.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import call
from tests.parity.lm_eval_runs import TINYMATH, command_line
from tests.parity.local_tasks import DATA, lm_eval_task_file, rows_for
from tests.parity.test_lm_eval_records import compared

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")
pytestmark = pytest.mark.skipif(DATA is None, reason="needs EVALENGINE_DATA, the folder with real rows")

LIMIT = 8
SEEDS = {"one": "1,1234,1234,1234", "again": "1,1234,1234,1234", "two": "2,1234,1234,1234", "shots": "1,1234,1234,7"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs gsm8k (5-shot) and arc_easy: twice with one seed, once with another, and once with other exemplars."""
    root, tasks = tmp_path_factory.mktemp("lm_eval"), []
    for name in ("gsm8k", "arc_easy"):
        (root / name).mkdir()
        tasks.append(str(lm_eval_task_file(name, rows_for(name, root / name))))
    common = ["run", "--model", "dummy", "--tasks", *tasks, "--limit", str(LIMIT), "--log_samples"]
    with pytest.MonkeyPatch.context() as patch:  # Else lm-eval fetches a tokenizer from the Hub.
        patch.setattr("lm_eval.models.dummy.DummyLM.tokenizer_name", str(TINYMATH), raising=False)
        for run, seed in SEEDS.items():
            done = command_line(*common, "--seed", seed, "--output_path", str(root / run))
            assert done.code == 0, done.err
    return {run: root / run for run in SEEDS}


def test_equal_runs_are_the_same_as_far_as_lm_eval_tells(folders: dict[str, Path]) -> None:
    outcome, result = compared(folders["one"], folders["again"])
    assert (outcome.code, outcome.err) == (1, "")  # without digests nothing is known to be equal bit by bit
    assert result["verdict"] == "SAME TOKENS" and result["differences"] == [] and result["digests_equal"] is None
    assert result["requests"]["common"] == LIMIT + 4 * LIMIT  # a document is one generation, or four choices
    assert result["unlike"] == result["settings"] == [] and "holds texts" in result["unchecked"][0]
    assert compared(folders["one"], folders["again"], "--level", "tokens")[0].code == 0


def test_another_seed_differs(folders: dict[str, Path]) -> None:
    outcome, result = compared(folders["one"], folders["two"])
    assert (outcome.code, outcome.err) == (1, "")
    assert result["verdict"] == "DIFFERENT" and result["unlike"] == []
    assert result["settings"] == ["The seeds differ (random_seed is 1 in A and 2 in B)"]
    assert {d["task"] for d in result["differences"]} == {"arc_easy"} and len(result["differences"]) == 4 * LIMIT
    assert {flip["task"] for flip in result["flips"]} == {"arc_easy"}
    assert result["causes"] == {"seed or unrecorded weights": 4 * LIMIT}
    scored = {(m["task"], m["metric"], m["filter"]): m for m in result["metrics"]}
    assert scored["arc_easy", "acc", "none"]["paired"]["n"] == LIMIT
    assert scored["gsm8k", "exact_match", "strict-match"]["paired"]["ties"] == LIMIT


def test_other_exemplars_are_other_inputs(folders: dict[str, Path]) -> None:
    """Runs whose prompts differ are not compared; the message names the task and the setting that differs."""
    outcome = call("compare", str(folders["one"]), str(folders["shots"]))
    assert outcome.code == 2 and outcome.out == ""
    reason = f"gsm8k: {LIMIT} of {LIMIT} prompts differ (the first is of doc 0): fewshot_seed is 1234 in A and 7 in B"
    assert reason in outcome.err and "arc_easy" not in outcome.err


def test_baseline_and_gate(folders: dict[str, Path], tmp_path: Path) -> None:
    """A baseline can be made of a run; the gate judges it by accuracy, and refuses bitwise, as there is no digest."""
    file = tmp_path / "baseline.json"
    assert call("baseline", str(folders["one"]), "-o", str(file)).code == 0
    same = call("gate", str(file), str(folders["again"]), "--policy", "accuracy")
    first = same.out.splitlines()[0]
    assert same.code == 3 and first.startswith("gate accuracy: INCONCLUSIVE: no check failed; 4 of 4 have too few ")
    bits = call("gate", str(file), str(folders["again"]), "--policy", "bitwise")
    assert bits.code == 2 and "it has no digest; use policy accuracy" in bits.err
    content = json.loads(file.read_text(encoding="utf-8"))
    assert compared(file, folders["again"])[1]["differences"] == [] and content
    assert len(compared(file, folders["two"])[1]["differences"]) == 4 * LIMIT


def test_a_gate_fails_a_loss(folders: dict[str, Path], tmp_path: Path) -> None:
    """A gate fails the seed that answers arc_easy worse, against the one that answers it better."""
    scores = {run: _acc_norm(folders[run]) for run in ("one", "two")}
    worse, better = sorted(scores, key=lambda run: scores[run])
    assert scores[worse] < scores[better]
    policy = tmp_path / "policy.yaml"
    policy.write_text("accuracy: {max_regression: 1.0, tasks: {arc_easy: {metrics: {acc: {skip: true}}}}}\n")
    words = ("gate", str(folders[better]), str(folders[worse]), "--policy", str(policy))
    assert call(*words).code == 1
    assert call("gate", words[2], words[1], *words[3:]).code == 3, "a gain, and too few documents to see a point's loss"


def _acc_norm(folder: Path) -> float:
    (file,) = folder.rglob("results_*.json")
    return float(json.loads(file.read_text(encoding="utf-8"))["results"]["arc_easy"]["acc_norm,none"])
