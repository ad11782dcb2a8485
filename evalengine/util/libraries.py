"""The versions of libraries: those that a result can depend on, and those that an answer's bits or text can depend on
beyond what its numerics level promises."""

from __future__ import annotations

from functools import cache
from importlib import metadata

LIBRARIES = (
    *("torch", "triton", "transformers", "tokenizers", "datasets", "safetensors", "gguf", "flash-attn", "hydra-core"),
    *("numpy", "scipy", "pandas", "pyarrow", "jinja2"),
)
# No test compares what two compilers make of a kernel, so `native` is only held to be equal within one version of each.
NATIVE_LIBRARIES = ("torch", "cuda", "triton")
# Stop strings are found in text, which these decode.
TEXT_LIBRARIES = ("tokenizers", "transformers")


def deciding(numerics: str) -> tuple[str, ...]:
    """The libraries that an answer of this level can depend on: `exact` has equal bits with every compiler, and `fast`
    promises none."""
    return (*(NATIVE_LIBRARIES if numerics == "native" else ()), *TEXT_LIBRARIES)


def installed_libraries() -> dict[str, str | None]:
    """The version of each of them in this process; "cuda" is the one that torch was built for."""
    import torch

    versions = {**library_versions(), "cuda": torch.version.cuda}
    return {name: versions.get(name) for name in (*NATIVE_LIBRARIES, *TEXT_LIBRARIES)}


@cache  # it reads metadata files for 8 ms
def library_versions() -> dict[str, str]:
    """The versions of the libraries that a result can depend on, those that are installed. Copy it to change it."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
