"""Runs that are killed, interrupted or out of disk: the same command again ends in the digest of an unbroken run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evalengine.records.journal import Journal
from tests.e2e.command import (
    LIMIT,
    ROOT,
    SHORT,
    Outcome,
    Run,
    after_entries,
    call,
    check_output,
    finish,
    finished,
    over,
    runs,
    start,
)

# Two requests run at a time, so that they finish one after another and a kill finds some done and some not.
SETTINGS = (f"limit={LIMIT}", SHORT, "engine.device=cpu", "engine.max_num_seqs=2", "progress=false")
IN_PROGRESS = [".lock", "config.yaml", "identity.json", "journal.jsonl"]
SIZE_OF_PAGE = os.sysconf("SC_PAGESIZE")


@contextmanager
def running(output_dir: Path, *settings: str, lines: int = 2) -> Iterator[tuple[subprocess.Popen[str], Run]]:
    """A run stopped (SIGSTOP) once its journal has `lines` lines; killed at the end if it still lives."""
    process = start(f"output_dir={output_dir}", *over(SETTINGS, *settings))
    try:
        journal = wait_for_journal(process, output_dir, lines)
        process.send_signal(signal.SIGSTOP)
        assert process.poll() is None and journal.exists(), "it was over before it could be stopped"
        yield process, Run(journal.parent)
    finally:
        process.kill()
        process.communicate()


def wait_for_journal(process: subprocess.Popen[str], output_dir: Path, lines: int) -> Path:
    """Waits until the journal of a run in `output_dir` has `lines` lines, and returns its path."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        for journal in output_dir.glob("*/journal.jsonl"):
            if journal.read_bytes().count(b"\n") >= lines:
                return journal
        time.sleep(0.005)
    raise AssertionError(f"no journal of {lines} lines; exit code {process.poll()}")


def resume(output_dir: Path, *settings: str) -> Outcome:
    """Runs the command with SETTINGS in this process, which resumes an unfinished run."""
    return call(f"output_dir={output_dir}", *over(SETTINGS, *settings))


def check_resumed(done: Outcome, run: Run, kept: int, reference: Run) -> None:
    """Asserts that the resumed run kept `kept` answers, cleared its scratch files, and has the reference's digest."""
    assert done.code == 0, done.err
    check_output(done, run)
    counts = run.manifest["counts"]
    assert counts["resumed_requests"] == kept and counts["requests"] == LIMIT
    assert counts["output_tokens"] < sum(len(record.output_ids) for record in run.records)
    assert f"{LIMIT} requests of {LIMIT} documents, {kept} of them answered by the interrupted run" in done.out
    assert not any((run.folder / name).exists() for name in (".lock", "identity.json", "journal.jsonl"))
    assert run.digest == reference.digest
    assert run.results == reference.results


def journaled(run: Run) -> int:
    """Whole lines of an unfinished run's journal."""
    return (run.folder / "journal.jsonl").read_bytes().count(b"\n")


@pytest.fixture(scope="module")
def killed(short_reference: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The unfinished folder of a run ended by kill -9; while it ran, the same command made another run beside it."""
    output_dir = tmp_path_factory.mktemp("killed")
    with running(output_dir) as (process, broken):
        meanwhile = resume(output_dir)
        assert meanwhile.code == 0, meanwhile.err
        (other,) = (run for run in runs(output_dir) if run != broken)
        check_output(meanwhile, other)
        assert other.digest == short_reference.digest and other.manifest["counts"]["resumed_requests"] == 0
        process.kill()
        assert finish(process).code == -signal.SIGKILL
    return broken


@pytest.fixture
def broken(killed: Run, tmp_path: Path) -> Run:
    """A copy of the killed run's folder, alone in its output folder."""
    return Run(Path(shutil.copytree(killed.folder, tmp_path / killed.folder.name)))


def test_kill_9_halfway(broken: Run, short_reference: Run, tmp_path: Path) -> None:
    assert sorted(entry.name for entry in broken.folder.iterdir()) == IN_PROGRESS
    kept = journaled(broken)
    assert 2 <= kept < LIMIT
    check_resumed(resume(tmp_path), broken, kept, short_reference)
    assert runs(tmp_path) == [broken]


def test_a_torn_last_line_runs_again(broken: Run, short_reference: Run, tmp_path: Path) -> None:
    journal, kept = broken.folder / "journal.jsonl", journaled(broken)
    os.truncate(journal, journal.stat().st_size - 7)
    check_resumed(resume(tmp_path, f"resume={broken.folder}"), broken, kept - 1, short_reference)


def test_resume_never_starts_anew(broken: Run, short_reference: Run, tmp_path: Path) -> None:
    done = resume(tmp_path, "resume=never")
    (new_run,) = (run for run in runs(tmp_path) if run != broken)
    assert done.code == 0 and new_run.manifest["counts"]["resumed_requests"] == 0
    assert new_run.digest == short_reference.digest
    assert sorted(entry.name for entry in broken.folder.iterdir()) == IN_PROGRESS


def test_a_damaged_journal_is_named(broken: Run, tmp_path: Path) -> None:
    journal = broken.folder / "journal.jsonl"
    content = bytearray(journal.read_bytes())
    content[10] ^= 1
    journal.write_bytes(content)
    done = resume(tmp_path)
    assert done.code == 1 and done.out == ""
    assert done.err.startswith(f"evalengine: {journal}: line 1 is damaged") and done.err.count("\n") == 1
    assert journal.read_bytes() == content, "the rest may be worth something to its owner"


def test_another_run_does_not_take_it_up(broken: Run, tmp_path: Path) -> None:
    """Another limit makes a run of its own; another seed is refused where the unfinished folder is named."""
    done = resume(tmp_path, "limit=1")
    assert done.code == 0 and len(runs(tmp_path)) == 2
    refused = resume(tmp_path, "seed=1", f"resume={broken.folder}")
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert "seed was 0, is 1" in refused.err and "set resume=auto" in refused.err


def test_another_model_does_not_take_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed rope_theta beside equal weight files makes another model, which starts a run of its own."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "evalengine" / "assets" / "tinymath", model)
    named = (f"model.path={model}", "limit=4", "engine.max_num_seqs=1", "task.generation.max_gen_toks=8")

    def interrupted(*_: object) -> None:
        append(*_)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    append = Journal.append
    with monkeypatch.context() as patch:  # A killed process, above, leaves the same files.
        patch.setattr(Journal, "append", interrupted)
        assert resume(tmp_path / "out", *named).code == 130
    (broken,) = runs(tmp_path / "out")
    config = json.loads((model / "config.json").read_text())
    rope_theta = config["rope_theta"]
    config["rope_theta"] = rope_theta * 2
    (model / "config.json").write_text(json.dumps(config))
    done = resume(tmp_path / "out", *named)
    assert done.code == 0, done.err
    (new_run,) = (run for run in runs(tmp_path / "out") if run != broken)
    assert new_run.manifest["counts"]["resumed_requests"] == 0
    assert new_run.digest == finished(tmp_path / "fresh", *over(SETTINGS, *named)).digest
    refused = resume(tmp_path / "out", *named, f"resume={broken.folder}")
    assert refused.code == 2 and f"model_spec.rope.theta was {rope_theta}, is {rope_theta * 2}" in refused.err


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "Interrupted"), (signal.SIGTERM, "Terminated")])
def test_interrupt(
    number: signal.Signals, word: str, short_reference: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either signal finishes the step that runs, keeps what is finished, and says that the same command resumes."""
    before = signal.signal(number, signal.default_int_handler)  # as the command's process has one for both
    try:
        with monkeypatch.context() as patch:
            after_entries(patch, 2, lambda: os.kill(os.getpid(), number))
            done = resume(tmp_path)
        assert signal.getsignal(number) is signal.default_int_handler, "the signal has its own meaning again"
    finally:
        signal.signal(number, before)
    (broken,) = runs(tmp_path)
    assert (done.code, done.out) == (128 + number, "")
    assert done.err == (
        "evalengine: finishing the step that runs; Ctrl-C again ends at once\n"
        f"{word}: finished requests are in {broken.folder}; the same command resumes.\n"
    )
    kept = journaled(broken)
    assert 2 <= kept < LIMIT
    check_resumed(resume(tmp_path), broken, kept, short_reference)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of our own, whose size `mount -o remount,size=` sets."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small tmpfs")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def leave(disk: Path, pages: int) -> None:
    """Resizes the file system to what it holds and `pages` pages more."""
    usage = os.statvfs(disk)
    size = (usage.f_blocks - usage.f_bfree) * usage.f_frsize + pages * SIZE_OF_PAGE
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)


# Quick stay a disk that is full before the first file and one that is full amid the journal.
PAGES = [pytest.param(pages, marks=() if pages in (0, 5) else pytest.mark.slow) for pages in (0, 1, 3, 5, 11)]


@pytest.mark.parametrize("pages", PAGES, ids=lambda pages: f"{pages} pages left")
def test_full_disk(pages: int, small_disk: Path, short_reference: Run) -> None:
    """Wherever the disk fills up (identity, configuration, journal, records, results; by the pages left): one sentence
    and no digest; with room again the same command finishes."""
    (small_disk / "filler").write_bytes(bytes(SIZE_OF_PAGE))  # To mount, size=0 would mean no limit.
    leave(small_disk, pages)
    done = resume(small_disk / "out")
    assert done.code == 1 and done.out == ""
    assert done.err.count("\n") == 1 and "No space left on device" in done.err and str(small_disk) in done.err
    assert "rerun the command to resume" in done.err
    assert not list(small_disk.glob("out/*/digest.txt"))
    assert len(runs(small_disk / "out")) == (pages > 0), "a folder that could not be resumed is not left behind"
    leave(small_disk, 256)
    resumed = resume(small_disk / "out")
    assert resumed.code == 0, resumed.err
    (run,) = runs(small_disk / "out")
    check_output(resumed, run)
    assert run.digest == short_reference.digest
    assert run.results == short_reference.results and len(run.samples("arithmetic")) == LIMIT
