"""The run folder: made, taken up again, locked while in use, finished; and no file half written."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evalengine.errors import ConfigError, EvalEngineError
from evalengine.records.folder import RunFolder, sanitise, write_text_file
from evalengine.records.schema import write_records
from evalengine.records.sealed import run_id_of


def open_folder(root: Path, resume: str = "auto", **identity: Any) -> RunFolder:
    """Opens the folder of a run with this identity."""
    return RunFolder.open(root, "gsm8k+arc-org/model", resume, identity)


def finish(folder: RunFolder) -> None:
    """Finishes the run: records, digest, and no trace of the work."""
    folder.write_with("records.parquet", lambda path: write_records(path, []))
    folder.finish("ab" * 32)
    folder.tidy()


def test_a_new_folder(tmp_path: Path) -> None:
    """The folder is made with its parents, and its name has the tasks, the model, the time and the identity."""
    with open_folder(tmp_path / "deep" / "results") as folder:
        assert folder.path.parent == tmp_path / "deep" / "results"
        assert folder.path.name.startswith("gsm8k+arc-org_model-2") and folder.path.name.endswith(f"-{run_id_of({})}")


def test_an_unfinished_run_is_taken_up_and_a_finished_one_is_not(tmp_path: Path) -> None:
    with open_folder(tmp_path) as first:
        first.journal.write_text("x")
    with open_folder(tmp_path) as second:
        assert second.path == first.path
        finish(second)
        assert sorted(p.name for p in second.path.iterdir()) == ["digest.txt", "records.parquet"]
        assert (second.path / "digest.txt").read_text() == "ab" * 32 + "\n"
    with open_folder(tmp_path) as third:
        assert third.path != first.path


def test_a_run_that_was_begun_with_other_libraries_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of its answers would be another compiler's; nothing else tells them apart afterwards."""

    def reopened(resume: str, torch: str) -> RunFolder:
        return RunFolder.open(tmp_path, "sums", resume, {"w": 1}, {"torch": torch, "triton": "3.6"})

    with reopened("auto", "2.11") as first:
        first.journal.write_text("x")
    with reopened("auto", "2.11") as again:
        assert again.path == first.path
    with reopened("auto", "2.13") as other:
        assert other.path != first.path
    assert f"{first.path} was started with torch 2.11 (here 2.13): skipped" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"started with torch 2\.11 \(here 2\.13\).*set resume=never"):
        reopened(str(first.path), "2.13")
    reopened(str(first.path), "2.11").close()


def test_the_newest_unfinished_one_is_taken(tmp_path: Path) -> None:
    paths = []
    for number in range(3):
        with open_folder(tmp_path, "never") as folder:
            os.utime(folder.path / "identity.json", ns=(number, number))
            paths.append(folder.path)
    assert len(set(paths)) == 3  # names of the same second still differ
    with open_folder(tmp_path) as reopened:
        assert reopened.path == paths[-1]


def test_other_ids_are_left_alone(tmp_path: Path) -> None:
    with open_folder(tmp_path) as first:
        pass
    with open_folder(tmp_path, limit=3) as other:
        assert other.path != first.path


def test_a_folder_in_use_is_never_taken(tmp_path: Path) -> None:
    program = (
        "import sys; from evalengine.records.folder import RunFolder;"
        "f = RunFolder.open(sys.argv[1], 'n', 'auto', {}); print(f.path, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        locked = process.stdout.readline().strip()
        with open_folder(tmp_path) as new:
            assert str(new.path) != locked
        with pytest.raises(ConfigError, match="another process"):
            open_folder(tmp_path, locked)
        process.kill()
        process.wait()
    with open_folder(tmp_path, locked) as taken:  # the lock went with the process
        assert str(taken.path) == locked


def test_resume_names_what_differs(tmp_path: Path) -> None:
    with open_folder(tmp_path, limit=3, engine={"max_model_len": None}) as folder:
        pass
    with pytest.raises(
        ConfigError, match=r"run: engine\.max_model_len was null, is 5; limit was 3, is 4\. .*resume=auto"
    ):
        open_folder(tmp_path, str(folder.path), limit=4, engine={"max_model_len": 5})
    with pytest.raises(ConfigError, match="it was written by another version"):  # one that has a further setting
        open_folder(tmp_path, str(folder.path), limit=3, engine={"max_model_len": None}, seed=None)
    with open_folder(tmp_path, str(folder.path), limit=3, engine={"max_model_len": None}) as reopened:
        assert reopened.path == folder.path
        finish(reopened)
    with pytest.raises(ConfigError, match="finished"):
        open_folder(tmp_path, str(folder.path), limit=3)
    with pytest.raises(ConfigError, match="not the folder of an evalengine run"):
        open_folder(tmp_path, str(tmp_path))


def test_a_failed_write_leaves_nothing_half_written(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_folder(tmp_path) as folder:
        folder.write_text("a.txt", "old")
        with pytest.raises(EvalEngineError, match=r"a\.txt: No space left on device; .*to resume"):
            folder.write_with("a.txt", write)
        assert (folder.path / "a.txt").read_text() == "old"
        assert sorted(p.name for p in folder.path.iterdir()) == [".lock", "a.txt", "identity.json"]


def test_a_link_a_pipe_and_a_device_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    for name, target in {"link": "far/real", "null": "/dev/null"}.items():
        (tmp_path / name).symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for text in ("first", "second"):
        for name in ("link", "null", "pipe"):
            write_text_file(tmp_path / name, text)
        assert os.read(reader, 99) == text.encode() == (tmp_path / "far" / "real").read_bytes()
    os.close(reader)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "null").is_symlink() and (tmp_path / "pipe").is_fifo()
    assert Path("/dev/null").is_char_device() and [path.name for path in (tmp_path / "far").iterdir()] == ["real"]


def test_a_text_is_appended_to_the_bytes_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\r\n")
    with (tmp_path / "x").open("ab", buffering=0) as other:  # another program that appends
        for name in ("x", "new"):
            write_text_file(tmp_path / name, "text", append=True)
        other.write(b"!")
    assert (tmp_path / "x").read_bytes() == b"\xff\r\ntext!" and (tmp_path / "new").read_text() == "text"


def test_a_text_that_the_disk_takes_half_of_is_removed_again(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
    try:
        with pytest.raises(EvalEngineError, match=r"could not write .*x: No space left on device"):
            write_text_file(tmp_path / "x", "text", append=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert (tmp_path / "x").read_text() == "old"


def test_an_output_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """The error says what could not be written."""
    (tmp_path / "file").write_text("")
    with pytest.raises(EvalEngineError, match="could not write"):
        open_folder(tmp_path / "file" / "results")


def test_an_interrupt_tells_the_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught, open_folder(tmp_path) as folder:
        raise KeyboardInterrupt
    assert caught.value.args == (str(folder.path),)


@pytest.mark.parametrize(
    ("name", "safe"),
    [("a/b", "a_b"), ("../x", "_x"), (".hidden", "hidden"), ("ü b", "_b"), ("", "run"), ("x" * 500, "x" * 120)],
)
def test_names_are_one_part_of_a_path(name: str, safe: str) -> None:
    assert sanitise(name) == safe


def test_a_damaged_identity_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_folder(tmp_path) as folder:
        pass
    for text in ("{", "[" * 5000, '{"run_id": 5}', "[]", "1" * 5000, ""):
        (folder.path / "identity.json").write_text(text)
        with pytest.raises(ConfigError, match=r"resume=.*its identity\.json is damaged .*; set resume=never"):
            open_folder(tmp_path, str(folder.path))
        with open_folder(tmp_path) as other:  # resume=auto passes the folder over, and says so
            assert other.path != folder.path
        assert "identity.json is damaged" in capsys.readouterr().err


def test_eight_digits_do_not_make_two_runs_one(tmp_path: Path) -> None:
    """The short id is part of the name; whether a folder is this run's is told by the whole identity."""
    with open_folder(tmp_path, dtype="float32") as folder:
        pass
    with open_folder(tmp_path, dtype="bfloat16") as other:
        assert other.path != folder.path
    with pytest.raises(ConfigError, match='dtype was "float32", is "bfloat16"'):
        open_folder(tmp_path, str(folder.path), dtype="bfloat16")


def test_a_run_killed_before_its_page_is_finished_not_run_again(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        finish_unpaged(folder)
    for resume in ("auto", str(folder.path)):
        with open_folder(tmp_path, resume) as reopened:
            assert reopened.path == folder.path and reopened.finished
    with open_folder(tmp_path) as reopened:
        reopened.tidy()
    with open_folder(tmp_path) as new:
        assert new.path != folder.path


def test_a_folder_killed_at_its_birth_is_taken_up(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        pass
    (folder.path / "identity.json").rename(folder.path / ".identity.json.partial")
    with open_folder(tmp_path) as reopened:
        assert reopened.path == folder.path and (reopened.path / "identity.json").is_file()
    (folder.path / "identity.json").unlink()
    (folder.path / "notes.txt").write_text("mine")
    with open_folder(tmp_path) as other:
        assert other.path != folder.path, "what holds something else is no folder of ours"


@pytest.mark.parametrize("name", ["x" * 300, "a/" + "y" * 5000])
def test_a_name_that_no_folder_can_have_is_a_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^resume="):
        open_folder(tmp_path, str(tmp_path / name))
    with pytest.raises(EvalEngineError, match="could not write"):
        open_folder(tmp_path / name)


def finish_unpaged(folder: RunFolder) -> None:
    """Writes records and digest, and ends there as a run does that is killed before its page."""
    folder.write_with("records.parquet", lambda path: write_records(path, []))
    folder.finish("ab" * 32)
