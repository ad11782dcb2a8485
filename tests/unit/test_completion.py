"""Shell completion: commands, options and the names of tasks and models, as each shell asks for them."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from evalengine.__main__ import main
from evalengine.config.shipped import available


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("evalengine com", ["compare"]),
        ("evalengine compare --le", ["--level"]),
        ("evalengine run --mu", ["--multirun"]),
        ("evalengine bench --round", ["--rounds"]),
        ("evalengine tasks gsm", ["gsm8k", "gsm8k_cot"]),
        ("evalengine task = gsm", ["gsm8k", "gsm8k_cot"]),  # bash ends a word at '='
        ("evalengine task=gsm", ["task=gsm8k", "task=gsm8k_cot"]),  # unless COMP_WORDBREAKS was changed
        ("evalengine model =", available("model")),
        ("evalengine -m limit = 4 task = gsm8k,arc_", ["gsm8k,arc_challenge", "gsm8k,arc_easy"]),
        ("evalengine run task = [gsm8k,arc_e", ["[gsm8k,arc_easy"]),
        ("evalengine limit = 4 ", []),
        ("evalengine nothing = ", []),
    ],
)
def test_bash_completes_commands_options_and_names(
    words: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"_EVALENGINE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert completed(asked, monkeypatch, capsys).split() == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("evalengine com", ["compare"]),
        ("evalengine limit=4 task=gsm", ["task=gsm8k", "task=gsm8k_cot"]),
        ("evalengine experiment=", [f"experiment={name}" for name in available("experiment")]),
    ],
)
def test_zsh_completes_them_too(
    words: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = completed({"_EVALENGINE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": words}, monkeypatch, capsys)
    assert [word.split(":")[0] for word in shlex.split(out.partition("((")[2].partition("))")[0])] == expected


def completed(asked: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a shell is answered that asks by these variables."""
    names = (*asked, "COMP_CWORD", "_EVALENGINE_COMPLETED_SETTING")
    for name in names:
        monkeypatch.setenv(name, asked.get(name, ""))  # so that it is as before at the test's end
    assert main([]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown_and_installed_for_the_shell_that_is_named(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the shell is that runs this; it is for the installed script, as `python -m` cannot be completed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/other")
    assert main(["--show-completion", shell]) == 0
    script = capsys.readouterr().out.strip()
    assert f"_EVALENGINE_COMPLETE=complete_{shell}" in script
    assert main(["--install-completion", shell]) == 0
    assert f"{shell} completion installed in {tmp_path}" in capsys.readouterr().out
    assert any(script in file.read_text() for file in tmp_path.rglob("*") if file.is_file())


def test_bash_itself_completes_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The words as a real bash splits them, by the script that is shown."""
    assert main(["--show-completion", "bash"]) == 0
    (tmp_path / "evalengine").write_text('#!/bin/sh\nexec python -m evalengine "$@"\n')
    (tmp_path / "evalengine").chmod(0o755)
    program = f"{capsys.readouterr().out}\nCOMP_WORDS=(evalengine limit = 4 \"'a.b=c d'\" task = arc_e)"
    program += "\nCOMP_CWORD=7\n"
    program += '_evalengine_completion evalengine\necho "${COMPREPLY[@]}"'
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(["bash", "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["arc_easy"], done.stderr
