"""A GGUF file taken apart, to be written again with anything in it: the library's writer refuses what is wrong."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import LlamaConfig

from evalengine.util.gguf_header import SCALARS
from tests.engine.test_gguf import Q, hf_model, write_gguf

Type = gguf.GGUFValueType


@dataclass
class Value:
    """A metadata value; for a list, `type` is the type of its items."""

    key: str
    type: Type
    items: list[Any]  # the items are numbers or bytes
    is_list: bool = False


@dataclass
class Described:
    """A tensor's entry in the header; `dims` have the file's order."""

    name: bytes
    dims: list[int]
    kind: int
    offset: int


@dataclass
class Parts:
    """The parts of a whole GGUF file."""

    values: list[Value]
    tensors: list[Described]
    data: bytes
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    counts: list[int] | None = None  # how many tensors and values the header claims

    def written(self) -> tuple[bytes, int]:
        """The file's bytes, and the offset at which its data begin."""
        counts = self.counts or [len(self.tensors), len(self.values)]
        out = bytearray(self.magic + struct.pack("<IQQ", self.version, *counts))
        for value in self.values:
            out += _string(value.key.encode())
            if value.is_list:
                out += struct.pack("<IIQ", Type.ARRAY, value.type, len(value.items))
            else:
                out += struct.pack("<I", value.type)
            for item in value.items:
                out += _string(item) if value.type == Type.STRING else struct.pack(f"<{SCALARS[value.type]}", item)
        for tensor in self.tensors:
            out += _string(tensor.name) + struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
            out += struct.pack("<IQ", tensor.kind, tensor.offset)
        out += bytes(-len(out) % self.alignment)
        return bytes(out) + self.data, len(out)


def sample(folder: Path) -> tuple[Parts, bytes]:
    """Parts and bytes of a small Llama by the library's writer: two block types, float32 vectors, RoPE divisors."""
    metadata: dict[str, Any] = {
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": 263,
        "llama.attention.causal": True,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
        "general.quantization_version": 2,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    model = hf_model(LlamaConfig, False, attention_bias=True)
    divisors, kinds = {"rope_freqs.weight": torch.linspace(1, 8, 8)}, {"output.weight": Q.Q4_0}
    path = write_gguf(folder / "sample.gguf", model, Q.Q8_0, divisors, kinds, **metadata)
    reader = gguf.GGUFReader(path)
    values = [
        Value(name, stored.types[-1], _items(stored), stored.types[0] == Type.ARRAY)
        for name, stored in reader.fields.items()
        if not name.startswith("GGUF.")
    ]
    tensors = [
        Described(t.name.encode(), t.shape.tolist(), int(t.tensor_type), t.data_offset - reader.data_offset)
        for t in reader.tensors
    ]
    whole = path.read_bytes()
    parts = Parts(values, tensors, whole[reader.data_offset :])
    assert parts.written() == (whole, reader.data_offset)
    return parts, whole


def _items(stored: gguf.ReaderField) -> list[Any]:
    contents = stored.contents()
    items = contents if isinstance(contents, list) else [contents]
    return [item.encode() if isinstance(item, str) else item for item in items]


def _string(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw
