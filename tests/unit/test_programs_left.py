"""However a run of programs ends, no process of theirs runs on, and no file of theirs is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from evalengine.errors import EvalEngineError
from evalengine.integrations.sandbox.run import WORKER, run_programs
from tests.unit.hostile_programs import QUICK, SLEEPS, SYSTEM_PYTHON, leftovers, running, wait_for

ROOT = Path(__file__).parents[2]


def test_what_a_program_started_ends_with_it(isolated: bool) -> None:
    mark = f"98{os.getpid()}{int(isolated)}"
    sleeps = {
        SLEEPS.format(mark=f"{mark}1", then=""): "passed",
        SLEEPS.format(mark=f"{mark}2", then="assert False"): "failed: AssertionError",
        SLEEPS.format(mark=f"{mark}3", then="time.sleep(100)"): "timeout: 4 s of time",
    }
    verdicts = run_programs(dict.fromkeys(sleeps, replace(QUICK, wall_seconds=4)), isolated)
    assert {program: str(verdict) for program, verdict in verdicts.items()} == sleeps
    assert all(wait_for(f"{mark}{n}", there=False, seconds=3) for n in (1, 2, 3))


def test_processes_that_are_killed_from_outside_are_no_verdict(kernel_isolates: None) -> None:
    """A program that was killed once runs again; if it is killed again and again, the run of programs stops."""
    mark, killed = f"97{os.getpid()}", 0
    program = SLEEPS.format(mark=mark, then="time.sleep(2.5)")
    limits, stop = replace(QUICK, wall_seconds=30), threading.Event()

    def kill(most: int) -> None:
        nonlocal killed
        while not stop.is_set() and killed < most:
            workers = [pid for pid in running(str(WORKER)) if _parent(pid) == os.getpid()]
            ran = {*running(mark)}
            if ran and workers:
                os.kill(workers[0], signal.SIGKILL)
                killed += 1
                while ran & {*running(mark)}:  # not until none has the mark: the next attempt's process has it, too
                    time.sleep(0.02)
            time.sleep(0.02)

    for most in (1, 3):
        killed = 0
        killer = threading.Thread(target=kill, args=(most,))
        killer.start()
        try:
            if most == 1:
                assert run_programs({program: limits}, isolated=True)[program].passed
            else:
                with pytest.raises(EvalEngineError, match="ended from outside 3 times"):
                    run_programs({program: limits}, isolated=True)
        finally:
            stop.set()
            killer.join()
            stop.clear()
        assert killed == most


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(isolated: bool, ending: signal.Signals, temporary: Path) -> None:
    mark = f"96{os.getpid()}{ending.value}"
    program = SLEEPS.format(mark=mark, then="time.sleep(100)")
    # A killed run without isolation leaves the folders of programs that had not begun, so only one runs there.
    count = 8 if isolated or ending == signal.SIGINT else 1
    code = (
        f"import sys; sys.executable = {sys.executable!r}\n"
        "from evalengine.integrations.sandbox.run import ProgramLimits, run_programs\n"
        f"run_programs({{{program!r} + '#' * n: ProgramLimits(wall_seconds=60) for n in range({count})}}, {isolated})"
    )
    python = sys.executable if sys.executable != SYSTEM_PYTHON else os.path.join(sys.prefix, "bin", "python")
    process = subprocess.Popen(
        [python, "-c", code], cwd=ROOT, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert wait_for(mark, there=True), process.communicate(timeout=5)
    process.send_signal(ending)
    began = time.monotonic()
    _, error_output = process.communicate(timeout=20)
    assert time.monotonic() - began < 10 and process.returncode != 0
    assert ending != signal.SIGINT or b"KeyboardInterrupt" in error_output
    assert wait_for(mark, there=False, seconds=5)
    end = time.monotonic() + 5
    while leftovers(temporary) and time.monotonic() < end:
        time.sleep(0.02)
    assert not leftovers(temporary)
