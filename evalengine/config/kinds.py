"""The kinds of values that settings have: pydantic's types with this package's limits and words."""

from __future__ import annotations

import os
import re
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, MinLen, Predicate
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from evalengine.config.arguments import integer, number, shown
from evalengine.config.typed import must

MAX_RANKS = 64  # ranks of one model: more GPUs than any machine has
MAX_SIZE = (1 << 31) - 1  # the most tokens in a step, and pages: kernels index both with int32
TASK_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}")
MAX_MODEL_NAME = 200


def as_typed(value: Any) -> str:
    """A word as on the command line; any other value in quotes or shortened, so that "8" does not look like 8."""
    return value if isinstance(value, str) and re.fullmatch(r"[a-z][\w:./-]{0,60}", value) else shown(value)


def is_folder(path: str) -> bool:
    """Whether the path is a folder; False also for names that are too long, and below folders that may not be read."""
    try:
        return Path(path).is_dir()
    except OSError:
        return False


def _whole(value: Any) -> Any:
    """NumPy's and torch's integers as Python's, and texts as they are; no truth value and no fraction is an integer."""
    if (read := integer(value)) is None and not isinstance(value, str):
        raise PydanticCustomError("int", "no integer")
    return value if read is None else read


def _real(value: Any) -> Any:
    if (read := number(value)) is None and not isinstance(value, str):
        raise PydanticCustomError("float", "no number")
    return value if read is None else read


def _text(value: Any) -> Any:
    """A path or a number as the text that was written: a Hub configuration may be called 2024."""
    return (
        os.fspath(value) if isinstance(value, os.PathLike) else str(value) if isinstance(value, int | float) else value
    )


# A number is taken as a text, since a Hub configuration may be called 2024. Objects that Python made are checked, too.
SETTINGS = ConfigDict(extra="forbid", coerce_numbers_to_str=True, revalidate_instances="always")
Whole = Annotated[int, BeforeValidator(_whole)]
Real = Annotated[float, BeforeValidator(_real)]
Documents = Annotated[Whole, must("be a whole number of documents, not a share of them"), Ge(1)]
Least0 = Annotated[Whole, Ge(0)]
Least1 = Annotated[Whole, Ge(1)]
Size = Annotated[Whole, Ge(1), Le(MAX_SIZE)]
Share = Annotated[Real, Gt(0), Le(1), must("lie in (0, 1]")]
ShareOfAnswers = Annotated[Real, Ge(0), Le(1), must("lie in 0 .. 1, a share of the answers")]
Seed = Annotated[Whole, Ge(0), Le((1 << 63) - 1), must("lie in 0 .. 2^63 - 1")]
Day = Annotated[
    str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"), AfterValidator(lambda text: str(date.fromisoformat(text))),
    must("be a day, as in 2024-07-26"),
]  # fmt: skip
ModelName = Annotated[
    str, Predicate(lambda name: name.isprintable() and len(name) <= MAX_MODEL_NAME),
    must(f"be at most {MAX_MODEL_NAME} printable characters; it names the run in folders and tables"),
]  # fmt: skip
TokenOrText = Annotated[
    Least0 | Annotated[str, MinLen(1)], must("be the text or the id of what ends a thinking, or null")
]
Automatic = Literal["auto"]
LoadFormat = Literal["auto", "safetensors", "pytorch", "gguf", "dummy"]
Implementation = Literal["auto", "native", "transformers"]
Chosen = Literal["auto", "always", "off"]
AttentionBackend = Literal["auto", "flash_attn", "triton", "sdpa"]
Level = Literal["auto", "native", "exact", "fast"]
LEVELS = get_args(Level)
Sequences = Annotated[Whole, Ge(1), Le((1 << 16) - 1)]  # a decode kernel's grid has one row per sequence
# OpenMP ends a process that gets no more threads. A larger machine's run may be explained on a smaller one.
Threads = Annotated[Whole, Ge(1), Le(max(256, os.cpu_count() or 1))]
Ranks = Annotated[Whole, Ge(1), Le(MAX_RANKS)]
Seconds = Annotated[Whole, Ge(1), Le(86_400)]
Temperature = Annotated[Real, Ge(0)]
Finite = Annotated[Real, Field(allow_inf_nan=False)]
NonEmpty = Annotated[str, MinLen(1)]
Device = Annotated[
    str, Predicate(lambda name: re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name) is not None),
    must("be auto, cpu, cuda or cuda:<number>"),
]  # fmt: skip
BlockSize = Annotated[Automatic | Size, must(f"be auto or a number of tokens from 1 to {MAX_SIZE}")]
Replicas = Annotated[Automatic | Annotated[Whole, Ge(1), Le(4096)], must("be auto or a number from 1 to 4096")]
ChatVariables = Annotated[dict[str, Any], must("be variables with their values, as in {effort: high}")]
Resume = Annotated[
    str, Predicate(lambda name: name in ("auto", "never") or is_folder(name)),
    must("be auto, never, or an existing run folder"),
]  # fmt: skip
CodeExecution = Annotated[
    Literal[False, True, "without_isolation"],
    must("be false, true or without_isolation (no more than limits; for a container or virtual machine)"),
]
