"""Whole fleets in processes of their own: machines that go and come, drivers that are killed, what Ray leaves."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import SETTINGS
from tests.e2e.command import ROOT, Outcome, Run, finish, finished, over, runs, start
from tests.e2e.test_resume import wait_for_journal

pytestmark = pytest.mark.slow
LONG = ("limit=40", "task.generation.max_gen_toks=60", "engine.max_num_seqs=2")
TWO = (*SETTINGS, "cluster=ray", "cluster.replicas=2", "engine.max_num_seqs=2")


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder with a short name for Ray's files, as the paths of its sockets may not be long."""
    folder = Path(tempfile.mkdtemp(prefix="ee", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def of_ray(scratch: Path) -> list[str]:
    """The command lines of Ray's processes that belong to that folder."""
    command_lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(scratch) in words and "ray" in words and str(os.getpid()) != entry.parent.name:
            command_lines.append(words.replace("\0", " ")[:80])
    return command_lines


def gone(scratch: Path, seconds: float = 30) -> bool:
    """Whether Ray's processes end within so many seconds."""
    deadline = time.monotonic() + seconds
    while of_ray(scratch) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not of_ray(scratch)


def on_two_machines(event: str, folder: Path, *settings: str) -> Outcome:
    """Runs two_nodes.py with the event, and waits for its end."""
    words = [sys.executable, str(ROOT / "tests/cluster/two_nodes.py"), str(folder), event, *over(SETTINGS, *settings)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_a_machine_goes_in_mid_run(tmp_path: Path) -> None:
    """The run is long enough that Ray, which takes seconds to see that a machine is gone, sees it before the end."""
    one_engine = finished(tmp_path / "one", *over(SETTINGS, *LONG))
    done = on_two_machines("remove", tmp_path / "two", *LONG)
    assert done.code == 0, done.err
    (run,) = runs(tmp_path / "two")
    assert run.digest == one_engine.digest
    replicas = run.manifest["cluster"]["replicas"]
    assert any(replica["lost"] for replica in replicas) and " is lost: " in done.err


def test_a_machine_comes_in_mid_run(one_engine: Run, tmp_path: Path) -> None:
    """The audit needs a second replica, and so waits for the machine that comes."""
    done = on_two_machines("join", tmp_path, "cluster.audit=0.2")
    assert done.code == 0, done.err
    (run,) = runs(tmp_path)
    assert run.digest == one_engine.digest
    cluster = run.manifest["cluster"]
    assert [bool(replica["audited"]) for replica in cluster["replicas"]] == [True, True] and not cluster["unaudited"]


def test_a_machine_with_other_weights_is_refused(one_engine: Run, tmp_path: Path) -> None:
    done = on_two_machines("weights", tmp_path)
    assert done.code == 0, done.err
    (run,) = runs(tmp_path)
    assert run.digest == one_engine.digest
    cluster = run.manifest["cluster"]
    assert len(cluster["replicas"]) == 1 and len(cluster["refused"]) == 1
    assert "its weights have the hash 000000000000" in cluster["refused"][0] and cluster["refused"][0] in done.err


def test_the_driver_is_killed_at_any_moment(one_engine: Run, tmp_path: Path, scratch: Path) -> None:
    """The same command resumes, as often as it takes; no process stays, and the last run removes every folder."""
    draw = random.Random(0)
    lines_before = 0
    for attempt in range(4):
        process = start(f"output_dir={tmp_path}", *TWO, TMPDIR=str(scratch))
        try:
            if attempt == 0:
                wait_for_journal(process, tmp_path, lines=3)
            else:
                time.sleep(draw.uniform(1, 15))
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        assert gone(scratch), of_ray(scratch)
        lines = sum(path.read_bytes().count(b"\n") for path in tmp_path.glob("*/journal.jsonl"))
        assert lines >= lines_before or runs(tmp_path)[0].folder.joinpath("digest.txt").exists(), "nothing is lost"
        lines_before = lines
    assert list(scratch.glob("evalengine-ray-*")), "a killed driver could not remove its folder"
    done = finish(start(f"output_dir={tmp_path}", *TWO, TMPDIR=str(scratch)))
    assert done.code == 0, done.err
    assert one_engine.digest in {run.digest for run in runs(tmp_path)}
    assert gone(scratch) and not list(scratch.glob("evalengine-ray-*"))


def test_replicas_are_killed_at_random_moments(one_engine: Run, tmp_path: Path, scratch: Path) -> None:
    draw = random.Random(1)
    process = start(f"output_dir={tmp_path}", *TWO, TMPDIR=str(scratch))
    killed = 0
    wait_for_journal(process, tmp_path, lines=1)
    while process.poll() is None and killed < 3:
        replicas = [
            int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if _is_replica(path, process)
        ]
        if replicas:
            os.kill(draw.choice(replicas), signal.SIGKILL)
            killed += 1
        time.sleep(draw.uniform(0.5, 4))
    done = finish(process)
    assert done.code == 0, done.err
    (run,) = runs(tmp_path)
    assert run.digest == one_engine.digest
    assert killed and any(replica["lost"] for replica in run.manifest["cluster"]["replicas"])


def _is_replica(cmdline: Path, driver: subprocess.Popen[str]) -> bool:
    """Whether the process is an actor of this driver's Ray: the raylet's child, and the driver's grandchild."""
    try:
        if not cmdline.read_bytes().startswith(b"ray::Replica"):
            return False
        parent = _parent(int(cmdline.parent.name))
        return _parent(parent) == driver.pid
    except (OSError, ValueError):
        return False


def _parent(pid: int) -> int:
    """The process id of the process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "Interrupted"), (signal.SIGTERM, "Terminated")])
def test_a_signal_to_the_whole_group(
    number: signal.Signals, word: str, one_engine: Run, tmp_path: Path, scratch: Path
) -> None:
    """A terminal's Ctrl-C and a batch system's SIGTERM reach Ray's processes, too: what arrived is kept, and nothing
    stays."""
    words = [sys.executable, "-m", "evalengine", f"output_dir={tmp_path}", *TWO]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )  # fmt: skip
    wait_for_journal(process, tmp_path, lines=2)
    os.killpg(process.pid, number)
    done = finish(process)
    (broken,) = runs(tmp_path)
    assert done.code == 128 + number and done.err.endswith(
        f"{word}: finished requests are in {broken.folder}; the same command resumes.\n"
    ), done.err
    assert "finishing the step that runs" in done.err and " is lost" not in done.err
    assert gone(scratch) and not list(scratch.glob("evalengine-ray-*"))
    resumed = finish(start(f"output_dir={tmp_path}", *TWO, TMPDIR=str(scratch)))
    assert resumed.code == 0 and runs(tmp_path)[0].digest == one_engine.digest, resumed.err
