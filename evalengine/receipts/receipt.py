"""A receipt: an item's prompt and answer, the path from it to its run's digest, and what computed it.

JSON that carries its own hash (`records.sealed`), which finds damage and careless edits. A check finds an edit that
rewrites the hash, too: the path must lead from prompt, output and logprobs to the digest, and computing the item again
must give every bit of the answer. Whether the digest is that of a run you know is for you to compare.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from evalengine.errors import ConfigError
from evalengine.records.digest import leaf_hash, root_of_path
from evalengine.records.folder import write_text_file
from evalengine.records.schema import RecordKey, RequestRecord, ids_sha256
from evalengine.records.sealed import SealedFormat
from evalengine.records.shapes import Count, Flag, Sha256, Text, UnicodeText, with_fields, wrong

FORMAT = SealedFormat("evalengine-receipt", 1, "receipt", "evalengine prove RUN --item ITEM -o FILE")
FIX = "ask for it again: evalengine prove RUN --item ITEM -o FILE"
COMPUTED_BY = ("contract_version", "weights", "model_spec", "tokenizer", "numerics", "dtype", "gpu_architecture")
_ITEM = {"task": UnicodeText, "doc_id": Count, "request_index": Count, "repeat": Count}
_SHAPE = with_fields(
    {
        "item": with_fields(_ITEM),
        "prompt_ids": list[Count],
        "output_ids": list[Count],
        "logprobs": Text,
        "finish_reason": Text,
        "text": Text,
        "is_greedy": Flag,
        "asked?": dict,
        "digest": Sha256,
        "leaf": with_fields({"index": Count, "count": Count, "path": list[Sha256]}),
        "computed_by": with_fields(
            {
                "contract_version": Count,
                "weights": Sha256,
                "model_spec": dict,
                "tokenizer": dict,
                "numerics": Text,
                "dtype": Text,
                "gpu_architecture?": Text,
            }
        ),
        "format": Any,
        "version": Any,
    },
    only=True,
)
MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class Receipt:
    """The content of a receipt."""

    record: RequestRecord
    asked: dict[str, Any] | None  # a generation's sampling settings in force; None: the output was scored
    digest: str  # the run's digest
    index: int  # the item's leaf, among `count`
    count: int
    path: tuple[str, ...]  # hex, lowest node first
    computed_by: dict[str, Any]  # the fields `COMPUTED_BY` of the run's identity

    @property
    def key(self) -> RecordKey:
        return self.record.key

    def leads_to_digest(self) -> bool:
        """Whether its prompt, output and logprobs are a leaf of the run with this digest."""
        path = [bytes.fromhex(node) for node in self.path]
        root = root_of_path(leaf_hash(self.record), self.index, self.count, path)
        return root is not None and root.hex() == self.digest


def write_receipt(file: Path, receipt: Receipt) -> int:
    """Writes `file`, whole or not at all, and returns its size in bytes. Raises `EvalEngineError`."""
    record = receipt.record
    content = {
        "item": {name: getattr(record, name) for name in _ITEM},
        "prompt_ids": list(record.prompt_ids),
        "output_ids": list(record.output_ids),
        "logprobs": base64.b64encode(record.logprobs.astype("<f4").tobytes()).decode(),
        **{name: getattr(record, name) for name in ("finish_reason", "text", "is_greedy")},
        **({} if receipt.asked is None else {"asked": receipt.asked}),
        "digest": receipt.digest,
        "leaf": {"index": receipt.index, "count": receipt.count, "path": list(receipt.path)},
        "computed_by": receipt.computed_by,
    }
    return write_text_file(file, FORMAT.seal(content))


def read_receipt(file: Path) -> Receipt:
    """Reads a receipt. Raises `ConfigError` if the file is none, is damaged or edited, or of another version."""
    content = FORMAT.unseal(file, FIX)
    if problem := wrong(content, _SHAPE):
        raise ConfigError(f"{file}: no receipt ({problem}); {FIX}")
    try:
        return _receipt(content)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{file}: its parts contradict each other ({error}); {FIX}") from error


def _receipt(content: Mapping[str, Any]) -> Receipt:
    prompt, output = content["prompt_ids"], content["output_ids"]
    raw = base64.b64decode(content["logprobs"], validate=True)
    if len(raw) != 4 * len(output) or not output or not prompt or len(prompt) + len(output) > MOST_TOKENS:
        raise ValueError(f"{len(prompt)} prompt ids, {len(output)} output ids, {len(raw)} bytes of logprobs")
    if base64.b64encode(raw).decode() != content["logprobs"]:
        raise ValueError("its logprobs are not written as base64 writes them")
    if max(*prompt, *output) >= 1 << 31 or max(content["leaf"]["count"], content["leaf"]["index"]) >= 1 << 40:
        raise ValueError("a number is too large")
    record = RequestRecord(
        **content["item"],
        kind="loglikelihood" if content.get("asked") is None else "generate_until",
        prompt_ids=prompt,
        prompt_sha256=ids_sha256(prompt),
        output_ids=output,
        logprobs=np.frombuffer(raw, dtype="<f4").astype(np.float32),
        truncated=0,
        **{name: content[name] for name in ("finish_reason", "text", "is_greedy")},
    )
    leaf = content["leaf"]
    return Receipt(
        record=record,
        asked=content.get("asked"),
        digest=content["digest"],
        index=leaf["index"],
        count=leaf["count"],
        path=tuple(leaf["path"]),
        computed_by=content["computed_by"],
    )


def plain_params(params: Any, room: int) -> dict[str, Any]:
    """A generation's `SamplingParams` in force, as plain JSON values; those of drawing are left out of greedy choice.

    room: tokens that `max_model_len` left for the output.
    """
    sampling = ("top_k", "top_p", "seed", "noise_key")
    plain = {item.name: getattr(params, item.name) for item in fields(params) if item.name not in ("n", "logprobs")}
    if params.temperature == 0:
        plain = {name: value for name, value in plain.items() if name not in sampling}
    plain["max_tokens"] = min(params.max_tokens, room)
    plain["stop"] = list(params.stop)
    plain["stop_token_ids"] = None if params.stop_token_ids is None else list(params.stop_token_ids)
    plain["processors"] = None if params.processors is None else asdict(params.processors)
    return plain
