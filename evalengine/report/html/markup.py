"""HTML and SVG from Python. A `str` is text and is escaped; only `tag` and `data_script` make markup.

Joining markup with "+" or an f-string gives a plain `str` again, which the next `tag` escapes: such a mistake shows on
the page, and lets no foreign markup in.
"""

from __future__ import annotations

import html
import json
import re
from typing import Any

VOID = frozenset(("br", "col", "input", "link", "meta"))
# Characters that HTML cannot hold or a reader could not see: controls, lone surrogates, and marks that reorder text.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


class Markup(str):
    """HTML that goes into the page as it is."""

    __slots__ = ()


Child = str | int | None


def tag(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """An element, `<name attributes>children</name>`.

    children: `Markup` as it is, other text and numbers escaped, None left out. attributes: `class_` is class, `for_`
    for, `data_x` data-x, `view_box` is SVG's viewBox; True is an attribute without a value, None and False leave it
    out. There is no `style`: the page's policy forbids it.
    """
    assert "style" not in attributes and not any(key.startswith("on") for key in attributes), "forbidden by the policy"
    written = "".join(
        _attribute(key, value) for key, value in attributes.items() if value is not None and value is not False
    )
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{''.join(escape(child) for child in children if child is not None)}</{name}>")


def escape(child: str | int) -> Markup:
    """Text as markup; `Markup` unchanged. What cannot be seen is written as its escape (U+202E as \\u202e)."""
    return child if isinstance(child, Markup) else Markup(html.escape(visible(str(child))))


def join(*parts: Child) -> Markup:
    """Several children without an element around them."""
    return Markup("".join(escape(part) for part in parts if part is not None))


def visible(text: str) -> str:
    """The text, with every character that cannot be seen, or that reorders its neighbours, written as its escape."""
    return UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def json_text(value: Any) -> str:
    """JSON that holds no `<`, `>` or `&`: it cannot end its element, whatever it says.

    What cannot be seen is escaped: lone surrogates, NUL and U+2028 pass unharmed. Other characters stay, an emoji in 4
    bytes and not in 12. Raises `ValueError` for NaN and infinities, which JSON lacks.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return text if text.isascii() else UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def data_script(name: str, value: Any) -> Markup:
    """A value for the page's scripts: `<script type="application/json" id="data-NAME">`, which is never run."""
    return tag("script", Markup(json_text(value)), type="application/json", id=f"data-{name}")


def _attribute(key: str, value: str | int | float | bool) -> str:
    name = "viewBox" if key == "view_box" else key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(visible(str(value)))}"'
