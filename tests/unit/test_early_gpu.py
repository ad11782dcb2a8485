"""A GPU's context is begun before torch is imported, for the runs that will need one."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import Any

import pytest
import torch

from evalengine.util import early_gpu
from evalengine.util.early_gpu import begin_triton_key, device_of, wake_gpu
from evalengine.util.forked import ForkedTask


@pytest.mark.parametrize(
    ("words", "device"),
    [
        ([], 0),
        (["task=mmlu", "engine.device=auto"], 0),
        (["engine.device=cuda"], 0),
        (["engine.device=cuda:3"], 3),
        (["engine.device=cuda:1", "engine.device=cpu"], None),
        (["engine.device=cuda:x"], None),
        (["cluster=ray"], None),
        (["cluster.replicas=2"], None),
        (["cache=kept"], None),
    ],
)
def test_the_device_is_that_of_the_words(words: list[str], device: int | None) -> None:
    assert device_of(words) == device


class Driver:
    """A driver whose start takes a moment."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*_: object) -> int:
            time.sleep(0.1)
            self.called.append(name)
            return 0

        return call


def test_the_context_is_made_beside_and_no_process_is_forked_amid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)  # another test's, beside which nothing is forked
    driver = Driver()
    with monkeypatch.context() as patched:
        patched.setattr(ctypes, "CDLL", lambda name: driver if name == "libcuda.so.1" else None)
        wake_gpu(["task=mmlu"])
        assert driver.called == []  # it returns at once
    with ForkedTask(lambda: threading.active_count()) as task:
        assert driver.called == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
        assert task.result() == 1


def test_a_machine_without_a_driver_has_nothing_to_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    wake_gpu([])
    assert not early_gpu._threads


def test_tritons_hash_of_itself_is_there_before_the_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    cache.triton_key.cache_clear()
    begin_triton_key()  # without a GPU no kernel will need it
    early_gpu.wait()
    assert cache.triton_key.cache_info().currsize == torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    begin_triton_key()
    early_gpu.wait()
    assert cache.triton_key.cache_info().currsize == 1
