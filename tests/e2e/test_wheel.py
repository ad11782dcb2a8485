"""Wheel and sdist hold all that a run needs: built from a copy, installed elsewhere, run from another folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADDRESS = "https://git.example.org/us/evalengine"
WEIGHTS = ROOT / "evalengine" / "assets" / "tinymath" / "model.safetensors"
LINKED = ("conf", "kernels", "tasks")  # top-level folders of the package: symlinks inside `evalengine` in a checkout
NOT_OURS = ("__pycache__", ".git", ".venv", ".*_cache", ".hypothesis", "*.egg-info", "build", "dist")


def built_from(source: Path, out: Path, *forms: str) -> Path:
    """Builds a folder's sdist and of it the wheel, or the given forms of the folder itself; returns `out`."""
    command = [sys.executable, "-m", "build", *forms, "--no-isolation", "--outdir", str(out)]
    environment = {**os.environ, "EVALENGINE_REPOSITORY": ADDRESS}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist of a copy of the checkout, which stays clean, and of the wheel made of that sdist."""
    source = tmp_path_factory.mktemp("source") / "checkout"

    def ignored(folder: str, names: list[str]) -> set[str]:
        runs = {name for name in names if name != "reference"} if Path(folder) == ROOT / "results" else set()
        return runs | shutil.ignore_patterns(*NOT_OURS)(folder, names)

    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    return built_from(source, tmp_path_factory.mktemp("built"))


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
    for top in ("evalengine", *LINKED):
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
    (named,) = (name for name in held if name.endswith("/entry_points.txt"))
    modules = re.findall(r"= (evalengine[\w.]*)", zipfile.ZipFile(wheel).read(named).decode())
    assert len(modules) == 3 and {f"{module.replace('.', '/')}.py" for module in modules} <= held


def test_sdist_holds_every_file(built: Path) -> None:
    """The package, and beside it what the pages link to and what tests need."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    beside = {*ROOT.glob("*.md"), *ROOT.glob("Docker*"), ROOT / "Makefile", ROOT / ".ci" / "run", ROOT / "setup.py"}
    for top in ("docs", "tests", "examples", "benchmarks", "results/reference", "conf", "tasks", "kernels", ".github"):
        beside |= {file for file in (ROOT / top).rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert ROOT / "CHANGELOG.md" in beside and len(beside) > 700
    package = {name for name in package_files() if name.split("/")[1] not in LINKED}
    assert sorted((package | {file.relative_to(ROOT).as_posix() for file in beside}) - held) == []
    assert not {f"evalengine/{name}" for name in LINKED} & held  # each file once


def test_links_hold_on_a_package_page(wheel: Path) -> None:
    """Also in a wheel that is made of an sdist, which no longer knows the repository."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        made = message_from_string(archive.read(name).decode("utf-8"))
    addresses = dict(value.split(", ") for value in made.get_all("Project-URL", []))
    assert addresses["Repository"] == ADDRESS and addresses["Changelog"] == f"{ADDRESS}/blob/HEAD/CHANGELOG.md"
    links = re.findall(r"\]\(([^)\s]+)\)", str(made.get_payload()))
    assert len(links) > 20 and [link for link in links if not link.startswith("https://")] == []
    ours = [link.removeprefix(ADDRESS).removeprefix("/blob/HEAD/").removeprefix("/raw/HEAD/") for link in links]
    assert [link for link in ours if not link.startswith("http") and not (ROOT / link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("links", ["symlinks", "text files"])
def test_the_image_is_made_of_the_same_package(wheel: Path, tmp_path: Path, links: str) -> None:
    """What .dockerignore lets in is all that the package is built of, also where a ZIP archive or git on Windows wrote
    the symlinks as text files."""
    context = tmp_path / "context"
    context.mkdir()
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for name in (line[1:] for line in lines if line.startswith("!")):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, context / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, context / name)
    for name in LINKED if links == "text files" else ():
        (context / "evalengine" / name).unlink()
        (context / "evalengine" / name).write_text(f"../{name}", encoding="utf-8")
    (image,) = built_from(context, tmp_path / "out", "--wheel").glob("*.whl")
    assert zipfile.ZipFile(image).namelist() == zipfile.ZipFile(wheel).namelist()


def test_editable_install_of_a_checkout_without_links(built: Path, tmp_path: Path) -> None:
    """An unpacked sdist has no symlinks; installed editably, it runs from any folder."""
    (sdist,) = built.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path)
    (checkout,) = tmp_path.glob("evalengine-*")
    build = "import setuptools.build_meta, sys; setuptools.build_meta.build_editable(sys.argv[1])"
    made = call(checkout, checkout, sys.executable, "-c", build, str(tmp_path))
    (editable,) = tmp_path.glob("*.whl")
    assert made.returncode == 0, made.stderr
    shutil.unpack_archive(editable, tmp_path / "site", "zip")
    # Without what is installed editably in this environment: -S, and the new one's finder first.
    places = Path(f"{tmp_path / 'site'}{os.pathsep}{sysconfig.get_path('purelib')}")
    program = (
        f"import site; site.addsitedir({str(tmp_path / 'site')!r}); "
        "import evalengine.kernels.limits, evalengine.tasks; from evalengine.__main__ import main; "
        "from evalengine.report.gate.policies import available; print(evalengine.kernels.limits.__file__); "
        "print(*available()); main(['--help'])"
    )
    for folder in (tmp_path, checkout):
        usage = call(places, folder, sys.executable, "-S", "-c", program)
        lines = usage.stdout.splitlines()
        assert lines[:2] == [f"{checkout}/kernels/limits.py", "accuracy bitwise tokens"], usage.stderr
        assert "gsm8k" in usage.stdout


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
