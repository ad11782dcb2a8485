"""Weight files: safetensors (single or sharded), their fingerprint, and seeded dummy weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from evalengine.errors import ConfigError, EvalEngineError

DUMMY_STD = 0.02  # of dummy weights: transformers' usual initializer_range
INDEX = "model.safetensors.index.json"
CHUNK = 1 << 22  # bytes read at once
HASHED_AT_ONCE = 1 << 20  # elements of a dummy tensor: 8 MB of int64, which fits a cache


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint folder, sorted by name.

    Those that the index names, else `model.safetensors`, else every *.safetensors. Raises `ConfigError` if there are
    none, `EvalEngineError` if the index is damaged or names a file that is not there.
    """
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, UnicodeDecodeError) as error:
            raise EvalEngineError(f"{index}: not an index of shards ({error}); download or copy it again") from error
        if absent := [name for name in names if not (folder / name).exists()]:
            raise EvalEngineError(
                f"{folder}: {len(absent)} of {len(names)} shards are missing: {', '.join(absent)}; "
                "download or copy the folder again"
            )
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"model.path={folder}: no *.safetensors file (other weight formats are not read); "
            "convert the checkpoint to safetensors, or use model.load_format=dummy for random weights"
        )
    return files


def safetensors_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor on the CPU) of every tensor, file by file, names sorted in each; one in memory at a time."""
    for file in safetensors_files(folder):
        try:
            with safe_open(str(file), framework="pt") as tensors:
                for name in sorted(tensors.keys()):
                    yield name, tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise EvalEngineError(
                f"{file}: damaged or truncated safetensors file ({error}); download or copy it again, "
                "or set model.path to another checkpoint"
            ) from error


def dummy_tensors(shapes: dict[str, tuple[int, ...]], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Seeded random float32 weights, the same on every machine, made on `device`: norm weights 1, the rest uniform.

    The integers are a hash of (name, element), in integer arithmetic: a generator's stream differs between CPU and GPU
    and between GPUs, and a CPU's takes minutes for 8 billion weights.
    """
    for name in sorted(shapes):
        tensor = torch.ones(shapes[name], device=device)
        if not name.endswith("norm.weight"):
            for start, part in enumerate(tensor.view(-1).split(HASHED_AT_ONCE)):
                part.copy_(_uniform(name, start * HASHED_AT_ONCE, len(part), device))
        yield name, tensor


def _uniform(name: str, start: int, count: int, device: torch.device) -> Tensor:
    """float32 [count], mean 0, standard deviation `DUMMY_STD`: elements [start, start + count) of a dummy tensor.

    Two rounds of a 32-bit multiply-xorshift hash, the name's two seeds before each. Products stay below 2^63.
    """
    seeds = hashlib.sha256(name.encode()).digest()
    x = torch.arange(start, start + count, device=device)
    for seed in (seeds[:4], seeds[4:8]):
        x += int.from_bytes(seed, "little")
        for _ in range(2):
            x &= 0xFFFFFFFF
            x ^= x >> 16
            x *= 0x45D9F3B
    return ((x >> 8) & 0xFFFFFF).float().mul_(2.0**-24).sub_(0.5).mul_(DUMMY_STD * 12**0.5)


def fingerprint(files: list[Path]) -> str:
    """SHA-256 (hex) over (name, content) of the files, in name order."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.name):
        content = hashlib.sha256()
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                content.update(chunk)
        digest.update(file.name.encode() + b"\0" + content.digest())
    return digest.hexdigest()
