"""The machine and the software on which a figure was measured, as every benchmark's files state them."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import import_module, metadata
from typing import Any

from evalengine.records.manifest import code_version, cpu_name

LIBRARIES = ("torch", "triton", "flash-attn", "fla-core")


def environment(command: Sequence[str]) -> dict[str, Any]:
    """The machine and the software of the measurement, without the names of a user, a host or a path."""
    import torch

    return {
        "command": " ".join(command),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "code": asdict(code_version()),
        "gpu": _gpu_name(),
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
        "libraries": {name: _version(name) for name in LIBRARIES},
        "python": platform.python_version(),
        "cpu": cpu_name(),
    }


def provenance(about: Mapping[str, Any]) -> str:
    """The command, the date and the commit of an `environment`, as every benchmark's page names them."""
    code = about["code"]
    commit = f"commit {code['commit'] or 'unknown'}{' (with changes)' if code['dirty'] else ''}"
    return ", ".join(filter(None, [f"`{about['command']}`", about.get("date"), commit]))


def slug(text: str) -> str:
    """Lower case letters, digits and hyphens: part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def _driver_version() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.split("\n")[0].strip() or None


def _version(name: str) -> str | None:
    """The version of an installed distribution, or else the one that its module states; None if there is neither."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
    try:
        return getattr(import_module(name.replace("-", "_")), "__version__", None)
    except ImportError:
        return None
