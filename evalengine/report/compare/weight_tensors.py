"""Which weights differ between two checkpoints: their tensors, by name, from the files. No torch, no engine.

Safetensors are read by their header (8 bytes of its length, JSON, then the tensors' bytes), GGUF by `util.gguf_header`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from evalengine.errors import first_of, listed
from evalengine.report.numbers import counted, shown
from evalengine.report.read.identities import short
from evalengine.report.read.run import Run
from evalengine.util.plain_files import fingerprint, gguf_parts, parse_json, read_json

if TYPE_CHECKING:
    from evalengine.util.gguf_header import TensorInfo

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # bfloat16 is the upper half of a float32
MAX_HEADER = 100_000_000  # bytes, the safetensors library's own limit
AT_ONCE = 1 << 22  # elements of a tensor that are held as float64 at one time
RUN_BYTES = 2_000_000_000  # most of a run's weights that `compare` reads, twice: two such take half a minute
INDEX = "model.safetensors.index.json"
UNREAD = {  # a format whose tensors are not compared -> why, after "A's weights"
    "dummy": "are dummies, and in no file",
    "pytorch": "are in PyTorch files, which are not compared by tensor; convert them to safetensors",
}
ADAPTED = "are merged with an adapter in memory, so no file has them"
SHOWN = 5  # the most tensors that are named, the largest change first


@dataclass(frozen=True)
class Tensor:
    """One stored tensor, not read yet."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray  # uint8, on disk
    values: Callable[[], Iterator[np.ndarray]] | None  # chunks of float64; None for a dtype that is not read


def differing_tensors(a: Sequence[Path], b: Sequence[Path]) -> list[str]:
    """A sentence each, without its full stop: how many tensors of two checkpoints' files differ, which, and the largest
    change. Raises OSError or ValueError for files that cannot be read."""
    left, right = _tensors(a), _tensors(b)
    lines = [
        f"{counted(len(only), 'tensor')} only in {label}: {listed(sorted(only), SHOWN)}"
        for label, only in (("A", left.keys() - right.keys()), ("B", right.keys() - left.keys()))
        if only
    ]
    common = left.keys() & right.keys()
    found = sorted(difference for name in common if (difference := _difference(name, left[name], right[name])))
    verb = "differs" if len(found) == 1 else "differ, the largest change first" if found else "differ"
    lines.append(f"{len(found)} of {counted(len(common), 'tensor')} {verb}")
    return lines + first_of([line for _, _, line in found], SHOWN)


def differing_weights(a: Run, b: Run, at_most: int = RUN_BYTES) -> list[str]:
    """Which tensors differ, a sentence each without its full stop; or why that is not known.

    Empty where a run recorded no hash of its weights, or both recorded the same.
    """
    hashes = [run.identity.get("weights") for run in (a, b)]
    if None in hashes or hashes[0] == hashes[1]:
        return []
    weights = []
    for label, run in (("A", a), ("B", b)):
        try:
            weights.append(_weights_of(run, at_most))
        except (OSError, ValueError) as error:
            return [f"which tensors differ is not known: {label}'s weights {error}"]
    try:
        return differing_tensors(*weights)
    except (OSError, ValueError) as error:
        return [f"which tensors differ is not known: {error}"]


def _weights_of(run: Run, at_most: int) -> list[Path]:
    """The files with the recorded hash. Raises `ValueError` (after "A's weights"), or OSError."""
    model, recorded_sha256 = run.manifest.model, str(run.identity["weights"])
    source = model.source
    if source is None:
        raise ValueError("are not named in its manifest")
    if model.adapter:
        raise ValueError(ADAPTED)
    if model.format in UNREAD:
        raise ValueError(UNREAD[model.format])
    place = Path(str(files("evalengine"))) / "assets" / source[6:] if source.startswith("asset:") else Path(source)
    sets = list(_sets(place.expanduser()))
    if not sets:
        raise ValueError(f"are not at {source} on this machine")
    if (size := min(sum(file.stat().st_size for file in candidate) for candidate in sets)) > at_most:
        raise ValueError(f"take {size / 1e9:.1f} GB, which `explain` reads, and this command does not")
    recorded = next((candidate for candidate in sets if fingerprint(candidate) == recorded_sha256), None)
    if recorded is None:
        raise ValueError(f"at {source} are others now (their hash is not {short(recorded_sha256)})")
    return recorded


def _sets(place: Path) -> Iterator[list[Path]]:
    """Every set of files that a loader may take as the weights of this place; the hash tells which one it took."""
    if place.is_file():
        yield gguf_parts(place)
    if not place.is_dir():
        return
    if (single := place / "model.safetensors").is_file():
        yield [single]
    if (index := place / INDEX).is_file():
        named = read_json(index).get("weight_map")
        shards = [place / Path(str(name)).name for name in sorted({*named.values()})] if isinstance(named, dict) else []
        if shards and all(file.is_file() for file in shards):
            yield shards
    for pattern in ("*.safetensors", "*.gguf"):
        if every := sorted(file for file in place.glob(pattern) if file.name != "adapter_model.safetensors"):
            yield every


def _difference(name: str, x: Tensor, y: Tensor) -> tuple[float, str, str] | None:
    """(what sorts it, its name, a sentence) of a tensor of which the two checkpoints have different bytes."""
    alike = x.dtype == y.dtype and x.shape == y.shape
    if alike and all(np.array_equal(u, v) for u, v in zip(_parts(x.data), _parts(y.data), strict=True)):
        return None
    stored = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (x, y)]
    if x.shape != y.shape or x.values is None or y.values is None:
        return -math.inf, name, f"{name}: {stored[0]} in A and {stored[1]} in B"
    differing, largest = 0, 0.0
    for u, v in zip(x.values(), y.values(), strict=True):
        differing += int(np.count_nonzero((u != v) & ~(np.isnan(u) & np.isnan(v))))
        with np.errstate(invalid="ignore"):  # inf - inf is NaN
            delta = np.abs(u - v)
        largest = max(largest, float(delta[np.isfinite(delta)].max(initial=0.0)))
    other = f" ({stored[0]} in A, {stored[1]} in B)" if stored[0] != stored[1] else ""
    elements = int(np.prod(x.shape, dtype=np.int64))
    change = f"{differing:,} of {elements:,} elements, by at most {shown(largest, '.3g')}"
    return -largest, name, f"{name}: {change if differing else 'the same values, stored otherwise'}{other}"


def _tensors(files: Sequence[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(_of_gguf(file) if file.suffix.lower() == ".gguf" else _of_safetensors(file))
    return tensors


def _of_safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    data = np.memmap(file, dtype=np.uint8, mode="r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if not 2 <= length <= min(MAX_HEADER, len(data) - 8):
        raise ValueError(f"{file}: no safetensors file")
    header = parse_json(data[8 : 8 + length].tobytes())
    if not isinstance(header, Mapping):
        raise ValueError(f"{file}: its header is no object")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = (8 + length + int(offset) for offset in entry["data_offsets"])
            dtype, shape, stored = str(entry["dtype"]), tuple(map(int, entry["shape"])), data[begin:end]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file}: its header is damaged at {str(name)[:80]}") from error
        numbers = stored.view(DTYPES[dtype]) if dtype in DTYPES else None
        yield str(name), Tensor(dtype, shape, stored, None if numbers is None else partial(_wide, numbers, dtype))


def _wide(numbers: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
    for part in _parts(numbers):
        yield ((part.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else part).astype(np.float64)


def _of_gguf(file: Path) -> Iterator[tuple[str, Tensor]]:
    from gguf.quants import dequantize

    from evalengine.util.gguf_header import open_gguf

    try:
        data, header = open_gguf(file)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    for info in header.tensors.values():

        def values(info: TensorInfo = info) -> Iterator[np.ndarray]:
            yield from _parts(dequantize(info.stored(data), info.kind).reshape(-1).astype(np.float64))

        yield info.name, Tensor(info.kind.name, info.shape, info.stored(data).reshape(-1), values)


def _parts(data: np.ndarray) -> Iterator[np.ndarray]:
    return (data[start : start + AT_ONCE] for start in range(0, len(data), AT_ONCE))
