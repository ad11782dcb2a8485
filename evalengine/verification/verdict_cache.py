"""Verdicts of `verify`, cached as JSON between processes until something that can change one changes."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from evalengine.kernels import cublaslt
from evalengine.kernels.launching.driver import driver_version

DRIVER = Path("/proc/driver/nvidia/version")
SOURCES = (Path(cublaslt.__file__).parent, Path(__file__).parent)  # the kernels, and the modules that compare them
COMPILER = (  # environment variables that change how Triton compiles a kernel
    "TRITON_PTXAS_PATH",
    "TRITON_PTXAS_BLACKWELL_PATH",
    "PTXAS_OPTIONS",
    "DISABLE_PTXAS_OPT",
    "DISABLE_LLVM_OPT",
    "TRITON_LIBDEVICE_PATH",
    "TRITON_OVERRIDE_ARCH",
    "TRITON_KERNEL_OVERRIDE",
    "TRITON_OVERRIDE_DIR",
    "TRITON_INTERPRET",
)


def environment(device: torch.device, contract_version: int) -> dict[str, Any]:
    """GPU, driver, torch, Triton, its compiler, contract version, and the kernels' own sources and tables."""
    import triton  # A CPU machine may lack Triton, and `sources_sha256` does not need it.

    gpu: dict[str, Any] = {"gpu": "cpu"}
    if device.type == "cuda":  # GPUs of one name are sold with different numbers of SMs.
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "gpu": torch.cuda.get_device_name(device),
            "capability": [properties.major, properties.minor],
            "sms": properties.multi_processor_count,
            "cuda_driver": driver_version(),  # all that is known of the driver in a container that hides DRIVER
        }
    return {
        **gpu,
        "driver": DRIVER.read_text().splitlines()[0] if DRIVER.exists() else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cublaslt": cublaslt.version() if device.type == "cuda" else None,  # cuBLASLt picks its algorithms itself.
        "triton": triton.__version__,
        "compiler": {name: _named(os.environ[name]) for name in COMPILER if name in os.environ},
        "contract_version": contract_version,
        "sources": sources_sha256(),
    }


def _named(value: str) -> list:
    """A variable's value and, if it names a file, the file's size and time, which tell it from a replacement."""
    try:
        status = Path(value).stat()
    except (OSError, ValueError):
        return [value]
    return [value, status.st_size, status.st_mtime_ns]


def sources_sha256() -> str:
    """SHA-256 (hex) over the sources and tables of the kernels and of their comparison: paths and contents, in
    order."""
    sources = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted(folder.rglob("*")):
            if file.suffix in (".py", ".json"):
                sources.update(file.relative_to(folder.parent).as_posix().encode() + b"\0" + file.read_bytes())
    return sources.hexdigest()


def load(key: Mapping[str, Any]) -> dict[str, Any] | None:
    """The verdict written under this key; None if there is none that can be read."""
    try:
        content = json.loads(_path(key).read_text(encoding="utf-8"))
        verdict: dict[str, Any] = content["verdict"]
        whole = content["key"] == _plain(key) and content["sha256"] == _sha256(verdict)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None
    return verdict if whole else None


def save(key: Mapping[str, Any], verdict: Mapping[str, Any]) -> None:
    """Writes the verdict whole or not at all. A cache that cannot be written costs the next process a few seconds,
    no more."""
    scratch = None
    try:
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=".kernels-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump({"key": _plain(key), "verdict": dict(verdict), "sha256": _sha256(verdict)}, stream, indent=1)
        os.replace(scratch, path)
    except (OSError, RuntimeError):
        if scratch is not None:
            Path(scratch).unlink(missing_ok=True)


def _path(key: Mapping[str, Any]) -> Path:
    """The file of the verdict under this key. Raises RuntimeError where the user has no home."""
    folder = os.environ.get("XDG_CACHE_HOME")
    root = Path(folder) if folder else Path.home() / ".cache"
    return root / "evalengine" / f"kernels-{_sha256(key)[:16]}.json"


def _plain(value: Mapping[str, Any]) -> Any:
    """The value as reading it back from a JSON file returns it."""
    return json.loads(json.dumps(value, sort_keys=True))


def _sha256(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
