"""The cache of verdicts: what its key holds, and that another driver's verdicts are not reused."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evalengine.kernels.launching import driver
from evalengine.verification import verdict_cache
from evalengine.version import CONTRACT_VERSION

ROOT = Path(__file__).parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def libcuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Sets what cuDriverGetVersion gives, on a machine with one GPU whose /proc hides the driver."""
    pytest.importorskip("triton")
    chip = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    monkeypatch.setattr(verdict_cache, "DRIVER", tmp_path / "absent")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def set_version(version: int, status: int = 0) -> None:
        def get_version(pointer: Any) -> int:
            pointer[0] = version
            return status

        function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))(get_version)
        library = SimpleNamespace(cuDriverGetVersion=function)
        monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": library}.__getitem__)

    return set_version


def test_an_updated_driver_reuses_no_verdict(libcuda: Callable[..., None]) -> None:
    libcuda(12080)
    old_environment, verdict = verdict_cache.environment(CUDA, CONTRACT_VERSION), {"failed": [], "dropped": []}
    assert (old_environment["driver"], old_environment["cuda_driver"]) == (None, 12080)
    verdict_cache.save(old_environment, verdict)
    libcuda(13000)
    new_environment = verdict_cache.environment(CUDA, CONTRACT_VERSION)
    assert new_environment == {**old_environment, "cuda_driver": 13000} and verdict_cache.load(new_environment) is None
    libcuda(12080)
    assert verdict_cache.load(verdict_cache.environment(CUDA, CONTRACT_VERSION)) == verdict


def test_a_cpu_asks_no_driver(libcuda: Callable[..., None]) -> None:
    libcuda(13000)
    environment = verdict_cache.environment(CPU, CONTRACT_VERSION)
    assert environment["gpu"] == "cpu" and "cuda_driver" not in environment


def test_a_driver_that_says_nothing(libcuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver whose version cannot be asked, or fails to say it, has the version None."""
    libcuda(13000, status=3)
    assert driver.driver_version() is None and verdict_cache.environment(CUDA, CONTRACT_VERSION)["cuda_driver"] is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())  # The library lacks the function.
    assert driver.driver_version() is None

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert driver.driver_version() is None


@pytest.mark.gpu
def test_the_version_is_one_that_runs_this_torch() -> None:
    major = int(str(torch.version.cuda).split(".")[0])
    version = driver.driver_version()
    assert version is not None and 1000 * major <= version < 100_000, "a minor version may be newer than the driver's"
    assert verdict_cache.environment(CUDA, CONTRACT_VERSION)["cuda_driver"] == driver.driver_version()


def test_the_hash_is_of_sources_and_tables_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = (tmp_path / "kernels", tmp_path / "verification")
    monkeypatch.setattr(verdict_cache, "SOURCES", folders)
    for folder in (*folders, folders[0] / "launching", folders[0] / "__pycache__"):
        folder.mkdir()
    (folders[0] / "b.py").write_bytes(b"x = 1\n")
    (folders[0] / "a.json").write_bytes(b"{}")
    (folders[0] / "launching" / "d.py").write_bytes(b"y = 2\n")
    (folders[1] / "a.py").write_bytes(b"")
    digest = verdict_cache.sources_sha256()
    hashed = b"kernels/a.json\0{}kernels/b.py\0x = 1\nkernels/launching/d.py\0y = 2\nverification/a.py\0"
    assert digest == hashlib.sha256(hashed).hexdigest()
    (folders[0] / "notes.md").write_text("no source")
    assert verdict_cache.sources_sha256() == digest
    for change in ("table", "source", "name"):
        if change == "name":
            (folders[0] / "b.py").rename(folders[0] / "c.py")
        else:
            (folders[0] / {"table": "a.json", "source": "b.py"}[change]).write_text(change)
        assert verdict_cache.sources_sha256() != digest, change
        digest = verdict_cache.sources_sha256()


def test_the_key_holds_the_hash_of_the_sources(libcuda: Callable[..., None]) -> None:
    assert verdict_cache.environment(CPU, CONTRACT_VERSION)["sources"] == verdict_cache.sources_sha256()
    kernels, verification = verdict_cache.SOURCES
    assert (kernels / "matmul_table.json").exists() and (verification / "verify.py").exists()
