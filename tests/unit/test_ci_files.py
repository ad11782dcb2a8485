"""The workflow, the gate's Action and the Dockerfile: what they fetch is pinned, and what they name is there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yaml"
FILES = [WORKFLOW, ROOT / "conf" / "gate" / "ci" / "action.yml", ROOT / "conf" / "gate" / "ci" / "github.yaml"]
ZIZMOR = Path(sys.executable).parent / "zizmor"


def steps(file: Path) -> Iterator[dict[str, Any]]:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    for job in [content["runs"]] if "runs" in content else content["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_actions_are_pinned_and_keep_no_credentials(file: Path) -> None:
    """A tag can be moved; a token that stays in .git/config is every later step's."""
    used = [step for step in steps(file) if "uses" in step and not step["uses"].startswith("OWNER/")]
    assert used and [step["uses"] for step in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])] == []
    for step in used:
        if step["uses"].startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_one_commit_of_each_action() -> None:
    pins = {step["uses"] for file in FILES for step in steps(file) if "uses" in step}
    assert len(pins) == len({pin.partition("@")[0] for pin in pins})


@pytest.mark.skipif(not ZIZMOR.exists(), reason="needs zizmor: pip install -e '.[dev]'")
def test_zizmor_finds_nothing(tmp_path: Path) -> None:
    """And finds what it should: the checkout that leaves its credentials, and an action by its tag."""
    command = [str(ZIZMOR), "--offline", "--no-progress", "--no-config"]
    done = subprocess.run([*command, *map(str, FILES)], capture_output=True, text=True)
    assert done.returncode == 0 and "No findings to report" in done.stdout + done.stderr, done.stdout + done.stderr
    worse = tmp_path / ".github" / "workflows" / "worse.yaml"
    worse.parent.mkdir(parents=True)
    text = WORKFLOW.read_text(encoding="utf-8").replace("persist-credentials: false", "fetch-depth: 1")
    worse.write_text(re.sub(r"@[0-9a-f]{40}", "@v4", text), encoding="utf-8")
    found = subprocess.run([*command, str(worse)], capture_output=True, text=True)
    assert found.returncode != 0 and all(name in found.stdout for name in ("artipacked", "unpinned-uses")), found.stdout


def test_the_workflow_does_what_our_ci_does() -> None:
    content = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert content["permissions"] == {"contents": "read"}
    lines = [step["run"] for step in steps(WORKFLOW) if "run" in step]
    assert lines[0] == ".ci/run" and (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_image_has_the_torch_that_is_tested() -> None:
    """The Dockerfile's torch, extra and command are those of the project; the rest it gets from its base image."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    asked = re.findall(r"torch==[\d.]+", text)
    assert asked and {*asked} == {*re.findall(r"torch==[\d.]+", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (extra,) = re.findall(r"/opt/evalengine\[(\w+)\]", text)
    assert f"\n{extra} = [" in project and '\nevalengine = "evalengine.__main__:program"' in project
    assert 'ENTRYPOINT ["evalengine"]' in text, "as a list: the process itself hears `docker stop`"
    shell = "\n".join(re.findall(r"^RUN (.*?[^\\])$", text, flags=re.S | re.M))
    assert shutil.which("bash") and subprocess.run(["bash", "-n"], input=shell, text=True).returncode == 0
