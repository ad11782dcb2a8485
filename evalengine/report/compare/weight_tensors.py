"""Which weights differ between two checkpoints: their tensors, by name, from the files. No torch, no engine.

Safetensors are read by their header (8 bytes of its length, JSON, then the tensors' bytes), GGUF by `util.gguf_header`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    "dummy": "are made up (dummy), and lie in no file",
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


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that both checkpoints have, with other bytes."""

    name: str
    elements: int
    differing: int | None  # elements of another value; None where shapes are unlike, or values are not read
    max_abs: float  # over the elements that are finite in both
    stored: tuple[str, str]  # dtype and shape in A and B


@dataclass(frozen=True)
class WeightsDifference:
    """Two checkpoints, tensor by tensor."""

    common: int
    tensors: list[TensorDifference]  # the largest change first
    only_a: list[str]
    only_b: list[str]


def weights_difference(a: Sequence[Path], b: Sequence[Path]) -> WeightsDifference:
    """Compares the files of two checkpoints. Raises OSError or ValueError for files that cannot be read."""
    left, right = _tensors(a), _tensors(b)
    names = [name for name in left if name in right]
    diffs = [d for name in names if (d := _difference(name, left[name], right[name])) is not None]
    diffs.sort(key=lambda d: (d.differing is not None, -d.max_abs, d.name))
    return WeightsDifference(len(names), diffs, sorted(left.keys() - right.keys()), sorted(right.keys() - left.keys()))


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
        return in_words(weights_difference(*weights))
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


def in_words(difference: WeightsDifference) -> list[str]:
    """A sentence each, without its full stop: how many tensors differ, which, and the largest change."""
    lines = []
    for label, only in (("A", difference.only_a), ("B", difference.only_b)):
        if only:
            lines.append(f"{counted(len(only), 'tensor')} only in {label}: {listed(only, SHOWN)}")
    count = len(difference.tensors)
    verb = "differs" if count == 1 else "differ"
    lines.append(
        f"{count} of {counted(difference.common, 'tensor')} {verb}{', the largest change first' * (count > 1)}"
    )
    return lines + first_of([_line(d) for d in difference.tensors], SHOWN)


def _line(d: TensorDifference) -> str:
    if d.differing is None:
        return f"{d.name}: {d.stored[0]} in A and {d.stored[1]} in B"
    other = f" ({d.stored[0]} in A, {d.stored[1]} in B)" if d.stored[0] != d.stored[1] else ""
    if not d.differing:
        return f"{d.name}: the same values, stored otherwise{other}"
    return f"{d.name}: {d.differing:,} of {d.elements:,} elements, by at most {shown(d.max_abs, '.3g')}{other}"


def _difference(name: str, x: Tensor, y: Tensor) -> TensorDifference | None:
    alike = x.dtype == y.dtype and x.shape == y.shape
    if alike and all(np.array_equal(u, v) for u, v in zip(_parts(x.data), _parts(y.data), strict=True)):
        return None
    stored = _stored(x), _stored(y)
    elements = int(np.prod(x.shape, dtype=np.int64))
    if x.shape != y.shape or x.values is None or y.values is None:
        return TensorDifference(name, elements, None, 0.0, stored)
    differing, largest = 0, 0.0
    for u, v in zip(x.values(), y.values(), strict=True):
        differing += int(np.count_nonzero((u != v) & ~(np.isnan(u) & np.isnan(v))))
        with np.errstate(invalid="ignore"):  # inf - inf is NaN
            delta = np.abs(u - v)
        largest = max(largest, float(delta[np.isfinite(delta)].max(initial=0.0)))
    return TensorDifference(name, elements, differing, largest, stored)


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
            yield str(name), _raw(str(entry["dtype"]), tuple(map(int, entry["shape"])), data[begin:end])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file}: its header is damaged at {str(name)[:80]}") from error


def _raw(dtype: str, shape: tuple[int, ...], data: np.ndarray) -> Tensor:
    if dtype not in DTYPES:
        return Tensor(dtype, shape, data, None)
    numbers = data.view(DTYPES[dtype])

    def values() -> Iterator[np.ndarray]:
        for part in _parts(numbers):
            wide = (part.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else part
            yield wide.astype(np.float64)

    return Tensor(dtype, shape, data, values)


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


def _stored(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
