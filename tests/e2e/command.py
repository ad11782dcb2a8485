"""The command line as tests drive it, and what its runs leave on disk."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from evalengine.__main__ import main
from evalengine.records.digest import leaf_hash
from evalengine.records.journal import Entry, Journal
from evalengine.records.schema import RecordKey, RequestRecord, read_records

ROOT = Path(__file__).parents[2]
LIMIT = 6  # Documents in most runs here: enough for batches, and for a kill in the middle.
SHORT = "task.generation.max_gen_toks=8"  # For runs whose answers need not be right: those take 50 tokens.


def installed(site: Path, group: str, name: str, function: str, source: str) -> Path:
    """Lays a module in `site` as an installed package, whose function is the group's entry point of the module's name;
    returns `site`."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}:{function}\n")
    (site / f"{name}.py").write_text(source)
    return site


@dataclass(frozen=True)
class Outcome:
    """A finished command: its exit code, standard output and standard error."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Run:
    """A run's folder, read back."""

    folder: Path

    @property
    def digest(self) -> str:
        return (self.folder / "digest.txt").read_text(encoding="utf-8").strip()

    @property
    def manifest(self) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        return manifest

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """The results file: task -> "metric,filter" -> value."""
        (file,) = self.folder.glob("results_*.json")
        results: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["results"]
        return results

    def samples(self, task: str) -> list[dict[str, Any]]:
        (file,) = self.folder.glob(f"samples_{task}_2*.jsonl")  # a name may begin as another does
        with open(file, encoding="utf-8") as lines:  # not `splitlines`, for which U+2028 ends a line, too
            return [json.loads(line) for line in lines]

    @property
    def records(self) -> list[RequestRecord]:
        return read_records(self.folder / "records.parquet")

    @property
    def leaves(self) -> dict[RecordKey, bytes]:
        """Record key -> leaf hash, of which the digest is made; runs of unlike length compare by them."""
        return {record.key: leaf_hash(record) for record in self.records}


def call(*arguments: str) -> Outcome:
    """Runs the command line in this process, which saves the seconds that importing torch takes."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return Outcome(code, out.getvalue(), err.getvalue())


def after_entries(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Has `act` called once journals have got so many entries more."""
    append, written = Journal.append, 0

    def counted(self: Journal, entry: Entry) -> None:
        nonlocal written
        append(self, entry)
        written += 1
        if written == number:
            act()

    monkeypatch.setattr(Journal, "append", counted)


def interrupt() -> None:
    """What Ctrl-C does."""
    raise KeyboardInterrupt


def proved(run: Run, item: int, folder: Path) -> Path:
    """The receipt of a run's item."""
    file = folder / "receipt.json"
    done = call("prove", str(run.folder), "--item", str(item), "-o", str(file))
    assert done.code == 0, done.err
    return file


def over(usual: Sequence[str], *own: str) -> list[str]:
    """The usual settings less those that `own` names, and `own`: a command line takes each setting once."""
    named = {word.partition("=")[0] for word in own}
    return [*(word for word in usual if word.partition("=")[0] not in named), *own]


def start(*arguments: str, program: Sequence[str] = ("-m", "evalengine"), **environment: str) -> subprocess.Popen[str]:
    """Starts `python -m evalengine ...` (or another program) in a new process, on one thread."""
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_default_interrupt,
    )


def finish(process: subprocess.Popen[str], timeout: float = 600) -> Outcome:
    """Waits for the process to end, at most `timeout` seconds."""
    out, err = process.communicate(timeout=timeout)
    return Outcome(process.returncode, out, err)


def runs(output_dir: Path) -> list[Run]:
    """The runs below `output_dir`, by name; none if it does not exist."""
    return [Run(folder) for folder in sorted(output_dir.glob("*")) if folder.is_dir()]


def finished(output_dir: Path, *settings: str) -> Run:
    """Runs a command in this process, and returns the one run that it leaves in `output_dir`."""
    done = call(f"output_dir={output_dir}", "engine.device=cpu", *settings)
    assert done.code == 0, done.err
    (run,) = runs(output_dir)
    check_output(done, run)
    return run


def check_output(done: Outcome, run: Run) -> None:
    """Asserts that the output ends with two lines: the run's folder and its digest."""
    *_, folder, digest = done.out.splitlines()
    assert folder == str(run.folder)
    assert digest == f"digest: {run.digest}" and re.fullmatch(r"digest: [0-9a-f]{64}", digest)


def _default_interrupt() -> None:
    """Makes SIGINT interrupt again: a shell's background job ignores it, and a child would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def write_tasks(folder: Path, *names: str) -> list[str]:
    """Writes a task of four rows under each name, and returns their files."""
    files = []
    for name in names:
        rows = [{"question": f"What is {name} + {n}?", "answer": str(n)} for n in range(4)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        lines = [f"task: {name}", f"dataset_path: {folder / name}.jsonl", "output_type: generate_until"]
        lines += ["test_split: test", 'doc_to_text: "{{question}}"', 'doc_to_target: "{{answer}}"', ""]
        (folder / f"{name}.yaml").write_text("\n".join(lines))
        files.append(str(folder / f"{name}.yaml"))
    return files


def with_more_template(folder: Path, end: str) -> Path:
    """A copy of the bundled model, in `folder`, whose chat template goes on with `end`."""
    shutil.copytree(str(files("evalengine.assets") / "tinymath"), folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["chat_template"] += end
    file.write_text(json.dumps(settings), encoding="utf-8")
    return folder
