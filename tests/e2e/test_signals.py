"""Ctrl-C and SIGTERM at any moment of a command's start: its exit code and one line, and nothing like success."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.command import finish, runs, start
from tests.e2e.test_resume import wait_for_journal

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
WORDS = {signal.SIGINT: "Interrupted: ", signal.SIGTERM: "Terminated: "}


def until_signals_are_watched(process: subprocess.Popen[str]) -> None:
    """Waits for the command's handlers: before, Python itself starts, to whose start a signal is a traceback."""
    while process.poll() is None:
        (caught,) = (line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "SigCgt" in line)
        if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.002)


def check(number: signal.Signals, delay: float, *words: str) -> None:
    process = start(*words)
    until_signals_are_watched(process)
    time.sleep(delay)
    process.send_signal(number)
    done = finish(process)
    assert (done.code, done.out) == (CODES[number], ""), (delay, done)
    assert "Traceback" not in done.err and done.err.splitlines()[-1].startswith(WORDS[number]), done.err
    assert "resume" in done.err


@pytest.mark.parametrize(
    ("number", "delay"),
    [(signal.SIGINT, delay) for delay in (0.0, 0.05, 0.4, 1.2)] + [(signal.SIGTERM, 0.1), (signal.SIGTERM, 0.8)],
)
def test_a_run_that_starts(number: signal.Signals, delay: float, tmp_path: Path) -> None:
    check(number, delay, f"output_dir={tmp_path}", "engine.device=cpu", "limit=200", "progress=false")


@pytest.mark.parametrize("words", [["gate", "a.json", "b"], ["compare", "a", "b"], ["verify", "--quick"]])
def test_other_commands_that_start(words: list[str]) -> None:
    check(signal.SIGINT, 0.02, *words)


@pytest.mark.slow  # the test above at many more moments
@pytest.mark.parametrize("number", CODES)
def test_a_run_at_many_moments_of_its_start(number: signal.Signals, tmp_path: Path) -> None:
    for step in range(30):
        check(number, step * 0.1, f"output_dir={tmp_path}", "engine.device=cpu", "limit=200", "progress=false")


# On a busy machine rank 0 may need longer to return from native code, and could not report the saved answers.
PATIENT = """
import sys
from evalengine.util import endings
endings.SECONDS_TO_COME_BACK = 60.0
from evalengine.__main__ import program
sys.exit(program())
"""


def test_a_second_ctrl_c_ends_a_run_whose_rank_is_stopped(tmp_path: Path) -> None:
    """Rank 0 waits for it in native code, where Python hears no signal."""
    words = ("engine.device=cpu", "engine.tensor_parallel_size=2", "numerics=exact", "limit=200", "progress=false")
    process = start(f"output_dir={tmp_path}", *words, "engine.max_num_seqs=2", program=("-c", PATIENT))
    try:
        wait_for_journal(process, tmp_path, lines=2)  # Ctrl-C before the first step would end the run at once.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (rank,) = (int(pid) for pid in children if b"parallel.worker" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(rank, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None and "Ctrl-C again ends at once" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        done = finish(process, timeout=100)
        (run,) = runs(tmp_path)
        assert done.code == 130 and f"{run.folder}; the same command resumes" in done.err, done.err
        deadline = time.monotonic() + 30
        while Path(f"/proc/{rank}").exists():  # The system collects what a process leaves once it has ended.
            assert time.monotonic() < deadline, "the rank is still there"
            time.sleep(0.05)
    finally:
        process.kill()
