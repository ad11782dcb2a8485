"""A trace as a small file, so that two machines can be compared: each writes one, and either reads both.

JSON with its own hash (`records.sealed`). All digests go in: 87 ops by 64 tokens take 70 kB. Outputs themselves go in
for a few token positions only, because those of all tokens would take a thousand times as much.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from evalengine.errors import ConfigError
from evalengine.explain.trace import DIGEST_BYTES, LOGITS, LOGPROB, Computation, Trace
from evalengine.records.folder import write_text_file
from evalengine.records.sealed import SealedFormat
from evalengine.report.read.baseline import fold, unfold

FORMAT = SealedFormat("evalengine-op-digests", 2, "digest file", "evalengine explain RUN --item ITEM --write FILE")
CURE = "copy it again, or write it anew: evalengine explain RUN --item ITEM --write {file}"
COLUMNS = ("position", "step_requests", "step_tokens", "reused")
PACKED = ("ops", "computations")  # fields of Trace; the others are plain JSON values


def write_trace(file: Path, trace: Trace, positions: Iterable[int]) -> int:
    """Writes `file`, whole or not at all, with the outputs at `positions`, and returns its size in bytes.

    Raises `EvalEngineError` if the disk refuses.
    """
    return write_text_file(file, FORMAT.seal(_content(trace, frozenset(positions))))


def read_trace(file: Path) -> Trace:
    """Reads a trace. Raises `ConfigError` if the file is none, truncated, damaged or edited, or of another version."""
    cure = CURE.format(file=file)
    content = FORMAT.unseal(file, cure)
    try:
        return _trace(content)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{file}: its parts contradict each other ({error}); {cure}") from error


def _content(trace: Trace, positions: frozenset[int]) -> dict[str, Any]:
    plain = {item.name: getattr(trace, item.name) for item in fields(Trace) if item.name not in PACKED}
    return {
        **plain,
        "count": len(trace.computations),
        "computations": {name: fold([getattr(x, name) for x in trace.computations]) for name in COLUMNS},
        "ops": [[op, dtype, *_digests(op, trace.computations)] for op, dtype in trace.ops.items()],
        "values": [
            [index, op, base64.b85encode(values.astype("<f4").tobytes()).decode()]
            for index, computation in enumerate(trace.computations)
            for op, values in computation.values.items()
            if computation.position in positions or op == LOGPROB
        ],
    }


def _digests(op: str, computations: list[Computation]) -> tuple[int, Any, str]:
    """(count, which computations have an output of the op, their digests)."""
    having = [index for index, computation in enumerate(computations) if op in computation.digests]
    packed = b"".join(computations[index].digests[op] for index in having)
    return len(having), fold(having), base64.b85encode(packed).decode()


def _trace(content: Mapping[str, Any]) -> Trace:
    count, digests = content["count"], {op: base64.b85decode(packed) for op, *_, packed in content["ops"]}
    if count * DIGEST_BYTES != max(map(len, digests.values())):  # a made-up count must not unfold long columns
        raise ValueError(f"{count} computations, but no op has as many digests")
    columns = [unfold(content["computations"][name], count) for name in COLUMNS]
    computations = [Computation(*row) for row in zip(*columns, strict=True)]
    for op, _, number, having, _ in content["ops"]:
        if len(digests[op]) != number * DIGEST_BYTES:
            raise ValueError(f"{op}: {len(digests[op])} bytes of digests for {number} outputs")
        for place, index in enumerate(unfold(having, number)):
            computations[index].digests[op] = digests[op][place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
    for index, op, packed in content["values"]:
        values = np.frombuffer(base64.b85decode(packed), dtype="<f4").astype(np.float32)
        stored_digest = computations[index].digests[op]
        computations[index].take(op, values, keep=True)
        if computations[index].digests[op] != stored_digest:
            raise ValueError(f"{op}: its values do not give its digest")
    plain = {item.name: content[item.name] for item in fields(Trace) if item.name not in PACKED}
    task, doc_id, request_index, repeat = content["key"]
    plain["key"] = (str(task), doc_id, request_index, repeat)
    ops = {op: dtype for op, dtype, *_ in content["ops"]}
    trace = Trace(ops=ops, computations=computations, **plain)
    if not {LOGITS, LOGPROB} <= ops.keys():
        raise ValueError("it ends before the logits")
    if {computation.position for computation in computations} != {*range(len(trace.fed_ids))}:
        raise ValueError("it does not have every token")
    return trace
