"""Runs one program and says how it ended, as a JSON line.

`evalengine.integrations.sandbox.run` starts this file by its path, with the number of a pipe that closes when its own
process ends. There are three processes: this one enters the namespaces; its child, the watcher, is out of the
program's reach; the child's child runs the program, in the interpreter that is loaded already, and says through a pipe
how it ended. A program that looks for that pipe finds it, so what comes through it is at most the program's own
verdict. When the watcher ends, the kernel ends all that the program started and removes its files. Without isolation
the watcher does both, as well as it can. In either case root's programs run as a user with an unused id, because the
kernel does not limit root's processes.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Any

import namespaces  # type: ignore[import-not-found]
from namespaces import NOBODYS, PDEATHSIG, SUBREAPER, drop_rights, leave_keys, prctl

SHOWN = 200  # characters of an exception's text
ENDINGS = ("passed", "failed", "memory")  # what the runner can say
ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")  # the address of an object, which differs between processes
STARTED = b"\0"  # the runner's first word when the program begins; or behind the reason why it cannot
LONGEST = 10_000  # bytes of the runner's message that are read
POLL = 0.02  # seconds between two looks at the program
ATTEMPTS = 200  # rounds of ending what a program left running, without namespaces

# {"outcome", "detail"}; {"error"} where the program could not be run, with "folder" if one that Python needs is why; or
# nothing where the program's process was ended before the program began
Ending = dict[str, str]


def main() -> None:
    """Runs the program that standard input describes: {"program", "limits", "isolated", "folder"} as one JSON text."""
    lifeline = int(sys.argv[1])
    job = json.loads(sys.stdin.buffer.read())
    os.umask(0o022)
    try:
        user = NOBODYS + os.getpid() if os.geteuid() == 0 else None
        if job["isolated"]:
            namespaces.enter()
        leave_keys()
        prctl(namespaces.DUMPABLE, 0)  # a program of the same user can neither trace this process nor open what is its
        watcher = os.fork()
    except OSError as error:
        _send({"error": str(error)})
        return
    if watcher:
        os.waitpid(watcher, 0)
        os._exit(0)  # taking the interpreter apart first is a seventh of a short program's time
    try:
        prctl(PDEATHSIG, signal.SIGKILL)
        _send(_watched(job, lifeline, user))
    except namespaces.NotShown as error:
        _send({"error": str(error), "folder": "not shown"})
    except OSError as error:
        _send({"error": str(error)})
    finally:
        os._exit(0)


def _send(ending: Ending) -> None:
    os.write(1, json.dumps(ending).encode() + b"\n")


def _watched(job: dict[str, Any], lifeline: int, user: int | None) -> Ending:
    limits = job["limits"]
    if job["isolated"]:
        namespaces.new_root(limits["files_bytes"], limits["files"])
    else:
        prctl(SUBREAPER, 1)
        if user is not None:
            os.chown(job["folder"], user, user)
    reading, writing = os.pipe()
    proof = os.urandom(16).hex().encode()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the kernel keeps the program's other signals from this process
    runner = os.fork()
    if runner == 0:
        try:
            _run(job, writing, proof, user)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        return _ending(runner, reading, proof, lifeline, limits)
    finally:
        if not job["isolated"]:
            _end_descendants()
            from shutil import rmtree  # a twentieth of a process's start, which isolated programs need not wait for

            rmtree(job["folder"], ignore_errors=True)


def _ending(runner: int, pipe: int, proof: bytes, lifeline: int, limits: dict[str, int]) -> Ending:
    """Waits until the program ends, its time is over or the caller's process ends; reads at most LONGEST bytes of the
    runner's message."""
    end, message, waiting = time.monotonic() + limits["wall_seconds"], b"", [pipe, lifeline]
    while True:
        # A process closes its pipes shortly before it can be waited for.
        ready, _, _ = select.select(waiting, [], [], POLL if pipe in waiting else POLL / 20)
        if lifeline in ready:
            return {"error": "cancelled"}
        if pipe in ready:
            part = os.read(pipe, LONGEST)
            message += part[: LONGEST - len(message)]
            if not part:
                waiting.remove(pipe)
        pid, status, used = os.wait4(runner, os.WNOHANG)
        if pid:
            # Reads the rest of the message. A process that the program left behind may hold the pipe open.
            with suppress(BlockingIOError):
                os.set_blocking(pipe, False)
                message += os.read(pipe, LONGEST)
            problem, started, said = message.partition(STARTED)
            if problem or not started:
                return {"error": problem.decode()} if started else {}
            return _ending_in(said, proof) or _died(status, used.ru_utime + used.ru_stime, limits, bool(said))
        if time.monotonic() >= end:
            return {"outcome": "timeout", "detail": f"{limits['wall_seconds']} s of time"}


def _ending_in(said: bytes, proof: bytes) -> Ending | None:
    """The ending that the runner says; None for anything else that came through the pipe, which the program wrote. A
    program that finds the proof in its process can only say how itself ended."""
    outcome, colon, detail = said.removeprefix(proof).decode("utf-8", "replace").partition(":")
    if not said.startswith(proof) or not colon or outcome not in ENDINGS:
        return None
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in detail)
    return {"outcome": outcome, "detail": line[:SHOWN]}


def _died(status: int, seconds: float, limits: dict[str, int], wrote: bool) -> Ending:
    """The ending of a program that ended its process, or whose process was ended.

    wrote: whether the program wrote into the runner's pipe.
    """
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU or (number == signal.SIGKILL and seconds >= limits["cpu_seconds"]):
            return {"outcome": "timeout", "detail": f"{limits['cpu_seconds']} s of processor time"}
        return {"outcome": "failed", "detail": f"its process was ended by {signal.Signals(number).name}"}
    if wrote:
        return {"outcome": "failed", "detail": "it wrote into a pipe that is not its own"}
    code = os.WEXITSTATUS(status)
    return {"outcome": "failed", "detail": f"it ended its process (exit code {code}) before its tests were over"}


def _end_descendants() -> None:
    """Ends every process below this one, until there is none; needed without namespaces."""
    for _ in range(ATTEMPTS):
        for pid in _children(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(POLL)


def _children(parent: int) -> list[int]:
    """The ids of all processes below `parent`, from the kernel's table of parents."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    below, newest = set[int](), {parent}
    while newest:
        newest = {pid for pid, above in parents.items() if above in newest} - below
        below |= newest
    return sorted(below)


def _run(job: dict[str, Any], pipe: int, proof: bytes, user: int | None) -> None:
    """In its own process: takes away what the program must not have, runs it, and writes how it ended."""
    # The functions are looked up now, since the program may replace them in their modules.
    write, leave, current_pid = os.write, os._exit, os.getpid
    own_pid = current_pid()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _close_all_but(pipe)
        _limit(job["limits"], 0 if job["isolated"] or user is not None else _own_processes())
        drop_rights(user, job["isolated"])
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if memory runs out all the same, the kernel ends this process first
        prctl(PDEATHSIG, signal.SIGKILL)
        os.chdir("/tmp" if job["isolated"] else job["folder"])
    except (OSError, ValueError) as error:
        write(pipe, str(error).encode() + STARTED)
        leave(1)
    write(pipe, STARTED)
    sys.argv, sys.path = [""], [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]
    outcome, detail = _executed(job["program"])
    if current_pid() == own_pid:  # a process that the program forked comes here, too
        write(pipe, proof + f"{outcome}:{detail}".encode())
    leave(0)


def _close_all_but(pipe: int) -> None:
    """Leaves the process an empty input, outputs that go nowhere, the pipe, and no other open file."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, max(nothing, pipe) + 1024)


def _limit(limits: dict[str, int], others: int) -> None:
    """Sets this process's limits. others: processes of this user that the kernel counts with the program's."""
    seconds = limits["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # the hard limit's signal cannot be ignored
    for name, most in (
        *(("AS", limits["memory_bytes"]), ("FSIZE", limits["file_bytes"]), ("NOFILE", limits["open_files"])),
        *(("CORE", 1), ("RTPRIO", 0), ("NPROC", others + limits["processes"])),  # CORE=0 still feeds a core handler
    ):
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (most, most))


def _own_processes() -> int:
    """How many processes and threads this user has."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        # The owner of /proc/PID is root where a process may not be traced.
        with suppress(OSError), open(f"/proc/{name}/status", "rb") as file:
            status = dict(line.split(b":", 1) for line in file)
            if int(status[b"Uid"].split()[0]) == os.getuid():
                count += int(status[b"Threads"])
    return count


def _executed(program: str) -> tuple[str, str]:
    """(outcome, detail). Only a program that runs to its last line has passed."""
    try:
        exec(compile(program, "<program>", "exec", dont_inherit=True), {})
    except MemoryError:
        return "memory", ""
    except BaseException as error:  # SystemExit counts as well: the program left before its tests were over
        return "failed", _short(error)
    return "passed", ""


def _short(error: BaseException) -> str:
    """The exception in one line, the same in every process."""
    name = type.__dict__["__name__"].__get__(type(error))  # a metaclass of the program's may have another __name__
    try:
        text = " ".join(str(error).split())
    except BaseException:  # the program's own exception may fail to give its text
        text = ""
    line = ADDRESS.sub("0x...", f"{name}: {text}" if text else name)
    return line[:SHOWN].encode("utf-8", "replace").decode()


if __name__ == "__main__":
    main()
