"""Runs cases through an engine: each alone, or together under a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evalengine.certify.cases import Case, pool_pages
from evalengine.certify.schedules import Variant
from evalengine.engine.llm import LLM
from evalengine.engine.request import RequestOutput
from evalengine.errors import EvalEngineError

Answers = list[tuple[Case, RequestOutput]]
BLOCK_SIZE = 64
DEFAULTS = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 4096,
    "enable_prefix_caching": True,
    "enforce_eager": False,
    "cascade_attention": "auto",
    "speculation": "off",
    "num_threads": None,
}


def alone(llm: LLM, cases: list[Case]) -> dict[int, RequestOutput]:
    """Makes the reference: every case runs by itself, its prompt in one chunk, without a prefix cache, every kernel
    launched.

    Raises `EvalEngineError` if the model gives no finite numbers even so, because there is nothing to compare with.
    """
    longest = max(case.length for case in cases)
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": longest, "enable_prefix_caching": False}
    settings |= {"enforce_eager": True}
    _reconfigure(llm, [max(cases, key=lambda case: case.length)], settings)
    answers = {}
    for case in cases:
        assert case.key is not None
        answers[case.key] = next(iter(llm.run([case.request])))
        if error := answers[case.key].error:
            raise EvalEngineError(f"{case.what}, run alone: {error}; this model cannot be certified")
    return answers


def batched(llm: LLM, variant: Variant) -> Answers:
    """Run every pass over the variant's cases in one engine; the neighbours' answers are left out."""
    _reconfigure(llm, variant.cases, variant.settings, fill=float("nan") if variant.nan_pool else 0.0)
    if variant.learned:
        llm.learn_answers(variant.learned)  # after the reconfiguration, which forgets them
    cases = {case.request.request_id: case for case in variant.cases}
    answers = []
    for _ in range(variant.passes):
        for output in llm.run([case.request for case in variant.cases]):
            if (case := cases[output.request_id]).key is not None:
                answers.append((case, output))
    # Sorted, so that the first difference is always the same.
    return sorted(answers, key=lambda pair: pair[0].key or 0)


def _reconfigure(llm: LLM, cases: list[Case], settings: Mapping[str, Any], fill: float = 0.0) -> None:
    """Gives the engine these settings and a pool for the cases, filled with one number: a slot that is read before it
    is written has the same value in every proof, not what the memory held before."""
    # fast's attention may prescribe a page size, and no schedule of the control sets another.
    default_size = llm.settings.block_size if llm.settings.numerics == "fast" else BLOCK_SIZE
    settings = {**DEFAULTS, "block_size": default_size, **settings}
    llm.reconfigure(**{"num_kv_blocks": pool_pages(cases, settings["block_size"]), **settings})
    assert llm.runner is not None
    llm.runner.fill_pool(fill)
