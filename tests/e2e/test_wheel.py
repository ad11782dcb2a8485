"""Wheel and sdist hold all that a run needs: built from a copy, installed elsewhere, run from another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("evalengine", "conf", "kernels", "tasks", "pyproject.toml", "README.md", "LICENSE")
WEIGHTS = ROOT / "evalengine" / "assets" / "tinymath" / "model.safetensors"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel and an sdist of a copy of the sources: the checkout stays clean, and links stay links."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--sdist", "--no-isolation", "--outdir", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    return out


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    """The wheel of the sources."""
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel is installed."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, capture_output=True, text=True)
    return target


def call(site: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in `folder`, with `site` before all other packages and without a network."""
    environment = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def package_files() -> set[str]:
    """The paths, inside the wheel, of all files of the checkout that it must hold."""
    required = {"evalengine/py.typed"}
    for top in ("evalengine", "conf", "kernels", "tasks"):
        base = Path() if top == "evalengine" else Path("evalengine")
        for file in (ROOT / top).rglob("*"):
            data = (".yaml", ".yml", ".json", ".jsonl", ".safetensors", ".jinja", ".css", ".js")
            if file.suffix in (".py", *data) or (file.is_file() and file.parent == ROOT / "conf" / "gate" / "ci"):
                required.add((base / file.relative_to(ROOT)).as_posix())
    assert {f"evalengine/conf/gate/ci/{name}" for name in ("action.yml", "test_gate.py.txt")} <= required
    return required


def test_wheel_holds_every_file(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    assert sorted(package_files() - held) == []
    outside = ("kernels/", "tasks/", "conf/", "tests/", "results/", "benchmarks/")
    assert not any(name.startswith(outside) for name in held)
    assert any(name.endswith("/licenses/LICENSE") for name in held)


def test_sdist_holds_every_file(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert sorted(package_files() - held) == []


def test_module_and_console_script_from_another_folder(site: Path, tmp_path: Path) -> None:
    """The module and the script run the installed package from any folder, and leave nothing there."""
    for command in ([sys.executable, "-m", "evalengine"], [str(site / "bin" / "evalengine")]):
        usage = call(site, tmp_path, *command, "--help")
        assert usage.returncode == 0 and "arithmetic" in usage.stdout and "tinymath" in usage.stdout, usage.stderr
        assert call(site, tmp_path, *command, "task=gsm9k").returncode == 2
    place = call(site, tmp_path, sys.executable, "-c", "import evalengine, evalengine.conf; print(evalengine.__file__)")
    assert place.stdout.startswith(str(site)), place.stdout + place.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not WEIGHTS.exists(), reason="needs the bundled model")
def test_installed_run_equals_the_checkouts(site: Path, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "evalengine", "limit=2", "progress=false")
    digests = []
    for place in (site, ROOT):
        folder = tmp_path / place.name
        folder.mkdir()
        done = call(place, folder, *command)
        assert done.returncode == 0, done.stderr
        digests.append(done.stdout.splitlines()[-1])
        assert [entry.name for entry in folder.iterdir()] == ["results"]
        (run,) = (path for path in (folder / "results").iterdir() if path.is_dir())
        short = (run / "digest.txt").read_text(encoding="utf-8")[:10]
        assert short in (folder / "results" / "index.html").read_text(encoding="utf-8"), "the list of runs"
        assert (run / "report.html").stat().st_size > 10_000, "its style and scripts are package data"
        assert digests[-1] == f"digest: {(run / 'digest.txt').read_text().strip()}"
    assert digests[0] == digests[1]
