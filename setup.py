"""Settings that pyproject.toml cannot express: where the package's folders are, and the repository's address.

`evalengine/{conf,kernels,tasks}` are symlinks, which mypy needs. The build takes the top-level folders themselves: a
ZIP archive or a checkout on Windows turns the links into small text files, and an sdist has none.

README's links lead to files of the repository, which a package page does not have: there they are absolute. The address
is `EVALENGINE_REPOSITORY`, or that of the remote `origin`; without one, a link is its words alone. An sdist has no
remote, and keeps what its PKG-INFO says.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from email import message_from_string
from pathlib import Path

from setuptools import find_namespace_packages, setup

PLACES = {"evalengine.conf": "conf", "evalengine.kernels": "kernels", "evalengine.tasks": "tasks"}
HERE = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
SSH = re.compile(r"(?:ssh://)?(?:[^@/]+@)([^:/]+)(?::\d+)?[:/](.+)")


def page(text: str, address: str | None) -> str:
    """README as a package page shows it: with no link that is relative."""

    def absolute(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if re.match(r"[a-z]+:", target):
            return link[0]
        if address is None:
            return "" if picture else words
        place = "" if target.startswith("#") else f"/{'raw' if picture else 'blob'}/HEAD/"
        return f"{picture}[{words}]({address}{place}{target})"

    return LINK.sub(absolute, text)


def urls(address: str | None) -> dict[str, str]:
    """The project's addresses, as a package page lists them."""
    if address is None:
        return {}
    files = {"Documentation": "README.md#documentation", "Changelog": "CHANGELOG.md"}
    return {"Repository": address, **{name: f"{address}/blob/HEAD/{file}" for name, file in files.items()}}


def repository(folder: Path, environment: Mapping[str, str] = os.environ) -> str | None:
    """The repository's web address, without a slash at its end; None where nothing says it."""
    if given := environment.get("EVALENGINE_REPOSITORY"):
        return given.rstrip("/")
    if not (folder / ".git").exists():  # a folder inside another repository, whose remote is not ours
        return None
    try:
        command = ["git", "-C", str(folder), "remote", "get-url", "origin"]
        return web_address(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    except (OSError, subprocess.CalledProcessError):  # no git, no such remote
        return None


def web_address(remote: str) -> str | None:
    """A remote's web address, without the password that its URL may hold; None for a folder."""
    if match := re.fullmatch(r"https?://(?:[^@/]*@)?(.+)", remote) or SSH.fullmatch(remote):
        return "https://" + "/".join(match.groups()).removesuffix(".git").rstrip("/").removesuffix(".git")
    return None


def metadata(folder: Path) -> tuple[str, dict[str, str]]:
    """(the long description, the project's addresses by name)."""
    if (folder / "PKG-INFO").exists():
        made = message_from_string((folder / "PKG-INFO").read_text(encoding="utf-8"))
        listed = (value.split(", ", 1) for value in made.get_all("Project-URL", []))
        return str(made.get_payload()), dict(listed)
    address = repository(folder)
    return page((folder / "README.md").read_text(encoding="utf-8"), address), urls(address)


def packages(folder: Path) -> list[str]:
    """Return the names of all packages. Raises SystemExit if a top-level folder is missing."""
    links = [pattern for package in PLACES for pattern in (package, f"{package}.*")]
    found = find_namespace_packages(str(folder), links, ["evalengine", "evalengine.*"])
    for package, name in PLACES.items():
        if not (folder / name).is_dir():
            raise SystemExit(f"{folder}: the package's folder {name}/ is missing; build from a complete checkout")
        found += [package, *(f"{package}.{inside}" for inside in find_namespace_packages(str(folder / name)))]
    return found


if __name__ == "__main__":
    long_description, project_urls = metadata(HERE)
    setup(
        packages=packages(HERE),
        package_dir=PLACES,
        long_description=long_description,
        long_description_content_type="text/markdown",
        project_urls=project_urls,
    )
