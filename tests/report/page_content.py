"""What a page's one JSON value holds, read without a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evalengine.report.html.page import Page


def content(page: Page | Path) -> dict[str, Any]:
    """The value that page.js builds the page from."""
    text = page.render() if isinstance(page, Page) else page.read_text(encoding="utf-8")
    match = re.search(r'<script type="application/json" id="page">(.*?)</script>', text)
    assert match is not None
    value: dict[str, Any] = json.loads(match[1])
    return value


def embedded(page: Page | Path, name: str) -> Any:
    """The data that the page embeds under this name."""
    return content(page)["data"][name]


def words(node: Any) -> str:
    """The text of a page or of one of its nodes, in reading order."""
    if isinstance(node, Page | Path):
        node = [content(node)[name] for name in ("eyebrow", "title", "lead", "sections")]
    return " ".join(" ".join(_texts(node)).split())


def nodes(node: Any, **attributes: Any) -> Iterator[dict[str, Any]]:
    """The elements and components that have these attributes (`is_` is "is"), in reading order."""
    if isinstance(node, Page | Path):
        node = content(node)
    if isinstance(node, dict) and all(node.get(name.rstrip("_")) == value for name, value in attributes.items()):
        yield node
    if isinstance(node, dict | list):
        for part in node.values() if isinstance(node, dict) else node:
            yield from nodes(part, **attributes)


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for part in node:
            yield from _texts(part)
    elif isinstance(node, dict):
        of_element = "is" in node and "in" in node
        yield from _texts([part for name, part in node.items() if name == "in" or (not of_element and name != "is")])
    elif node is not None and not isinstance(node, bool):
        yield str(node)
