"""README and docs: every link leads somewhere, and every command and setting stands on a page."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from evalengine.cli.commands import COMMANDS
from evalengine.config.schema import Config, EngineConfig
from evalengine.integrations.lm_eval_tasks.index import NEEDED
from tests.parity.lm_eval_runs import TOLERANCE

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "NUMERICS.md", ROOT / "tasks" / "README.md"]
PAGES += [ROOT / "evalengine" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAP = ROOT / "tests" / "README.md"
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the page's headings."""
    titles = re.findall(r"^#+ (.*)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: Path) -> list[str]:
    """The page's links that lead nowhere."""
    links = []
    for link in LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            links.append(link)
    return links


@pytest.mark.parametrize("page", [*PAGES, MAP], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](#a-title) [b](nowhere.md) [c](#nothing) [d](https://example.org)\n")
    assert broken(page) == ["nowhere.md", "#nothing"]


def test_every_folder_of_tests_and_every_helper_is_on_the_map() -> None:
    """A newcomer finds every helper there; the test above finds links that lead nowhere."""
    shared = {file for file in MAP.parent.rglob("*.py") if not file.name.startswith(("test_", "conftest"))}
    folders = {file.parent for file in MAP.parent.rglob("test_*.py")}
    linked = {(MAP.parent / link).resolve() for link in LINK.findall(prose(MAP))}
    assert shared | folders <= linked
    assert "(tests/README.md)" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_folder_of_the_package_is_on_the_map_of_the_code() -> None:
    code = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
    named = {name.removeprefix("evalengine/") for name in re.findall(r"`([\w/]+)/`", code)}
    folders = {folder.name for folder in (ROOT / "evalengine").iterdir() if next(folder.glob("*.py"), None)}
    assert folders <= named, f"docs/code.md says nothing of {sorted(folders - named)}"


def test_no_file_has_more_than_500_lines() -> None:
    lengths = {
        file: len(file.read_text(encoding="utf-8").splitlines())
        for top in ("evalengine", "kernels", "tasks", "benchmarks", "tests")
        for file in (ROOT / top).rglob("*.py")
    }
    assert {file.name: lines for file, lines in lengths.items() if lines > 500} == {}


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= linked


def test_every_command_and_setting_stands_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    settings = [field.name for field in (*fields(Config), *fields(EngineConfig))]
    assert [name for name in (*COMMANDS, *settings) if not re.search(rf"\b{name}\b", text)] == []
    assert [name for name in COMMANDS if f"`{name}`" not in (ROOT / "docs" / "settings.md").read_text()] == []


def test_the_life_of_a_request_has_the_codes_names() -> None:
    text = (ROOT / "docs" / "request.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)+\b|\b[a-z]+_[a-z_]+\b", text))
    files = [file for top in ("evalengine", "kernels") for file in (ROOT / top).rglob("*.py")]
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    assert len(names) >= 12 and [name for name in sorted(names) if not re.search(rf"\b{name}\b", source)] == []


def test_one_version_of_lm_eval_is_named() -> None:
    """The one that the tests of parity run beside, in all pages, tasks and their files."""
    files = [*PAGES, *(ROOT / "tasks").glob("*.py"), *(ROOT / "conf").rglob("*.yaml")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    assert {*re.findall(r"(?<!before )\b0\.4\.1\d\b", text)} == {NEEDED}


def test_figures_on_the_pages_are_those_of_the_files() -> None:
    numerics, lm_eval = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("numerics.md", "lm-eval.md"))
    ran = json.loads((ROOT / "results" / "reference" / "gpu-tests-nvidia-h200.json").read_text())
    result = f"{ran['passed']} passed and {ran['failed']} failed on a machine with two"
    assert f"[{result}](../results/reference/gpu-tests-nvidia-h200.json)" in numerics
    assert f"within {TOLERANCE:.0e}".replace("e-0", "e-") in lm_eval


def test_one_duration_of_the_tests_is_named() -> None:
    """`make test` took 22 minutes on two cores where pages said seven and eleven."""
    pages = [(ROOT / name).read_text() for name in ("CONTRIBUTING.md", "tests/README.md")]
    named = [set(re.findall(r"make test\b[^\n]*about (\w+) minutes on two", page)) for page in pages]
    assert named[0] == named[1] and len(named[0]) == 1


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
