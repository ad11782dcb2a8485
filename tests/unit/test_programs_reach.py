"""What a program reaches as an ordinary user, whose processes, keys and folders are those that watch it."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from evalengine.integrations.sandbox.inside import namespaces as inside
from evalengine.integrations.sandbox.run import WORKER, run_programs
from tests.unit.hostile_programs import ATTACKS, QUICK, REACHES, SYSTEM_PYTHON

ROOT = Path(__file__).parents[2]
ORDINARY: dict[str, Any] = {"user": 54_321, "group": 54_321, "extra_groups": []} if os.geteuid() == 0 else {}
SIGNALS = "import os, time\nos.kill(os.getppid(), {})\ntime.sleep(0.2)\nassert False, 'still here'"
PYTHON = SYSTEM_PYTHON if ORDINARY else sys.executable


def ended(program: str, folder: Path | None = None) -> dict[str, str]:
    """A worker's own answer for an ordinary user's program, isolated unless there is a folder for it; {} if it gives
    none."""
    if folder is not None:
        folder.mkdir()
        os.chown(folder, *[ORDINARY.get("user", -1)] * 2)
    reading, writing = os.pipe()
    place = None if folder is None else str(folder)
    job = {"program": program, "limits": asdict(QUICK), "isolated": folder is None, "folder": place}
    try:
        done = subprocess.run(
            [PYTHON, "-s", str(WORKER), str(reading)], input=json.dumps(job).encode(), capture_output=True,
            pass_fds=(reading,), env={}, start_new_session=True, check=False, **ORDINARY,
        )  # fmt: skip
    finally:
        os.close(reading)
        os.close(writing)
    answer: dict[str, str] = json.loads(done.stdout or b"{}")
    return answer


@pytest.fixture
def namespaces() -> None:
    """Skips the test where ordinary users have no namespaces, or may not read this checkout."""
    if "outcome" not in (first := ended("assert 1 == 1")):
        pytest.skip(f"this kernel gives ordinary users no namespaces: {first}")
    assert first["outcome"] == "passed"


def test_an_ordinary_user_s_programs_are_isolated_by_a_user_namespace(namespaces: None) -> None:
    own = f"import os\nassert os.getuid() == {ORDINARY.get('user', os.getuid())} and len(os.listdir('/proc')) < 90"
    assert ended(own)["outcome"] == "passed"
    assert "unreachable" in ended("import socket\nsocket.create_connection(('192.0.2.1', 80), 1)")["detail"]
    assert "Read-only" in ended("open('/usr/mine', 'w')")["detail"]
    assert "Permission denied" in ended("open('/mine', 'w')")["detail"]
    assert ended(ATTACKS["a fork bomb"][0])["detail"].startswith("BlockingIOError")
    assert ended("open('/etc/passwd')")["detail"].startswith("FileNotFoundError")
    status = ended("raise ValueError([l for l in open('/proc/self/status') if 'CapEff' in l])")["detail"]
    assert "0000000000000000" in status
    assert ended("assert open('/proc/self/oom_score_adj').read() == '1000\\n'")["outcome"] == "passed"


def test_an_ordinary_user_s_program_does_not_reach_its_watcher(namespaces: None, temporary: Path) -> None:
    """Isolated, signals do not either: the kernel keeps them from the first process of a namespace."""
    temporary.chmod(0o777)
    assert ended(REACHES)["outcome"] == "passed"
    assert ended(REACHES, temporary / "reaches") == ended(REACHES)
    assert ended(ATTACKS["a fork bomb"][0], temporary / "forks")["detail"].startswith("BlockingIOError")
    for number in (2, 9, 15, 19):
        assert ended(SIGNALS.format(number))["detail"] == "AssertionError: still here", number
    assert ended(SIGNALS.format(9), temporary / "kills") == {}, "unisolated, signals reach it"


def test_a_program_that_ends_its_watcher_is_the_one_that_fails(namespaces: None) -> None:
    """Without isolation an ordinary user's program can end or stop its watcher; the other programs run all the same,
    and none waits for three times the time."""
    programs = {
        "kills": "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(1)",
        "stops": "import os, time\nos.kill(os.getppid(), 19)\ntime.sleep(100)",
        "harmless": "assert 1 == 1",
    }
    code = (
        "import json\nfrom evalengine.integrations.sandbox import run\n"
        "run.SPARE_SECONDS = 1\nlimits = run.ProgramLimits(cpu_seconds=1, wall_seconds=2)\n"
        f"programs = {programs!r}\n"
        "verdicts = run.run_programs(dict.fromkeys(programs.values(), limits), isolated=False)\n"
        "print(json.dumps({name: str(verdicts[program]) for name, program in programs.items()}))"
    )
    began = time.monotonic()
    done = subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, check=False, cwd="/",
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}, **ORDINARY,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "kills": "failed: the process that watches it was ended 3 times",
        "stops": "timeout: 2 s of time, and its watcher is stopped",
        "harmless": "passed",
    }
    assert time.monotonic() - began < 8


def test_the_caller_s_keys_are_out_of_reach(isolated: bool) -> None:
    """Keys that this session holds (a token, say) are neither read nor named to a program, nor added to."""
    column, _ = inside.ARCHITECTURES[platform.machine()]
    add, _, keyctl = (inside.REFUSED[name][column] for name in ("add_key", "request_key", "keyctl"))
    session, secret = -3, f"evalengine-secret-{os.getpid()}"
    program = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        f"found = [n for n in (-3, -4, -5) if libc.syscall({keyctl}, 10, n, b'user', b'{secret}', 0) != -1]\n"
        f"listed = os.path.exists('/proc/keys') and '{secret}' in open('/proc/keys').read()\n"
        f"added = libc.syscall({add}, b'user', b'mine', b'x', 1, {session}) != -1\n"
        "assert not (found or listed or added), (found, listed, added)"
    )
    ends: list[str] = []

    def with_a_key() -> None:
        """A session's keyring belongs to a thread, and to what it starts."""
        libc = ctypes.CDLL(None)
        if libc.syscall(keyctl, 1, None) == -1 or libc.syscall(add, b"user", secret.encode(), b"x", 1, session) == -1:
            return
        ends.append(str(run_programs({program: QUICK}, isolated)[program]))
        ends.append(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stderr)

    thread = threading.Thread(target=with_a_key)
    thread.start()
    thread.join()
    if not ends:
        pytest.skip("this kernel has no keyrings")
    assert ends[0] == "passed"
    assert "AssertionError: ([-3], True, True)" in ends[1], "the attack is one where nothing prevents it"


@pytest.mark.parametrize("behind", ["the folder", "a folder above", "two links", "the interpreter"])
def test_a_virtual_environment_behind_a_link_runs_programs(kernel_isolates: None, tmp_path: Path, behind: str) -> None:
    if sys.prefix == sys.base_prefix:
        pytest.skip("this Python is in no virtual environment")
    prefix = Path(sys.prefix)
    (tmp_path / "above").mkdir()
    (tmp_path / "second").symlink_to(prefix)
    (tmp_path / "above" / "relative").symlink_to("../second")
    (tmp_path / "parent").symlink_to(prefix.parent)
    python = {
        "the folder": tmp_path / "second" / "bin" / "python",
        "a folder above": tmp_path / "parent" / prefix.name / "bin" / "python",
        "two links": tmp_path / "above" / "relative" / "bin" / "python",
        "the interpreter": tmp_path / "new" / "bin" / "python",
    }[behind]
    if behind == "the interpreter":  # its environment was made by a Python that is a link in a folder of programs
        (tmp_path / "python").symlink_to(os.path.realpath(sys.executable))
        python.parent.mkdir(parents=True)
        python.symlink_to(tmp_path / "python")
        (tmp_path / "new" / "pyvenv.cfg").write_text(f"home = {tmp_path}\n")
    code = (
        "from evalengine.integrations.sandbox import run\nrun.PROBE = 'import sys, subprocess, json\\n'"
        '\'subprocess.run([sys.executable, "-c", "import decimal"], check=True)\'\nprint(run.problem(True))'
    )
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.stdout == "None\n", done.stderr
