"""Programs as models write them, and worse: each ends within its limits, and reaches nothing that it must not."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from evalengine.integrations.sandbox import run as run_module
from evalengine.integrations.sandbox.inside import namespaces as inside
from evalengine.integrations.sandbox.run import WORKER, problem, run_programs
from evalengine.tasks.instance import ProgramLimits, ProgramVerdict
from tests.unit.hostile_programs import ATTACKS, CALLS, HARMLESS, ISOLATED_ATTACKS, QUICK, SYSTEM_PYTHON, leftovers


def run_one(program: str, isolated: bool = True, limits: ProgramLimits = QUICK) -> ProgramVerdict:
    """The verdict on one program."""
    (verdict,) = run_programs({program: limits}, isolated).values()
    return verdict


def test_every_attack_is_contained(isolated: bool, monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    attacks = {**ATTACKS, **(ISOLATED_ATTACKS if isolated else {})}
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    done: list[int] = []
    verdicts = run_programs(
        dict.fromkeys((program for program, _ in attacks.values()), QUICK), isolated, lambda: done.append(1)
    )
    wrong = {
        name: f"{verdicts[program]} is not {expected}"
        for name, (program, expected) in attacks.items()
        if not str(verdicts[program]).startswith(expected)
    }
    assert not wrong
    assert len(done) == len(attacks) and not leftovers(temporary)


def test_harmless_programs_pass_each_time_alike(isolated: bool) -> None:
    programs = dict(HARMLESS)
    if sys.executable == SYSTEM_PYTHON:
        del programs["NumPy"]
    limits = replace(QUICK, wall_seconds=20, memory_bytes=ProgramLimits.memory_bytes)
    verdicts = run_programs(dict.fromkeys(programs.values(), limits), isolated)
    assert {name: str(verdicts[program]) for name, program in programs.items()} == dict.fromkeys(programs, "passed")
    order = "raise ValueError(hash('a'), {'a', 'b', 'c', 'd'}, {int, str, float, len, None}, id(object()) % 4096)"
    assert len({str(run_one(order, isolated)) for _ in range(3)}) == 1


def test_time_is_that_of_the_processor(isolated: bool) -> None:
    """A busy machine decides nothing: a program that waits uses no processor time."""
    patient = replace(QUICK, wall_seconds=60)
    assert str(run_one("while True: pass", isolated, patient)) == "timeout: 1 s of processor time"
    assert run_one("import time\ntime.sleep(1.5)", isolated, patient).passed


def test_nothing_of_the_caller_is_reached(isolated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program reaches network, files, descriptors or environment; unisolated, it reaches the network."""
    monkeypatch.setenv("SECRET_TOKEN", "hunter2-of-the-caller")
    tmp_path.chmod(0o755)
    (tmp_path / "secret").write_text("hunter2")
    inherited = os.open(tmp_path / "secret", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0evalengine-{os.getpid()}")
        local.listen()
        address = server.getsockname()
        programs = {
            "network": f"import socket\nsocket.create_connection({address!r}, 2)",
            "abstract": f"import socket\nsocket.socket(socket.AF_UNIX).connect('\\0evalengine-{os.getpid()}')",
            "file": f"open({str(tmp_path / 'secret')!r}).read()",
            "environment": "import os, glob\nassert 'SECRET_TOKEN' not in os.environ\n"
            "for file in glob.glob('/proc/*/environ'):\n    try: found = open(file, 'rb').read()\n"
            "    except OSError: continue\n    assert b'hunter2' not in found, file",
            "descriptors": "import os\nassert len(os.listdir('/proc/self/fd')) == 5",  # one is the listing's
            "user": "import os\nassert os.getuid() != 0",
        }
        verdicts = run_programs(dict.fromkeys(programs.values(), QUICK), isolated)
    outcomes = {name: str(verdicts[program]) for name, program in programs.items()}
    os.close(inherited)
    assert outcomes["descriptors"] == "passed" and (outcomes["user"] == "passed" or os.geteuid() != 0)
    if isolated:
        assert outcomes["network"].startswith("failed: OSError: [Errno 101] Network is unreachable")
        assert outcomes["abstract"].startswith("failed: ConnectionRefusedError")
        assert outcomes["file"].startswith("failed: FileNotFoundError")
        assert outcomes["environment"] == "passed"
    else:
        assert outcomes["network"] == outcomes["abstract"] == "passed", "the attack is one where nothing prevents it"


def test_calls_that_lift_limits_are_not_there(isolated: bool) -> None:
    column, _ = inside.ARCHITECTURES[platform.machine()]
    numbers = {name: calls[column] for name, calls in inside.REFUSED.items()}
    program = CALLS.format(numbers=numbers | {"of the future": inside.UNKNOWN})
    assert run_one(program, isolated).passed
    unfiltered = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "AssertionError: [" in unfiltered.stderr and "'unshare'" in unfiltered.stderr
    flags = [1 << bit for bit in range(31) if inside.NAMESPACES >> bit & 1]
    clones = (  # A child of clone(17), which means fork, ends at once.
        "import ctypes, os\nlibc, me = ctypes.CDLL(None, use_errno=True), os.getpid()\n"
        f"def clone(flags): child = libc.syscall({inside.CLONE[column]}, flags | 17, 0, 0, 0, 0); "
        "os._exit(0) if os.getpid() != me else None; return child\n"
        f"assert clone(0) > 0 and {{clone(flag) for flag in {flags}}} == {{-1}}, ctypes.get_errno()"
    )
    assert run_one(clones, isolated).passed


def test_a_machine_that_isolates_nothing_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text('import json, sys\nsys.stdin.read()\nprint(json.dumps({"error": "unshare: not permitted"}))')
    monkeypatch.setattr(run_module, "WORKER", worker)
    problem.cache_clear()
    why = problem(True)
    assert why is not None and why.startswith("a program could not be run: unshare: not permitted; let users have")
    worker.write_text(worker.read_text().replace("}", ', "folder": "not shown"}'))
    problem.cache_clear()
    assert str(problem(True)).endswith(run_module.READABLE), "a folder is no matter of namespaces"
    monkeypatch.setattr(run_module, "WORKER", WORKER)
    monkeypatch.setattr(run_module, "PROBE", "import nothing_of_this_name")
    problem.cache_clear()
    assert "ModuleNotFoundError" in str(problem(True)) or problem(True) == why
    problem.cache_clear()
