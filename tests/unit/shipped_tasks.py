"""The shipped tasks as parameters of tests that let Hydra compose each, which takes seconds for a group of fifty."""

from __future__ import annotations

from typing import Any

import pytest

from evalengine.config.shipped import available

# One task of every class, and one group of every shape: with groups within it, with a mean, without one, with settings
# of its own for its members. The others are slow; test_task_outline.py reads the files of all.
QUICK = (
    *("aime", "arc_easy", "arithmetic", "drop", "gpqa_main_zeroshot", "gsm8k", "gsm8k_cot", "hellaswag", "humaneval"),
    *("humaneval_instruct", "ifeval", "lambada_openai", "leaderboard_musr", "math", "mbpp", "mbpp_instruct"),
    *("mgsm_direct", "minerva_math", "mmlu_stem", "open_llm", "truthfulqa_mc2", "wikitext", "winogrande"),
    "gpqa_main_cot_zeroshot",
)


def each_task() -> list[Any]:
    """A parameter for every task and group that is shipped."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in available("task")]
