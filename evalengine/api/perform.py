"""Makes one run with everything that it leaves, for `python -m evalengine` and for `evalengine.evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evalengine.config.schema import Config
from evalengine.util.phases import phase
from evalengine.util.plugins import load

if TYPE_CHECKING:
    from evalengine.engine.llm import LLM


def perform(
    config: Config,
    command: Sequence[str] | None = None,
    llm: LLM | None = None,
    show: Callable[[Path], None] | None = None,
) -> Path:
    """Runs the tasks, writes the run's page and the list of all runs next to it; returns the run's folder.

    command: the command line's words. llm: an engine that is loaded already (`harness.runner.run`). show: is called
    with the folder once all this is left, and before the run counts as finished: whatever ends it earlier, the same
    command finishes it.

    Raises `ConfigError` and `EvalEngineError` as `harness.runner.run` does.
    """
    with phase("imports"):
        from evalengine.report.html.on_complete import write_list, write_page

    def on_complete(folder: Path) -> None:
        with phase("page"):
            write_page(folder)
            write_list(folder)
        if config.log_to is not None:
            load("evalengine.integrations.exports.tracking:leave_log")(folder, config.log_to)
        if show is not None:
            show(folder)

    if config.model.api is not None:
        folder = _answered_elsewhere(config)
        on_complete(folder)
        return folder
    with phase("imports"):
        from evalengine.harness.runner import run
    gate = None
    if config.sequential.step is not None:
        from evalengine.harness.runner import Gate
        from evalengine.report.gate.gate import decider

        gate = Gate(*decider(config.sequential))
    return run(config, on_complete, command, llm, gate, _answered_elsewhere)


def _answered_elsewhere(config: Config) -> Path:
    folder: Path = load("evalengine.integrations.endpoint.run:run")(config)
    return folder
