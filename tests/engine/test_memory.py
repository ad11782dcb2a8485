"""Which memory counts as free: a container's limit, without the files that the kernel keeps for it in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evalengine.engine.execute import memory

GIB = 1 << 30
CPU = torch.device("cpu")


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container's folder of limits, with 16 GiB on a machine that has 1 TiB."""
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory.os, "sysconf", lambda name: 1 << 20)  # This many pages of this many bytes: 1 TiB.
    monkeypatch.setattr(memory, "Path", lambda name: tmp_path / "none")
    (tmp_path / "memory.max").write_text(f"{16 * GIB}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("used", "files", "free"), [(4, 0, 12), (15, 12, 13), (17, 0, 0), (17, 2, 1)], ids=lambda x: f"{x}GiB"
)
def test_a_container(cgroup: Path, used: int, files: int, free: int) -> None:
    """Free is the limit less what is used, where files that the kernel can drop are not counted as used."""
    (cgroup / "memory.current").write_text(f"{used * GIB}\n")
    (cgroup / "memory.stat").write_text(f"anon {GIB}\nfile {files * GIB}\ninactive_file {files * GIB}\nactive_file 0\n")
    assert memory._free_bytes(CPU) == free * GIB


def test_a_container_that_does_not_count_files(cgroup: Path) -> None:
    (cgroup / "memory.current").write_text(f"{4 * GIB}\n")
    (cgroup / "memory.stat").write_text("anon 1\n")
    assert memory._free_bytes(CPU) == 12 * GIB, "its limit holds all the same"


def test_no_container_or_no_limit(cgroup: Path) -> None:
    """Without a container, or in one without a limit, the machine's memory counts."""
    assert memory._free_bytes(CPU) == 1 << 40, "memory.current is not there"
    for name, text in (("current", "1"), ("stat", "inactive_file 0"), ("max", "max")):
        (cgroup / f"memory.{name}").write_text(text + "\n")
    assert memory._free_bytes(CPU) == 1 << 40


@pytest.mark.gpu
def test_what_was_given_back_to_torch_is_free_too() -> None:
    """torch returns what it keeps before another pool is planned, since the driver counts that as used."""
    given_back = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    del given_back
    reserved = torch.cuda.memory_reserved()
    assert reserved >= GIB and memory._free_bytes(torch.device("cuda")) > 0
    assert torch.cuda.memory_reserved() <= reserved - GIB
