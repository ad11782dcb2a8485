"""What differs between two plain JSON values: identities, settings, parts of a manifest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str, ...]  # names, from the outermost object in


def differing(old: Any, new: Any, where: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """(path of names, value in `old`, value in `new`) of the plain JSON values that differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            yield from differing(old.get(name), new.get(name), (*where, name))
    elif old != new:
        yield where, old, new


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """One sentence for each value that differs between two plain JSON values, which stand at `where`."""
    for path, was, now in differing(old, new, (where,) if where else ()):
        yield f"{'.'.join(path)} was {json.dumps(was)}, is {json.dumps(now)}"
