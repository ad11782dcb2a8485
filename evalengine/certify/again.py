"""Runs the same requests in a new process: `python -m evalengine.certify.again SUBJECT OUT`.

SUBJECT is a `Subject` as JSON, OUT an .npz file of every request's token ids and logprobs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np

from evalengine.certify.cases import Case
from evalengine.certify.compare import Answer
from evalengine.certify.process import own_command, own_environment
from evalengine.certify.run import together
from evalengine.certify.schedules import Variant
from evalengine.certify.subject import Subject, open_subject
from evalengine.errors import EvalEngineError


def in_a_new_process(subject: Subject, cases: list[Case]) -> list[tuple[Case, Answer]]:
    """The answers to all cases, computed by another Python. Raises `EvalEngineError` with its output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answers.npz"
        command = own_command("again", json.dumps(asdict(subject)), str(out))
        process = subprocess.run(command, env=own_environment(), capture_output=True, text=True)
        if process.returncode:
            raise EvalEngineError(f"the same requests in a new process failed: {process.stderr.strip()[-2000:]}")
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


def _main(subject: Subject, out: Path) -> None:
    checkpoint, tasks = open_subject(subject.config, subject.layers)
    cases = subject.cases(checkpoint, tasks)
    with subject.engine(checkpoint, cases) as llm:
        _save(out, together(llm, Variant("a new process", cases)))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    _main(Subject(**{**given, "words": tuple(given["words"])}), Path(sys.argv[2]))
