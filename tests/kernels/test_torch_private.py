"""torch's private names: this torch has each of them, or the failure says what takes its place."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from evalengine.kernels import torch_private
from evalengine.kernels.torch_private import FIXES

ROOT = Path(__file__).parents[2]
# The keys of the dispatcher are texts elsewhere; their class is private.
NAMES = sorted({name.rpartition(".")[2] for name in FIXES} - {"CompositeImplicitAutograd"})


def found(name: str) -> Any:
    """What the dotted name stands for. Raises AttributeError without it."""
    parts = name.split(".")
    place: Any = torch
    for number, part in enumerate(parts[1:], 2):
        try:
            place = getattr(place, part)
        except AttributeError:
            try:
                place = import_module(".".join(parts[:number]))
            except ImportError as error:
                raise AttributeError(name) from error
    return place


@pytest.mark.parametrize("name", FIXES)
def test_this_torch_has_the_name(name: str) -> None:
    if name.startswith("torch._C._cuda") and torch.version.cuda is None:
        pytest.skip("torch is built without CUDA")
    try:
        found(name)
    except AttributeError:
        pytest.fail(f"torch {torch.__version__} has no {name}; in kernels/torch_private.py {FIXES[name]}")


def test_a_missing_name_is_noticed() -> None:
    with pytest.raises(AttributeError):
        found("torch._C._no_such_name")


def test_no_other_file_uses_one() -> None:
    pattern = re.compile(r"torch\._C\b|\b(" + "|".join(NAMES) + r")\b")
    files = [path for folder in ("evalengine", "kernels", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    own = Path(torch_private.__file__).resolve()
    users = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if path.resolve() != own and (match := pattern.search(path.read_text(encoding="utf-8")))
    }
    assert users == set()
