"""The page of the models lists the families that are registered, as their modules describe them."""

from __future__ import annotations

import re
from pathlib import Path

from evalengine.models import families
from evalengine.models.registry import MODEL_REGISTRY, Family

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def rows() -> list[str]:
    """The table's rows, in the order of the modules."""
    lines = []
    for name in families.FAMILIES:
        module = getattr(families, name)
        what = re.split(r"\.(?=\s|$)", str(module.__doc__).strip())[0].replace("\n", " ")
        for family in (value for value in vars(module).values() if isinstance(value, Family)):
            gguf = f"`{family.gguf.architecture}`" if family.gguf else ""
            lines.append(f"| `{family.architecture}` | `{family.model_type}` | {gguf} | {what} |")
    return lines


def test_the_page_lists_every_family() -> None:
    listed = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| `\w+For\w+` \|", line)]
    assert listed == rows() and len(listed) == len(MODEL_REGISTRY) >= 21
