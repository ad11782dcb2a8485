"""Lengths, layouts and types of values that a GGUF header is refused for; `tests/fuzz` has damage by accident."""

from __future__ import annotations

import copy
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from evalengine.engine.load.gguf import GGUFFile
from evalengine.errors import EvalEngineError
from evalengine.util.gguf_header import GGUFFields, StoredValue, read_header
from tests.engine.test_gguf import resolve
from tests.fuzz.gguf_bytes import Parts, Type, Value, sample
from tests.parity.gguf_files import write_file


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """The parts of a small GGUF file: header, metadata, tensors, data."""
    return sample(tmp_path_factory.mktemp("gguf"))[0]


def edited(parts: Parts, edit: Callable[[Parts], Any]) -> bytes:
    """The bytes of the file whose parts `edit` has changed."""
    parts = copy.deepcopy(parts)
    edit(parts)
    return parts.written()[0]


def test_a_file_of_the_librarys_writer_is_read_as_the_library_reads_it(parts: Parts, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(parts.written()[0])
    header, reader = read_header(path.read_bytes()), gguf.GGUFReader(path)
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert (info.kind, info.start, info.size) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
    fields = GGUFFields(path, header.metadata)
    for key in fields.names():
        assert fields.any(key) == reader.fields[key].contents(), key


def test_the_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_custom_alignment(128)
    for name in ("a", "b"):
        writer.add_tensor(name, np.ones((3, 8), np.float32))
    write_file(writer)
    data = (tmp_path / "m.gguf").read_bytes()
    infos = read_header(data).tensors
    assert infos["b"].start - infos["a"].start == 128 and infos["a"].start % 128 == 0
    assert read_header(data[: infos["b"].start + infos["b"].size]).tensors == infos  # The last padding may be absent.


def tensor(index: int, **values: Any) -> Callable[[Parts], Any]:
    """An edit that sets fields of the tensor `index`."""
    return lambda parts: [setattr(parts.tensors[index], name, value) for name, value in values.items()]


def value(key: str, kind: Type, *items: Any, is_list: bool = False) -> Callable[[Parts], Any]:
    """An edit that sets the metadata key to these items, of this type."""

    def edit(parts: Parts) -> None:
        parts.values = [value for value in parts.values if value.key != key]
        parts.values.append(Value(key, kind, list(items), is_list))

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: tensor(1, offset=p.tensors[1].offset + 1)(p), "is at offset .*expected"),
        (lambda p: tensor(1, offset=p.tensors[1].offset + 32)(p), "is at offset .*expected"),  # This makes a gap.
        (lambda p: tensor(2, offset=p.tensors[1].offset)(p), "is at offset .*expected"),  # This makes an overlap.
        (lambda p: tensor(1, offset=p.tensors[1].offset + 2**64 - 2**32)(p), "is at offset .*expected"),  # This wraps.
        (lambda p: p.tensors.reverse(), "is at offset .*expected 0"),
        (tensor(0, dims=[2**33, 2**33]), r"ends at byte \d{10,}, the file has"),  # The product wraps in 64 bits.
        (tensor(0, dims=[64, 0]), "rows must be multiples of 32, none empty"),
        (tensor(0, dims=[65, 263]), "rows must be multiples of 32"),
        (tensor(0, dims=[]), "has 0 dimensions, expected 1 to 4"),
        (tensor(0, dims=[1] * 5), "has 5 dimensions, expected 1 to 4"),
        (tensor(0, kind=4), "has type 4, which the gguf library does not know"),  # Type 4 was Q4_2, which is withdrawn.
        (tensor(0, kind=99), "has type 99, which the gguf library does not know"),
        (tensor(0, kind=0), "tensor .* is at offset"),  # float32 is larger than the stored type.
        (lambda p: tensor(1, name=p.tensors[0].name)(p), "token_embd.weight occurs twice"),
        (tensor(0, name=b"\x1b[2J"), r"a tensor's name cannot be meant: b'\\x1b\[2J'"),
        (tensor(0, name=b"\xff"), "a tensor's name is not UTF-8"),
        (lambda p: setattr(p, "data", p.data[:-1]), "ends at byte .*the file has"),
        (lambda p: setattr(p, "counts", [2**63, len(p.values)]), "claims 9223372036854775808 tensors"),
        (lambda p: setattr(p, "version", 1), "it has version 1; versions 2 and 3"),
        (lambda p: setattr(p, "version", 3 << 24), "big-endian"),
        (lambda p: setattr(p, "magic", b"GGML"), "begins with b'GGML'"),
        (value("general.alignment", Type.UINT32, 48), "general.alignment must be a power of two"),
        (value("general.alignment", Type.UINT32, 0), "general.alignment must be a power of two"),
        (value("general.alignment", Type.INT32, 32), "general.alignment must be a power of two"),
        (value("general.alignment", Type.UINT32, 2**31), "ends at byte"),
        (lambda p: p.values.append(p.values[0]), "metadata key general.architecture occurs twice"),
        (value("x", Type.ARRAY, is_list=True), "metadata key x is a list of lists"),
        (value("x", 77, is_list=True), "metadata key x has type 77"),  # type: ignore[arg-type]
    ],
)
def test_a_layout_that_cannot_be_meant_is_refused(
    parts: Parts, tmp_path: Path, edit: Callable[[Parts], Any], message: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(edited(parts, edit))
    with pytest.raises(EvalEngineError, match=rf"m.gguf: not a whole GGUF file \((.*{message}).*\); download or copy"):
        GGUFFile(path)


def test_zeros_behind_the_last_tensor_are_read(parts: Parts, tmp_path: Path) -> None:
    path, whole = tmp_path / "m.gguf", parts.written()[0]
    path.write_bytes(whole + bytes(5000))
    assert resolve(path).spec.num_layers == 2
    path.write_bytes(whole + bytes(4999) + b"x")
    with pytest.raises(EvalEngineError, match=rf"5000 bytes follow its last tensor.*\(head -c {len(whole)}\)"):
        resolve(path)


@pytest.mark.parametrize("claimed", [2**64 - 1, 2**40, 2**23 + 1, 10**6])
def test_a_claimed_length_is_not_believed(claimed: int) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    for kind in (Type.STRING, Type.UINT8):
        with pytest.raises(ValueError, match=r"more than any model has|needs"):
            read_header(head + struct.pack("<IIQ", Type.ARRAY, kind, claimed) + bytes(64))
    with pytest.raises(ValueError, match=r"longer than any model's|needs"):
        read_header(head + struct.pack("<IQ", Type.STRING, claimed) + bytes(64))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(EvalEngineError, match="not a regular file"):
        resolve(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("read", "stored", "message"),
    [
        ("integer", StoredValue(Type.FLOAT32, (2.0,)), "FLOAT32 2.0, expected an integer from 0 to"),
        ("integer", StoredValue(Type.BOOL, (1,)), "BOOL 1, expected an integer"),
        ("integer", StoredValue(Type.INT32, (-1,)), "INT32 -1, expected an integer"),
        ("integer", StoredValue(Type.UINT32, (1, 2), True), "a list of 2 values of type UINT32, expected an integer"),
        ("integer", StoredValue(Type.UINT32, (), True), "a list of 0 values"),
        ("number", StoredValue(Type.FLOAT32, (float("nan"),)), "FLOAT32 nan, expected a finite"),
        ("number", StoredValue(Type.FLOAT64, (float("inf"),)), "FLOAT64 inf, expected a finite"),
        ("number", StoredValue(Type.UINT32, (1,)), "UINT32 1, expected a finite"),
        ("boolean", StoredValue(Type.BOOL, (2,)), "BOOL 2, expected true or false"),
        ("boolean", StoredValue(Type.UINT8, (1,)), "UINT8 1, expected true or false"),
        ("string", StoredValue(Type.UINT32, (1,)), "UINT32 1, expected a string"),
        ("string", StoredValue(Type.STRING, (b"\xff",)), r"STRING b'\\xff', expected UTF-8 text"),
        ("strings", StoredValue(Type.STRING, (b"a",)), "STRING b'a', expected a list of strings"),
        ("strings", StoredValue(Type.UINT8, (1,), True), "of type UINT8, expected a list of strings"),
        ("integers", StoredValue(Type.INT32, (1, -1), True), "expected a list of integers from 0 to"),
        ("integers", StoredValue(Type.BOOL, (1,), True), "type BOOL, expected a list of integers"),
    ],
)
def test_a_value_of_another_type_names_its_key(read: str, stored: StoredValue, message: str) -> None:
    fields = GGUFFields(Path("m.gguf"), {"llama.k": stored}).under("llama")
    with pytest.raises(EvalEngineError, match=rf"m.gguf: metadata key llama\.k is .*{message}.*; download or copy"):
        getattr(fields, read)("k")
    with pytest.raises(EvalEngineError, match=r"metadata key llama\.none is missing"):
        getattr(fields, read)("none")
    assert getattr(fields, read)("none", None) is None


def test_values_are_read_as_they_are_meant() -> None:
    eps = struct.unpack("<f", struct.pack("<f", 1e-5))[0]
    stored = {
        "f": StoredValue(Type.FLOAT32, (eps,)),
        "d": StoredValue(Type.FLOAT64, (eps,)),
        "i": StoredValue(Type.INT8, (-1,)),
        "l": StoredValue(Type.UINT16, (1, 2), True),
    }
    fields = GGUFFields(Path("m.gguf"), stored)
    assert fields.number("f") == 1e-5 and fields.number("d") == eps  # A float32 is read as its shortest decimal.
    assert fields.integer("i", least=-1) == -1 and fields.integers("l", length=2) == [1, 2]
    assert (fields.count("l"), fields.count("none"), fields.any("l"), fields.any("none")) == (2, None, [1, 2], None)
    with pytest.raises(EvalEngineError, match="expected a list of 3 integers"):
        fields.integers("l", length=3)
