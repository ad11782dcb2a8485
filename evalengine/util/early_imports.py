"""Imports torch and transformers side by side, while the command reads its settings.

An import mostly asks the file system (10,000 files are looked for, and as many read), for which Python lets go of its
lock: where a file system takes long to answer, two threads are nearly twice as fast. Neither library imports what
the other one is in the middle of; transformers waits for torch where it needs it.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from evalengine.util import ahead
from evalengine.util.phases import phase


def begin_imports() -> None:
    """Begins the imports that every run needs; `ahead.wait` returns when they are over."""
    if "torch" not in sys.modules:
        ahead.begin("torch", _torch)
        ahead.begin("transformers", _transformers)


def _torch() -> None:
    with suppress(Exception), phase("torch"):  # the run's own import says what is wrong
        import torch  # noqa: F401


def _transformers() -> None:
    with suppress(Exception), phase("transformers"):
        import pyarrow.parquet  # noqa: F401  # the format of records
        from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast  # noqa: F401
