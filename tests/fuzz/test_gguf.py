"""Mutated GGUF headers: refused in a sentence, or read as the same model, or as one whose difference shows."""

from __future__ import annotations

import copy
import logging
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import resolve_checkpoint
from evalengine.errors import EvalEngineError
from evalengine.models.spec import ModelSpec
from tests.fuzz.cases import Case, cases
from tests.fuzz.gguf_bytes import Described, Parts, Type, Value, sample

SCALAR_VALUES: list[tuple[Type, list[Any]]] = [
    *((Type(kind), [0, 1, 2, 255]) for kind in (Type.UINT8, Type.UINT16)),
    (Type.INT8, [-128, -1, 0, 1, 2, 127]),
    (Type.INT32, [-(2**31), -1, 0, 1, 2, 3, 16, 10**9, 2**31 - 1]),
    (Type.UINT32, [0, 1, 2, 3, 4, 8, 16, 64, 263, 10**9, 2**32 - 1]),
    (Type.UINT64, [0, 1, 2**40, 2**63, 2**64 - 1]),
    (Type.INT64, [-(2**63), -1, 0, 2**62]),
    *(
        (Type(kind), [0.0, -2.0, 1.0, 1e-5, 1e30, float("inf"), float("-inf"), float("nan")])
        for kind in (Type.FLOAT32, Type.FLOAT64)
    ),
    (Type.BOOL, [0, 1, 2, 255]),
    (Type.STRING, [b"", b"llama", b"qwen2", b"linear", b"none", b"yarn", b"gpt2", b"\xff\xfe", b"x" * 300]),
]
SIZES = [0, 1, 2, 16, 31, 32, 63, 64, 65, 2**31, 2**32, 2**58, 2**61, 2**62, 2**63, 2**64 - 32, 2**64 - 1]


@dataclass
class Reading:
    """What a file was read as."""

    spec: ModelSpec
    weights: dict[str, bytes]
    tokenizer: tuple[object, ...]
    kinds: dict[str, str]
    warned: bool


def read(path: Path, caplog: pytest.LogCaptureFixture) -> Reading:
    """What the file is read as."""
    caplog.clear()
    checkpoint = resolve_checkpoint(ModelConfig(name="t", path=str(path)))
    warned = bool(caplog.records)
    file, tokenizer = checkpoint.gguf, checkpoint.tokenizer
    assert file is not None and tokenizer is not None
    weights = {name: tensor.numpy().tobytes() for name, tensor in file.tensors()}
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    facts = (backend.to_str(), str(tokenizer.special_tokens_map), tokenizer.chat_template)
    kinds = {name: info.kind.name for name, info in file._tensors.items()}
    return Reading(checkpoint.spec, weights, facts, kinds, warned)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Parts, bytes]:
    return sample(tmp_path_factory.mktemp("gguf"))


def check(
    subject: str, count: int, mutate: Any, whole: bytes, folder: Path, caplog: pytest.LogCaptureFixture
) -> Counter[str]:
    """How the readings of mutated files end, counted. mutate: case -> (what was done, the file's bytes)."""
    path = folder / "m.gguf"
    path.write_bytes(whole)
    caplog.set_level(logging.WARNING)
    unmutated = read(path, caplog)
    assert not unmutated.warned
    outcomes: Counter[str] = Counter()
    for case in cases(subject, count):
        what, mutated = mutate(case)
        path.write_bytes(mutated)
        with case.named(what):
            try:
                reading = read(path, caplog)
            except EvalEngineError as error:
                assert len(str(error)) < 5000 and all(line.isprintable() for line in str(error).split("\n"))
                outcomes[f"refused ({type(error).__name__})"] += 1
                continue
            outcomes[compare(unmutated, reading, what)] += 1
    print(subject, dict(outcomes))
    return outcomes


def compare(expected: Reading, reading: Reading, what: str) -> str:
    """How the mutated file was read, in words; fails for a difference that nothing shows."""
    if reading.weights != expected.weights:
        # Nothing in a file tells one type from another of the same size; the roles of q and k's rows are in the spec.
        assert reading.kinds != expected.kinds or reading.spec != expected.spec, "other weights, silently"
        return "other types of the same size" if reading.kinds != expected.kinds else "another spec"
    if reading.spec != expected.spec:
        return "another spec"
    if reading.tokenizer != expected.tokenizer:
        assert reading.warned or "key" not in what.split(), "a setting of the tokenizer was lost, silently"
        return "another tokenizer"
    return "the same"


def flipped(case: Case, whole: bytes, header: int) -> tuple[str, bytes]:
    """The file with bytes of its header replaced, inserted or removed, or the file cut short."""
    mutated, done = bytearray(whole), []
    for _ in range(case.choice([1, 1, 1, 2, 4])):
        at, how = case.randrange(max(header - 8, 1)), case.randrange(12)
        if how < 4:
            mutated[at] = case.randrange(256)
        elif how < 8:
            mutated[at] ^= 1 << case.randrange(8)
        elif how < 10:
            mutated[at : at + 8] = struct.pack("<Q", case.choice(SIZES))
        elif how == 10:
            mutated[at : at + case.randint(0, 8)] = case.randbytes(case.randint(0, 8))
        else:
            del mutated[case.choice([at, case.randrange(len(mutated))]) :]
            mutated = mutated or bytearray(b"G")
        done.append((how, at))
        header = min(header, len(mutated))
    return str(done), bytes(mutated)


def rewritten(case: Case, parts: Parts) -> tuple[str, bytes]:
    """The file with one value or one entry replaced by something that the format can hold."""
    parts = copy.deepcopy(parts)
    ways = [other_value] * 4 + [other_list] * 2 + [other_key, other_entries, other_head] + [other_tensor] * 5
    what = case.choice(ways)(case, parts)
    return what, parts.written()[0]


def other_value(case: Case, parts: Parts) -> str:
    """Gives one metadata value another type and content; says what was done."""
    value = case.choice(parts.values)
    before = f"{value.key} {value.type.name}"
    value.type, choices = case.choice(SCALAR_VALUES)
    value.is_list = case.random() < 0.1
    value.items = case.choices(choices, k=case.choice([0, 1, 3, 263])) if value.is_list else [case.choice(choices)]
    return f"{before} -> {value.type.name} {value.items[:3]}"


def other_list(case: Case, parts: Parts) -> str:
    """Changes one item or the order of a list, or empties it; says what was done."""
    value = case.choice([value for value in parts.values if value.is_list])
    at, how = case.randrange(len(value.items)), case.choice(["remove", "repeat", "replace", "reverse", "empty"])
    if how == "remove":
        del value.items[at]
    elif how == "repeat":
        value.items.insert(at, value.items[at])
    elif how == "replace":
        texts: list[Any] = [b"", b"\xff", b" ", b"a b c", b"h", b"x" * 50]
        value.items[at] = case.choice(texts if value.type == Type.STRING else [0, 3, 4, 7, -1])
    elif how == "reverse":
        value.items.reverse()
    else:
        value.items = []
    return f"{how} {at} of {value.key}"


def other_key(case: Case, parts: Parts) -> str:
    """Renames one metadata key; says what was done."""
    value = case.choice(parts.values)
    before, at = value.key, case.randrange(len(value.key))
    value.key = value.key[:at] + case.choice("abcxyz._") + value.key[at + 1 :]
    return f"key {before} renamed to {value.key}"


def other_entries(case: Case, parts: Parts) -> str:
    """Removes or repeats an entry of the header; says what was done."""
    entries: list[Any] = case.choice([parts.values, parts.tensors])
    at = case.randrange(len(entries))
    if case.random() < 0.5:
        return f"entry removed: {entries.pop(at)}"[:100]
    entries.insert(case.randrange(len(entries)), entries[at])
    return f"entry repeated: {entries[at]}"[:100]


def other_tensor(case: Case, parts: Parts) -> str:
    """Changes one field of a tensor's entry; says what was done."""
    tensor: Described = case.choice(parts.tensors)
    before, how = copy.copy(tensor), case.randrange(6)
    other: Described = case.choice(parts.tensors)
    if how == 0:
        tensor.offset = (tensor.offset + case.choice([-64, -32, -1, 1, 4, 32, 64, 2**63, 2**64 - 32])) % 2**64
    elif how == 1:
        tensor.offset = case.choice([other.offset, case.choice(SIZES)])
    elif how == 2:
        tensor.kind = case.randrange(48)
    elif how == 3:
        tensor.dims = case.choice([tensor.dims[::-1], [*tensor.dims, 1], [1, *tensor.dims], other.dims, []])
    elif how == 4:
        tensor.dims = [case.choice([size, case.choice(SIZES), (size + 2**62) % 2**64]) for size in tensor.dims]
    else:
        tensor.name = case.choice([other.name, b"", b"x", b"\xff", tensor.name + b".x", b"model.norm.weight"])
    return f"{before} -> {tensor}"


def other_head(case: Case, parts: Parts) -> str:
    """Changes the version, the alignment or the counts; says what was done."""
    if case.random() < 0.3:
        parts.version = case.choice([0, 1, 2, 4, 3 << 24])
        return f"version {parts.version}"
    if case.random() < 0.4:
        number = case.choice([0, 1, 3, 8, 16, 32, 64, 2**31, 2**32 - 1])
        parts.values.append(Value("general.alignment", case.choice([Type.UINT32, Type.INT32]), [number % 2**31]))
        return f"alignment {number}"
    parts.counts = [len(parts.tensors), len(parts.values)]
    parts.counts[case.randrange(2)] = case.choice([0, 1, 2**32, 2**63, 2**64 - 1, 21])
    return f"counts {parts.counts}"


def test_mutated_bytes(parts: tuple[Parts, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each file is refused, read as the same model, or read as one whose difference shows."""
    whole = parts[1]
    _, header = parts[0].written()
    check("gguf_bytes", 300, lambda case: flipped(case, whole, header), whole, tmp_path, caplog)


def test_mutated_values(parts: tuple[Parts, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each file is refused, read as the same model, or read as one whose difference shows."""
    check("gguf_values", 250, lambda case: rewritten(case, parts[0]), parts[1], tmp_path, caplog)
