"""Ctrl-C and SIGTERM end every command with 130 and 143, also where a library takes the exception for its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from evalengine.__main__ import main
from evalengine.cli.command import Words
from evalengine.cli.commands import COMMANDS
from evalengine.report.gate.gate import made_run
from evalengine.util.endings import Terminated

ROOT = Path(__file__).parents[2]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
# A command's process whose work is `work`; `press` sends it the signal.
PROGRAM = """
import os, signal, sys
import evalengine.__main__ as m
signal.signal(signal.SIGINT, signal.{before})
def press(kill=os.kill, process=os.getpid(), number=signal.{name}):
    kill(process, number)
def work(words):
{work}
m._command = work
sys.exit({way})
"""
IMPORTS = """
    try:
        import interrupted
    except BaseException:
        pass  # as libraries do around a part that may be missing
    print("it went on")
    return 0
"""
SWALLOWS = """
    try:
        press()
    except BaseException:
        pass
    return 0
"""
REPLACES = """
    from evalengine.errors import ConfigError
    class Lock:
        def __enter__(self): pass
        def __exit__(self, *_): raise ConfigError(": 'NoneType' object has no attribute 'cache'")
    with Lock():
        press()
"""
FORKS = """
    import time
    children = []
    for _ in range(2):
        if child := os.fork():
            children.append(child)
        else:
            time.sleep(60)
    for child in children:
        os.kill(child, signal.{name})
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    time.sleep(4.5)  # a second signal that the main thread does not hear ends a process after four
    print(*codes)
    return 0
"""
ENDS = """
    import atexit
    class Last:
        def __del__(self, press=press):
            press()
    m.last = Last()  # goes as Python takes its modules apart
    atexit.register(press)
    print("digest")
    return 0
"""


def ran(tmp_path: Path, number: signal.Signals, work: str, before: str = "default_int_handler",
        way: str = "m.program()") -> subprocess.CompletedProcess[str]:  # fmt: skip
    """The process of a command that does `work`, once it has ended."""
    (tmp_path / "interrupted.py").write_text(f"import os\nos.kill(os.getpid(), {number.value})\n")
    program = PROGRAM.format(before=before, name=number.name, work=work, way=way)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("number", CODES)
def test_an_import_that_a_library_tries_swallows_no_signal(tmp_path: Path, number: signal.Signals) -> None:
    done = ran(tmp_path, number, IMPORTS)
    assert (done.returncode, done.stdout) == (CODES[number], "")
    assert done.stderr.count("\n") == 1 and "rerun the command" in done.stderr


def test_an_import_swallows_a_signal_that_only_raises(tmp_path: Path) -> None:
    """The inverse: without the handler, the run above goes on without its part."""
    done = ran(tmp_path, signal.SIGINT, IMPORTS, way="m.main()")
    assert (done.returncode, done.stdout) == (0, "it went on\n")


@pytest.mark.parametrize("number", CODES)
def test_a_signal_that_was_swallowed_elsewhere_is_no_success(tmp_path: Path, number: signal.Signals) -> None:
    assert ran(tmp_path, number, SWALLOWS).returncode == CODES[number]


@pytest.mark.parametrize("number", CODES)
def test_an_error_of_what_a_signal_came_amid_is_not_the_reason(tmp_path: Path, number: signal.Signals) -> None:
    """OmegaConf's clean-up fails so where a signal comes amid its start."""
    done = ran(tmp_path, number, REPLACES)
    assert (done.returncode, done.stdout) == (CODES[number], "")
    assert done.stderr.count("\n") == 1 and "rerun the command" in done.stderr, done.stderr


@pytest.mark.parametrize("number", CODES)
def test_a_signal_that_was_held_back_is_heard_once_it_is_watched(tmp_path: Path, number: signal.Signals) -> None:
    """`gate` starts its run so: Python's start, at which Ctrl-C is a traceback, is over by then."""
    way = f"(signal.pthread_sigmask(signal.SIG_BLOCK, [{number.value}]), press(), m.program())[2]"
    done = ran(tmp_path, number, SWALLOWS, way=way)
    assert (done.returncode, done.stdout) == (CODES[number], "")
    assert done.stderr.count("\n") == 1 and "rerun the command" in done.stderr, done.stderr


def test_a_gate_holds_signals_back_from_its_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    said = "(line,) = (line for line in open('/proc/self/status') if line.startswith('SigBlk'))"
    python.write_text(f"#!{sys.executable}\n{said}\nopen('{tmp_path}/blocked', 'w').write(line)\n")
    python.chmod(0o755)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    monkeypatch.setattr(sys, "executable", str(python))
    with made_run([], None):
        blocked = int((tmp_path / "blocked").read_text().split()[1], 16)
    assert all(blocked >> (number - 1) & 1 for number in CODES)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_signal_before_the_handlers_are_there_is_no_traceback(tmp_path: Path) -> None:
    way = "(setattr(signal, 'set_wakeup_fd', lambda *_, **__: press()), m.program())[1]"
    done = ran(tmp_path, signal.SIGINT, SWALLOWS, way=way)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.count("\n") == 1 and "rerun the command" in done.stderr, done.stderr


@pytest.mark.parametrize("number", CODES)
def test_a_signal_after_the_end_changes_nothing(tmp_path: Path, number: signal.Signals) -> None:
    done = ran(tmp_path, number, ENDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "digest\n", "")


def test_a_signal_that_the_shell_ignores_stays_ignored(tmp_path: Path) -> None:
    done = ran(tmp_path, signal.SIGINT, SWALLOWS, before="SIG_IGN")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("error", [KeyboardInterrupt, Terminated])
@pytest.mark.parametrize("command", [name for name in ("run", *COMMANDS) if name != "lm_eval"])
def test_a_signal_while_words_are_parsed_is_no_help(
    command: str, error: type[KeyboardInterrupt], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typer's own `main` returns 130 for it, as it returns 0 for --help; to `gate`'s callers, 0 means merge."""

    def parse_args(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Words, "parse_args", parse_args)
    assert main([command]) == CODES[signal.SIGTERM if error is Terminated else signal.SIGINT]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("number", CODES)
def test_signals_of_forked_children_are_theirs_alone(tmp_path: Path, number: signal.Signals) -> None:
    """lm-eval's bootstrap ends the processes of its pool so; the run had the signals for its own."""
    done = ran(tmp_path, number, FORKS.format(name=number.name))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{-number} {-number}\n", "")


@pytest.mark.parametrize("number", CODES)
def test_a_second_signal_ends_a_process_that_waits_in_native_code(number: signal.Signals) -> None:
    """The first one is answered by what helps: the main thread hears nothing before the native call returns. That is a
    wait for a mutex that the thread itself holds: no signal ends it, and it takes no processor time."""
    work = "    import ctypes\n    lock = ctypes.CDLL(None).pthread_mutex_lock\n"
    work += "    mutex = ctypes.create_string_buffer(64)\n    print('waits', flush=True)\n    lock(mutex), lock(mutex)"
    program = PROGRAM.format(before="default_int_handler", name=number.name, work=work, way="m.program()")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        time.sleep(0.5)  # By then it waits.
        process.send_signal(number)
        assert process.stderr.readline() == "evalengine: waiting for what runs now; Ctrl-C again ends at once\n"
        assert process.poll() is None
        process.send_signal(number)
        assert process.stderr.read().count("rerun the command") == 1
    assert process.returncode == CODES[number]
