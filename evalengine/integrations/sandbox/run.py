"""Runs programs by `inside/worker.py`, each in its own processes, as many at once as there are cores."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from threading import Lock

from evalengine.errors import EvalEngineError
from evalengine.tasks.instance import MAX_PROGRAM, OUTCOMES, ProgramLimits, ProgramVerdict

WORKER = Path(__file__).parent / "inside" / "worker.py"
SPARE_SECONDS = 60  # after a program's own time limit, until this process ends its worker
ATTEMPTS = 3  # runs of one program whose processes are ended from outside
NAMESPACES = (
    "let users have user namespaces (containers often forbid them, and so does "
    "kernel.apparmor_restrict_unprivileged_userns=1; Linux 5.14 or newer with seccomp filters, on x86-64 or arm64), "
    "or, in a container or virtual machine that may be lost, set allow_code_execution=without_isolation"
)
READABLE = "use a Python that every user can read, with its packages in its own folders, as a virtual environment has"
FIXED_ADDRESSES = 0x0040000  # ADDR_NO_RANDOMIZE of sys/personality.h
# A program's whole environment; it sees no variable of the caller's.
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LC_ALL": "C.UTF-8",
    "PYTHONUTF8": "1",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",  # a set of texts has the same order in every process
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
# Every program may count on what this one uses: Python's own modules, NumPy (HumanEval+ compares by it), and threads.
PROBE = "import decimal, json, threading, numpy\nt = threading.Thread(target=len, args=('',))\nt.start()\nt.join()"


def run_programs(
    programs: Mapping[str, ProgramLimits], isolated: bool, each: Callable[[], None] = lambda: None
) -> dict[str, ProgramVerdict]:
    """The verdict on every program.

    each: called in this thread whenever a program is finished.
    Raises EvalEngineError where a program cannot be run, or its processes are ended from outside again and again.
    However this ends, no process of a program runs on, and none of its files is left.
    """
    verdicts: dict[str, ProgramVerdict] = {}
    crew = _Crew(isolated)
    workers = len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(workers, "program", initializer=_fix_addresses)
    try:
        futures = {pool.submit(crew.run, program, limits): program for program, limits in programs.items()}
        for future in as_completed(futures):
            verdicts[futures[future]] = future.result()
            each()
    finally:
        crew.stop()
        pool.shutdown(cancel_futures=True)
    return verdicts


@lru_cache(None)
def problem(isolated: bool) -> str | None:
    """Why programs cannot be run here, with or without isolation, and the fix; None where they can."""
    if sys.platform != "linux":
        return f"programs are run on Linux only, and this is {sys.platform}"
    try:
        (verdict,) = run_programs({PROBE: ProgramLimits()}, isolated).values()
    except EvalEngineError as error:
        return str(error)
    return None if verdict.passed else f'a program that only imports modules ended with "{verdict}"; {READABLE}'


def _fix_addresses() -> None:
    """Gives the processes that this thread starts the same addresses each time, so that sets of objects have the same
    order; where a container forbids it, their order differs between processes, as usual."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).personality(FIXED_ADDRESSES)


class _Crew:
    """The processes that run now. Each has the reading end of a pipe, its lifeline: when this process ends, the pipe is
    closed and they end, too."""

    def __init__(self, isolated: bool) -> None:
        self._isolated = isolated
        self._lifelines: set[int] = set()
        self._lock = Lock()
        self._stopped = False

    def run(self, program: str, limits: ProgramLimits) -> ProgramVerdict:
        """The verdict on a program; called in a thread of the pool. Raises EvalEngineError if it cannot be run."""
        if refused := _refusal(program):
            return ProgramVerdict("refused", refused)
        for _ in range(ATTEMPTS):
            try:
                ending = self._attempt(program, limits)
            except OSError as error:  # processes, descriptors or folders have run out
                raise EvalEngineError(f"a program could not be run: {error}") from error
            if "error" in ending:
                raise EvalEngineError(f"a program could not be run: {ending['error']}; {self._cure(ending)}")
            if ending.get("outcome") in OUTCOMES:
                return ProgramVerdict(ending["outcome"], ending["detail"])
        if not self._isolated:  # a program of the same user can do that, and must not keep the others from ending
            return ProgramVerdict("failed", f"the process that watches it was ended {ATTEMPTS} times")
        raise EvalEngineError(
            f"the processes that run a program were ended from outside {ATTEMPTS} times; with more free memory the "
            "same command continues, with what was generated"
        )

    def _cure(self, ending: dict[str, str]) -> str:
        if "folder" in ending:
            return READABLE
        return NAMESPACES if self._isolated else "run as a user who may start processes"

    def _attempt(self, program: str, limits: ProgramLimits) -> dict[str, str]:
        folder = None if self._isolated else tempfile.mkdtemp(prefix="evalengine-program-")
        job = {"program": program, "limits": asdict(limits), "isolated": self._isolated, "folder": folder}
        reading, writing = os.pipe()
        try:
            with self._lock:
                if self._stopped:
                    os.close(writing)
                    return {"error": "cancelled"}
                self._lifelines.add(writing)
            return self._answer(json.dumps(job).encode(), reading, limits, folder)
        finally:
            os.close(reading)
            self._let_go(writing)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def _answer(self, job: bytes, lifeline: int, limits: ProgramLimits, folder: str | None) -> dict[str, str]:
        process = subprocess.Popen(
            [sys.executable, "-s", str(WORKER), str(lifeline)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(lifeline,),
            cwd="/",
            env=ENVIRONMENT if folder is None else {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
            start_new_session=True,  # this process handles Ctrl-C
        )
        try:
            out, _ = process.communicate(job, timeout=limits.wall_seconds + SPARE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            if not out and folder is not None:  # its watcher was stopped, which a program of the same user can do
                return {"outcome": "timeout", "detail": f"{limits.wall_seconds} s of time, and its watcher is stopped"}
        try:
            answer: dict[str, str] = json.loads(out)
        except ValueError:
            failed = process.returncode > 0  # a negative code means a signal from outside
            return {"error": f"{sys.executable} ended with exit code {process.returncode}"} if failed else {}
        return answer

    def _let_go(self, lifeline: int) -> None:
        with self._lock:
            if lifeline in self._lifelines:
                self._lifelines.remove(lifeline)
                os.close(lifeline)

    def stop(self) -> None:
        """Ends all programs that run; no program runs after it."""
        with self._lock:
            self._stopped = True
            for lifeline in self._lifelines:
                os.close(lifeline)
            self._lifelines.clear()


def _refusal(program: str) -> str | None:
    """Why a program is not run; None if it is."""
    try:
        size = len(program.encode("utf-8"))
    except UnicodeEncodeError:
        return "it is no text in UTF-8"
    return f"it is longer than {MAX_PROGRAM:,} bytes" if size > MAX_PROGRAM else None
