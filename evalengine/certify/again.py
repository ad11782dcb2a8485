"""The same requests in a new process: `python -m evalengine.certify.again MODEL LAYERS DEVICE NUMERICS EFFORT OUT`.

OUT is an .npz file of every request's token ids and logprobs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import evalengine
from evalengine.certify.axes import Variant
from evalengine.certify.cases import EFFORTS, Case, build_cases
from evalengine.certify.compare import Answer
from evalengine.certify.model import open_checkpoint
from evalengine.certify.run import together
from evalengine.engine.llm import LLM
from evalengine.engine.loader import Checkpoint
from evalengine.errors import EvalEngineError


@dataclass(frozen=True)
class Subject:
    """What is certified, by names that another process understands."""

    model: str
    layers: int | None
    device: str
    numerics: str
    effort: str  # key of EFFORTS

    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.model, self.layers)

    def cases(self, checkpoint: Checkpoint) -> list[Case]:
        return build_cases(EFFORTS[self.effort], checkpoint)

    def engine(self, checkpoint: Checkpoint, batch_invariant: bool = True) -> LLM:
        """Loaded, with a pool of one page: every schedule makes its own."""
        length = min(EFFORTS[self.effort].max_model_len, checkpoint.spec.max_position_embeddings)
        return LLM(
            checkpoint,
            batch_invariant=batch_invariant,
            numerics=self.numerics if batch_invariant else "auto",
            device=self.device,
            max_model_len=length,
            num_kv_blocks=1,
        )


def in_a_new_process(subject: Subject, cases: list[Case]) -> list[tuple[Case, Answer]]:
    """The answers to all cases, computed by another Python. Raises `EvalEngineError` with its words if it fails."""
    package = str(Path(evalengine.__file__).parents[1])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answers.npz"
        names = [subject.model, str(subject.layers or ""), subject.device, subject.numerics, subject.effort, str(out)]
        command = [sys.executable, "-m", "evalengine.certify.again", *names]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        if done.returncode:
            raise EvalEngineError(f"the same requests in a new process failed: {done.stderr.strip()[-2000:]}")
        answers = _load(out)
    return [(case, answers[case.key]) for case in cases if case.key is not None]


def _save(path: Path, answers: list[tuple[Case, Answer]]) -> None:
    arrays = {}
    for case, answer in answers:
        arrays[f"ids{case.key}"] = np.array(answer.token_ids, dtype=np.int64)
        arrays[f"logprobs{case.key}"] = answer.logprobs
    np.savez(path, **arrays)  # type: ignore[arg-type]


def _load(path: Path) -> dict[int, Answer]:
    with np.load(path) as arrays:
        keys = [int(name.removeprefix("ids")) for name in arrays.files if name.startswith("ids")]
        return {key: Answer(arrays[f"ids{key}"].tolist(), arrays[f"logprobs{key}"]) for key in keys}


def _main(model: str, layers: str, device: str, numerics: str, effort: str, out: str) -> None:
    subject = Subject(model, int(layers) if layers else None, device, numerics, effort)
    checkpoint = subject.checkpoint()
    with subject.engine(checkpoint) as llm:
        _save(Path(out), together(llm, Variant("a new process", subject.cases(checkpoint))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
