"""setup.py: the package's folders, README's links on a package page, and the repository's address."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest

setup = runpy.run_path(str(Path(__file__).parents[2] / "setup.py"))


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://github.com/o/r.git", "https://github.com/o/r"),
        ("https://github.com/o/r.git/", "https://github.com/o/r"),
        ("https://user:a-token@github.com/o/r", "https://github.com/o/r"),
        ("git@gitlab.com:group/sub/r.git", "https://gitlab.com/group/sub/r"),
        ("ssh://git@host.org:2222/o/r", "https://host.org/o/r"),
        ("/srv/git/r.git", None),
        ("file:///srv/r", None),
        ("", None),
    ],
)
def test_a_remotes_web_address(remote: str, address: str | None) -> None:
    """No password of a remote reaches the metadata."""
    assert setup["web_address"](remote) == address


def test_where_the_repository_lies(tmp_path: Path) -> None:
    repository = setup["repository"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert repository(tmp_path, {}) is None
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", "git@h.org:o/r.git"], check=True)
    assert repository(tmp_path, {}) == "https://h.org/o/r"
    assert repository(tmp_path, {"EVALENGINE_REPOSITORY": "https://x.org/y/"}) == "https://x.org/y"
    (tmp_path / "inside").mkdir()
    assert repository(tmp_path / "inside", {}) is None, "another project's repository, in which ours was unpacked"


def test_links_of_a_page() -> None:
    text = "[a](docs/a.md#b) ![picture](x.svg) [c](https://c.org) [d](#d), `list[int](x)`"
    assert setup["page"](text.partition(",")[0], "https://h/o/r") == (
        "[a](https://h/o/r/blob/HEAD/docs/a.md#b) ![picture](https://h/o/r/raw/HEAD/x.svg) [c](https://c.org) "
        "[d](https://h/o/r#d)"
    )
    assert setup["page"](text.partition(",")[0], None) == "a  [c](https://c.org) d"


def test_an_sdist_keeps_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("[a](b)")
    told = "Metadata-Version: 2.4\nName: e\nProject-URL: Repository, https://h/o/r\n\n# Title\n\n[a](https://h/b)\n"
    (tmp_path / "PKG-INFO").write_text(told)
    assert setup["metadata"](tmp_path) == ("# Title\n\n[a](https://h/b)\n", {"Repository": "https://h/o/r"})


def test_a_missing_folder_stops_the_build(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    with pytest.raises(SystemExit, match="the package's folder kernels/ is missing; build from a complete checkout"):
        setup["packages"](tmp_path)
