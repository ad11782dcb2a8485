"""Starting another Python that has this very evalengine, wherever it lies."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def own_command(module: str, *arguments: str) -> list[str]:
    """`python -m evalengine.certify.<module> ARGUMENTS`, by this interpreter."""
    return [sys.executable, "-m", f"evalengine.certify.{module}", *arguments]


def own_environment() -> dict[str, str]:
    """This process's environment, with the package's folder first in PYTHONPATH."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}
