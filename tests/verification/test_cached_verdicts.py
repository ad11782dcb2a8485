"""Verdicts that are kept: what they are keyed by, what they drop again, and how a damaged cache is treated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evalengine.kernels import matmul_schedules
from evalengine.verification import verdict_cache, verify
from evalengine.verification.verdict import KernelsVerdict
from evalengine.version import CONTRACT_VERSION
from tests.verification.tiny_shapes import TINY, chosen, verified
from tests.verification.verify_double import DEVICE
from tests.verification.verify_double import alone as alone  # The fixture is used by every test here.


@pytest.fixture
def only_matmul(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Leaves products alone of all that `verify` compares, and makes their first schedule wrong; returns the shapes
    compared."""
    shapes_asked: list[Any] = []
    bad = chosen(1)

    def verify_matmul(verdict: KernelsVerdict, shapes: Any, *arguments: Any) -> None:
        shapes_asked.extend(shapes)
        if len(shapes) == 4:
            verdict.drop("matmul", bad, "here", "planted")

    monkeypatch.setattr(verify, "verify_matmul", verify_matmul)
    for name in ("verify_attention", "verify_rows"):
        monkeypatch.setattr(verify, name, lambda *args: None)
    return shapes_asked


def test_a_verdict_is_cached_with_what_it_dropped(
    only_matmul: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = chosen(1)
    first = verified()
    assert not first["cached"] and len(first["dropped"]) == 1
    assert sorted(shape[:2] for shape in only_matmul) == [(32, 24), (32, 32), (48, 32), (64, 32), (100, 32)]
    files = [file.name for file in (tmp_path / "evalengine").iterdir()]
    assert len(files) == 3 and all(name.startswith("kernels-") for name in files), "products, rows, attention"
    monkeypatch.setattr(matmul_schedules, "excluded", set())  # A new process excludes nothing.
    caplog.clear()
    cached = verified()
    assert verified()["cached"]
    assert caplog.text.count("is not used on this machine (here): planted") == 1, "said once in a process"
    assert cached["cached"] and {**cached, "cached": False, "seconds": first["seconds"]} == first
    assert matmul_schedules.excluded == {bad} and len(only_matmul) == 5
    assert not verified(use_cache=False)["cached"]
    assert not verified(replace(TINY, head_dim=32))["cached"]
    assert not verified(replace(TINY, attention_bias=True))["cached"]


def test_another_page_size_costs_only_its_own_comparisons(only_matmul: list[Any]) -> None:
    verified()
    of_two_sizes = verified(page_sizes=(16, 64))
    assert not of_two_sizes["cached"] and len(of_two_sizes["dropped"]) == 1 and len(only_matmul) == 5


@pytest.mark.parametrize("changed", ["torch", "driver", "gpu", "triton", "compiler", "contract_version", "sources"])
def test_what_the_cache_is_keyed_by(only_matmul: list[Any], monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    """Another value of any of these facts makes `verify` compare again."""
    verified()
    environment = verdict_cache.environment(DEVICE, CONTRACT_VERSION)
    monkeypatch.setattr(verdict_cache, "environment", lambda *about: {**environment, changed: "another"})
    assert not verified()["cached"]


def test_the_environment_names_the_compiler_and_the_chip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environments = [verdict_cache.environment(DEVICE, CONTRACT_VERSION)]
    for name in ("TRITON_PTXAS_PATH", "DISABLE_PTXAS_OPT", "PTXAS_OPTIONS", "TRITON_LIBDEVICE_PATH"):
        monkeypatch.setenv(name, "1")
        environments.append(verdict_cache.environment(DEVICE, CONTRACT_VERSION))
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "ptxas"))
    for content in ("one", "another"):
        (tmp_path / "ptxas").write_text(content)
        environments.append(verdict_cache.environment(DEVICE, CONTRACT_VERSION))
    assert all(a != b for i, a in enumerate(environments) for b in environments[:i])

    class Chip:
        major, minor, multi_processor_count = 9, 0, 114

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Chip)
    environment = verdict_cache.environment(torch.device("cuda"), CONTRACT_VERSION)
    assert (environment["gpu"], environment["capability"], environment["sms"]) == ("H", [9, 0], 114)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"verdict": {}}', b"\xff", None])
def test_a_damaged_cache_is_computed_again(only_matmul: list[Any], tmp_path: Path, damage: bytes | None) -> None:
    verified()
    (file,) = (file for file in (tmp_path / "evalengine").iterdir() if '"products"' in file.read_text())
    if damage is None:  # As if edited by hand, the drop is gone.
        content = json.loads(file.read_text())
        content["verdict"]["dropped"] = []
        damage = json.dumps(content).encode()
    file.write_bytes(damage)
    assert not verified()["cached"] and verified()["cached"]


def test_a_cache_that_cannot_be_written_is_no_error(
    only_matmul: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not verified()["cached"] and not verified()["cached"]
