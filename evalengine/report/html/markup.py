"""Elements of a page as JSON values, which page.js builds, and their text for a file or a notebook.

Text from outside is data everywhere: `json_text` escapes it in a page, `markup` in a file.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from typing import Any

# Characters that HTML cannot hold or a reader could not see: controls, lone surrogates, and marks that reorder text.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
# Text, an element (see `tag`), one of page.js's or plots.js's components, or several of these.
Node = str | int | None | Sequence[Any] | dict[str, Any]


def tag(name: str, /, *children: Node, **attributes: str | int | float | bool | None) -> dict[str, Any]:
    """An element: {"is": name, attributes, "in": children}.

    attributes: `class_` is class, `data_x` data-x, `view_box` is SVG's viewBox; True is an attribute without a value,
    None and False leave it out. There is no `style`: the page's policy forbids it.
    """
    assert "style" not in attributes and not any(key.startswith("on") for key in attributes), "forbidden by the policy"
    written = {
        "viewBox" if key == "view_box" else key.rstrip("_").replace("_", "-"): value
        for key, value in attributes.items()
        if value is not None and value is not False
    }
    return {"is": name, **written, "in": [child for child in children if child is not None]}


def markup(node: Node) -> str:
    """An element as HTML or SVG, texts escaped; what cannot be seen is written as its escape (U+202E as \\u202e)."""
    if not isinstance(node, dict):
        return html.escape(visible(str(node)))
    inner = node["in"] if node["is"] == "style" else map(markup, node["in"])
    written = "".join(f' {key}="{markup(value)}"' for key, value in node.items() if key not in ("is", "in"))
    return f"<{node['is']}{written}>{''.join(inner)}</{node['is']}>"


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
