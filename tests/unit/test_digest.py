"""The digest changes with every byte that counts, and with nothing else."""

from __future__ import annotations

import hashlib
import random
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalengine.records.digest import DIGEST_VERSION, digests, leaf_hash, merkle_root
from evalengine.records.schema import RequestRecord, ids_sha256

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
FLOATS = st.integers(0, 2**32 - 1)  # any float32 bit pattern, NaN payloads included


def make(
    task: str = "t",
    doc: int = 0,
    index: int = 0,
    repeat: int = 0,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    logprobs: np.ndarray | None = None,
) -> RequestRecord:
    prompt = [5, 6] if prompt is None else prompt
    output = [7] if output is None else output
    logprobs = np.linspace(-1, -2, len(output), dtype=np.float32) if logprobs is None else logprobs
    sha = ids_sha256(prompt)
    return RequestRecord(
        output, logprobs, "stop", "x", False, task, doc, index, repeat, "generate_until", prompt, sha, 0
    )


@st.composite
def records(draw: Any) -> RequestRecord:
    output = draw(IDS)
    bits = draw(st.lists(FLOATS, min_size=len(output), max_size=len(output)))
    logprobs = np.array(bits, dtype=np.uint32).view(np.float32)
    doc, index = draw(st.integers(0, 9)), draw(st.integers(0, 3))
    return make(draw(st.text(max_size=4)), doc, index, 0, draw(IDS), output, logprobs)


def test_leaf_is_the_documented_preimage() -> None:
    record = make("gsm8k", 3, 1, 2, [258], [1, 2], np.array([-0.5, -1.0], dtype=np.float32))
    fields = [
        *(b"evalengine", struct.pack("<I", DIGEST_VERSION), b"gsm8k"),
        *(struct.pack("<q", number) for number in (3, 1, 2)),
        *(bytes([2, 1, 0, 0]), bytes([1, 0, 0, 0, 2, 0, 0, 0]), struct.pack("<2f", -0.5, -1.0)),
    ]
    preimage = b"\x00" + b"".join(struct.pack("<Q", len(part)) + part for part in fields)
    assert leaf_hash(record) == hashlib.sha256(preimage).digest()


def rfc6962(leaves: list[bytes]) -> bytes:
    """Merkle tree hash as the RFC defines it: recursion, split at the largest power of two below n."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << ((len(leaves) - 1).bit_length() - 1)
    return hashlib.sha256(b"\x01" + rfc6962(leaves[:half]) + rfc6962(leaves[half:])).digest()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 100])
def test_root_is_rfc_6962(count: int) -> None:
    leaves = [hashlib.sha256(bytes([number])).digest() for number in range(count)]
    assert merkle_root(leaves) == rfc6962(leaves)


CHANGES: list[dict[str, Any]] = [
    {"task": "u"},
    {"doc_id": 1},
    {"request_index": 1},
    {"repeat": 1},
    {"prompt_ids": [5, 7]},
    {"prompt_ids": []},
    {"output_ids": [8]},
    {"logprobs": np.nextafter(np.array([-1], dtype=np.float32), np.float32(0))},
    {"output_ids": [], "logprobs": np.empty(0, dtype=np.float32)},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_what_counts_changes_the_leaf(change: dict[str, Any]) -> None:
    assert leaf_hash(replace(make(), **change)) != leaf_hash(make())


def test_what_does_not_count_leaves_the_leaf_unchanged() -> None:
    other = replace(make(), text="y", is_greedy=True, truncated=3, finish_reason="length", kind="loglikelihood")
    assert leaf_hash(other) == leaf_hash(make())


def test_signed_zero_and_nan_payloads_count() -> None:
    bits = [0x00000000, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000]
    hashes = {leaf_hash(make(logprobs=np.array([b], dtype=np.uint32).view(np.float32))) for b in bits}
    assert len(hashes) == len(bits)


def test_tokens_cannot_move_between_prompt_and_output() -> None:
    short_prompt = make(prompt=[1], output=[2, 3], logprobs=np.zeros(2, dtype=np.float32))
    long_prompt = make(prompt=[1, 2], output=[3], logprobs=np.zeros(1, dtype=np.float32))
    # Both records hold the ids 1, 2, 3 in this order: the border between prompt and output alone has moved.
    assert leaf_hash(short_prompt) != leaf_hash(long_prompt)
    assert leaf_hash(make(task="a\x00", prompt=[])) != leaf_hash(make(task="a", prompt=[0]))


@given(st.lists(records(), max_size=12, unique_by=lambda record: record.key), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_order_does_not_count(rows: list[RequestRecord], source: random.Random) -> None:
    shuffled = list(rows)
    source.shuffle(shuffled)
    assert digests(shuffled).run == digests(rows).run


@given(st.lists(records(), min_size=1, max_size=8, unique_by=lambda record: record.key), st.data())
@settings(max_examples=80, deadline=None)
def test_any_flipped_bit_counts(rows: list[RequestRecord], data: Any) -> None:
    before = digests(rows).run
    row = data.draw(st.integers(0, len(rows) - 1))
    record = rows[row]
    names = [name for name in ("prompt_ids", "output_ids", "logprobs") if len(getattr(record, name))]
    if not names:
        changed = replace(record, prompt_ids=[0])
    else:
        name = data.draw(st.sampled_from(names))
        kind = np.float32 if name == "logprobs" else np.int32
        values = np.array(getattr(record, name), dtype=kind)
        bits = values.view(np.uint32)
        bits[data.draw(st.integers(0, len(bits) - 1))] ^= np.uint32(1 << data.draw(st.integers(0, 30)))
        changed = replace(record, **{name: values if name == "logprobs" else values.tolist()})
    assert digests([*rows[:row], changed, *rows[row + 1 :]]).run != before


@given(records(), records())
@settings(max_examples=80, deadline=None)
def test_different_requests_have_different_leaves(first: RequestRecord, second: RequestRecord) -> None:
    def contents(record: RequestRecord) -> tuple[Any, ...]:
        return record.key, list(record.prompt_ids), list(record.output_ids), record.logprobs.tobytes()

    assert (leaf_hash(first) == leaf_hash(second)) == (contents(first) == contents(second))


def test_tasks_have_their_own_roots() -> None:
    rows = [make("b", 0), make("a", 1), make("a", 0)]
    roots = digests(rows).tasks
    assert list(roots) == ["a", "b"]
    assert roots["b"] == digests(rows[:1]).run and roots["a"] == digests(rows[1:]).run
    changed = digests([make("b", 0, output=[9]), *rows[1:]]).tasks
    assert changed["a"] == roots["a"] and changed["b"] != roots["b"]


def test_a_request_counts_once() -> None:
    with pytest.raises(AssertionError, match="two records"):
        digests([make(), make()])


def test_float64_logprobs_are_refused() -> None:
    with pytest.raises(AssertionError, match="float32"):
        leaf_hash(make(logprobs=np.array([-1.0])))
