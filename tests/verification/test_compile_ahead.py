"""The kernels of a comparison are compiled side by side before it: found by a rehearsal in which none runs."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from evalengine.kernels.launching.launch import INTERPRETED, launch, observed_launches
from evalengine.verification import verify
from evalengine.verification import verify as module
from evalengine.verification.verdict import KernelsVerdict
from evalengine.verification.verify import compile_ahead, dry_run, in_processes
from tests.verification.tiny_shapes import verified
from tests.verification.verify_double import DEVICE, alone

__all__ = ["alone"]


def plain(args: tuple) -> tuple:
    """What of a launch's arguments another launch of the same kernel has too."""
    return tuple(arg for arg in args if isinstance(arg, int | float | str | bool | None))


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="counts the interpreter's runs")
def test_a_rehearsal_tells_of_every_launch_and_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """For kernel, sizes and constexprs, what is told is what the comparison then launches."""
    made: set[tuple[str, tuple]] = set()
    told: set[tuple[str, tuple]] = set()
    comparisons: list[Callable[[KernelsVerdict], None]] = []
    interpreted = type(launch.__globals__["triton"].jit(lambda x: None))
    real = interpreted.__getitem__

    def getitem(kernel: Any, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **options: Any) -> None:
            made.add((kernel.fn.__name__, plain(args)))
            real(kernel, grid)(*args, **options)

        return run

    def part(key: Any, run: Callable[[KernelsVerdict], None], *_: Any) -> dict[str, Any]:
        comparisons.append(run)
        return {"schedules": 0, "checked": 0, "dropped": [], "failed": [], "cached": False}

    with monkeypatch.context() as patched:
        patched.setattr(verify, "_part", part)
        verified()
    monkeypatch.setattr(interpreted, "__getitem__", getitem)
    dry_run(
        comparisons, lambda kernel, grid, args, constants, _: told.add((kernel.fn.__name__, plain((*args, *constants))))
    )
    assert not made and len(told) > 20
    verdict = KernelsVerdict()
    for compare in comparisons:
        compare(verdict)
    assert verdict.checked and not verdict.failed and not verdict.dropped
    assert made == told


def test_what_is_told_is_not_run_and_an_empty_grid_is_nothing() -> None:
    told: list[tuple] = []
    kernel, x = object(), torch.zeros(4, device=DEVICE)
    with observed_launches(lambda *launched: told.append(launched)):
        assert launch(kernel, (2, 1, 1), (x, 4), (16,), 8, 2, maxnreg=64) is None
        assert launch(kernel, (0, 1, 1), (x, 4), (16,), 8, 2) is None
    ((_, grid, args, constants, options),) = told
    assert grid == (2, 1, 1) and args == (x, 4) and constants == (16,)
    assert options == {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": False, "maxnreg": 64}


def meet(folder: Path, count: int) -> None:
    """Wait until `count` processes have started; until then, each has taken at most one task."""
    (folder / f"process-{os.getpid()}").touch()
    end = time.monotonic() + 60
    while len(list(folder.glob("process-*"))) < count:
        assert time.monotonic() < end, "too few processes work"
        time.sleep(0.005)


@pytest.mark.parametrize("cores", [1, 3])
def test_work_is_done_once_by_several_and_what_fails_spoils_nothing(
    cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)  # another test's, beside which nothing is forked
    monkeypatch.setattr(module, "cores", lambda: cores)
    (done := tmp_path / "done").mkdir()
    (processes := tmp_path / "processes").mkdir()

    def work(number: int) -> Callable[[], None]:
        def write() -> None:
            meet(processes, cores)
            if number == 2:
                raise ValueError("it does not compile")
            with (done / str(number)).open("a") as file:
                file.write(f"{os.getpid()}\n")

        return write

    assert in_processes([work(number) for number in range(300)]) == ["ValueError: it does not compile"]
    assert {path.name for path in done.iterdir()} == {str(number) for number in range(300) if number != 2}
    by = [line for path in done.iterdir() for line in path.read_text().splitlines()]
    assert len(by) == 299, "each is done once"
    assert len({*by}) <= cores == len(list(processes.iterdir())) and (processes / f"process-{os.getpid()}").exists()


class ForkedDriver:
    """Triton's driver: it needs torch for the GPU, and torch raises in a process forked after CUDA was initialised."""

    def __init__(self, stubs: Path) -> None:
        self.process, self.stubs = os.getpid(), stubs

    def get_current_target(self) -> str:
        if os.getpid() != self.process:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return "sm_90"

    def launcher_cls(self, src: str, metadata: str) -> None:
        (self.stubs / f"{src}-{metadata}").write_text(str(os.getpid()))


def test_kernels_are_compiled_elsewhere_and_taken_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton has it: a compilation that another process has put into the cache is only read."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(module, "cores", lambda: 2)
    (stubs := tmp_path / "stubs").mkdir()
    driver = ForkedDriver(stubs)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    ready: dict[str, tuple[str, str]] = {}

    def kernel(name: str) -> Any:
        def compiled() -> SimpleNamespace:
            file = tmp_path / name
            meet(tmp_path, 2)
            if name == "bad":
                raise ValueError
            if not file.exists():
                file.write_text(str(os.getpid()))
            return SimpleNamespace(src=name, metadata=driver.get_current_target(), by=file.read_text())

        def warmup(*_: Any, **__: Any) -> None:
            mode = triton.runtime._async_compile.active_mode.get()
            mode.submit(name, compiled, lambda result: ready.update({name: (result.by, str(os.getpid()))}))

        return SimpleNamespace(warmup=warmup)

    def compare(verdict: KernelsVerdict) -> None:
        x = torch.zeros(4)
        for name in ("a", "bad", "b", "a", "c"):
            launch(kernel(name), (1, 1, 1), (x,), (), 4, 1)
        verdict.compare("matmul", None, "nowhere", lambda: x / 0, x)
        raise RuntimeError("a comparison that fails in the rehearsal")

    compile_ahead([compare], DEVICE)
    assert ready.keys() == {"a", "b", "c"} and {where for _, where in ready.values()} == {str(os.getpid())}
    assert {by for by, _ in ready.values()} - {str(os.getpid())}, "another process compiles, too"
    by_stub = {stub.name: stub.read_text() for stub in stubs.iterdir()}
    assert by_stub == {f"{name}-sm_90": by for name, (by, _) in ready.items()}, "each makes the stubs of its kernels"


@pytest.mark.gpu
def test_the_comparison_on_a_gpu_compiles_nothing_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes compile, the threads after them read, and the comparison needs no other kernel or stub."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    if module.cores() < 2:
        pytest.skip("on one core, threads compile")
    late: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit and threading.current_thread() is not threading.main_thread():
            late.append(src.name)

    def rehearsed(comparisons: Any, device: torch.device) -> None:
        monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
        compile_ahead(comparisons, device)
        alone: Any = lambda *, src, cache_hit, **_: None if cache_hit else late.append(src.name)  # noqa: E731
        monkeypatch.setattr(triton.knobs.compilation, "listener", alone)
        monkeypatch.setattr(triton.runtime.build, "_build", lambda name, *_: late.append(name))

    monkeypatch.setattr(verify, "compile_ahead", rehearsed)
    assert not verified(dtype=torch.bfloat16)["failed"]
    assert not late


def test_the_double_of_a_verdict_looks_at_nothing() -> None:
    def never() -> Tensor:
        raise AssertionError

    module.DryRun().compare("matmul", None, "", never, torch.zeros(1))
