"""Reads the weights of a checkpoint's folder, safetensors or PyTorch files: which files count, which tensors they hold,
and the tensors.

Headers are read first, so that a name in two files, a tensor that the index gives to another file and a shape that
does not fit are known before anything is allocated.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from evalengine.engine.load.unpacking import unpacked
from evalengine.errors import ConfigError, EvalEngineError, listed
from evalengine.kernels import exact
from evalengine.models.file_values import one_line, plain, shown
from evalengine.models.packing import Activations
from evalengine.util.plain_files import read_json

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"  # none of the model's files
PYTORCH = "pytorch_model.bin"  # read where there are no safetensors
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STORED_DTYPES = {  # safetensors' names for torch's types
    **{dtype: name for name, dtype in DTYPES.items()},
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}
COMPARED_AT_ONCE = 1 << 12  # rows of two tensors that are compared in one go
MAX_NAMES = 8  # the most names of tensors or files that a message lists
FIX = "download or copy the folder again"
# The PyTorch files that `pytorch_files_open` keeps open; None outside of it.
_open_files: ContextVar[dict[tuple[Path, int, int, int, int], _PyTorchFile] | None] = ContextVar("open", default=None)
# The names of the files that transformers writes for a model spread over ranks, and reads before any other file.
_OF_A_RANK = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class LowRank:
    """An adapter's update of a weight: scale * (B A), or its transpose."""

    a: StoredTensor  # [r, K]
    b: StoredTensor  # [N, r]
    scale: float
    transposed: bool = False


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, known from the file's header."""

    name: str  # the name in the file
    file: Path
    dtype: str  # safetensors' name, e.g. "BF16"
    shape: tuple[int, ...]
    # Of a packed weight, whose dtype and shape are those that it unpacks to: how, its other tensors (None for one that
    # it may have and has not), its integers, and what a reader calls its form.
    method: str | None = None
    others: tuple[StoredTensor | None, ...] = ()
    sizes: tuple[int, ...] = ()
    packing: str = ""
    # How the input of its product is quantised, and the constant by which, where that is one.
    activations: Activations | None = None
    input_scale: StoredTensor | None = None
    update: LowRank | None = None


@contextmanager
def pytorch_files_open() -> Iterator[None]:
    """Keep PyTorch files open until the end: each opening unpickles a file, and reads all of one in the old format."""
    token = _open_files.set({})
    try:
        yield
    finally:
        _open_files.reset(token)


def weight_files(folder: Path, load_format: str = "auto") -> list[Path]:
    """The weight files of a checkpoint folder, sorted by name: `model.safetensors`, else those that the index names,
    else `pytorch_model.bin` or those that its index names (transformers' order), else every other *.safetensors.

    load_format: "safetensors" or "pytorch" for files of that kind alone. Raises `ConfigError` if there are none,
    `EvalEngineError` for a damaged index or a file that is not there.
    """
    return _files_and_index(folder, load_format)[0]


def has_weights(folder: Path) -> bool:
    """Whether the folder has any `weight_files`."""
    return has_named_weights(folder, "auto") or bool(_unnamed(folder, "auto"))


def has_named_weights(folder: Path, load_format: str) -> bool:
    """Whether the folder has weights under the names that transformers looks for, or an index of them."""
    return any((folder / file).exists() for name in _names(load_format) for file in (name, _index_of(name)))


def stored_tensors(folder: Path, load_format: str = "auto") -> dict[str, StoredTensor]:
    """Every tensor of the folder's `weight_files` by name, file by file.

    Raises what `weight_files` raises, and one `EvalEngineError` for tensors that are in two files or elsewhere than
    the index says.
    """
    files, index = _files_and_index(folder, load_format)
    tensors: dict[str, StoredTensor] = {}
    problems = []
    for tensor in (tensor for file in files for tensor in tensors_of(file)):
        if tensor.name in tensors:
            first = tensors[tensor.name].file.name
            problems.append(f"{plain(tensor.name)} is in {first} and in {tensor.file.name}")
        elif index is not None and index.get(tensor.name) != tensor.file.name:
            entry = f"gives it to {index[tensor.name]}" if tensor.name in index else "does not name it"
            problems.append(f"{plain(tensor.name)} is in {tensor.file.name}, and {_index_name(files)} {entry}")
        else:
            tensors[tensor.name] = tensor
    lacking = [] if index is None else [name for name in index if name not in tensors]
    where = f"where {_index_name(files)} has it"
    problems += [f"{plain(name)} is not in {index[name]}, {where}" for name in lacking if index]
    if problems:
        raise EvalEngineError(f"{folder}: {listed(problems, MAX_NAMES, '; ')}; {FIX}")
    return tensors


def read_tensors(
    stored: Mapping[str, StoredTensor], device: torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Pairs (key, tensor), file by file, sorted by name in each file; one tensor in memory at a time. Those that an
    adapter changes are on `device` (None: the CPU), where their products are computed, and the others on the CPU."""
    for file, items in groupby(
        sorted(stored.items(), key=lambda item: (item[1].file, item[1].name)), key=lambda item: item[1].file
    ):
        with _open(file) as tensors:
            for key, tensor in items:
                yield key, _content(tensors.get_tensor(tensor.name), tensor, device)


def read_parts(tensor: StoredTensor) -> list[Tensor | None]:
    """A tensor as it is stored, with the others of a packed weight; None for one that it may have and has not."""
    parts: list[Tensor | None] = []
    for part in (tensor, *tensor.others):
        if part is None:
            parts.append(None)
            continue
        with _open(part.file) as tensors:
            parts.append(tensors.get_tensor(part.name))
    return parts


def _content(first: Tensor, tensor: StoredTensor, device: torch.device | None) -> Tensor:
    if tensor.update is not None:
        merged = _updated(first if device is None else first.to(device), tensor.update)
        extremes = torch.stack(torch.aminmax(merged))  # both NaN if one is; isfinite of all takes 30 times as long
        if not extremes.isfinite().all():
            raise EvalEngineError(
                f"{tensor.file}: {plain(tensor.name)} has an infinity or a NaN with {plain(tensor.update.a.name)} of "
                f"{tensor.update.a.file} added; check lora_alpha and the adapter"
            )
        return merged
    if tensor.method is None:
        return first
    try:
        return unpacked(tensor.method, [first, *read_parts(tensor)[1:]], tensor.sizes)
    except IndexError as error:  # the group of an input is a number in the file
        raise EvalEngineError(f"{tensor.file}: {plain(tensor.name)} names a group that is not there; {FIX}") from error


def _updated(weight: Tensor, update: LowRank) -> Tensor:
    """The weight with an adapter's product, float32. The product is `exact`, so any device has the same bits; it is
    rounded once, and so are then its product with the scale and the sum."""
    factors = []
    for part in (update.a, update.b):
        (factor,) = read_parts(part)
        assert factor is not None
        if not factor.isfinite().all():
            raise EvalEngineError(f"{part.file}: {plain(part.name)} has an infinity or a NaN; {FIX}")
        factors.append(factor.to(weight.device, torch.float32))
    a, b = factors
    delta = exact.linear(b, exact.quantize_weight(a.t().contiguous()))
    return (delta.t() if update.transposed else delta).mul_(update.scale).add_(weight)


def equal_tensors(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two tensors have the same values, a part of them in memory at a time; not for packed ones."""
    if first.method or second.method or {first.dtype, second.dtype} - DTYPES.keys():
        return False
    if first.shape != second.shape or not first.shape:
        return False
    with _open(first.file) as of_first, _open(second.file) as of_second:
        a, b = of_first.get_slice(first.name), of_second.get_slice(second.name)
        rows = range(0, first.shape[0], COMPARED_AT_ONCE)
        return all(
            torch.equal(a[i : i + COMPARED_AT_ONCE].double(), b[i : i + COMPARED_AT_ONCE].double()) for i in rows
        )


def stored_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """The dtype of the first floating-point tensor, else float32: transformers' choice where config.json names none."""
    return next((DTYPES[tensor.dtype] for tensor in stored.values() if tensor.dtype in DTYPES), torch.float32)


def _names(load_format: str) -> list[str]:
    return [name for name, kind in ((SINGLE, "safetensors"), (PYTORCH, "pytorch")) if load_format in ("auto", kind)]


def _index_of(single: str) -> str:
    return f"{single}.index.json"


def _unnamed(folder: Path, load_format: str) -> list[Path]:
    """Every *.safetensors file but an adapter's."""
    files = [] if load_format == "pytorch" else sorted(folder.glob("*.safetensors"))
    return [file for file in files if file.name != ADAPTER]


def _files_and_index(folder: Path, load_format: str) -> tuple[list[Path], dict[str, str] | None]:
    if of_ranks := sorted(file.name for file in folder.glob("*.safetensors") if _OF_A_RANK.fullmatch(file.name)):
        raise ConfigError(
            f"model.path={folder}: {of_ranks[0]} is part of a checkpoint spread over ranks, which is not supported; "
            "save it whole"
        )
    for single in (folder / name for name in _names(load_format)):
        index_file = folder / _index_of(single.name)
        if single.exists():
            if index_file.exists():
                logger.info("%s: %s is read, %s is not (as in transformers)", folder, single.name, index_file.name)
            return [single], None
        if index_file.exists():
            index = _index(index_file, single.suffix)
            files = [folder / name for name in sorted(set(index.values()))]
            if absent := [file.name for file in files if not file.exists()]:
                raise EvalEngineError(
                    f"{folder}: {len(absent)} of {len(files)} shards are missing: {listed(absent, MAX_NAMES)}; {FIX}"
                )
            return files, index
    if every := _unnamed(folder, load_format):
        return every, None
    if load_format != "auto" and has_weights(folder):
        wanted, found = ("*.safetensors", "PyTorch files") if load_format == "safetensors" else (PYTORCH, "safetensors")
        raise ConfigError(f"model.load_format={load_format}: {folder} has no {wanted}, only {found}; use auto")
    if (folder / "adapter_config.json").exists():
        raise ConfigError(
            f"model.path={folder}: it has an adapter and no model; set model.adapter={folder}, and model.path to the "
            "model that it was trained on"
        )
    raise ConfigError(
        f"model.path={folder}: no *.safetensors file and no {PYTORCH} (other weight formats are not read); "
        "convert the checkpoint to safetensors, or use model.load_format=dummy for random weights"
    )


def _index_name(files: list[Path]) -> str:
    return _index_of(PYTORCH) if files[0].suffix == ".bin" else INDEX


def _index(file: Path, suffix: str) -> dict[str, str]:
    """The index: tensor name -> file name, which ends in `suffix`. Raises EvalEngineError for anything else."""
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise EvalEngineError(
            f"{file}: not an index of shards ({one_line(error)}); download or copy it again"
        ) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise EvalEngineError(
            f"{file}: not an index of shards (no weight_map from tensors to files); download or copy it again"
        )
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain_file_name(name, suffix):
            raise EvalEngineError(
                f"{file}: weight_map gives {plain(tensor)} to {shown(name)}, which is not the plain name of a "
                f"{suffix} file in this folder; download or copy it again"
            )
    return weight_map


def _is_plain_file_name(name: str, suffix: str) -> bool:
    """Whether it is a file's name without a path, which would lead the reader out of the folder. No index has other
    characters than these."""
    return re.fullmatch(r"[\w.+-]{1,200}" + re.escape(suffix), name, re.ASCII) is not None


def tensors_of(file: Path) -> list[StoredTensor]:
    """The file's tensors, in its order. Raises EvalEngineError for two entries of one name, of which the library
    would keep the last."""
    with _open(file) as tensors:
        names = list(tensors.keys())
        parts = [tensors.get_slice(name) for name in names]
        stored = [
            StoredTensor(name, file, part.get_dtype(), tuple(part.get_shape()))
            for name, part in zip(names, parts, strict=True)
        ]
    if file.suffix == ".bin":
        return stored
    with file.open("rb") as stream:
        text = stream.read(int.from_bytes(stream.read(8), "little"))
    entries = Counter(name for name, _ in json.loads(text, object_pairs_hook=list))
    if twice := [plain(name) for name, count in entries.items() if count > 1]:
        raise EvalEngineError(f"{file}: {listed(twice, MAX_NAMES)}: twice in its header; download or copy it again")
    return stored


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """An open weight file. Raises `EvalEngineError` for a damaged file, also while tensors are read from it."""
    if not file.is_file():  # opening a pipe would wait for ever
        raise EvalEngineError(f"{file}: not a regular file; download or copy it again")
    if file.suffix == ".bin":
        yield _pytorch_file(file)
        return
    try:
        with safe_open(str(file), framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise EvalEngineError(
            f"{file}: damaged or truncated safetensors file ({one_line(error)}); download or copy it again, "
            "or set model.path to another checkpoint"
        ) from error


def _pytorch_file(file: Path) -> _PyTorchFile:
    """An open PyTorch file, one of the last two inside of `pytorch_files_open`: of a model and of its adapter."""
    open_files = _open_files.get()
    if open_files is None:
        return _PyTorchFile(file)
    at = file.stat()
    key = (file, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns)
    opened = open_files.pop(key, None)
    if opened is None:
        while len(open_files) > 1:
            del open_files[next(iter(open_files))]
        opened = _PyTorchFile(file)
    open_files[key] = opened  # the most recent is last
    return opened


class _PyTorchFile:
    """The tensors of a file that `torch.save` wrote, with the interface of an open safetensors file.

    Only tensors are unpickled (`weights_only`): no code of the file runs. They are mapped into memory, not read, unless
    the file is in the format of before torch 1.6.
    """

    def __init__(self, file: Path) -> None:
        """Raises `EvalEngineError` for a damaged file, and for one with anything but tensors by their names."""
        if not file.stat().st_size:
            raise EvalEngineError(f"{file}: empty file; {FIX}")
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        except Exception as error:  # what a damaged pickle raises is not limited to one type
            if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
                # torch's message advises to load the file by running its code.
                raise EvalEngineError(
                    f"{file}: damaged, or it has Python objects other than tensors, which are not loaded; "
                    "convert the checkpoint to safetensors where you trust it"
                ) from error
            raise EvalEngineError(f"{file}: damaged or truncated PyTorch file ({one_line(error)}); {FIX}") from error
        if not isinstance(content, dict):
            raise EvalEngineError(f"{file}: has a {type(content).__name__}, not tensors by their names; {FIX}")
        if not content:
            raise EvalEngineError(f"{file}: has no tensors; {FIX}")
        for name, tensor in content.items():
            if not isinstance(name, str):
                raise EvalEngineError(
                    f"{file}: has the key {shown(name)} of type {type(name).__name__}, not a tensor's name; "
                    "save the model's state_dict"
                )
            if not isinstance(tensor, Tensor):
                raise EvalEngineError(
                    f"{file}: {plain(name)} is {type(tensor).__name__}, not a tensor; save the model's state_dict"
                )
            dense = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
            if not dense or tensor.device.type != "cpu":
                raise EvalEngineError(f"{file}: {plain(name)} is not a dense tensor; save it as one")
        self._tensors: dict[str, Tensor] = {name: tensor.detach() for name, tensor in content.items()}

    def keys(self) -> list[str]:
        return [*self._tensors]

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name].contiguous()

    def get_slice(self, name: str) -> _PyTorchTensor:
        return _PyTorchTensor(self._tensors[name])


@dataclass(frozen=True)
class _PyTorchTensor:
    tensor: Tensor

    def get_dtype(self) -> str:
        return _STORED_DTYPES.get(self.tensor.dtype, str(self.tensor.dtype))

    def get_shape(self) -> list[int]:
        return [*self.tensor.shape]

    def __getitem__(self, rows: slice) -> Tensor:
        return self.tensor[rows]
