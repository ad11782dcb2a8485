"""Finds policies, by name among those that come with evalengine, or by file; `extends` builds on another policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.report.gate.policies import RULES, Policy
from evalengine.report.gate.policy_reader import near, parse_policy, quoted
from evalengine.util.plain_files import read_yaml

POLICIES = Path(__file__).parents[2] / "conf" / "gate"


def available() -> list[str]:
    """The names of the policies that come with evalengine, sorted."""
    return sorted(file.stem for file in POLICIES.glob("*.yaml"))


def load_policy(name: str) -> Policy:
    """A policy by name or by file, on top of what it extends. Raises `ConfigError` with everything that is wrong."""
    path, value = _read(name, Path(), f"--policy {name}")
    chain = [path]
    while isinstance(value, dict) and "extends" in value:
        parent, base = _parent(value.pop("extends"), chain)
        chain.append(parent)
        value = merged(base, value)
    where = " <- ".join(str(file) for file in chain)  # a problem may be in any of them
    return parse_policy(value, path.stem, where)


def merged(base: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` on top of `base`: mappings are merged key by key, `allow` adds to what the base allows, and everything else
    (numbers, texts, other lists, null) replaces what the base says. A rule of another kind replaces the base's rule.
    """
    base = dict(base) if isinstance(base, dict) else {}
    if any(key in own for key in RULES):
        base = {key: value for key, value in base.items() if key not in RULES or key in own}
    return _merged(base, own) | _allowed(base.get("allow"), own.get("allow"))


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in own.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        result[key] = _merged(base[key], value) if both else value
    return result


def _allowed(base: Any, own: Any) -> dict[str, Any]:
    """The merged `allow`; empty where one of the two is no list, which the reader will report."""
    if not isinstance(base, list) or not isinstance(own, list):
        return {}
    return {"allow": [*base, *(part for part in own if part not in base)]}


def _parent(name: Any, chain: list[Path]) -> tuple[Path, Any]:
    """The policy that the last of `chain` extends: a name, or a file beside it."""
    here = chain[-1]
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{here}: extends: is {quoted(name)}; name a policy ({', '.join(available())}) or a file")
    path, value = _read(name, here.parent, f"{here}: extends: {name}")
    if path.resolve() in [file.resolve() for file in chain]:
        turns = " -> ".join(str(file) for file in [*chain, path])
        raise ConfigError(f"{here}: extends: {name}: these policies extend each other in a circle: {turns}")
    return path, value


def _read(name: str, folder: Path, where: str) -> tuple[Path, Any]:
    path = POLICIES / f"{name}.yaml" if name in available() else folder / name
    try:
        value = read_yaml(path)
    except OSError as error:
        raise ConfigError(f"{where}: no such policy or file ({error}); {near(name, available())}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    return path, value
