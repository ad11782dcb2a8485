"""JSON files with a hash of their content: small evidence that lives in git or travels between machines. And what
differs between two plain JSON values: identities, settings, parts of a manifest.

`sha256` is over the rest as canonical JSON. The hash finds damage and careless edits; it is no signature.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError, readable
from evalengine.util.plain_files import parse_json, read_bytes

Names = tuple[str, ...]  # names, from the outermost object in


@dataclass(frozen=True)
class SealedFormat:
    """One kind of sealed file."""

    format: str  # the name that the file gives itself
    version: int
    name: str  # the name for people
    writing: str  # the command that writes one

    def seal(self, content: Mapping[str, Any]) -> str:
        """The file's text: a line per top-level key, so that a diff in git shows which part changed."""
        whole = {**content, "format": self.format, "version": self.version}
        whole["sha256"] = content_sha256(whole)
        lines = [f"{json.dumps(key)}: {canonical(value)}" for key, value in sorted(whole.items())]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def claimed_by(self, path: Path) -> bool:
        """Whether the file names this format, damaged or not."""
        try:
            return f'"{self.format}"'.encode() in read_bytes(path)
        except (OSError, ValueError):
            return False

    def unseal(self, path: Path, fix: str) -> dict[str, Any]:
        """A file's content. Raises `ConfigError` if it is none, truncated, damaged or edited, or of another version."""
        try:
            with readable(path):
                content = parse_json(read_bytes(path).decode("utf-8"))
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON, so truncated, damaged or half merged ({error}); {fix}") from error
        if not isinstance(content, dict) or content.get("format") != self.format:
            raise ConfigError(f"{path}: not a {self.name} (its format is not {self.format}); write one: {self.writing}")
        if content.get("version") != self.version:
            version = str(content.get("version"))[:20]
            raise ConfigError(
                f"{path}: version {version} of the format, this evalengine reads {self.version}; update evalengine, or "
                f"write the {self.name} anew"
            )
        seal = str(content.pop("sha256", None))[:64]
        if seal != (now := sha256_of(content)):
            raise ConfigError(f"{path}: its content gives sha256 {now}, not {seal}: it was edited or damaged; {fix}")
        return content


def canonical(value: Any) -> str:
    """Plain JSON values as canonical text, which is what is hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def sha256_of(content: Mapping[str, Any]) -> str | None:
    """`content_sha256` of what a file held; None for a NaN or an infinity, which JSON does not have."""
    try:
        return content_sha256(content)
    except ValueError:
        return None


def content_sha256(content: Mapping[str, Any]) -> str:
    """The hash that a sealed file with this content (its format and version included) carries."""
    return hashlib.sha256(canonical(content).encode()).hexdigest()


def differing(old: Any, new: Any, where: Names = ()) -> Iterator[tuple[Names, Any, Any]]:
    """(path of names, value in `old`, value in `new`) of the plain JSON values that differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            yield from differing(old.get(name), new.get(name), (*where, name))
    elif old != new:
        yield where, old, new


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """One sentence for each value that differs between two plain JSON values. where: their name."""
    for path, was, now in differing(old, new, (where,) if where else ()):
        yield f"{'.'.join(path)} was {json.dumps(was)}, is {json.dumps(now)}"


def run_id_of(identity: Mapping[str, Any]) -> str:
    """The first 8 hex digits of the identity's SHA-256, which name a run."""
    return content_sha256(identity)[:8]
