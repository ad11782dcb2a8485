"""The configuration files that come with the package, by group; listed without Hydra, so that help answers at once."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError

CONF = "evalengine.conf"
ONE_OF = ("model", "engine", "cluster")  # groups of which a run has one: Hydra would mix the files of several
GROUPS = ("task", *ONE_OF, "experiment")
PACKAGE = re.compile(r"#+\s*@package\s+(\S+)")


def available(group: str) -> list[str]:
    """The names of a configuration group ("task", "model", "engine"), sorted."""
    folder = files(CONF) / group
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def shipped_model(name: str) -> dict[str, Any] | None:
    """The settings of `conf/model/<name>.yaml`; None for a text that names no such file.

    Raises ConfigError if a folder or file here has the same name: which of the two models is meant is not guessed.
    """
    if name not in available("model"):
        return None
    from evalengine.util.plain_files import read_yaml

    settings: dict[str, Any] = read_yaml(Path(str(files(CONF) / "model" / f"{name}.yaml")))
    if Path(name).exists():
        raise ConfigError(
            f"model={name}: is the name of a model that comes with the package, and of {Path(name).resolve()}; write "
            f"./{name} for that, or {settings['path']} for the other"
        )
    return settings


def package_of(path: Path) -> str | None:
    """The package that the file's `@package` line names. Hydra reads that line only if it precedes all other lines,
    comments included."""
    from evalengine.util.plain_files import read_bytes

    for line in filter(str.strip, read_bytes(path).decode().splitlines()):
        if not re.match(r"\s*#\s*@", line):
            return None
        if match := PACKAGE.match(line.strip()):
            return match[1]
    return None
