"""The certificate: what was varied, how many logprobs, and the first difference if there is one: JSON and a table."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

import evalengine
from evalengine.certify.again import Subject
from evalengine.certify.compare import Answer
from evalengine.certify.kernels import kernels_summary
from evalengine.certify.proof import NONE_FOUND, AxisResult, Proof, Trial
from evalengine.errors import EvalEngineError
from evalengine.records.folder import write_whole
from evalengine.records.manifest import code_version, cpu_name, gpu_names, library_versions

VERSION = 1  # of the file's layout


def certificate(
    subject: Subject, proof: Proof, weights_sha256: str, kernels: Mapping[str, Any] | None, seconds: float
) -> dict[str, Any]:
    """As plain JSON values. `kernels`: the verdict of `evalengine.kernels.verify`, or None where none of them ran."""
    device = proof.facts["device"]
    return {
        "certificate_version": VERSION,
        "verdict": _whole_verdict(proof, kernels),
        "incomplete": proof.incomplete,
        "contract_version": evalengine.CONTRACT_VERSION,
        "subject": {**asdict(subject), **proof.facts, "weights_sha256": weights_sha256},
        "requests": {
            "count": len(proof.cases),
            "longest": max(case.length for case in proof.cases),
            "answers_sha256": answers_sha256(proof.reference),  # equal on two machines: equal bits
        },
        "total": _without_first(proof.total.as_json()),
        "first_difference": proof.total.as_json()["first_difference"],
        "axes": {axis.name: _axis(axis) for axis in proof.axes},
        "negative_control": _axis(proof.control),
        "kernels": None if kernels is None else dict(kernels),
        "code": code_version(),
        "hardware": {"device": device, "cpu": cpu_name(), "cpu_count": os.cpu_count(), "gpus": gpu_names(device)},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "libraries": library_versions(),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
    }


def _whole_verdict(proof: Proof, kernels: Mapping[str, Any] | None) -> str:
    """The proof's, or FAILED: the requests found no difference, but kernels that must give equal bytes do not."""
    failed = proof.verdict != "DIFFERENT" and kernels is not None and kernels["failed"]
    return "FAILED" if failed else proof.verdict


def write_certificate(path: Path, content: Mapping[str, Any]) -> None:
    """The file appears whole or not at all. Raises `EvalEngineError` if the disk refuses."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda scratch: scratch.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise EvalEngineError(f"--out={path}: could not be written: {error.strerror or error}") from error


def answers_sha256(answers: Mapping[int, Answer]) -> str:
    """SHA-256 (hex) over every answer's key, token ids (int32) and logprobs (float32), little-endian, by key."""
    digest = hashlib.sha256()
    for key, answer in sorted(answers.items()):
        digest.update(np.array([key, len(answer.token_ids)], dtype="<i8").tobytes())
        digest.update(np.array(answer.token_ids, dtype="<i4").tobytes())
        digest.update(answer.logprobs.astype("<f4").tobytes())
    return digest.hexdigest()


def axes_table(proof: Proof) -> Table:
    """A row an axis, the control last."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(("Axis", "Schedules", "Logprobs", "Differing", "Verdict")):
        table.add_column(name, justify="right" if 1 <= number <= 3 else "left", no_wrap=number < 4)
    for axis in proof.axes:
        table.add_row(axis.name, *_counts(axis), Text(_verdict(axis)))
    total = proof.total
    schedules = sum(len(axis.trials) for axis in proof.axes)
    table.add_section()
    table.add_row("total", str(schedules), f"{total.logprobs:,}", f"{total.differing_logprobs:,}", proof.verdict)
    table.add_row("fast (control)", *_counts(proof.control), Text(_control_verdict(proof.control)))
    return table


def _counts(axis: AxisResult) -> tuple[str, str, str]:
    found = axis.comparison
    return str(len(axis.trials)), f"{found.logprobs:,}", f"{found.differing_logprobs:,}"


def _verdict(axis: AxisResult) -> str:
    found = axis.comparison
    if found.differing_logprobs:
        return f"DIFFERENT: {found.first_difference}"
    if axis.missed:
        return f"not exercised: {'; '.join(axis.missed)}"
    return f"skipped: {axis.skipped}" if axis.skipped else "identical"


def _control_verdict(control: AxisResult) -> str:
    found = control.comparison
    if not found.differing_logprobs:
        return NONE_FOUND
    return f"differs, as it should: by up to {found.largest_difference:.2g} for the same token"


def _axis(axis: AxisResult) -> dict[str, Any]:
    return {
        **axis.comparison.as_json(),
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
        "new_process": variant.new_process,
        **_without_first(trial.comparison.as_json()),
        "steps": stats.num_steps,
        "largest_batch": stats.largest_batch,
        "cached_tokens": stats.num_cached_tokens,
        "preemptions": stats.num_preemptions,
        "seconds": round(trial.seconds, 2),
    }


def _without_first(counts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in counts.items() if name != "first_difference"}


def summary(content: Mapping[str, Any]) -> Iterator[str]:
    """The lines below the table."""
    total, subject = content["total"], content["subject"]
    if first := content["first_difference"]:
        yield f"first difference: {first['schedule']}: {first['request']}, token {first['token']}:"
        yield f"  {first['found']}"
        yield f"  {first['expected']} alone"
    if kernels := content["kernels"]:
        yield from (f"kernels: {line}" for line in kernels_summary(kernels))
    yield from (f"incomplete: {reason}" for reason in content["incomplete"])
    where = ", ".join(content["hardware"]["gpus"]) or content["hardware"]["cpu"]
    yield f"numerics {subject['numerics']} ({subject['dtype']}) on {subject['device']}: {where}"
    yield f"answers: {content['requests']['answers_sha256']}"
    yield (
        f"verdict: {content['verdict']}: {total['differing_bytes']} differing bytes in {total['logprobs']:,} logprobs, "
        f"{content['seconds']:.0f} s"
    )
