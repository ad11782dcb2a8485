"""What `compare`, `gate` and the report know of a run, wherever it was read from: a run folder of ours, an output
folder of lm-evaluation-harness, or a baseline file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from evalengine.errors import ConfigError, readable
from evalengine.plain_files import read_json
from evalengine.records.digest import merkle_root
from evalengine.records.evidence import file_sha256, is_bound
from evalengine.records.lm_eval_file import results_files
from evalengine.records.sealed import sha256_of
from evalengine.records.shapes import text, wrong
from evalengine.report.read.names import INDEX, SWEEP_PLACE, stands_for

Key = tuple[str, int, int, int]  # task, document, request index, repeat
ScoreKey = tuple[str, str, str]  # task, metric, filter
Program = Literal["evalengine", "lm-eval", "evalengine in lm-eval"]  # the last: lm-eval's tasks, our engine

SWEEP_FORMAT = "evalengine.sweep"  # of the file that an experiment ends with


@dataclass(frozen=True, eq=False)
class Item:
    """One request. What the source does not hold is None, or "" for a hash."""

    task: str
    doc_id: int
    request_index: int
    repeat: int
    kind: str  # generate_until | loglikelihood | loglikelihood_rolling
    leaf: str  # hex digest leaf (`records.digest.leaf_hash`); "" where unknown (lm-eval)
    prompt_sha256: str
    output_sha256: str  # `records.schema.ids_sha256` of the output ids
    output_ids: list[int] | None  # None: a baseline or an lm-eval folder holds none
    logprobs: np.ndarray | None  # float32 [len(output_ids)]
    sum_logprob: float | None  # math.fsum of logprobs, or what the source says
    text: str | None
    truncated: int  # tokens cut from the prompt's left

    @property
    def key(self) -> Key:
        return (self.task, self.doc_id, self.request_index, self.repeat)


@dataclass(frozen=True, eq=False)
class Run:
    """A run as evidence. Scores and answers are lm-eval's: a document's value under a filter."""

    source: Path
    kind: Literal["run", "baseline", "lm-eval"]
    name: str  # short label for tables
    digest: str | None
    task_digests: dict[str, str]
    identity: dict[str, Any]  # manifest["identity"]; of lm-eval: what its results say about model, tasks and prompts
    manifest: dict[str, Any]  # {} where there is none
    items: dict[Key, Item]  # in key order
    scores: dict[ScoreKey, dict[int, float]]  # doc_id -> value
    results: dict[ScoreKey, tuple[float, float | None]]  # aggregated value, standard error
    higher_is_better: dict[ScoreKey, bool]  # absent where the source does not say
    answers: dict[tuple[str, str], dict[int, str]]  # (task, filter) -> doc_id -> filtered answer as text
    hashes: dict[str, dict[int, tuple[str, str, str]]]  # task -> doc_id -> (doc_hash, prompt_hash, target_hash)
    choices: dict[ScoreKey, dict[int, int]] = field(default_factory=dict)  # `chosen`: doc_id -> what a metric chose
    choice_texts: dict[str, dict[int, tuple[str, ...]]] = field(default_factory=dict)  # task -> doc_id -> what there is
    # (log-likelihood, weight) of each document, for metrics that are made of those sums: perplexities by word or byte
    weighted: dict[ScoreKey, dict[int, tuple[float, float]]] = field(default_factory=dict)
    clusters: dict[str, dict[int, str]] = field(default_factory=dict)  # task -> doc_id -> what related documents share
    records: Path | None = None  # the folder of its records and manifest, where that is not `source`

    @property
    def program(self) -> Program:
        """What ran it: the settings that two programs record are not the same ones."""
        if self.by_lm_eval:
            return "lm-eval"
        return "evalengine in lm-eval" if self.identity.get("harness") == "lm-eval" else "evalengine"

    @property
    def by_lm_eval(self) -> bool:
        """Whether lm-eval ran it. Of a baseline the digest tells: every run of ours has one, no run of lm-eval's."""
        return self.kind == "lm-eval" or (self.kind == "baseline" and self.digest is None)

    @property
    def unbound(self) -> bool:
        """Whether it is a folder of ours whose manifest does not list its files: edits of them would pass unseen."""
        return self.kind == "run" and not is_bound(self.manifest)


def load_run(path: str | Path, page: bool = True) -> Run:
    """A run folder, an lm-eval output folder (or its results file), or a baseline file; or a name of `names`.

    page: whether an edited `report.html` of a run folder counts.

    Raises `ConfigError` (the file at fault, and the cure) for what is missing, unreadable, unfinished, damaged or
    edited.
    """
    with readable(path):
        return _load(Path(stands_for(path)), page)


def _load(path: Path, page: bool) -> Run:
    from evalengine.report.read.baseline import is_baseline, load_baseline
    from evalengine.report.read.lm_eval_records import load_results
    from evalengine.report.read.run_folder import is_run_folder, load_folder

    if path.is_file():
        if results_files(path):
            return load_results(path)
        if not is_baseline(path) and is_run_folder(path.parent):
            raise ConfigError(f"{path}: one file of a run; give the folder: {path.parent}")
        return load_baseline(path)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such file or folder; give a run folder, an lm-eval output folder or a baseline")
    any(path.iterdir())  # without permission, everything would merely seem to be missing
    if is_run_folder(path):
        return load_folder(path, page)
    if results_files(path):
        return load_results(path)
    return _only_run_inside(path, page)


def named_runs(names: Iterable[str]) -> list[str]:
    """What a command's words name: a finished experiment's folder stands for its runs, `latest` and `SWEEP:3` for one
    (`names`), the index of a folder of runs for none, all else for itself.

    Raises `ConfigError` for the folder of an unfinished one, and for what cannot be read.
    """
    found, given = [], list(names)
    for name in map(str, map(stands_for, given)):
        with readable(name):
            listed = Path(name).name == INDEX and len(given) > 1  # as `results/*` names it too
            found += _experiment_runs(Path(name)) or ([] if listed else [name])
    return found


def _experiment_runs(folder: Path) -> list[str]:
    """The runs that an experiment's file in this folder lists, in its order; none where there is no such file."""
    if not folder.is_dir() or (folder / "manifest.json").exists():  # a run's own files are many, and some large
        return []
    for file in sorted(folder.glob("*.json")):
        try:
            content = read_json(file)
        except (OSError, ValueError):
            continue  # another file: the folder is judged as a run's
        if isinstance(content, dict) and content.get("format") == SWEEP_FORMAT:
            return [str(folder / source) for source in _listed(file, content)]
    if places := [child for child in folder.iterdir() if _is_place(child)]:
        raise ConfigError(
            f"{folder}: an experiment that is not finished ({len(places)} of its runs were begun); its command, given "
            "again, takes it up; or name its runs"
        )
    return []


def _listed(file: Path, sweep: dict[str, Any]) -> list[str]:
    """The places of the runs in an experiment's file. Raises `ConfigError` if it was edited: it carries its own hash,
    unless it was written before such files did."""
    problem = wrong(sweep, {"runs": [{"source": text, "digest?": text}], "picture_sha256?": text})
    said = sweep.pop("sha256", None)
    if not problem and said is not None and said != sha256_of(sweep):
        problem = "its sha256 is not that of its content"
    problem = problem or _elsewhere(file, sweep)
    if problem:
        raise ConfigError(f"{file}: {problem}: it was edited or damaged; take it from where it was copied, or name the "
                          "runs in its folder one by one")  # fmt: skip
    return [run["source"] for run in sweep["runs"]]


def _elsewhere(file: Path, sweep: dict[str, Any]) -> str:
    """What beside an experiment's file is not what it lists: a run, or the picture; "" if all is. Runs that lack a
    digest, or are gone, are named where they are opened."""
    for run in sweep["runs"]:
        digest = file.parent / run["source"] / "digest.txt"
        if run.get("digest") and digest.is_file() and digest.read_bytes().strip() != run["digest"].encode():
            return f"it lists another digest for {run['source']} than that run has"
    picture = file.with_suffix(".svg")
    if "picture_sha256" in sweep and picture.is_file() and file_sha256(picture) != sweep["picture_sha256"]:
        return f"{picture.name} beside it is not the picture that was drawn"
    return ""


def _is_place(folder: Path) -> bool:
    """Whether this is where an experiment put one of its runs."""
    from evalengine.report.read.run_folder import is_run_folder

    if not SWEEP_PLACE.fullmatch(folder.name) or not folder.is_dir() or is_run_folder(folder):
        return False
    return any(is_run_folder(child) for child in folder.iterdir() if child.is_dir())


def merkle_differences(a: Run, b: Run) -> list[Key]:
    """The items whose leaves differ, or that one run lacks, in key order. Equal digests end it at once.

    Both runs need leaves: lm-eval's have none (`Run.digest` is None), for which this raises `ConfigError`.
    """
    for run in (a, b):
        if run.digest is None or any(not item.leaf for item in run.items.values()):
            raise ConfigError(f"{run.source}: it holds no digests (kind {run.kind}); compare its texts and scores")
    if a.digest == b.digest:
        return []
    keys = sorted({*a.items, *b.items})
    leaves = [[_leaf(run, key) for key in keys] for run in (a, b)]
    return [keys[position] for position in merkle_descent(*leaves)[0]]


def merkle_descent(a: Sequence[bytes], b: Sequence[bytes]) -> tuple[list[int], int]:
    """(positions at which the leaves differ, node pairs compared) of two equally long lists of 32-byte leaves.

    From the root down, into unequal nodes only: one unequal leaf of n costs 2 ceil(log2 n) + 1 comparisons. The tree is
    the digest's (`records.digest.merkle_root`): equal nodes hold equal leaves.
    """
    assert len(a) == len(b), "leaves are compared position by position"
    levels_a, levels_b = _levels(a), _levels(b)
    unequal, compared = [0] if a else [], 0
    for height in range(len(levels_a) - 1, -1, -1):
        nodes_a, nodes_b = levels_a[height], levels_b[height]
        compared += len(unequal)
        found = [node for node in unequal if nodes_a[node] != nodes_b[node]]
        if height == 0:
            return found, compared
        below = len(levels_a[height - 1])
        unequal = [child for node in found for child in (2 * node, 2 * node + 1) if child < below]
    return [], compared


_ABSENT = bytes(32)  # the leaf of an item that a run lacks; no SHA-256 is known to be it


def _leaf(run: Run, key: Key) -> bytes:
    item = run.items.get(key)
    return _ABSENT if item is None else bytes.fromhex(item.leaf)


def _levels(leaves: Sequence[bytes]) -> list[list[bytes]]:
    """The tree's nodes, leaves first, root last; an odd last node moves up unchanged."""
    levels = [list(leaves)]
    while len(levels[-1]) > 1:
        below = levels[-1]
        levels.append([merkle_root(below[i : i + 2]) for i in range(0, len(below), 2)])
    return levels


def _only_run_inside(path: Path, page: bool) -> Run:
    """lm-eval writes into <output_path>/<model>/, and a results/ folder may hold a single run."""
    from evalengine.report.read.run_folder import is_run_folder

    inside = sorted(child for child in path.iterdir() if child.is_dir())
    found = [child for child in inside if is_run_folder(child) or results_files(child)]
    if len(found) == 1:
        return load_run(found[0], page)
    if found:
        names = ", ".join(child.name for child in found[:4]) + (", ..." if len(found) > 4 else "")
        raise ConfigError(f"{path}: it holds {len(found)} runs ({names}); name one of them")
    if runs := _experiment_runs(path):
        raise ConfigError(f"{path}: an experiment of {len(runs)} runs; name one of them, such as {runs[0]}")
    raise ConfigError(f"{path}: no run in this folder (neither digest.txt nor results_*.json)")
