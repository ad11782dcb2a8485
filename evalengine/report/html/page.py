"""The frame of a page: policy, sections, embedded data. `assets/` holds the shell, its style, and the scripts that
build everything from one JSON value.

Everything a page needs is in its file. Its Content-Security-Policy names the hashes of its scripts and style and
forbids all else: other scripts, event handlers, style attributes, images, frames, forms, every request.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import jinja2

from evalengine.errors import EvalEngineError
from evalengine.records.evidence import sealed_page
from evalengine.records.folder import write_whole
from evalengine.records.manifest_data import Manifest
from evalengine.report.html.markup import Node, json_text, visible
from evalengine.util.forked import spread
from evalengine.version import __version__

Item = TypeVar("Item")
BLOCK = 64  # items in a compressed block, all of which are unpacked to open one
LEAST = 16  # blocks that earn a process: some 0.15 s of work


class Page:
    """One HTML file. Add sections in reading order, then `write`."""

    def __init__(self, title: str, eyebrow: str = "Evaluation run", scripts: Sequence[str] = ()) -> None:
        """title: names the thing, in the tab and as the heading. eyebrow: what kind of thing it is.

        scripts: assets to run after those of every page, in order, such as "samples.js".
        """
        self._scripts = ["page.js", "plots.js", "panel.js", "grid.js", *scripts]
        self._content: dict[str, Any] = {"title": title, "eyebrow": eyebrow, "lead": [], "sections": [], "data": {}}
        self._blocks: list[tuple[str, str]] = []
        self._names: set[str] = set()

    def lead(self, *children: Node) -> None:
        """Adds what stands above all sections, the verdict first."""
        self._content["lead"] += children

    def section(self, name: str, title: str, *children: Node, note: Node = None) -> None:
        """Adds a section, listed in the navigation. name: its anchor, unique. note: a sentence under the title."""
        self._claim(name)
        self._content["sections"].append({"name": name, "title": title, "note": note, "in": children})

    def data(self, name: str, value: Any) -> None:
        """Adds JSON for scripts, which `report.data(name)` gives back. Use lists where keys come from outside."""
        self._claim(f"data-{name}")
        self._content["data"][name] = value

    def blocks(self, name: str, items: Sequence[Any]) -> None:
        """Adds long items (texts), compressed: `await report.blocks(name).get(i)` unpacks the block that has item i."""
        self.packed_blocks(name, packed(items), len(items))

    def packed_blocks(self, name: str, blocks: Sequence[str], items: int) -> None:
        """Adds long items, `items` in all, as `blocks` does; packed already, by `pack`, `BLOCK` items in each."""
        self._blocks += [(f"block-{name}-{number}", text) for number, text in enumerate(blocks)]
        self.data(f"blocks-{name}", {"items": items, "size": BLOCK})

    def render(self) -> str:
        """The whole HTML file."""
        style, scripts = asset("page.css"), [asset(name) for name in self._scripts]
        shell = files("evalengine.report.html").joinpath("assets/page.jinja").read_text(encoding="utf-8")
        headline = next((node["word"] for node in self._content["lead"] if node and node["is"] == "verdict"), "")
        words = {"title": self._content["title"], "eyebrow": self._content["eyebrow"], "headline": headline}
        return jinja2.Environment(autoescape=True, keep_trailing_newline=True).from_string(shell).render(
            **{name: visible(text) for name, text in words.items()}, version=__version__, style=style, scripts=scripts,
            policy=_policy(style, scripts), payload=json_text(self._content), blocks=self._blocks,
        )  # fmt: skip

    def write(self, path: Path, manifest: Manifest | None = None) -> int:
        """Writes the file, whole or not at all; returns its size in bytes. Raises `EvalEngineError`.

        manifest: that of the page's run, to which the page's last line then binds it (`records.evidence`).
        """
        content = sealed_page(self.render(), manifest or Manifest({}))
        try:
            write_whole(path, lambda scratch: scratch.write_bytes(content))
        except OSError as error:
            raise EvalEngineError(
                f"could not write {path}: {error.strerror or error}; free the place, or name another file"
            ) from error
        return len(content)

    def _claim(self, name: str) -> None:
        assert name not in self._names, f"two parts of the page are called {name}"
        self._names.add(name)


def packed(items: Sequence[Any]) -> list[str]:
    """Items, `BLOCK` in each string. 20,000 5-shot gsm8k samples are 105 MB of JSON and 42 MB packed; by columns, with
    like texts side by side, they take 45 MB: gzip's window already reaches the next item."""
    return spread(lambda blocks: [pack(block) for block in blocks], in_blocks(items), LEAST)


def in_blocks(items: Sequence[Item]) -> list[Sequence[Item]]:
    """The items, `BLOCK` at a time."""
    return [items[start : start + BLOCK] for start in range(0, len(items), BLOCK)]


def pack(block: Sequence[Any]) -> str:
    """JSON values as one string: JSON, gzip, base64."""
    text = json_text(block).encode("utf-8")
    return base64.b64encode(gzip.compress(text, compresslevel=6, mtime=0)).decode("ascii")


def asset(name: str) -> str:
    """The text of a file in assets/, which must not end the element that holds it."""
    text = files("evalengine.report.html").joinpath("assets").joinpath(name).read_text(encoding="utf-8")
    assert "</" not in text, f"{name}: '</' would end the element that holds it"
    return text


def _policy(style: str, scripts: Sequence[str]) -> str:
    sources = [base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode() for text in (style, *scripts)]
    own, *allowed = (f"'sha256-{source}'" for source in sources)
    return f"default-src 'none'; script-src {' '.join(allowed)}; style-src {own}; base-uri 'none'; form-action 'none'"
