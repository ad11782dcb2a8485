"""What the tests of `verify` share: settings for a CPU, few requests, a prover, and a working folder for each test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalengine.certify.cases import EFFORTS, Effort
from evalengine.certify.proof import Proof, Prover
from evalengine.certify.subject import Subject, open_subject
from evalengine.engine.load.loader import Checkpoint
from evalengine.models.spec import Block

ROOT = Path(__file__).parents[2]
CPU = ("engine.device=cpu", "numerics=exact")
TINY = Effort(100, (2, 18, 90), (15, 70), 6, 4, (40,), 30, 1, 1, 0, 2, 5)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a test's certificates go to results/ below its own folder; a new process still finds the package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(scope="session")
def tiny_subject() -> tuple[Subject, Any]:
    """A subject with tiny requests, and its tasks: composed once, as no proof changes them."""
    subject = Subject((*CPU, "engine.max_model_len=256"), "tiny")
    return subject, open_subject(subject.config, None)[1]


@pytest.fixture
def prove(
    small_checkpoint: Checkpoint, tiny_subject: tuple[Subject, Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Proof]:
    """Runs axes on one layer of the small random model with tiny requests, and two documents of the default task."""
    monkeypatch.setitem(EFFORTS, "tiny", TINY)

    def run(*names: str, logprobs: int | None = None, blocks: tuple[Block, ...] = (Block(),)) -> Proof:
        subject, tasks = tiny_subject
        cut = replace(small_checkpoint.spec, num_layers=len(blocks), blocks=blocks)
        return Prover(subject, replace(small_checkpoint, spec=cut), tasks, logprobs).prove(names)

    return run
