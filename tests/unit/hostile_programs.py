"""Programs that a model might write by mistake or by intent, how each must end, and helpers for tests that run them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from evalengine.programs.limits import Limits

QUICK = Limits(cpu_seconds=1, wall_seconds=4, memory_bytes=1 << 29)
SYSTEM_PYTHON = "/usr/bin/python3"  # every user can read it, unlike a Python in root's home
# This program leaves a process behind, which a test finds by `mark`.
SLEEPS = "import subprocess, time\nsubprocess.Popen(['sleep', '{mark}'])\n{then}"

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
