"""A run killed at any write: the same command leaves one finished folder, whole, with an unbroken run's digest."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalengine.cli.run import run_one
from evalengine.config.compose import compose_jobs
from evalengine.config.schema import Config
from evalengine.engine.llm import LLM
from evalengine.report.read.load import load_run
from tests.e2e.command import ROOT, call, runs

SETTINGS = ("engine.device=cpu", "limit=2", "task.generation.max_gen_toks=3", "progress=false")
WHOLE = ["config.yaml", "digest.txt", "manifest.json", "records.parquet", "report.html", "results", "samples",
         "tokens.json"]  # fmt: skip
WRITES = ("replace", "unlink", "mkdir")  # These functions of `os` are watched: a file appears by a rename only.
# A program whose first argument is FUNCTION:NAME: before `os`.FUNCTION takes a path that ends in NAME, it kills itself.
VICTIM = """
import os, signal, sys
from evalengine.__main__ import main
name, where = sys.argv[1].split(":")
real = getattr(os, name)
def write(*arguments, **options):
    if str(arguments[-1]).endswith(where):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **options)
setattr(os, name, write)
main(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def config() -> Config:
    """The configuration of a short run."""
    (job,) = compose_jobs(list(SETTINGS), False)
    return job.config


def kinds(folder: Path) -> list[str]:
    """The names of the folder's files, without the task and the time that are in some of them."""
    return sorted(re.sub(r"^(results|samples)_.*", r"\1", path.name) for path in folder.iterdir())


@contextmanager
def copies_before_every_write(root: Path, to: Path) -> Iterator[list[str]]:
    """Copies `root` to `to`/<number> before each write, as a kill there would leave it; yields the writes in order."""
    writes: list[str] = []
    with pytest.MonkeyPatch.context() as patch:

        def copied_before(name: str) -> Callable[..., Any]:
            real = getattr(os, name)

            def write(*arguments: Any, **options: Any) -> Any:
                target = Path(arguments[-1] if name == "replace" else arguments[0])
                if target.is_relative_to(root) and (name != "unlink" or target.exists()):
                    writes.append(f"{name} {target.name}")
                    shutil.copytree(root, to / f"{len(writes)}")
                    for scratch in to.glob(f"{len(writes)}/*/.*.partial"):
                        os.truncate(scratch, scratch.stat().st_size // 2)  # The kill came while this file was written.
                return real(*arguments, **options)

            return write

        for name in WRITES:
            patch.setattr(os, name, copied_before(name))
        yield writes


def test_every_write_of_a_run(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before any one of its writes, a run is finished by the same command; if its digest stood, nothing runs
    again."""
    root, copies = tmp_path / "whole", tmp_path / "copies"
    root.mkdir()
    with copies_before_every_write(root, copies) as writes:
        assert run_one(replace(config, output_dir=str(root))) == 0
    (unbroken,) = runs(root)
    assert kinds(unbroken.folder) == WHOLE
    assert len(writes) >= 14 and {"replace digest.txt", "replace report.html", "replace index.html"} <= {*writes}
    assert writes[-1] == "unlink identity.json", "the last of all: with it, the same command makes no other run"
    run_calls: list[int] = []
    real = LLM.run
    monkeypatch.setattr(LLM, "run", lambda self, *rest: run_calls.append(1) or real(self, *rest))  # type: ignore[func-returns-value]
    capsys.readouterr()
    for number, write in enumerate(writes, 1):
        output_dir, had_digest = copies / str(number), bool([*copies.glob(f"{number}/*/digest.txt")])
        run_calls.clear()
        assert run_one(replace(config, output_dir=str(output_dir))) == 0, write
        (resumed,) = runs(output_dir)
        assert kinds(resumed.folder) == WHOLE, write
        assert resumed.digest == unbroken.digest and load_run(resumed.folder).digest == unbroken.digest, write
        assert capsys.readouterr().out.endswith(f"digest: {unbroken.digest}\n"), write
        assert bool(run_calls) != had_digest, f"{write}: a run whose digest stands is not computed again"
        assert resumed.results == unbroken.results, write


@pytest.mark.parametrize("where", ["html.on_complete.write_list", "run_table.print_report"])
def test_ctrl_c_after_the_digest(where: str, tmp_path: Path) -> None:
    """A run that is interrupted while its table is made is finished by the same command, which computes nothing."""
    words = (f"output_dir={tmp_path}", *SETTINGS)

    def interrupted(folder: Path) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"evalengine.report.{where}", interrupted)
        broken = call(*words)
    (run,) = runs(tmp_path)
    assert broken.code == 130 and f"{run.folder}; the same command resumes" in broken.err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "run", lambda *_: pytest.fail("it computes again"))
        done = call(*words)
    assert done.code == 0 and runs(tmp_path) == [run] and done.out.endswith(f"digest: {run.digest}\n"), done.err
    assert kinds(run.folder) == WHOLE


@pytest.mark.slow  # quick: a kill before every write, in this process, above; and a killed process in test_resume.py
@pytest.mark.parametrize("write", ["replace:report.html", "replace:index.html", "unlink:identity.json"])
def test_kill_9_between_the_digest_and_the_end(write: str, tmp_path: Path) -> None:
    """A run killed when its digest stands is finished by the same command, which writes no evidence again."""
    (tmp_path / "victim.py").write_text(VICTIM)
    words = (f"output_dir={tmp_path / 'out'}", *SETTINGS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, tmp_path / "victim.py", write, *words], cwd=ROOT, env=environment,
                            capture_output=True)  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (broken,) = runs(tmp_path / "out")
    before = {path.name: path.read_bytes() for path in broken.folder.iterdir() if not path.name.startswith(".")}
    assert "digest.txt" in before and "identity.json" in before
    done = call(*words)
    assert done.code == 0, done.err
    (run,) = runs(tmp_path / "out")
    assert run == broken and kinds(run.folder) == WHOLE and done.out.endswith(f"digest: {run.digest}\n")
    for name, content in before.items():
        if name not in ("identity.json", "journal.jsonl", "report.html"):
            assert (run.folder / name).read_bytes() == content, f"{name}: evidence is not written again"
