"""Reads JSON and YAML that came from outside: anything wrong with them raises a ValueError with one sentence.

The libraries' own readers raise other errors for nesting beyond Python's recursion limit, wait for ever for a
named pipe, and expand YAML aliases until the memory ends (nine lines of nine aliases each are 3.5 * 10^8 nodes).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK = 1 << 22  # bytes read at once
YAML_SUFFIXES = (".yaml", ".yml")
MAX_YAML_NODES = 100_000  # nodes after aliases are expanded; the longest shipped file has fewer than 1,000
MAX_YAML_DEPTH = 100
MAX_JSON_DEPTH = 200  # recursive functions walk the values, and Python allows 1,000 nested calls


def parse_json(text: str | bytes) -> Any:
    """`json.loads`. Raises only ValueError, also for bytes that are no UTF-8, deep nesting and long integers."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
    except ValueError as error:
        raise _for_author(error) from error
    brackets = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, brackets)) > MAX_JSON_DEPTH and not _is_flatter(value, MAX_JSON_DEPTH):  # type: ignore[arg-type]
        raise ValueError("its values are nested too deeply")
    return value


def read_json(path: Path) -> Any:
    """The file's value. Raises OSError, or ValueError if it is no JSON or no regular file."""
    return parse_json(read_bytes(path))


@dataclass(frozen=True)
class Tagged:
    """A YAML value with an unknown tag, as `!function utils.f`; nothing is looked up by its name."""

    tag: str
    value: str

    def __str__(self) -> str:
        return f"{self.tag} {self.value}"


def read_yaml(path: Path, *, tags: bool = False) -> Any:
    """The file's value, None for an empty one. tags: unknown tags become `Tagged` values.

    Raises OSError, or ValueError if the file is no YAML, is no regular file, grows beyond `MAX_YAML_NODES` through its
    aliases, holds half of a surrogate pair, or an unknown tag without `tags`.
    """
    import yaml

    text = read_bytes(path).decode("utf-8")
    try:
        loader = (_tag_loader() if tags else yaml.SafeLoader)(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if (size := _expanded_size(node)) > MAX_YAML_NODES:
            raise ValueError(f"its aliases expand it to {size:,} values, more than {MAX_YAML_NODES:,}")
        return loader.construct_document(node)
    except ValueError as error:
        raise _for_author(error) from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
    except (TypeError, AttributeError, OverflowError) as error:  # as for a mapping that is a key, or an impossible date
        raise ValueError(str(error)) from error


def _tag_loader() -> Any:
    """PyYAML's safe loader, which makes a `Tagged` of each value with an unknown tag."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def tagged(_: Any, suffix: str, node: Any) -> Tagged:
        return Tagged(f"!{suffix}", str(node.value) if isinstance(node, yaml.ScalarNode) else "...")

    Loader.add_multi_constructor("!", tagged)
    return Loader


def read_bytes(path: Path) -> bytes:
    """The file's content. Raises OSError, or ValueError for a pipe or a device, which might never end."""
    if path.exists() and not path.is_dir() and not path.is_file():
        raise ValueError("it is not a regular file")
    return path.read_bytes()


def _is_flatter(value: Any, depth: int) -> bool:
    """Whether no value lies deeper than `depth` levels."""
    level = [value]
    for _ in range(depth):
        level = [inner for outer in level if isinstance(outer, list | dict)
                 for inner in (outer.values() if isinstance(outer, dict) else outer)]  # fmt: skip
        if not level:
            return True
    return False


def _for_author(error: ValueError) -> ValueError:
    """The error in words for the file's author: Python's own message names a function that raises a limit."""
    return ValueError("it holds an integer of thousands of digits") if "integer string" in str(error) else error


def _expanded_size(root: Any) -> int:
    """How many values the YAML node stands for, with every alias replaced by the value it names."""
    import yaml

    sizes: dict[int, int] = {}
    unfinished: set[int] = set()

    def size(node: Any, depth: int) -> int:
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in unfinished:
            raise ValueError("one of its aliases names a value that holds the alias itself")
        if depth > MAX_YAML_DEPTH:
            raise ValueError("its values are nested too deeply")
        unfinished.add(id(node))
        children: list[Any] = []
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if twice := next((key for key in keys if keys.count(key) > 1), None):
                raise ValueError(f"the key {twice[:60]!r} stands twice in one mapping, line {node.start_mark.line + 1}")
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        elif any("\ud800" <= char <= "\udfff" for char in node.value):
            raise ValueError(f"line {node.start_mark.line + 1} holds half of a surrogate pair, which is no character")
        sizes[id(node)] = 1 + sum(size(child, depth + 1) for child in children)
        unfinished.discard(id(node))
        return sizes[id(node)]

    return size(root, 0)


_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.DOTALL | re.IGNORECASE)


def gguf_parts(file: Path) -> list[Path]:
    """The files of a GGUF model: `file`, and the further parts of a split model if that is the first by its name."""
    match = _PART.fullmatch(file.name)
    if match is None or int(match[2]) != 1:
        return [file]
    count = int(match[3])
    return [file, *(file.with_name(f"{match[1]}-{i:05}-of-{count:05}{match[4]}") for i in range(2, count + 1))]


def is_later_part(file: Path) -> bool:
    """Whether a file is, by its name, a part of a split GGUF model, and not the first."""
    return (match := _PART.fullmatch(file.name)) is not None and int(match[2]) > 1


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of the file's bytes. Raises `OSError`."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint(files: list[Path]) -> str:
    """SHA-256 (hex) over (name, content) of the files, in name order."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.name):
        digest.update(file.name.encode() + b"\0" + bytes.fromhex(file_sha256(file)))
    return digest.hexdigest()


def deep_merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one file over those of another: mappings are merged name by name, anything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        below = base.get(key)
        result[key] = deep_merged(below if isinstance(below, dict) else {}, value) if isinstance(value, dict) else value
    return result
