"""The frame of a page: head, policy, sections, embedded data. `evalengine/report/html/assets/` holds style and scripts.

Everything a page needs is in its file. Its Content-Security-Policy names the hashes of its own scripts and style and
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

from evalengine.errors import EvalEngineError
from evalengine.records.evidence import sealed_page
from evalengine.records.folder import write_whole
from evalengine.records.manifest_data import Manifest
from evalengine.report.html.markup import Child, Markup, data_script, join, json_text, tag
from evalengine.util.forked import spread
from evalengine.version import __version__

Item = TypeVar("Item")
Section = tuple[str, str, Markup]  # anchor, title, element
BLOCK = 64  # items in a compressed block, all of which are unpacked to open one
LEAST = 16  # blocks that earn a process: some 0.15 s of work
LOGO = "M2 12h4l3-8 4 16 3-11 2 3h4"


class Page:
    """One HTML file. Add sections in reading order, then `write`."""

    def __init__(self, title: str, eyebrow: str = "Evaluation run", scripts: Sequence[str] = ()) -> None:
        """title: names the thing, in the tab and as the heading. eyebrow: what kind of thing it is.

        scripts: assets to run after page.js, in order, such as "samples.js".
        """
        self.title = title
        self.eyebrow = eyebrow
        self._scripts = ["page.js", "panel.js", "grid.js", *scripts]
        self._head: list[Markup] = []
        self.sections: list[Section] = []
        self._data: list[Markup] = []
        self._names: set[str] = set()

    def lead(self, *children: Child) -> None:
        """Adds what stands above all sections, the verdict first."""
        self._head.append(join(*children))

    def section(self, name: str, title: str, *children: Child, note: Child = None) -> None:
        """Adds a section, listed in the navigation. name: its anchor, unique. note: a sentence under the title."""
        about = tag("p", note, class_="note") if note is not None else None
        self.add([(name, title, tag("section", tag("h2", title), about, *children, id=name))])

    def add(self, sections: Sequence[Section]) -> None:
        """Adds sections that another page made, such as one in another process."""
        for section in sections:
            self._claim(section[0])
            self.sections.append(section)

    def data(self, name: str, value: Any) -> None:
        """Adds JSON for scripts, which `report.data(name)` gives back. Use lists where keys come from outside."""
        self._claim(f"data-{name}")
        self._data.append(data_script(name, value))

    def blocks(self, name: str, items: Sequence[Any]) -> None:
        """Adds long items (texts), compressed: `await report.blocks(name).get(i)` unpacks the block that has item i."""
        self.packed_blocks(name, packed(items), len(items))

    def packed_blocks(self, name: str, blocks: Sequence[str], items: int) -> None:
        """Adds long items, `items` in all, as `blocks` does; packed already, by `pack`, `BLOCK` items in each."""
        for number, text in enumerate(blocks):
            self._data.append(tag("script", Markup(text), type="text/plain", id=f"block-{name}-{number}"))
        self.data(f"blocks-{name}", {"items": items, "size": BLOCK})

    def render(self) -> str:
        """The whole HTML file."""
        style, scripts = asset("page.css"), [asset(name) for name in self._scripts]
        links = [tag("a", title, href=f"#{name}") for name, title, _ in self.sections]
        logo = tag("svg", tag("path", d=LOGO), view_box="0 0 24 24", class_="logo", aria_hidden="true")
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", **{"http-equiv": "Content-Security-Policy", "content": _policy(style, scripts)}),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("meta", name="referrer", content="no-referrer"),
            tag("meta", name="generator", content=f"evalengine {__version__}"),
            tag("title", f"{self.title} · {self.eyebrow}"),
            tag("style", Markup(style)),
        )
        top = tag("header", tag("p", logo, self.eyebrow, class_="eyebrow"), tag("h1", self.title), *self._head)
        body = tag(
            "body",
            tag("nav", *links, aria_label="Sections") if len(links) > 1 else None,
            tag("main", top, *(section for _, _, section in self.sections)),
            tag("footer", f"evalengine {__version__}. This file holds everything it shows and fetches nothing."),
            *self._data,
            *(tag("script", Markup(script)) for script in scripts),
        )
        return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"

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
    allowed = " ".join(_source(script) for script in scripts)
    return f"default-src 'none'; script-src {allowed}; style-src {_source(style)}; base-uri 'none'; form-action 'none'"


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"
