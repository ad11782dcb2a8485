"""Fixtures for every test: where public data lies, what needs CUDA, and torch's thread count put back."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from evalengine.integrations.sandbox.run import problem
from tests.triton_interpreter import (
    compute_operators_directly,
    compute_types_once,
    list_builtins_once,
    multiply_each_row_alike,
    skip_overflow_checks,
)


def _start_with_another_gpu() -> None:
    """Gives xdist's workers another GPU as their first one each, where there are several."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), torch.cuda.device_count()
    if worker and count > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        order = ((int(worker.removeprefix("gw")) + i) % count for i in range(count))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order))


_start_with_another_gpu()  # before the driver is initialised, which reads the variable once
pytest_plugins = ["tests.results_file"]
gc.disable()  # While tests are collected nothing of what is made becomes free, and looking for it takes seconds.

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads this when a kernel is defined
    compute_operators_directly()
    list_builtins_once()
    compute_types_once()
    multiply_each_row_alike()
    skip_overflow_checks()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with public datasets (`EVALENGINE_DATA`); tests that need it skip without it."""
    folder = os.environ.get("EVALENGINE_DATA")
    if not folder:
        pytest.skip("needs public datasets: set EVALENGINE_DATA to their folder")
    path = Path(folder)
    assert path.is_dir(), f"EVALENGINE_DATA={folder}: no such folder"
    return path


@pytest.fixture(scope="module")
def collected() -> None:
    """Takes what exists out of later garbage collections, for a module that collects in every test: in the middle of a
    session, a collection takes 0.6 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def needs_cuda() -> None:
    _skip_without_cuda()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Takes what was imported and collected out of the garbage collector's later passes: millions of objects. Those
    come after 100,000 new objects instead of 700, as a run's do after 3,000,000 (`evalengine.__main__`)."""
    result = yield
    gc.freeze()
    gc.set_threshold(100_000, *gc.get_threshold()[1:])
    gc.enable()
    return result


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        _skip_without_cuda()


@pytest.fixture
def no_github(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides GitHub's variables from the test, which may itself run in its CI."""
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def kernel_isolates() -> None:
    """Skips the test where programs cannot be isolated."""
    if (why := problem(True)) is not None:
        pytest.skip(f"programs cannot be isolated here: {why}")


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    """Restores torch's thread count, so that a test which sets it does not set it for the next one."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


def _skip_without_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
