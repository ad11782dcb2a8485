"""docs/endpoint.md as it stands: its command line and its example of a setting, against a server on this machine."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import re
import shlex
from pathlib import Path

from tests.e2e.command import ROOT, call
from tests.endpoint.asking import only, results
from tests.endpoint.fake import Fake
from tests.serve.running import serving
from tests.unit.test_docs_in_shells import commands

PAGE = ROOT / "docs" / "endpoint.md"


def test_the_command_line_and_the_setting_of_the_page(tmp_path: Path, data_dir: Path) -> None:
    (line,) = commands(PAGE)
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "evalengine"]
    (body,) = re.findall(r"`'(endpoint\.body=[^']*)'`", PAGE.read_text(encoding="utf-8"))
    fake = Fake(seconds=0)
    with serving(fake.app) as url:
        own = [word.replace("https://HOST", url) for word in words[3:]]
        done = call(*own, body, f"data_dir={data_dir}", f"output_dir={tmp_path}", "progress=false")
    assert done.code == 0, done.err
    facts = results(only(tmp_path))["endpoint"]
    assert facts["requests"] == len(fake.bodies) == 600 and facts["noise"]["asks"] == 3
    for asked in fake.bodies:
        assert asked["model"] == "THEIR_MODEL" and asked["messages"][-1]["role"] == "user"
        assert asked["max_completion_tokens"] == 512 and "max_tokens" not in asked
