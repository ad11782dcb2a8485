"""lm-eval runs its own task, this engine answers it. Needs `pip install 'evalengine[lm-eval]'`.

    python examples/lm_eval_harness.py [MODEL]

The command line does the same: python -m evalengine lm_eval --model evalengine --model_args pretrained=MODEL --tasks T
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROWS = [{"question": f"What is {n} plus {n}?", "choices": [str(n), str(2 * n)], "answer": 1} for n in range(1, 5)]


def main(model: str = "asset:tinymath") -> None:
    """Scores a small multiple-choice task of lm-eval, and prints its table."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    from evalengine.integrations.lm_eval.model import EvalEngineLM

    with tempfile.TemporaryDirectory() as name:
        rows = Path(name) / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
        task = {
            "task": "doubles",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(rows)}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}],
        }
        engine = EvalEngineLM(pretrained=model, max_num_seqs=8, output_dir=str(Path(name) / "records"))
        no_others = TaskManager(include_defaults=False)  # An index of lm-eval's 14,000 tasks would take ten seconds.
        print(make_table(simple_evaluate(engine, tasks=[task], task_manager=no_others)))


if __name__ == "__main__":
    main(*sys.argv[1:2])
