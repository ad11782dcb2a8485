"""Compares mathematical answers by lm-eval's scorer of MATH, in its own process.

`evalengine.tasks.minerva` starts this file by its path. The process reads JSON lines and answers each with one line:
{"solution"}, a gold solution, with {"answer"}, lm-eval's normal form of the boxed answer; {"doc", "answer"} with the
scores; {} with the exemplars. A model's answer may be an expression whose value has a billion digits; comparing it can
end no more than this process.

Two things differ from lm-eval's own process. The limit of five seconds counts processor time, so that a busy machine
scores as an idle one does. And sympy's LaTeX parser was made for ANTLR 4.11, while Hydra holds the environment at 4.9,
which reads the same tables in an older encoding: `Tables` reads the newer one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

BYTES = 4 << 30  # the memory that this process may use
SECONDS = 60  # processor time for one answer; this process ends after it
NEWER = 4  # the version of the tables that ANTLR 4.10 and later write
WRITTEN_BY = "4.11"  # the version of ANTLR that sympy and lm-eval ask for

timed_out = False  # whether lm-eval's time limit ended the last comparison


def count_processor_time() -> None:
    """Makes the libraries' alarms count this process's processor time instead of seconds on the clock."""
    install = signal.signal

    def with_note(number: int, handler: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            global timed_out
            timed_out = True
            return handler(*arguments)

        return install(number, noted if number == signal.SIGPROF and callable(handler) else handler)

    changed: Any = signal
    changed.SIGALRM = signal.SIGPROF
    changed.signal = with_note
    changed.alarm = lambda seconds: signal.setitimer(signal.ITIMER_PROF, seconds)


def let_sympy_read_latex() -> None:
    """Lets ANTLR 4.9 read the tables of sympy's parser; does nothing under ANTLR 4.11, which reads them itself."""
    import antlr4

    if not importlib.metadata.version("antlr4-python3-runtime").startswith("4.9"):
        return
    from antlr4.atn.ATNDeserializer import ATNDeserializer
    from antlr4.Recognizer import Recognizer

    class Tables(ATNDeserializer):
        """Reads tables of ANTLR 4.10 and later too: plain numbers, no identifier, one list of sets instead of two."""

        newer = False
        uuid: Any = None

        def reset(self, data: Any) -> None:
            self.newer = not isinstance(data, str)
            if self.newer:
                self.data, self.pos = data, 0
            else:
                super().reset(data)

        def checkVersion(self) -> None:
            if not self.newer:
                super().checkVersion()
            elif (table_version := self.readInt()) != NEWER:
                raise ValueError(f"tables of version {table_version}, not {NEWER}")

        def checkUUID(self) -> None:
            if not self.newer:
                super().checkUUID()

        def isFeatureSupported(self, feature: Any, actual: Any) -> bool:
            return not self.newer and super().isFeatureSupported(feature, actual)

    antlr4.ATNDeserializer = Tables
    Recognizer.checkVersion = lambda self, version: None  # the original prints that the versions differ
    import math_verify  # noqa: F401  # it requires ANTLR's version as well, and has a parser for 4.9
    import sympy.parsing.latex._parse_latex_antlr as latex

    true_version = importlib.metadata.version

    def version(name: str) -> str:
        return WRITTEN_BY if name == "antlr4-python3-runtime" else true_version(name)

    latex.version = version
    importlib.metadata.version = version  # type: ignore[assignment]  # its parameter has another name
    if latex.LaTeXParser is None or latex.LaTeXLexer is None:
        raise ImportError(f"sympy {true_version('sympy')} has a LaTeX parser whose tables are of an unknown kind")


def scorer(file: str) -> Any:
    """lm-eval's module in `file`."""
    spec = importlib.util.spec_from_file_location("lm_eval_minerva_math", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(module: Any, question: dict[str, Any]) -> dict[str, Any]:
    """The reply to one line: scores, a solution's answer, or the exemplars."""
    if "doc" in question:
        return {**module.process_results(question["doc"], [question["answer"]]), "timed_out": timed_out}
    if "solution" in question:
        inside = module.last_boxed_only_string(question["solution"])
        return {"answer": None if inside is None else module.normalize_final_answer(module.remove_boxed(inside))}
    return {"samples": module.list_fewshot_samples()}


def guarded(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The work's result, or {"error"} with what it raised."""
    try:
        return work()
    except Exception as error:  # the libraries may raise anything over a model's text
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def main() -> None:
    """Answers until standard input ends. argv: lm-eval's minerva_math/utils.py."""
    global timed_out
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the libraries print must not mix with the replies
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    count_processor_time()
    modules: list[Any] = []

    def begin() -> dict[str, Any]:
        let_sympy_read_latex()
        modules.append(scorer(sys.argv[1]))
        return {}

    reply = guarded(begin)
    while True:
        print(json.dumps(reply), file=replies, flush=True)
        if not (line := sys.stdin.readline()):
            return
        question, timed_out = json.loads(line), False
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + SECONDS, resource.RLIM_INFINITY))
        reply = guarded(partial(answer, modules[0], question))


if __name__ == "__main__":
    main()
