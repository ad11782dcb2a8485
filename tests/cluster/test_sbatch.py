"""examples/slurm_ray.sbatch, with stand-ins for Slurm's commands: two Rays of this machine are its two nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import SETTINGS
from tests.e2e.command import ROOT, Run, runs

SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
if [[ "$1" == show ]]; then printf '%s\\n' 127.0.0.1 node-b; else echo "$*" >>"$REQUEUED"; fi
"""
JOB = 4242


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the job of a run, as Slurm starts it on the first of two nodes."""
    commands, jobs = tmp_path / "bin", []
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    slurm = {"JOB_ID": str(JOB), "JOB_NUM_NODES": "2", "JOB_NODELIST": "two", "CPUS_ON_NODE": "1"}
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    others = {"SLURMD_NODENAME": "127.0.0.1", "REQUEUED": str(tmp_path / "requeued"), "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **{f"SLURM_{name}": value for name, value in slurm.items()}, **others, "PATH": path}

    def start(*words: str) -> subprocess.Popen[str]:
        command = [str(ROOT / "examples" / "slurm_ray.sbatch"), *words, f"output_dir={tmp_path / 'out'}"]
        job = subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True, start_new_session=True)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def left_behind() -> list[str]:
    """The processes of the job's Ray."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"evalengine-ray-{JOB}" in words:
            found.append(words)
    return found


def test_two_nodes_give_the_bits_of_one_engine(
    submit: Callable[..., subprocess.Popen[str]], tmp_path: Path, one_engine: Run
) -> None:
    """The audit needs a second replica, and so the run waits for that of the other node, however slowly it comes."""
    job = submit(*SETTINGS, "cluster.audit=0.2")
    out, err = job.communicate(timeout=300)
    assert job.returncode == 0, out + err
    (run,) = runs(tmp_path / "out")
    assert run.digest == one_engine.digest and out.rstrip().endswith(f"digest: {run.digest}")
    assert [bool(replica["audited"]) for replica in run.manifest["cluster"]["replicas"]] == [True, True]
    assert left_behind() == [] and not (tmp_path / "requeued").exists()
    assert not Path(f"/tmp/evalengine-ray-{JOB}").exists()


def test_a_job_whose_time_is_over_is_queued_again(submit: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    job = submit("limit=200", "engine.device=cpu", "engine.num_threads=1", "progress=false")
    while not [*(tmp_path / "out").glob("*/journal.jsonl")]:
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)  # what `--signal=B:TERM@120` sends to the script alone
    _, err = job.communicate(timeout=300)
    assert job.returncode == 143 and "the same command resumes" in err, err
    assert (tmp_path / "requeued").read_text() == f"requeue {JOB}\n" and left_behind() == []
