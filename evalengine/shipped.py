"""The configuration files that come with the package, by group; listed without Hydra, so that help answers at once."""

from __future__ import annotations

from importlib.resources import files

CONF = "evalengine.conf"


def available(group: str) -> list[str]:
    """The names of a configuration group ("task", "model", "engine"), sorted."""
    folder = files(CONF) / group
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
