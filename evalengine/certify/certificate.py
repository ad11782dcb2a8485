"""The certificate in plain JSON values: what was varied, how many logprobs were compared, the first difference."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from evalengine.certify.axes import AXES
from evalengine.certify.cases import EFFORTS, Case
from evalengine.certify.fault_injection import FEW_ROWS
from evalengine.certify.kernels import failures, kernels_summary
from evalengine.certify.proof import AxisResult, Proof, Trial
from evalengine.certify.subject import Subject
from evalengine.engine.load.loader import Checkpoint, weights_fingerprint
from evalengine.engine.request import GenerateRequest, RequestOutput
from evalengine.errors import EvalEngineError
from evalengine.records.folder import write_whole
from evalengine.records.manifest import machine_facts
from evalengine.verification.verdict_cache import sources_sha256

HEADINGS = ("Axis", "Schedules", "Logprobs", "Differing", "Result")
MEANING = {
    "IDENTICAL": "No schedule changed a bit.",
    "DIFFERENT": "A schedule changed bits: results of this installation depend on how requests are scheduled.",
    "INCOMPLETE": "No logprob differed, but the evidence is incomplete.",
    "FAILED": "No logprob differed, but some kernels do not return the bytes that they must return.",
}
METHOD = """\
Each request runs alone first. Every schedule runs the same requests again, and every token id and float32 logprob is
compared with the request alone, byte by byte. The control runs the ordinary mode (batch_invariant=false), which must
differ: otherwise the comparison shows nothing."""
LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")  # on the page; the JSON has all

VERSION = 3  # the version of the certificate file's layout


def certificate(
    subject: Subject, proof: Proof, checkpoint: Checkpoint, kernels: Mapping[str, Any] | None, seconds: float
) -> dict[str, Any]:
    """The certificate of a proof. `kernels`: the result of `kernels_verdict`; None where the caller did not ask for
    it."""
    machine = machine_facts(proof.facts["device"])
    return {
        "certificate_version": VERSION,
        "verdict": _whole_verdict(proof, kernels),
        "incomplete": proof.incomplete,
        "contract_version": checkpoint.spec.contract_version,
        "subject": {
            "model": subject.config.model.name,
            "tasks": subject.task_names,
            "settings": list(subject.words),
            "effort": subject.effort,
            "layers": subject.layers,
            **proof.facts,
            "weights_sha256": weights_fingerprint(checkpoint),
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
        **machine,
        # The commit may be only what EVALENGINE_COMMIT claims; the kernels' hash is that of the files used here.
        "code": {**machine["code"], "kernels_sha256": sources_sha256()},
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


Content = Mapping[str, Any]


def axes_table(content: Content) -> Table:
    """A row for each axis, then the total and the control."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(HEADINGS):
        table.add_column(name, justify="right" if 1 <= number <= 3 else "left", no_wrap=number < 4)
    *axes, total, control = _rows(content)
    for row in axes:
        table.add_row(*(Text(cell) for cell in row))
    table.add_section()
    for row in (total, control):
        table.add_row(*(Text(cell) for cell in row))
    return table


def summary(content: Content) -> Iterator[str]:
    """The lines below the table; the verdict is the last."""
    yield from _findings(content)
    yield f"requests: {_requests(content)}"
    yield f"numerics: {_where(content)}: {_machine(content)}"
    yield _control(content["negative_control"])
    yield f"answers: {content['requests']['answers_sha256']}"
    yield f"verdict: {content['verdict']}: {_total(content)}"


def _findings(content: Content) -> Iterator[str]:
    """The differences, the kernels' verdict, and the reason for everything that was not compared."""
    if first := content["first_difference"]:
        yield f"first difference: {_place(first)}: {first['found']}, alone {first['expected']}"
    others = (axis["first_difference"] for axis in content["axes"].values())
    yield from (f"different: {_place(other)}" for other in others if other and other != first)
    if kernels := content["kernels"]:
        yield from (f"kernels: {line}" for line in kernels_summary(kernels))
    yield from (f"incomplete: {reason}" for reason in content["incomplete"])
    skipped = {name: axis["skipped"] for name, axis in content["axes"].items() if axis["skipped"]}
    yield from (f"skipped: {name}: {reason}" for name, reason in skipped.items())


def markdown(content: Content) -> str:
    """Return the certificate as one page; the JSON has every schedule."""
    subject, code, libraries = content["subject"], content["code"], content["libraries"]
    findings = list(_findings(content))
    headings = ("Axis", "What varies", *HEADINGS[1:])
    about = [axis["varies"] for axis in content["axes"].values()]
    rows = [
        (row[0], what, *row[1:]) for row, what in zip(_rows(content), [*about, "", "the ordinary mode"], strict=True)
    ]
    changed = " with uncommitted changes" if code["dirty"] else ""
    facts = {
        "Model": _model(subject),
        "Requests": _requests(content),
        "Settings": " ".join(subject["settings"]) or "the defaults",
        "Numerics": f"{_where(content)}; contract version {content['contract_version']}",
        "Control": _control(content["negative_control"]),
        "Self-test": _self_test(subject.get("self_test")),
        "Answers": f"sha256 {content['requests']['answers_sha256']}",
        "Weights": f"sha256 {subject['weights_sha256']}",
        "Code": f"evalengine {code['version']}, commit {code['commit'] or 'unknown'}{changed}",
        "Kernels": f"sha256 {code['kernels_sha256']}",
        "Machine": f"{_machine(content)}, {content['hardware']['cpu_count']} CPUs, {content['platform']}",
        "Python": content["python"],
        "Libraries": ", ".join(f"{name} {libraries[name]}" for name in LIBRARIES if libraries.get(name)),
        "Finished": content["finished"],
    }
    return "\n".join(
        [
            f"# {content['verdict']}: {', '.join([subject['model'], *subject['tasks']])}",
            "",
            f"{MEANING[content['verdict']]} {_total(content)}.",
            "",
            METHOD,
            "",
            *_table(headings, rows),
            "",
            *(f"- {_escaped(line)}" for line in findings),
            *([""] if findings else []),
            *_table(("", ""), [(name, text) for name, text in facts.items() if text]),
            "",
        ]
    )


def _rows(content: Content) -> Iterator[tuple[str, ...]]:
    """The cells of each axis, of the total and of the control."""
    for name, axis in content["axes"].items():
        yield (name, *_counts(axis), _verdict(axis))
    total, schedules = content["total"], sum(len(axis["schedules"]) for axis in content["axes"].values())
    yield "total", str(schedules), f"{total['logprobs']:,}", f"{total['differing_logprobs']:,}", content["verdict"]
    control = content["negative_control"]
    yield ("fast (control)", *_counts(control), _control_verdict(control))


def _counts(axis: Content) -> tuple[str, str, str]:
    return str(len(axis["schedules"])), f"{axis['logprobs']:,}", f"{axis['differing_logprobs']:,}"


def _verdict(axis: Content) -> str:
    if axis["differing_logprobs"]:
        return "DIFFERENT"
    if axis["not_exercised"]:
        return "not exercised"
    return "skipped" if axis["skipped"] else "identical"


def _control_verdict(control: Content) -> str:
    largest = f"{control['largest_difference']:.2g}"
    return f"differs, as it must (by up to {largest})" if control["differing_logprobs"] else "no difference found"


def _control(control: Content) -> str:
    counts = f"{control['differing_bytes']:,} differing bytes in {control['logprobs']:,} logprobs"
    fault = f", injected fault: products of up to {FEW_ROWS} rows split over K" if control.get("planted") else ""
    return f"fast (control) with {control['attention_backend']} attention{fault}: {counts}"


def _requests(content: Content) -> str:
    requests = content["requests"]
    counts = [f"{number} of {task}" for task, number in requests["of_tasks"].items()]
    generated = requests["count"] - sum(requests["of_tasks"].values())
    counts.append(f"{generated} with lengths around page and chunk borders")
    limit = f", answers truncated at {requests['answers_cut_at']} tokens" if requests["answers_cut_at"] else ""
    return f"{requests['count']} ({', '.join(counts)}), longest {requests['longest']} tokens{limit}"


def _model(subject: Content) -> str:
    weights = "random weights" if subject["format"] == "dummy" else f"{subject['format']} weights"
    millions = subject["num_parameters"] / 1e6
    size = f"{millions / 1e3:.3g} B" if millions >= 1e3 else f"{millions:.3g} M"
    return f"{subject['architecture']}, {subject['num_layers']} layers, {size} parameters, {weights}"


def _where(content: Content) -> str:
    subject = content["subject"]
    return f"{subject['numerics']} ({subject['dtype']}) on {subject['device']}"


def _machine(content: Content) -> str:
    return ", ".join(content["hardware"]["gpus"]) or str(content["hardware"]["cpu"])


def _place(difference: Content) -> str:
    return f"{difference['schedule']}: {difference['request']}, token {difference['token']}"


def _total(content: Content) -> str:
    total, schedules = content["total"], sum(len(axis["schedules"]) for axis in content["axes"].values())
    counts = f"{total['differing_bytes']:,} differing bytes in {total['logprobs']:,} logprobs"
    return f"{counts} of {schedules} schedules, {content['seconds']:.0f} s"


def _self_test(verdict: Mapping[str, Any] | None) -> str:
    if verdict is None or verdict["status"] != "passed":
        return "" if verdict is None else verdict["status"]
    text = f"passed: {', '.join(verdict['axes'])}"
    if errors := verdict["errors"]:
        ours, plain = errors["ours"]["rms"], errors["plain"]["rms"]
        text += f"; RMS error against float32 {ours:.2g} nats, of plain PyTorch ops {plain:.2g}"
    return text


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    yield from (f"| {' | '.join(map(_escaped, row))} |" for row in rows)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
