"""Your own model and your own data: a checkpoint's folder (or a Hub id, or a .gguf file), and rows that you wrote.

    python examples/own_model_and_data.py [MODEL]

The task is a YAML file in lm-eval's keys, next to its rows; here both are written into a folder first.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import evalengine

ROWS = [
    {
        "question": "A hall has 9 rows with 20 seats each. On Friday 63 seats are empty. How many are taken?",
        "answer": "117",
    },
    {"question": "Elif is 4 years old and Samir is 2 times as old. How old will Samir be in 3 years?", "answer": "11"},
    {"question": "Arlo collects 45 flowers. Diego has 32 fewer. How many do they have together?", "answer": "58"},
]
TASK = """\
task: my_sums
dataset_path: json
dataset_kwargs:
  data_files: {test: my_sums.jsonl}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 64}
filter_list:
  - name: last-number
    filter:
      - {function: regex, regex_pattern: "(-?[0-9]+)", group_select: -1}
      - {function: take_first}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
metadata: {version: 1.0}
"""


def main(model: str = "asset:tinymath") -> None:
    """Writes a task and its rows, runs them, and shows what was answered."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "my_sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
        (folder / "my_sums.yaml").write_text(TASK, encoding="utf-8")
        run = evalengine.evaluate(model, str(folder / "my_sums.yaml"))
    print(run)
    print(run.samples[["doc_id", "target", "answers"]].to_string(index=False))


if __name__ == "__main__":
    main(*sys.argv[1:2])
