"""Calls scorers of the installed lm-eval for shipped tasks: they are other authors' code, which is not copied here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, ClassVar

from evalengine.tasks.lm_eval_yaml import installed_content, installed_file
from evalengine.tasks.templated import Templated
from evalengine.util.plugins import not_installed


class ScoredByLmEval(Templated):
    """A task whose answers lm-eval's own code scores. `extra` installs the scorer."""

    limited = False  # `_scorer_problems` rejects files in lm-eval's keys
    scorer: ClassVar[tuple[str, ...]]  # its files, below lm-eval's tasks/
    packages: ClassVar[tuple[str, ...]]  # the modules that it imports in addition to lm-eval's

    def problems(self) -> list[str]:
        return [*super().problems(), *self._scorer_problems()]

    def _scorer_problems(self) -> Iterator[str]:
        config, file = self.config, self.config.template.lm_eval_file
        if file is None:
            yield (
                f"cls={config.cls}: is for this package's tasks alone, whose template.lm_eval_file names lm-eval's "
                "scorer; use one of them, or a class of your own (cls: mypackage.module:Class)"
            )
            return
        if missing := not_installed(str(self.extra), "lm_eval", *self.packages):
            yield f"cls: answers are scored by lm-eval's own code, and {missing}"
            return
        try:
            current = (installed_content(file).get("metadata") or {}).get("version")
        except ValueError as error:
            yield f"template.{error}"
            return
        if current != config.version:
            yield (
                f"version={config.version}: lm-eval {version('lm-eval')} has version {current} of this task, and "
                f"scores by that: pip install -U 'evalengine[{self.extra}]', or task.version={current} to take it as "
                "it is"
            )

    def definition(self) -> dict[str, Any]:
        """A SHA-256 of the scorer's files, and the versions of the packages that it calls."""
        content = b"".join(installed_file(name).read_bytes() for name in self.scorer)
        versions = {name: version(name) for name in ("lm-eval", *(name.replace("_", "-") for name in self.packages))}
        return {**versions, "sha256": hashlib.sha256(content).hexdigest()}
