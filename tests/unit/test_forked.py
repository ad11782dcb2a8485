"""Forked processes do parts of a run's work with the results of one process, and none outlives what asked for it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from evalengine.errors import ConfigError, EvalEngineError
from evalengine.util import forked, limits
from evalengine.util.forked import ForkedTask, shares, spread

ORPHAN = """
import os, sys, time
from evalengine.util.forked import ForkedTask
work = ForkedTask(lambda: (print(os.getpid(), flush=True), time.sleep(60)))
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "cores", lambda: 4)


def squares(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return [(number**2, os.getpid()) for number in numbers]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 31])
def test_shares_come_back_in_order_and_from_as_many_processes_as_they_earn(count: int) -> None:
    results = spread(squares, range(count), least=4)
    assert [square for square, _ in results] == [number**2 for number in range(count)]
    assert len({process for _, process in results}) == (0 if not count else max(1, min(4, count // 4)))


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ([3, 3, 3], [[3], [3], [3]]),
        ([1, 1, 1, 1, 8], [[1, 1, 1], [1], [8]]),
        ([9, 1, 1, 1], [[9], [1, 1, 1]]),
        ([10, 1, 1], [[10], [1, 1]]),
        ([0, 0], [[0, 0]]),
        ([2, 1, 2, 1, 2, 1], [[2], [1, 2], [1], [2, 1]]),
    ],
)
def test_shares_hold_about_as_much_work_each(sizes: list[int], wanted: list[list[int]]) -> None:
    assert shares(sizes, 2, sizes) == wanted


def test_a_result_is_made_in_another_process_where_it_earns_one() -> None:
    for worthwhile in (True, False):
        with ForkedTask(os.getpid, worthwhile) as process:
            assert (process.result() != os.getpid()) is worthwhile


def test_an_error_is_raised_where_its_result_is_asked_for() -> None:
    def fails() -> None:
        raise ConfigError(["one", "two"])

    with ForkedTask(fails) as failing, pytest.raises(ConfigError, match="- two"):
        failing.result()


def test_what_a_killed_process_did_not_do_is_done_here() -> None:
    here = os.getpid()

    def dies_elsewhere() -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    with ForkedTask(dies_elsewhere) as killed:
        assert killed.result() == here


def test_a_limited_call_is_made_in_its_process_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "cores", lambda: 1)
    with ForkedTask(os.getpid, worthwhile=False, limited=True) as limited:
        assert limited.result() != os.getpid()
    killed = ForkedTask(lambda: os.kill(os.getpid(), signal.SIGKILL), limited=True)
    with killed, pytest.raises(EvalEngineError, match="templates and patterns was killed"):
        killed.result()


def test_a_limited_call_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless() -> None:
        for _ in limits.limited([0]):
            while True:
                pass

    monkeypatch.setattr(limits, "SECONDS", 0.1)
    with ForkedTask(endless, limited=True) as process, pytest.raises(EvalEngineError, match="are not finished after"):
        process.result()


def test_without_another_process_all_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(EvalEngineError, match="cannot start a process for templates and patterns"):
        ForkedTask(os.getpid, limited=True)
    assert {process for _, process in spread(squares, range(40), least=1)} == {os.getpid()}


class Odd(Exception):
    """An error that pickle makes no more: it has another argument than it was made with."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def test_a_bug_in_another_process_shows_where_it_is() -> None:
    def bug() -> None:
        raise KeyError("a bug")

    def odd() -> None:
        raise Odd(1, 2)

    with ForkedTask(bug) as failing, pytest.raises(KeyError, match="a bug") as raised:
        failing.result()
    assert "in bug" in str(raised.value.__cause__)
    with ForkedTask(odd) as failing, pytest.raises(RuntimeError, match="1 and 2"):
        failing.result()
    with ForkedTask(lambda: lambda: 0) as unsendable, pytest.raises((AttributeError, pickle.PicklingError)):
        unsendable.result()


def test_no_process_is_left_when_the_block_ends_early(tmp_path: Path) -> None:
    def never() -> None:
        (tmp_path / "process").write_text(str(os.getpid()))
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt), ForkedTask(never):
        until_written(tmp_path / "process")
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "process").read_text()), 0)


def test_a_process_dies_with_a_killed_parent() -> None:
    """Otherwise it would write into a folder that the next command has taken up."""
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 20
    with suppress(OSError):  # it is gone, or went between open and read
        while Path(f"/proc/{child}/cmdline").read_bytes():
            assert time.monotonic() < deadline, "the child outlives its parent"
            time.sleep(0.01)


def test_only_a_limited_process_has_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    for limited, wanted in ((False, 1), (True, len(os.sched_getaffinity(0)))):
        with ForkedTask(forked.cores, limited=limited) as process:
            if process._process:  # a machine may have one core
                assert process.result() == wanted


def test_a_daemon_does_everything_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of a pool may have no children."""
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert forked.cores() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    assert forked.cores() == 1
    assert {process for _, process in spread(squares, range(40), least=1)} == {os.getpid()}


def until_written(file: Path) -> None:
    deadline = time.monotonic() + 20
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline, f"{file} is not written"
        time.sleep(0.01)


def test_the_process_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may hold a module's lock at the fork, which the process would then wait for without an end."""
    monkeypatch.delitem(sys.modules, "evalengine.util.limits")
    monkeypatch.setattr(sys, "meta_path", [])  # an import now fails
    with ForkedTask(os.getpid) as task:
        assert task.result() != os.getpid()
