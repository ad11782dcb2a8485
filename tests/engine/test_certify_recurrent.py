"""`verify engine` of models with recurrent layers: every axis passes, the control differs, a wrong state is caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evalengine.certify import axes
from evalengine.certify.cases import EFFORTS
from evalengine.certify.proof import Proof, Prover
from evalengine.certify.subject import Subject, open_subject
from evalengine.engine.execute.rank_runner import RankRunner
from tests.engine.certify_double import CPU, TINY
from tests.engine.certify_double import elsewhere as elsewhere  # The fixture is used by every test here.
from tests.fuzz.test_recurrent import MODELS
from tests.parity.families import random_model

# Those that states take part in: the others are slow, or compare what no state is in.
QUICK = ("batch", "chunks", "prefix", "preemption", "nan", "speculation")
ALL = tuple(name for name in axes.AXES if name != "restart")


@pytest.fixture(scope="module", params=["delta", "scan"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    model_type, more = MODELS[request.param]
    random_model(model_type, {**more, "vocab_size": 1024}, made)
    return made


def prove(folder: Path, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Proof:
    monkeypatch.setitem(EFFORTS, "tiny", TINY)
    settings = (*CPU, f"model.path={folder}", "model.tokenizer=asset:tinymath", "engine.max_model_len=256")
    subject = Subject(settings, "tiny")
    return Prover(subject, *open_subject(subject.config, None), None).prove(names)


@pytest.mark.parametrize("names", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_every_axis_passes_and_the_control_differs(
    folder: Path, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    proven = prove(folder, names, monkeypatch)
    assert proven.verdict == "IDENTICAL" and proven.total.differing_bytes == 0
    assert [axis.name for axis in proven.axes] == [*names]
    for axis in proven.axes:
        assert bool(axis.trials) != bool(axis.skipped) and not axis.missed
    stats = [trial.stats for axis in proven.axes for trial in axis.trials]
    assert any(s.num_preemptions for s in stats) and any(s.num_cached_tokens for s in stats)
    assert proven.control.tally.differing_logprobs, "the comparison can see a difference"


def test_a_ring_of_inputs_drops_wrong_guesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The axis `speculation` is skipped where a state is updated token by token, not for convolutions."""
    model_type, more = MODELS["convolution"]
    random_model(model_type, {**more, "vocab_size": 1024}, tmp_path)
    proven = prove(tmp_path, ("speculation",), monkeypatch)
    (axis,) = proven.axes
    assert proven.verdict == "IDENTICAL" and not axis.skipped and not axis.missed
    assert all(trial.stats.num_guesses for trial in axis.trials[1:])


def test_a_copy_that_is_not_made_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_made(self: RankRunner, copies: Any) -> None:
        return None

    monkeypatch.setattr(RankRunner, "copy_states", not_made)
    assert prove(folder, ("prefix",), monkeypatch).verdict == "DIFFERENT"
