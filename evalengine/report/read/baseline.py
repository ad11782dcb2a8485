"""A baseline file (`evalengine baseline RUN -o FILE`): the part of a run that later runs are held against.

A baseline is JSON with sorted keys: the run's digest and task digests, its manifest, and per request the digest leaf,
the hashes of prompt and output ids and the summed log-probability; per document scores, answers, the choices that were
taken (which older files lack) and the sums behind perplexities; results. Token ids, single log-probabilities and texts
stay out; so do lm-eval's hashes of documents where the manifest has those of datasets and prompts. 1319 generated items
(gsm8k) take 0.2 MB, small enough for git.

The file carries its own hash (`records.sealed`), and the leaves must give the digest as well.

Its columns are small: hashes and floats as base85 of their bytes, constants and counts once. Base85
(`base64.b85encode`) needs 5 characters for 4 bytes, and none that JSON escapes. Nothing is cut: a baseline's hashes
equal a run's.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.records.digest import merkle_root
from evalengine.records.evidence import file_problems
from evalengine.records.folder import write_text_file
from evalengine.records.manifest_data import Manifest
from evalengine.records.sealed import SealedFormat
from evalengine.records.shapes import Count, Flag, Text, with_fields, wrong
from evalengine.report.read.run import Item, Run, tree_digests

MAX_ROWS = 10_000_000  # most values of a column
_SHA256 = re.compile(r"[0-9a-f]{64}")
_VALUES = list[tuple[Text, Text, Text, Any, Any, Any]]  # task, metric, filter, count, documents, values
_SHAPE = with_fields({
    "digest?": Text, "task_digests": dict[str, Text], "identity": dict[str, Any], "scores": _VALUES,
    "choices?": _VALUES, "answers": list[tuple[Text, Text, Any, Any, Any]],
    "weighted?": list[tuple[Text, Text, Text, Any, Any, Any, Any]], "results": list[tuple[Text, Text, Text, Any, Any]],
    "higher_is_better": list[tuple[Text, Text, Text, Flag]], "groups?": dict[str, list[Text]],
    "unanswered?": dict[str, dict[str, Count]],
})  # fmt: skip


def pack_hashes(values: Sequence[str]) -> Any:
    """SHA-256 hex digests as one base85 string; "" if all are ""; the list as it is if any is something else."""
    if not any(values):
        return ""
    if all(_SHA256.fullmatch(value) for value in values):
        return base64.b85encode(bytes.fromhex("".join(values))).decode()
    return list(values)


def unpack_hashes(packed: Any, count: int) -> list[str]:
    """The hashes that `pack_hashes` packed. Raises `ValueError` if there are not `count`."""
    if packed == "":
        return [""] * _plausible(count)
    if isinstance(packed, list):
        return _counted([str(value) for value in packed], count)
    digits = base64.b85decode(packed).hex()
    return _counted([digits[i : i + 64] for i in range(0, len(digits), 64)], count)


def pack_floats(values: Sequence[float | None]) -> Any:
    """float64, little-endian, as base85: bit for bit, infinities and NaN too; null if all are None."""
    if all(value is None for value in values):
        return None
    if all(value is not None for value in values):
        return base64.b85encode(struct.pack(f"<{len(values)}d", *values)).decode()
    return [None if value is None else float.hex(value) for value in values]


def unpack_floats(packed: Any, count: int) -> list[float | None]:
    """The values that `pack_floats` packed. Raises `ValueError` if there are not `count`."""
    if packed is None:
        return [None] * _plausible(count)
    if isinstance(packed, list):
        return _counted([None if value is None else float.fromhex(value) for value in packed], count)
    try:
        return list(struct.unpack(f"<{count}d", base64.b85decode(packed)))
    except struct.error as error:
        raise ValueError(str(error)) from error


def fold(values: Sequence[Any]) -> Any:
    """A column: {"all": value} if constant, {"from": first} if it counts up by one, the list otherwise."""
    if values and all(value == values[0] for value in values):
        return {"all": values[0]}
    if all(isinstance(value, int) and value == values[0] + i for i, value in enumerate(values)):
        return {"from": values[0]} if values else []
    return list(values)


def unfold(column: Any, count: int) -> list[Any]:
    """The column that `fold` folded. Raises `ValueError` if it does not hold `count` values."""
    if isinstance(column, dict):
        count = _plausible(count)
        return [column["all"]] * count if "all" in column else [column["from"] + i for i in range(count)]
    return _counted(list(column), count)


def pack_number(value: float | None) -> Any:
    """A readable number: integers without ".0"; what JSON cannot write ("nan", "inf") as text."""
    if value is None:
        return None
    if not math.isfinite(value):
        return str(value)
    return int(value) if value == int(value) and abs(value) < 2**53 else value


def _plausible(count: Any) -> int:
    """The length of a column that does not hold its own length; a made-up length must not fill the memory."""
    if not isinstance(count, int) or not 0 <= count <= MAX_ROWS:
        raise ValueError(f"a column of {str(count)[:20] if not isinstance(count, int) else 'too many'} values")
    return count


def _counted(values: list[Any], count: int) -> list[Any]:
    if len(values) != count:
        raise ValueError(f"{len(values)} values where {count} belong")
    return values


FORMAT = SealedFormat("evalengine-baseline", 1, "baseline", "evalengine baseline RUN -o")
HASHES = ("leaf", "prompt_sha256", "output_sha256")
FOLDED = ("doc_id", "request_index", "repeat", "kind", "truncated")
FIX = "take it from git again (git checkout -- {file}) or write it anew: evalengine baseline RUN -o {file} --force"


def to_text(run: Run) -> str:
    """The text of a run's baseline file."""
    return FORMAT.seal(_content(run))


def write_baseline(run: Run, file: Path, force: bool = False) -> int:
    """Writes `file`, whole or not at all, and returns its size in bytes.

    Raises `ConfigError` if it exists (without `force`), no file may be written there, or `run` is a baseline;
    `EvalEngineError` if the disk refuses.
    """
    if run.kind == "baseline":
        raise ConfigError(f"{run.source}: already a baseline; copy the file, or name the run")
    if problems := [*file_problems(f"-o {file}", file, (), [run.source], new_folder=True)]:
        raise ConfigError(problems)
    if file.exists() and not force:
        raise ConfigError(f"-o {file}: it exists; name another file, or replace it with --force")
    return write_text_file(file, to_text(run))


is_baseline = FORMAT.claimed_by  # whether a file calls itself a baseline, damaged or not


def load_baseline(path: Path) -> Run:
    """Reads a baseline. Raises `ConfigError` if it is none, is truncated, damaged or edited, or of a newer version."""
    fix = FIX.format(file=path)
    content = FORMAT.unseal(path, fix)
    try:
        run = _run(path, content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{path}: its parts contradict each other ({error}); {fix}") from error
    root = merkle_root([bytes.fromhex(item.leaf) for item in run.items.values()]).hex()
    if run.digest is not None and (root, tree_digests(run.items)) != (run.digest, run.task_digests):
        raise ConfigError(f"{path}: its leaves do not give its digests: it was edited; {fix}")
    return run


def _content(run: Run) -> dict[str, Any]:
    # The identity of a run of ours holds the hashes of datasets and prompts.
    hashes = {} if run.program == "evalengine" else run.hashes
    later = {
        "weighted": [[*key, len(own), *_packed(own, pack_floats, 2)] for key, own in sorted(run.weighted.items())],
        "clusters": {task: _by_document(names, str) for task, names in sorted(run.clusters.items())},
        "cut": {task: [len(docs), fold(sorted(docs))] for task, docs in sorted(run.cut.items())},
        "unanswered": run.unanswered,
        "groups": run.groups,
    }
    return {
        "name": run.name,
        "digest": run.digest,
        "task_digests": run.task_digests,
        "identity": run.identity,
        "manifest": {key: value for key, value in run.manifest.content.items() if key != "identity"},
        "items": {task: _columns([*group]) for task, group in groupby(run.items.values(), key=lambda item: item.task)},
        "scores": [[*key, *_by_document(values, pack_number)] for key, values in sorted(run.scores.items())],
        "results": [[*key, *map(pack_number, pair)] for key, pair in sorted(run.results.items())],
        "higher_is_better": [[*key, value] for key, value in sorted(run.higher_is_better.items())],
        "answers": [[*key, *_by_document(values, str)] for key, values in sorted(run.answers.items())],
        "choices": [[*key, *_by_document(values, int)] for key, values in sorted(run.choices.items())],
        "hashes": {task: [*_packed(own, pack_hashes, 3), len(own)] for task, own in hashes.items()},
        **{name: value for name, value in later.items() if value},  # files of runs without it stay as they were
    }


def _packed(values: Mapping[int, Sequence[Any]], pack: Callable[[list[Any]], Any], width: int) -> list[Any]:
    """[documents, a packed column for each of the `width` values that a document has]."""
    docs = sorted(values)
    return [fold(docs), *(pack([values[doc][place] for doc in docs]) for place in range(width))]


def _columns(items: Sequence[Item]) -> dict[str, Any]:
    return {
        "count": len(items),
        **{name: fold([getattr(item, name) for item in items]) for name in FOLDED},
        **{name: pack_hashes([getattr(item, name) for item in items]) for name in HASHES},
        "sum_logprob": pack_floats([item.sum_logprob for item in items]),
    }


def _by_document(values: Mapping[int, Any], pack: Any) -> tuple[int, Any, Any]:
    """(count, documents, their values)."""
    docs = sorted(values)
    return len(docs), fold(docs), fold([pack(values[doc]) for doc in docs])


def _run(path: Path, content: Mapping[str, Any]) -> Run:
    """The run in a file's content; older files lack choices, weighted, clusters, cut, unanswered and groups."""
    if problem := wrong(content, _SHAPE):
        raise ValueError(problem)
    items = {item.key: item for task, columns in content["items"].items() for item in _items(task, columns)}
    manifest = content["manifest"]
    choices = _by_key(content.get("choices", ()), lambda value: value)
    if odd := [x for own in choices.values() for x in own.values() if type(x) is not int or x < 0]:
        raise ValueError(f"choice {str(odd[0])[:20]} is no number of a choice")
    return Run(
        source=path,
        kind="baseline",
        name=path.stem,
        digest=content["digest"],
        task_digests=content["task_digests"],
        identity=content["identity"],
        manifest=Manifest({**manifest, "identity": content["identity"]} if manifest else {}),
        items=dict(sorted(items.items())),
        scores=_by_key(content["scores"], float),
        results={
            tuple(key): (float(value), None if error is None else float(error))
            for *key, value, error in content["results"]
        },
        higher_is_better={tuple(key): value for *key, value in content["higher_is_better"]},
        answers=_by_key(content["answers"], str),
        hashes={
            task: _rows(count, docs, unpack_hashes, columns)
            for task, (docs, *columns, count) in content["hashes"].items()
        },
        choices=choices,
        weighted={
            (task, metric, name): _rows(count, docs, _numbers, columns)
            for task, metric, name, count, docs, *columns in content.get("weighted", ())
        },
        clusters={
            task: _documents(count, docs, names, str)
            for task, (count, docs, names) in content.get("clusters", {}).items()
        },
        cut={task: frozenset(_numbers_of(docs, count)) for task, (count, docs) in content.get("cut", {}).items()},
        unanswered=dict(content.get("unanswered", {})),
        groups=dict(content.get("groups", {})),
    )


def _items(task: str, columns: Mapping[str, Any]) -> list[Item]:
    count = columns["count"]
    table = {name: unfold(columns[name], count) for name in FOLDED}
    table |= {name: unpack_hashes(columns[name], count) for name in HASHES}
    table["sum_logprob"] = unpack_floats(columns["sum_logprob"], count)
    rows = (dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True))
    return [Item(task=task, **row) for row in rows]


def _by_key(rows: Sequence[Any], read: Callable[[Any], Any]) -> dict[Any, dict[int, Any]]:
    """The values by document of each key, from `_by_document`'s rows of (*key, count, documents, values)."""
    return {tuple(key): _documents(count, docs, values, read) for *key, count, docs, values in rows}


def _documents(count: int, docs: Any, values: Any, read: Callable[[Any], Any]) -> dict[int, Any]:
    return dict(zip(_numbers_of(docs, count), map(read, unfold(values, count)), strict=True))


def _rows(count: int, docs: Any, unpack: Callable[[Any, int], list[Any]], columns: Sequence[Any]) -> dict[int, Any]:
    """The documents' values, from `_packed`'s columns."""
    rows = zip(*(unpack(column, count) for column in columns), strict=True)
    return dict(zip(_numbers_of(docs, count), rows, strict=True))


def _numbers_of(docs: Any, count: int) -> list[int]:
    """The documents' numbers. Raises `ValueError` for anything else."""
    numbers = unfold(docs, count)
    if odd := [doc for doc in numbers if type(doc) is not int]:
        raise ValueError(f"{str(odd[0])[:20]} is no number of a document")
    return numbers


def _numbers(packed: Any, count: int) -> list[float]:
    """Floats of which none is missing. Raises `TypeError` for a missing one."""
    return [*map(float, unpack_floats(packed, count))]  # type: ignore[arg-type]
