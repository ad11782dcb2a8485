"""Programs that a model might write by mistake or by intent, how each must end, and helpers for tests that run them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from evalengine.tasks.instance import ProgramLimits

QUICK = ProgramLimits(cpu_seconds=1, wall_seconds=4, memory_bytes=1 << 29)
SYSTEM_PYTHON = "/usr/bin/python3"  # every user can read it, unlike a Python in root's home
# This program leaves a process behind, which a test finds by `mark`.
SLEEPS = "import subprocess, time\nsubprocess.Popen(['sleep', '{mark}'])\n{then}"
# Finds the pipe by which the runner says how the program ended, and the word that proves it to be the runner.
FINDS = (
    "import os, sys\nframe = sys._getframe()\nwhile 'proof' not in frame.f_locals: frame = frame.f_back\n"
    "pipe, proof = frame.f_locals['pipe'], frame.f_locals['proof']\n"
)
FORGED = "failed: it wrote into a pipe that is not its own"


def forges(said: bytes) -> str:
    """A program that says by the runner's pipe, in the runner's name, how it ended, and ends."""
    return f"{FINDS}os.write(pipe, proof + {said!r})\nos._exit(0)"


# What a program of the same user might do to the process that watches it, apart from signals.
REACHES = """
import ctypes, os, resource
watcher, reached = os.getppid(), []
def traces():
    if ctypes.CDLL(None).ptrace(0x4206, watcher, None, None): raise OSError  # PTRACE_SEIZE
for name, reach in {
    "writes its answer": lambda: os.open(f"/proc/{watcher}/fd/1", os.O_WRONLY),
    "changes its memory": lambda: open(f"/proc/{watcher}/mem", "r+b"),
    "reads its environment": lambda: open(f"/proc/{watcher}/environ").read(),
    "has it ended first": lambda: open(f"/proc/{watcher}/oom_score_adj", "w").write("1000"),
    "limits it": lambda: resource.prlimit(watcher, resource.RLIMIT_NOFILE),
    "traces it": traces,
}.items():
    try: reach()
    except OSError: continue
    reached.append(name)
assert not reached, reached
"""
# Calls each system call of `numbers` (name -> number); fails unless the kernel has none of them.
CALLS = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
there = [n for n, call in {numbers!r}.items() if libc.syscall(call, *[0] * 6) != -1 or ctypes.get_errno() != 38]
assert not there, there
"""

ATTACKS = {  # name -> (the program, the beginning of its verdict)
    "ends early": ("import sys\nsys.exit(0)\nassert False", "failed: SystemExit: 0"),
    "ends its process": ("import os\nos._exit(0)\nassert False", "failed: it ended its process (exit code 0)"),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)", "failed: its process was ended by SIGKILL"),
    "crashes": ("import ctypes\nctypes.string_at(0)", "failed: its process was ended by SIGSEGV"),
    "says that it passed": (
        'print("passed", flush=True)\nimport os\nfor n in range(64):\n    try: os.write(n, b\'["passed", ""]\')\n'
        "    except OSError: pass\nos._exit(0)",
        "failed: it wrote into a pipe that is not its own",
    ),
    "says that it could not be run": (forges(b'["error", "mine"]'), FORGED),
    "says nothing at all": (forges(b"null"), FORGED),
    "says half of it": (forges(b"passed"), FORGED),
    "says that it was not run": (forges(b"refused:mine"), FORGED),
    "says what is no text": (forges(b"\xff\xfe:"), FORGED),
    "nests": (forges(b"[" * 9_000), FORGED),
    "says too much": (f"{FINDS}os.write(pipe, proof + b'failed:' + b'x' * 10_000_000)", f"failed: {'x' * 200}"),
    "says how to clear a screen": (forges(b"failed:\x1b[2J\nb"), r"failed: \x1b[2J\nb"),
    "closes every file": ("import os\nos.closerange(3, 1024)", "failed: it ended its process (exit code 1)"),
    "a class of many lines": (
        "raise type('A\\n\\x1b[2J' + 'B' * 10_000, (Exception,), {})",
        rf"failed: A\n\x1b[2J{'B' * 190}",
    ),
    "a class without a name": (
        "class Meta(type):\n    __name__ = property(lambda self: 1 // 0)\nclass Odd(Exception, metaclass=Meta): pass\n"
        "raise Odd('x')",
        "failed: Odd: x",
    ),
    "a root of its own": (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.unshare(0x10020000): raise OSError(ctypes.get_errno(), 'unshare')\n"  # CLONE_NEWUSER | CLONE_NEWNS
        "libc.mount(b'mine', b'/tmp', b'tmpfs', 0, None)\n"
        "for n in range(6000): open(f'/tmp/{n}', 'wb').write(b'x' * 100_000)",
        "failed: OSError: [Errno 38] unshare",
    ),
    "memory that no process has": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.shmget(0, 100 << 20, 0o1600) < 0: raise OSError(ctypes.get_errno(), 'shmget')",
        "failed: OSError: [Errno 38] shmget",
    ),
    "a file in no folder": ("import os\nos.memfd_create('x')", "failed: OSError: [Errno 38]"),
    "the way to a machine's host": ("import socket\nsocket.socket(socket.AF_VSOCK)", "failed: OSError: [Errno 38]"),
    "another assert": (
        "import builtins\nclass No(Exception): pass\nbuiltins.AssertionError = No\nbuiltins.BaseException = No\n"
        "builtins.Exception = No\nassert False, 'no'",
        "failed: it ended its process",
    ),
    "another end": (
        "import os, json\nos._exit = os.write = json.dumps = lambda *a, **k: None\nassert False, 'still'",
        "failed: AssertionError: still",
    ),
    "a child passes": (
        "import os\nif os.fork():\n    os.wait()\n    raise ValueError('mine')",
        "failed: ValueError: mine",
    ),
    "does not listen": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    try:\n"
        "        while True: pass\n    except BaseException: pass",
        "timeout: ",
    ),
    "sleeps": ("import time\ntime.sleep(100)", "timeout: 4 s of time"),
    "writes without end": ("while True: print('x' * 10_000)", "timeout: "),
    "takes memory": ("x = bytearray(8 << 30)", "memory"),
    "takes memory bit by bit": ("x = []\nwhile True: x.append(bytes(50 << 20))", "memory"),
    "a huge file": ("open('x', 'wb').write(b'x' * (17 << 20))", "failed: OSError: [Errno 27]"),
    "open files": ("x = []\nwhile True: x.append(open('/dev/null'))", "failed: OSError: [Errno 24]"),
    "a fork bomb": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError as error: why = error; break\nraise why",
        "failed: BlockingIOError",
    ),
    "threads": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "failed: RuntimeError: can't start new thread",
    ),
    "reads input": ("input()", "failed: EOFError"),
    "raises what cannot be shown": (
        "class Odd(Exception):\n    def __str__(self): raise Odd\nraise Odd",
        "failed: Odd",
    ),
    "an address": ("raise ValueError(object())", "failed: ValueError: <object object at 0x...>"),
    "no program": ("def f(:", "failed: SyntaxError"),
    "half a character": ("'\ud800'", "refused: it is no text in UTF-8"),
    "too long": ("#" * (1 << 20) + "\n", "refused: it is longer than"),
}
ISOLATED_ATTACKS = {
    "many files": (
        "n = 0\nwhile True:\n    open(f'{n}', 'wb').write(b'x' * (1 << 20)); n += 1",
        "failed: OSError: [Errno 28]",
    ),
    "more files than there may be": (
        "n = 0\nwhile n < 5000: open(f'/dev/shm/{n}', 'w'); n += 1",
        "failed: OSError: [Errno 28]",
    ),
    "folders that are not its own": (
        "import os\nfor folder, below, _ in os.walk('/'):\n"
        "    if os.path.ismount(folder) and folder != '/': below.clear()\n"
        "    assert folder in ('/tmp', '/dev/shm') or not os.access(folder, os.W_OK), folder",
        "passed",
    ),
    "kills all others": ("import os\nos.kill(1, 9)\nos.kill(-1, 9)", "failed: "),
    "a daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(100)\n    os._exit(0)",
        "passed",
    ),
    "writes where it may not": ("open('/usr/mine', 'w')", "failed: "),
    "mounts": (
        "import ctypes\nassert ctypes.CDLL(None).mount(None, b'/usr', None, 4096 | 32, None) == 0",
        "failed: AssertionError",
    ),
}  # fmt: skip
HARMLESS = {
    "a sum": "assert 1 + 1 == 2",
    "files of its own": "import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'x')\n"
    "open('here', 'w').write('x')",
    "prints": "print('hello')\nimport sys\nprint('x', file=sys.stderr)",
    "no annotations from the future": "def f(x: 1 + 1): pass\nassert f.__annotations__['x'] == 2",
    "NumPy": "import numpy\nassert numpy.ones(3).sum() == 3",
    "a process": "import subprocess, sys\nassert subprocess.run([sys.executable, '-c', '1']).returncode == 0",
    "a queue": "import multiprocessing as m\nq = m.Queue()\np = m.Process(target=q.put, args=(1,))\np.start()\n"
    "assert q.get() == 1",
}


def running(mark: str) -> list[int]:
    """Ids of the processes whose command has `mark` as one of its words."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
        except OSError:
            continue
    return pids


def wait_for(mark: str, there: bool, seconds: float = 10) -> bool:
    """Whether a process with the mark appears (`there`), or all of them end, within so many seconds."""
    end = time.monotonic() + seconds
    while bool(running(mark)) != there and time.monotonic() < end:
        time.sleep(0.02)
    return bool(running(mark)) == there


def leftovers(temporary: Path) -> list[str]:
    """Names of the folders in which programs were run, in a test's own folder of temporary files: other tests may run
    programs meanwhile."""
    return [name for name in os.listdir(temporary) if name.startswith("evalengine-program-")]
