"""The axes `speculation` and `cascade` of `verify engine`: they are exercised with random weights, and can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from evalengine.certify import proof
from evalengine.certify.proof import Proof
from evalengine.engine.execute import sharing
from evalengine.engine.llm import LLM
from evalengine.models.spec import Block
from tests.engine.certify_double import elsewhere as elsewhere  # The fixture is used by every test here.
from tests.engine.certify_double import prove as prove
from tests.engine.certify_double import tiny_subject as tiny_subject
from tests.engine.test_speculation import take_unchecked


def test_right_and_wrong_guesses_come_with_random_weights(prove: Callable[..., Proof]) -> None:
    (axis,) = prove("speculation").axes
    assert not axis.missed and not axis.skipped and not axis.tally.differing_logprobs
    counts = {trial.variant.label: (trial.stats.num_right_guesses, trial.stats.num_guesses) for trial in axis.trials}
    assert len(counts) == 7 and counts["no guesses"] == (0, 0)
    assert all(counts[f"siblings, max_num_seqs={size}"][0] > 0 for size in (2, 3))
    for when in ("always", "auto"):
        right, guesses = counts[f"learned answers, speculation={when}"]
        assert right == guesses > 0, "every token of the answer was known"
    right, guesses = counts["learned answers with wrong tokens"]
    assert 0 < right < guesses
    right, guesses = counts["learned answers of other requests"]
    assert right < guesses


def test_guesses_that_are_accepted_unchecked_are_caught(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_unchecked(monkeypatch)
    (axis,) = prove("speculation").axes
    caught = {trial.variant.label for trial in axis.trials if trial.tally.differing_logprobs}
    assert {"learned answers with wrong tokens", "learned answers of other requests"} <= caught
    assert not {"no guesses", "learned answers, speculation=auto"} & caught, "nothing wrong was guessed there"


def test_answers_that_are_not_learned_are_no_proof(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights that repeat the last token make right guesses without being known, but no wrong ones."""
    monkeypatch.setattr(LLM, "learn_answers", lambda self, answers: None)
    proven = prove("speculation")
    assert proven.verdict == "INCOMPLETE"
    assert proven.axes[0].missed == [
        "learned answers, speculation=auto: without mostly right guesses",
        "learned answers with wrong tokens: without right and wrong guesses",
        "learned answers of other requests: without wrong guesses",
    ]


def test_shared_reads_are_an_axis_where_a_layer_sees_all_keys(
    prove: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU. Here the attention reads nothing once, so the axis says that it was not exercised."""

    def least_saved(config: Any, settings: Any, spec: Any) -> int | None:
        return sharing.least_saved(config, replace(settings, attention_backend="triton"), spec)

    monkeypatch.setattr(proof, "least_saved", least_saved)
    (axis,) = prove("cascade").axes
    assert [missed.split(":")[0] for missed in axis.missed] == ["read once", "read once, pages of 16"]
    (axis,) = prove("cascade", blocks=(Block(window=19),)).axes
    assert axis.skipped is not None and "sliding window" in axis.skipped and not axis.trials
