"""The files by which words become a run's settings are those that docs/request.md names."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import evalengine
from evalengine.__main__ import main
from evalengine.cli.commands import COMMANDS
from evalengine.config import compose

PACKAGE = Path(evalengine.__file__).parent
PAGE = PACKAGE.parent / "docs" / "request.md"
STEPS = 7  # files that a reader goes through in order; a change that needs one more says so here and on the page


def test_words_become_a_configuration_in_the_files_of_the_page(capsys: Any) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## From the words")[2].partition("\n## ")[0]
    listed = re.findall(r"\]\(\.\./evalengine/(\S+\.py)\)", section)
    steps = re.findall(r"^\d+\. \[\S+\]\(\.\./evalengine/(\S+\.py)\)", section, re.MULTILINE)
    names: set[str] = set()

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            names.add(frame.f_code.co_filename)

    assert compose.MAX_RUNS and COMMANDS  # imported before, so that modules' own code is not counted
    sys.setprofile(see)
    try:
        assert main(["task=gsm8k", "limit=16", "--cfg"]) == 0
    finally:
        sys.setprofile(None)
    files = [Path(name) for name in names]
    entered = {file.relative_to(PACKAGE).as_posix() for file in files if file.is_relative_to(PACKAGE)}
    assert "num_fewshot: 5" in capsys.readouterr().out
    assert len(steps) == STEPS and len(listed) == len({*listed})
    assert {file for file in entered if file.startswith(("__main__", "cli/", "config/"))} <= {*listed}
    assert {*steps} <= entered | {"config/schema.py"}, "a schema is read by what is made of it when it is imported"
