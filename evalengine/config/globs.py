"""`model.path=glob('out/checkpoint-*')`: a sweep over the folders that a pattern matches."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from hydra.core.override_parser.types import Glob, Override

from evalengine.config.words import written
from evalengine.errors import ConfigError

SETTING = "model.path"


def with_folders(parsed: Sequence[Override]) -> list[str]:
    """The overrides' texts, with a glob of models replaced by the folders and .gguf files that it matches,
    sorted with numbers by value (checkpoint-900 before checkpoint-1000).

    Raises `ConfigError` for a pattern that matches nothing.
    """
    return [_listed(override) if _is_glob(override) else str(override.input_line) for override in parsed]


def _is_glob(override: Override) -> bool:
    return override.key_or_group == SETTING and isinstance(override.value(), Glob)


def _listed(override: Override) -> str:
    pattern = override.value()
    assert isinstance(pattern, Glob)
    matches = {path for include in pattern.include for path in glob.glob(include) if _is_model(Path(path))}
    models = sorted((path for path in matches if not any(fnmatch(path, out) for out in pattern.exclude)), key=_natural)
    if not models:
        raise ConfigError(f"{override.input_line}: no folder and no .gguf file is called so, seen from {Path.cwd()}")
    return f"{SETTING}={','.join(map(written, models))}"


def _is_model(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".gguf"


def _natural(path: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", path)]
