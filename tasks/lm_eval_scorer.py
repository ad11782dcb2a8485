"""Calls scorers of the installed lm-eval for shipped tasks: they are other authors' code, which is not copied here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from evalengine.config.schema import TaskConfig
from evalengine.tasks.lm_eval_quiet import quiet
from evalengine.tasks.lm_eval_yaml import installed_content, installed_file


def scorer_problems(config: TaskConfig, extra: str, packages: Sequence[str]) -> Iterator[str]:
    """Yields why the scorer cannot be called; each problem begins with the setting.

    extra: the extra of this package that installs the scorer. packages: the modules that it imports beside lm-eval's.
    """
    file = config.template.lm_eval_file
    if file is None:
        yield (
            f"cls={config.cls}: is for this package's tasks alone, whose template.lm_eval_file names lm-eval's scorer; "
            "use one of them, or a class of your own (cls: mypackage.module:Class)"
        )
        return
    missing = [name for name in ("lm_eval", *packages) if find_spec(name) is None]
    if missing:
        yield (
            f"cls: answers are scored by lm-eval's own code, and {', '.join(missing)} is not installed: pip install "
            f"'evalengine[{extra}]'"
        )
        return
    try:
        current = (installed_content(file).get("metadata") or {}).get("version")
    except ValueError as error:
        yield f"template.{error}"
        return
    if current != config.version:
        yield (
            f"version={config.version}: lm-eval {version('lm-eval')} has version {current} of this task, and scores by "
            f"that: pip install -U 'evalengine[{extra}]', or task.version={current} to take it as it is"
        )


def scorer_module(name: str) -> Any:
    """A module below lm_eval.tasks. Importing it imports all of lm-eval, which takes seconds."""
    with quiet():
        return import_module(f"lm_eval.tasks.{name}")


def scorer_definition(files: Sequence[str], packages: Sequence[str]) -> dict[str, Any]:
    """Identifies what decides the scores: a SHA-256 of the scorer's files (below lm-eval's tasks/), and the versions of
    the packages that it calls."""
    content = b"".join(installed_file(name).read_bytes() for name in files)
    versions = {name: version(name) for name in ("lm-eval", *packages)}
    return {**versions, "sha256": hashlib.sha256(content).hexdigest()}
