"""What a command begins before it needs it: imports beside its settings, and its end while they still go on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from evalengine.util import ahead
from evalengine.util.early_imports import begin_triton_key, folders_known
from evalengine.util.forked import ForkedTask

ROOT = Path(__file__).parents[2]


def test_no_process_is_forked_amid_work_that_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)  # another test's, beside which nothing is forked
    done: list[int] = []

    def work() -> None:
        time.sleep(0.2)
        done.append(1)

    ahead.begin("work", work)
    assert sys.getswitchinterval() < 0.001 < ahead.USUAL_TURN_S
    with ForkedTask(lambda: (list(done), threading.active_count())) as task:
        assert task.result() == ([1], 1)
    assert sys.getswitchinterval() == ahead.USUAL_TURN_S


def test_tritons_hash_of_itself_is_there_before_the_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    cache.triton_key.cache_clear()
    begin_triton_key()  # without a GPU no kernel will need it
    ahead.wait()
    assert cache.triton_key.cache_info().currsize == torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    begin_triton_key()
    ahead.wait()
    assert cache.triton_key.cache_info().currsize == 1
    assert sys.getswitchinterval() == ahead.USUAL_TURN_S


PROGRAM = """
import sys, time
import pytest

from evalengine.util import ahead
from evalengine.util.early_imports import begin_triton_key, folders_known
import evalengine.__main__ as m
def forever():
    while True:
        time.sleep(1)
def work(words):
    ahead.begin("imports", forever)
    print("said")
    return 2
m._command = work
m.program()
"""


def test_a_command_that_ends_early_does_not_wait_for_what_it_began() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "said\n", "")


def test_both_libraries_are_there_once_all_is_waited_for() -> None:
    """Side by side, each time in a new process: a module that is half there would be an error here."""
    program = (
        "from evalengine.util import ahead; from evalengine.util.early_imports import begin_imports;"
        "begin_imports(); ahead.wait(); import sys; print('torch' in sys.modules, 'transformers' in sys.modules);"
        "import torch, transformers; print(torch.ones(2).sum().item(), transformers.AutoTokenizer.__name__)"
    )
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("True True\n2.0 AutoTokenizer\n", "")


EARLY = """
import os, sys, threading, time
import evalengine.cli.jobs as jobs
from evalengine.__main__ import main
from evalengine.util import ahead

jobs.begin_imports = lambda: ahead.begin("imports", lambda: time.sleep(1.5))
early, seen = set(), set()

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "tokenizers"):
            seen.add(name)
            if any(thread.name == "evalengine imports" for thread in threading.enumerate()):
                early.add(name)

sys.meta_path.insert(0, Watch())
main([*sys.argv[1:], "task=arithmetic", "limit=1", "progress=false"])
print(sorted(early), len(seen))
"""


@pytest.mark.parametrize("api", [True, False])
def test_no_run_imports_what_a_background_thread_may_be_importing(tmp_path: Path, api: bool) -> None:
    """A module that another thread has half imported raises errors such as KeyError: 'tokenizers'."""
    own = ["model.api=http://127.0.0.1:9/v1", "model.name=m", "endpoint.retries=0"] if api else ["engine.device=cpu"]
    words = [sys.executable, "-c", EARLY, *own, f"output_dir={tmp_path}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["[] 3"], done.stdout + done.stderr


def test_a_real_path_is_the_same_where_folders_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "file").touch()
    (tmp_path / "a" / "other").symlink_to(tmp_path / "a" / "file")
    monkeypatch.chdir(tmp_path)
    names = ["a/file", "link/file", "link/other", "link/b/../file", "link/b/..", "link/", "file", "", ".", "a/nowhere"]
    paths: list[Any] = [*names, *(str(tmp_path / name) for name in names), tmp_path / "link" / "b", b"link/file"]
    real, expected = os.path.realpath, [os.path.realpath(path) for path in paths]
    asked: list[Any] = []
    with folders_known():
        assert [os.path.realpath(path) for path in paths] == expected
        assert os.path.realpath("link/other", strict=True) == expected[2]
        monkeypatch.setattr(os, "lstat", lambda path, real=os.lstat, **o: (asked.append(path), real(path, **o))[1])
        for name in ("a", "b", "c"):
            os.path.realpath(str(tmp_path / "a" / name))
    assert len(asked) == 3, "one call for each file"
    assert os.path.realpath is real
