"""What README and docs tell to type is what arrives, in bash and in zsh: no pattern, no comment, no parted word."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.test_docs import PAGES, ROOT, prose

SHOWN = ("python", "evalengine", "pip", "uv", "git", "cd", "docker", "sbatch")  # what the pages' lines start
SHOW = """show() { printf '%s\\n' "$@"; }; """ + "".join(f'{name}() {{ show "$@"; }}; ' for name in SHOWN)
SETTINGS = re.compile(r"`('[^`]*'|(?:-m )?\+?[a-z_]\w*(?:[./][\w<>./]+)*=[^`]*)`")  # a span of code that sets something

pytestmark = pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")


def commands(page: Path) -> list[str]:
    """The page's command lines, continued lines joined."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"<[\w ]+>", "NAME", line[2:]) for line in lines if line.startswith("$ ")]


def handed_over(shell: str, line: str, folder: Path) -> list[str] | None:
    """The words that the commands of a line are given; None if the shell refuses it."""
    done = subprocess.run(
        [shell, *["-f"][: shell == "zsh"], "-c", SHOW + line], cwd=folder, capture_output=True, text=True
    )
    return done.stdout.splitlines() if done.returncode == 0 else None


@pytest.mark.parametrize(
    "page", [page for page in PAGES if commands(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_command_lines(page: Path, tmp_path: Path) -> None:
    for run in ("arithmetic-1", "a-step-2"):  # for `results/arithmetic-*`
        (tmp_path / "results" / run).mkdir(parents=True)
    lines = commands(page)
    assert [line for line in lines if handed_over("zsh", line, tmp_path) is None] == []
    assert [line for line in lines if handed_over("zsh", line, tmp_path) != handed_over("bash", line, tmp_path)] == []
    assert [line for line in lines if re.search(r"\s#", line)] == [], "zsh takes no comments where people type"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_in_sentences(page: Path, tmp_path: Path) -> None:
    if page == ROOT / "evalengine" / "README.md":
        return  # its settings are Python's
    for span in map(str, SETTINGS.findall(prose(page))):
        words = handed_over("zsh", "show " + re.sub(r"<[\w ]+>", "NAME", span), tmp_path)
        assert words is not None and all("=" in word or word.startswith("-") for word in words), f"{span}: quote it"


def test_what_a_shell_reads_otherwise_is_found(tmp_path: Path) -> None:
    for line in ("python task=[gsm8k,arc_easy]", "python chat_template_args={effort: high}"):
        assert handed_over("zsh", line, tmp_path) is None
    assert handed_over("bash", "python task=[a, b]", tmp_path) == ["task=[a,", "b]"]
    assert handed_over("zsh", "python 'task=[a, b]' until=a,b", tmp_path) == ["task=[a, b]", "until=a,b"]


def test_what_messages_tell_to_type_is_quoted() -> None:
    """Brackets in a command that a message prints, in what every module says."""
    bare = re.compile(r"pip install (?:-e )?[\w.-]+\[|(?<!')\b(?:task|steps|pass_at)=\[[a-z\d]+,")
    sources = [*(ROOT / "evalengine").rglob("*.py"), *(ROOT / "tasks").rglob("*.py")]
    found = [(file.name, line) for file in sources for line in file.read_text().splitlines() if bare.search(line)]
    assert len(sources) > 300 and found == [], found
