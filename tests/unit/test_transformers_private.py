"""transformers' private names: this version has each of them, or the failure says what takes its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from transformers import PreTrainedModel

from evalengine.models.hf_module import source
from evalengine.models.hf_module.source import FIXES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", FIXES)
def test_this_transformers_has_the_name(name: str) -> None:
    assert hasattr(PreTrainedModel, name), (
        f"transformers {transformers.__version__} has no PreTrainedModel.{name}; in {source.__name__} {FIXES[name]}"
    )


def test_no_other_file_uses_one() -> None:
    pattern = re.compile(r"\.(" + "|".join(FIXES) + r")\b")
    files = [path for folder in ("evalengine", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    users = {path for path in files if pattern.search(path.read_text(encoding="utf-8"))}
    assert users == {Path(source.__file__)}
