"""Every local row of every task: the task hash is lm-eval's own, so that all prompts are byte-identical.

tests/parity/all_rows.py wrote lm-eval's hashes once, so these tests need no lm-eval, only EVALENGINE_DATA.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evalengine.config.shipped import outline
from evalengine.harness.outcome import sample_hashes, task_hash
from evalengine.tasks.base import Task
from evalengine.tasks.registry import load_task
from tests.parity.all_rows import CHOSEN, HASHES, local_rows, tasks
from tests.parity.local_tasks import DATA

pytestmark = pytest.mark.skipif(DATA is None, reason="needs EVALENGINE_DATA, the folder with real rows")
EXPECTED = json.loads(HASHES.read_text(encoding="utf-8"))["hashes"]
# The hash that a public study recorded with lm-eval 0.4.12 (tests/unit/test_tasks_gsm8k.py).
GSM8K = "2330f4ebfcccaf66a892922df2819cdb1f118e448d076d3f42bdde4177678ac7"


def hash_of(task: Task, skipped: int = 0) -> str:
    """Returns the task's hash over its documents, without the first `skipped`."""
    task.load()
    hashes = [
        sample_hashes(doc, requests, task.target(doc))
        for doc, requests in zip(task.docs, task.instances(), strict=True)
    ]
    return task_hash(hashes[skipped:], len(task.filters))


def test_the_hashes_are_of_all_local_tasks() -> None:
    """Every folder of rows has its tasks' hashes, which all differ; GSM8K's is the one that was published."""
    assert DATA is not None
    folders = {path.name for path in Path(DATA).iterdir() if path.is_dir()}
    assert folders - {"wikitext2"} <= {*CHOSEN} and EXPECTED["gsm8k"] == GSM8K
    assert [name for _, name, _ in tasks()] == [*EXPECTED] and len({*EXPECTED.values()}) == 57 + 7


# The 14,042 rows of mmlu are slow: test_groups.py compares all its subjects' definitions, and the prompts of some.
CHOICES = [pytest.param(name, marks=pytest.mark.slow if name == "mmlu" else ()) for name in CHOSEN if name != "ifeval"]


@pytest.mark.parametrize("chosen", CHOICES)
def test_all_rows_have_lm_eval_s_prompts(chosen: str) -> None:
    """Every task's hash equals lm-eval's; with one exemplar, or one document, less it does not."""
    for name, config in outline(chosen).tasks.items():
        task = load_task(name, replace(config, num_fewshot=CHOSEN[chosen]), data_dir=DATA)
        assert hash_of(task) == EXPECTED[name], name
    fewer = max(CHOSEN[chosen] - 1, 0)  # with one exemplar less; a document less where there are none
    other = load_task(name, replace(config, num_fewshot=fewer), data_dir=DATA)
    assert hash_of(other, skipped=int(fewer == CHOSEN[chosen])) != EXPECTED[name]


def test_all_of_ifeval_s_rows(tmp_path: Path) -> None:
    """IFEval's hash over all local rows equals lm-eval's."""
    pytest.importorskip("langdetect", reason="needs lm-eval's checks (pip install evalengine[ifeval])")
    nltk = pytest.importorskip("nltk", reason="needs lm-eval's checks (pip install evalengine[ifeval])")
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        pytest.skip("needs NLTK's punkt_tab (python -m nltk.downloader punkt_tab, or NLTK_DATA)")
    (tmp_path / "ifeval").mkdir()
    rows = local_rows(Path(str(DATA)), "ifeval")["train"]
    (tmp_path / "ifeval" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    task = load_task("ifeval", outline("ifeval").tasks["ifeval"], data_dir=str(tmp_path))
    assert hash_of(task) == EXPECTED["ifeval"]
