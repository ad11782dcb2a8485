"""Bitwise equality for tests: bytes, not values. -0 is not +0, and a NaN equals only a NaN of the same bits."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from evalengine.errors import ConfigError


def _bytes_of(x: Tensor | np.ndarray) -> tuple[np.ndarray, tuple[int, ...], str]:
    """The elements' bytes (uint8 [elements, item size]), the shape, and the dtype's name."""
    if isinstance(x, Tensor):
        flat = x.detach().cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().reshape(flat.numel(), flat.element_size())
        return raw, tuple(x.shape), str(x.dtype)
    flat_array = np.ascontiguousarray(x).reshape(-1)
    return flat_array.view(np.uint8).reshape(flat_array.size, flat_array.itemsize), x.shape, str(x.dtype)


def count_differing(actual: Tensor | np.ndarray, expected: Tensor | np.ndarray) -> int:
    """How many elements' bytes differ; shapes and dtypes must agree."""
    left, left_shape, left_dtype = _bytes_of(actual)
    right, right_shape, right_dtype = _bytes_of(expected)
    assert (left_shape, left_dtype) == (right_shape, right_dtype), (
        f"{left_dtype}{list(left_shape)} against {right_dtype}{list(right_shape)}"
    )
    return int(_differ(left, right).sum())


def _differ(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Which elements differ in a byte: uint8 [elements, item size], twice -> bool [elements]."""
    size = left.shape[1]
    if size in (2, 4, 8):  # comparing byte by byte takes thirty times as long
        left, right = left.view(f"u{size}"), right.view(f"u{size}")
    return (left != right).any(-1) if left.shape[1] > 1 else (left != right)[:, 0]


def assert_bitwise_equal(actual: Tensor | np.ndarray, expected: Tensor | np.ndarray, what: str = "") -> None:
    """Fails with the first differing coordinate, both values there (and their bytes), how many differ, and `what`."""
    different = count_differing(actual, expected)
    if not different:
        return
    left, shape, _ = _bytes_of(actual)
    right, _, _ = _bytes_of(expected)
    first = int(_differ(left, right).argmax())
    pairs = ((actual, left), (expected, right))
    where = tuple(int(i) for i in np.unravel_index(first, shape)) if shape else ()
    actual_text, expected_text = (f"{x[where].item()!r} ({raw[first].tobytes()[::-1].hex()})" for x, raw in pairs)
    total = f"{what}: {different} of {len(left)}" if what else f"{different} of {len(left)}"
    raise AssertionError(f"{total} elements differ; first at {where}: {actual_text} against {expected_text}")


def check_that_edits_are_found(file: Path, count: int, read: Callable[[Path], object]) -> None:
    """Another character at any of so many places makes `read` raise `ConfigError` with the file's name."""
    whole, draw = file.read_text(encoding="utf-8"), random.Random(0)
    for place in draw.sample(range(len(whole)), count):
        new = draw.choice([c for c in 'aZ0}"-,x9' if c != whole[place]])
        file.write_text(whole[:place] + new + whole[place + 1 :], encoding="utf-8")
        with pytest.raises(ConfigError, match=re.escape(file.name)):
            read(file)


def check_that_a_cut_is_found(file: Path, part: float, read: Callable[[Path], object], why: str) -> None:
    """Of the file that share is left, or all but so many characters: `read` raises `ConfigError` that says why."""
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole[: int(len(whole) * part) if part >= 0 else int(part)], encoding="utf-8")
    with pytest.raises(ConfigError, match=why):
        read(file)
