"""Imports torch and transformers side by side, while the command reads its settings.

An import mostly asks the file system (10,000 files are looked for, and as many read), for which Python lets go of its
lock. With a nap before each answer, a run on two busy cores came to its rows after 16 s, and after 20 without this.
Neither library imports what the other one is in the middle of; transformers waits for torch where it needs it.
"""

from __future__ import annotations

import os
import os.path
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from evalengine.util import ahead
from evalengine.util.phases import phase


def begin_imports() -> None:
    """Begins the imports that every run needs; `ahead.wait` returns when they are over."""
    try:
        os.getcwd()
    except FileNotFoundError:  # torch's libraries would end the process before the command can say so
        return
    if "torch" not in sys.modules:
        ahead.begin("torch", _torch)
        ahead.begin("transformers", _transformers)


def begin_triton_key() -> None:
    """Begins the hash of all of Triton, 460 MB, by which it names what it compiles: 0.3 s at the first kernel."""
    torch = sys.modules.get("torch")
    if "triton" in sys.modules and torch is not None and torch.cuda.is_available():
        ahead.begin("Triton", _triton_key)


def _triton_key() -> None:
    with suppress(Exception), phase("Triton's hash"):
        from triton.runtime.cache import triton_key

        triton_key()  # it remembers the result


def _torch() -> None:
    with suppress(Exception), phase("torch"), folders_known():  # the run's own import says what is wrong
        import torch  # noqa: F401


def _transformers() -> None:
    with suppress(Exception), phase("transformers"):
        import pyarrow.parquet  # noqa: F401  # the format of records
        from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast  # noqa: F401


@contextmanager
def folders_known() -> Iterator[None]:
    """Within, a folder is looked for once by `os.path.realpath`, and not with every file in it.

    As torch is imported, `inspect` asks for the real path of each of 1,100 modules, by a system call for each part of
    each path: 9,000, half of all that the import makes.
    """
    real = os.path.realpath
    of_folder = cache(real)

    def realpath(path: Any, **options: Any) -> Any:
        if options or not isinstance(path, str) or os.path.islink(path):
            return real(path, **options)
        folder, name = os.path.split(path)
        if not folder or name in ("", ".", ".."):
            return real(path)
        return os.path.join(of_folder(folder), name)

    os.path.realpath = realpath  # type: ignore[assignment]  # it is overloaded for bytes and text
    try:
        yield
    finally:
        os.path.realpath = real
