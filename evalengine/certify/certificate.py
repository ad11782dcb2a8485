"""The certificate in plain JSON values: what was varied, how many logprobs were compared, the first difference."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from evalengine import version
from evalengine.certify.axes import AXES
from evalengine.certify.cases import EFFORTS, Case
from evalengine.certify.certificate_text import markdown
from evalengine.certify.kernels import failures
from evalengine.certify.proof import AxisResult, Proof, Trial
from evalengine.certify.subject import Subject
from evalengine.engine.request import GenerateRequest, RequestOutput
from evalengine.errors import EvalEngineError
from evalengine.records.folder import write_whole
from evalengine.records.manifest import code_version, cpu_name, gpu_names
from evalengine.util.libraries import library_versions
from evalengine.verification.verdict_cache import sources_sha256

VERSION = 3  # the version of the certificate file's layout


def certificate(
    subject: Subject, proof: Proof, weights_sha256: str, kernels: Mapping[str, Any] | None, seconds: float
) -> dict[str, Any]:
    """The certificate of a proof. `kernels`: the result of `kernels_verdict`; None where the caller did not ask for
    it."""
    device = proof.facts["device"]
    return {
        "certificate_version": VERSION,
        "verdict": _whole_verdict(proof, kernels),
        "incomplete": proof.incomplete,
        "contract_version": version.CONTRACT_VERSION,
        "subject": {
            "model": subject.config.model.name,
            "tasks": subject.task_names,
            "settings": list(subject.words),
            "effort": subject.effort,
            "layers": subject.layers,
            **proof.facts,
            "weights_sha256": weights_sha256,
        },
        "requests": {
            "count": len(proof.cases),
            "of_tasks": dict(Counter(case.origin.partition(",")[0] for case in proof.cases if case.origin)),
            "answers_cut_at": _cut(subject, proof.cases),
            "longest": max(case.length for case in proof.cases),
            "answers_sha256": answers_sha256(proof.reference),  # equal on two machines: equal bits
        },
        "total": _without_first(proof.total.as_json()),
        "first_difference": proof.total.as_json()["first_difference"],
        "axes": {axis.name: {"varies": _about(axis.name), **_axis(axis)} for axis in proof.axes},
        "negative_control": {
            "attention_backend": proof.control.attention_backend,
            "planted": proof.control.fault_injected,
            **_axis(proof.control),
        },
        "kernels": None if kernels is None else dict(kernels),
        # The commit may be only what EVALENGINE_COMMIT claims; the kernels' hash is that of the files used here.
        "code": {**asdict(code_version()), "kernels_sha256": sources_sha256()},
        "hardware": {"device": device, "cpu": cpu_name(), "cpu_count": os.cpu_count(), "gpus": gpu_names(device)},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "libraries": library_versions(),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
    }


def write_certificate(path: Path, content: Mapping[str, Any]) -> list[Path]:
    """Writes `path` (JSON) and the same as Markdown (`.md`), each whole or not at all; returns both paths.

    Raises `EvalEngineError` if the disk refuses.
    """
    texts = {path: json.dumps(content, indent=2, ensure_ascii=False) + "\n", path.with_suffix(".md"): markdown(content)}
    for file, text in texts.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, lambda scratch, text=text: scratch.write_text(text, encoding="utf-8"))  # type: ignore[misc]
        except OSError as error:
            raise EvalEngineError(f"--out={path}: could not be written: {error.strerror or error}") from error
    return list(texts)


def default_path(content: Mapping[str, Any]) -> Path:
    """The certificate's path below results/, named after what was certified and when (UTC)."""
    subject = content["subject"]
    time = "".join(c for c in content["finished"][:19] if c not in "-:")
    name = f"{'+'.join(subject['tasks']) or 'shape'}-{subject['model']}-{time}Z.json"
    return Path("results", "certificates", name)


def answers_sha256(answers: Mapping[int, RequestOutput]) -> str:
    """SHA-256 (hex) over every answer's key, token ids (int32) and logprobs (float32), little-endian, by key."""
    digest = hashlib.sha256()
    for key, answer in sorted(answers.items()):
        digest.update(np.array([key, len(answer.token_ids)], dtype="<i8").tobytes())
        digest.update(np.array(answer.token_ids, dtype="<i4").tobytes())
        digest.update(answer.logprobs.astype("<f4").tobytes())
    return digest.hexdigest()


def _whole_verdict(proof: Proof, kernels: Mapping[str, Any] | None) -> str:
    """The proof's verdict, or FAILED: no request differed, but kernels that must give equal bytes do not."""
    failed = proof.verdict != "DIFFERENT" and kernels is not None and failures(kernels)
    return "FAILED" if failed else proof.verdict


def _cut(subject: Subject, cases: Sequence[Case]) -> int | None:
    """Tokens at which the tasks' answers were cut; None where none is generated, or the caller said how long."""
    generated = any(case.origin and isinstance(case.request, GenerateRequest) for case in cases)
    return EFFORTS[subject.effort].answer_tokens if generated and not subject.whole_answers else None


def _about(axis: str) -> str:
    """Return what the axis varies: the first line of its docstring."""
    return (AXES[axis].__doc__ or "").strip().split("\n")[0].rstrip(".")


def _axis(axis: AxisResult) -> dict[str, Any]:
    return {
        **axis.tally.as_json(),
        "skipped": axis.skipped,
        "not_exercised": axis.missed,
        "schedules": [_trial(trial) for trial in axis.trials],
    }


def _trial(trial: Trial) -> dict[str, Any]:
    variant, stats = trial.variant, trial.stats
    return {
        "schedule": variant.label,
        "settings": dict(variant.settings),
        "requests": len(variant.cases),
        "passes": variant.passes,
        "nan_pool": variant.nan_pool,
        "learned_answers": len(variant.learned),
        "new_process": variant.new_process,
        "busy": variant.busy,
        **_without_first(trial.tally.as_json()),
        "steps": stats.num_steps,
        "largest_batch": stats.largest_batch,
        "cached_tokens": stats.num_cached_tokens,
        "preemptions": stats.num_preemptions,
        "shared_read_steps": stats.num_cascade_steps,
        "guesses": stats.num_guesses,
        "right_guesses": stats.num_right_guesses,
        "seconds": round(trial.seconds, 2),
    }


def _without_first(counts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in counts.items() if name != "first_difference"}
