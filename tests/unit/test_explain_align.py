"""Two traces side by side: the first difference, its size, and what must not be compared."""

from __future__ import annotations

import numpy as np
import pytest

from evalengine.errors import ConfigError
from evalengine.explain.cli import verdict
from evalengine.explain.trace import explain, op_name, size_of
from tests.unit.traces import FED, OPS, computation, moved, output, trace

PLACES = [(op, position) for op in OPS for position in (0, 2, 4) if position or op not in ("lm_head", "logprob")]


@pytest.mark.parametrize(("op", "position"), PLACES)  # no logits are read at token 0
def test_one_ulp_is_named_and_measured(op: str, position: int) -> None:
    explanation = explain(trace(), trace(moved(op, position)))
    assert explanation.first is not None
    assert (explanation.first.op, explanation.first.position) == (op, position)
    assert explanation.first.size is not None
    assert (explanation.first.size.differing, explanation.first.size.max_ulps) == (1, 1)
    assert [row.op for row in explanation.ops if row.differing] == [op]


def test_equal_traces_have_no_difference() -> None:
    explanation = explain(trace(), trace())
    assert explanation.first is None and explanation.lacking == []
    assert [row.compared for row in explanation.ops] == [5] * 7 + [3, 3]
    assert not any(row.differing for row in explanation.ops)
    assert (explanation.common, explanation.until) == (5, 4)


def test_first_is_by_depth_among_the_tokens_up_to_the_first_other_logprob() -> None:
    deep_and_early = moved(OPS[5], 0)
    shallow_and_late = moved(OPS[2], 1)
    too_late = moved(OPS[0], 4)  # token 3's logprob differs already
    result = moved("logprob", 3)
    explanation = explain(trace(), trace({**deep_and_early, **shallow_and_late, **too_late, **result}))
    assert explanation.first is not None and (explanation.first.op, explanation.first.position) == (OPS[2], 1)
    assert explanation.until == 3
    without = explain(trace(), trace({**deep_and_early, **shallow_and_late, **too_late}))
    assert without.first is not None and (without.first.op, without.first.position) == (OPS[0], 4)


def test_equal_logprobs_of_other_logits_end_at_the_logits() -> None:
    explanation = explain(trace(), trace(moved("lm_head", 2)))
    assert explanation.until == 2 and explanation.first is not None and explanation.first.op == "lm_head"


def test_tokens_after_the_outputs_part_are_not_compared() -> None:
    other = trace({**moved(OPS[0], 4), **moved("logprob", 3)}, fed=[*FED[:4], 1])
    explanation = explain(trace(), other)
    assert explanation.common == 4 and explanation.next_differs
    assert explanation.first is None, "the logprobs of two unlike tokens say nothing of the op"
    assert "the next token was sampled differently" in verdict(explanation)
    other = trace({**moved("lm_head", 3), **moved("logprob", 3)}, fed=[*FED[:4], 1])
    explanation = explain(trace(), other)
    assert explanation.first is not None and (explanation.first.op, explanation.first.position) == ("lm_head", 3)
    assert explanation.until == 3 and explanation.ops[-1].size is None
    assert not explain(trace(), trace()).next_differs


def test_a_token_that_was_computed_again_is_compared_again() -> None:
    equal = explain(trace(), trace(recomputed=[computation(1, {})]))
    assert equal.first is None and equal.ops[0].compared == 6
    for sides in ((trace(), trace(recomputed=[computation(1, moved(OPS[3], 1))])),
                  (trace(recomputed=[computation(1, moved(OPS[3], 1))]), trace())):  # fmt: skip
        explanation = explain(*sides)
        assert explanation.first is not None and (explanation.first.op, explanation.first.position) == (OPS[3], 1)
        assert [row.differing for row in explanation.ops if row.op == OPS[3]] == [1]


def test_what_was_not_kept_is_asked_for() -> None:
    result = moved("logprob", 4)
    explanation = explain(trace(keep=False), trace({**moved(OPS[2], 1), **result}, keep=False))
    assert explanation.lacking == [1, 4]
    assert explain(trace(), trace({**moved(OPS[2], 1), **result})).lacking == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (trace(key=("sums", 4, 0, 0)), "A is sums doc 3 and B sums doc 4"),
        (trace(prompt_sha256="ab" * 32), "prompts of sums doc 3 differ"),
        (trace(ops=dict.fromkeys(OPS[1:], "float32")), "not the same model: model.embed_tokens"),
        (trace({(OPS[1], 0): np.zeros(5, np.float32)}), "has 4 outputs and 5"),
    ],
)
def test_what_is_not_the_same_item_is_refused(other: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        explain(trace(), other)  # type: ignore[arg-type]


def test_sizes() -> None:
    """A size has the elements that differ in value or in bits, and the greatest distances."""
    a = np.array([1.0, -2.0, 0.0, 0.5], np.float32)
    b = np.array([1.0, -2.0 - 2**-21, -0.0, 0.5], np.float32)
    size = size_of(a, b, "float32")
    assert (size.elements, size.differing, size.max_ulps) == (4, 2, 2)  # -0 is 0 in value, not in bits
    assert size.max_abs == 2**-21 and size.max_relative == 2**-22


def test_ulps_are_the_dtypes_own() -> None:
    ones, unit = np.ones(1, np.float32), np.float32(1.0)
    assert size_of(ones, np.array([unit + 2**-7], np.float32), "bfloat16").max_ulps == 1
    assert size_of(ones, np.array([unit + 3 * 2**-10], np.float32), "float16").max_ulps == 3
    assert size_of(ones, np.array([unit + 2**-7], np.float32), "float32").max_ulps == 1 << 16
    across = (np.array([2**-24], np.float32), np.array([-(2**-24)], np.float32))  # float16's smallest numbers
    assert size_of(*across, "float16").max_ulps == 2


def test_numbers_that_are_not_finite_differ_without_a_distance() -> None:
    a = np.array([np.nan, 1.0, np.inf], np.float32)
    b = np.array([np.nan, np.inf, np.inf], np.float32)
    size = size_of(a, b, "float32")
    assert (size.differing, size.max_abs, size.max_ulps) == (1, 0.0, 0)


def test_a_difference_from_nothing_is_infinite() -> None:
    assert size_of(np.zeros(2, np.float32), np.array([0, 1], np.float32), "float32").max_relative == np.inf


def test_digests_are_of_the_bits() -> None:
    zero, minus = (
        computation(0, {(OPS[0], 0): np.zeros(4, np.float32)}),
        computation(0, {(OPS[0], 0): -np.zeros(4, np.float32)}),
    )
    assert zero.digests[OPS[0]] != minus.digests[OPS[0]]
    assert computation(0, {}).digests[OPS[0]] != computation(0, {(OPS[0], 0): output(OPS[1], 0)}).digests[OPS[0]]


def test_places_are_named_as_a_reader_knows_them() -> None:
    assert op_name(OPS[2]) == "layer 0, self_attn.attention"
    assert op_name(OPS[6]) == "norm.norm" and op_name("lm_head") == "lm_head"
