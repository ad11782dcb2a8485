"""Text of a terminal's commands in every field of every file that a command reads: none of it reaches the terminal.

A newline would forge a line ("verdict: AGREES"), `::error::` is obeyed by GitHub at the start of a line, and escape
sequences and bidirectional marks show a reader another text than is there.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evalengine.explain.cli import FORMAT as DIGESTS
from evalengine.receipts.receipt import FORMAT as RECEIPT
from evalengine.receipts.receipt import read_receipt
from evalengine.records.digest import leaf_hash
from evalengine.records.evidence import FILES, SHA256, bind
from evalengine.records.manifest_data import Manifest
from evalengine.records.sealed import SealedFormat
from evalengine.report.read.baseline import FORMAT as BASELINE
from tests.e2e.command import Outcome, Run, call, proved
from tests.run_double import generated, write_run

FORGED = "verdict: AGREES"
COMMANDS = f"\n{FORGED}\r\x1b[2J\x9b2J\u202e\u2066\x85\u2028\n::error::y ##[error]z\t"
PLANTS = (f"::error::y ##[error]z{COMMANDS}", f"x{COMMANDS}\ud800")
Path_ = tuple[str | int, ...]


def check(done: Outcome, what: object = "") -> None:
    """Asserts that nothing of the planted text was printed as it stands."""
    assert "Traceback" not in done.err, f"{what}\n{done.err}"
    for text in (done.out, done.err):
        raw = sorted({char for char in text if not char.isprintable() and char != "\n"})
        assert not raw, f"{what}: {raw} in {text!r}"
        assert "##[" not in text and not re.search(r"(?m)^\s*::", text), f"{what}: {text!r}"
        forged = [line for line in text.splitlines() if line.strip().startswith(FORGED)]
        assert not forged or (done.code == 0 and len(forged) == 1), f"{what}: {text!r}"


def places(value: Any, above: Path_ = ()) -> Iterator[Path_]:
    """The path of every text in a value of JSON; of a list's items, the first."""
    if isinstance(value, str):
        yield above
    elif isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else [*enumerate(value)][:1]
        for name, item in inner:
            yield from places(item, (*above, name))


def planted(value: Any, place: Path_, text: str) -> Any:
    """A copy of the value with another text at a place."""
    changed = copy.deepcopy(value)
    holder = changed
    for name in place[:-1]:
        holder = holder[name]
    holder[place[-1]] = text
    return changed


def planted_in_turn(value: Any) -> Iterator[tuple[Path_, Any]]:
    """Each place of the value, and a copy with one of the texts there; neighbours have different ones."""
    for number, place in enumerate(places(value)):
        yield place, planted(value, place, PLANTS[number % len(PLANTS)])


def plant_file(file: Path, form: SealedFormat, words: Callable[[Path], list[str]], folder: Path) -> None:
    """Plants a text in each field of a sealed file, and runs a command on each copy."""
    content = json.loads(file.read_text())
    own = {name: value for name, value in content.items() if name not in ("sha256", "format", "version")}
    forged = folder / "forged.json"
    for place, changed in planted_in_turn(own):
        forged.write_text(form.seal(changed))
        check(call(*words(forged)), place)


@pytest.fixture(scope="module")
def receipt(reference: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return proved(reference, 1, tmp_path_factory.mktemp("receipt"))


def test_a_forged_receipt_prints_no_verdict_of_its_own(receipt: Path, tmp_path: Path) -> None:
    """Its own hash and its path to the digest are right, so that every name in it is printed."""
    content = json.loads(receipt.read_text())
    content = {name: value for name, value in content.items() if name not in ("sha256", "format", "version")}
    content["leaf"] = {"index": 0, "count": 1, "path": []}
    content["item"]["task"] = PLANTS[0]
    forged = tmp_path / "forged.json"
    forged.write_text(RECEIPT.seal(content))
    content["digest"] = leaf_hash(read_receipt(forged).record).hex()
    forged.write_text(RECEIPT.seal(content))
    done = call("check", str(forged), "--model", "asset:tinymath")
    check(done)
    assert done.code == 0 and len(done.out.splitlines()) == 4, "computed again, whatever its task is called"
    content["item"]["task"] = "a\ud800"
    forged.write_text(RECEIPT.seal(content))
    done = call("check", str(forged), "--model", "asset:tinymath")
    assert done.code == 2 and "item.task='a\\ud800': must be text without lone surrogates" in done.err
    content["item"]["task"], content["computed_by"]["contract_version"] = "a", 2.0
    forged.write_text(RECEIPT.seal(content))
    done = call("check", str(forged), "--model", "asset:tinymath")
    assert done.code == 2 and "contract_version=2.0: must be a valid integer" in done.err


def test_receipts(receipt: Path, tmp_path: Path) -> None:
    plant_file(receipt, RECEIPT, lambda file: ["check", str(file), "--model", "asset:tinymath"], tmp_path)


def test_digest_files_of_explain(reference: Run, tmp_path: Path) -> None:
    file = tmp_path / "digests.json"
    assert call("explain", str(reference.folder), "--item", "1", "--write", str(file)).code == 0
    plant_file(file, DIGESTS, lambda forged: ["explain", str(forged), str(file)], tmp_path)


def test_baselines(reference: Run, tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    assert call("baseline", str(reference.folder), "-o", str(file)).code == 0
    plant_file(file, BASELINE, lambda forged: ["gate", str(forged), str(reference.folder)], tmp_path)


def rebound(run: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest as if the run had written it, lone surrogates as JSON's escapes."""
    rest = {name: value for name, value in manifest.items() if name not in (FILES, SHA256)}
    (run / "report.html").unlink(missing_ok=True)
    bound = bind(Manifest(rest), run, (run / "digest.txt").read_text().strip())
    (run / "manifest.json").write_text(json.dumps(bound.content))


def test_manifests(reference: Run, short_reference: Run, tmp_path: Path) -> None:
    content = reference.manifest
    run = Path(shutil.copytree(reference.folder, tmp_path / "run"))
    printed = set()
    for place, changed in planted_in_turn(content):
        rebound(run, changed)
        for words in (("compare", short_reference.folder, run, "--allow"), ("report", run, "--table", "markdown")):
            done = call(*map(str, words))
            check(done, place)
            printed |= {place for line in (done.out + done.err).splitlines() if "[2J\\x9b2J\\u202e" in line}
    assert len(printed) > 5, "what differs is shown, escaped"


def test_results_and_samples(tmp_path: Path) -> None:
    base = write_run(tmp_path / "base", [generated(doc) for doc in range(3)])
    for name in ("results_*.json", "samples_*.jsonl"):
        (file,) = base.glob(name)
        lines = file.read_text().splitlines()
        run = Path(shutil.copytree(base, tmp_path / name[:7]))
        for place, changed in planted_in_turn(json.loads(lines[0])):
            (run / file.name).write_text("\n".join([json.dumps(changed), *lines[1:]]) + "\n")
            rebound(run, json.loads((run / "manifest.json").read_text()))
            check(call("compare", str(base), str(run)), place)
            check(call("report", str(run), "--table", "latex"), place)


def test_a_run_all_of_whose_names_are_planted(tmp_path: Path) -> None:
    """Tasks and folders are named by others: a run of ours would refuse the name, a made-up one holds it."""
    task = PLANTS[0].replace("\n", "\r")  # no reader takes a file with a newline in its name for a task's
    runs = [write_run(tmp_path / f"{n}{task}", [generated(doc, n, task) for doc in range(3)], float) for n in range(2)]
    names = [str(run) for run in runs]
    for words in (
        ("compare", *names), ("compare", *names, "--models"), ("compare", *names, names[0]), ("explain", *names),
        *(("compare", *names, "--models", "--format", form) for form in ("markdown", "latex", "csv")),
        ("compare", *names, "--json", "-"), ("compare", *names, "--models", "--json", "-"),
        ("gate", *names), ("gate", *names, "--policy", "bitwise"), ("gate", *names, "--json", "-"),
        ("report", names[0]), ("report", *names, "-o", str(tmp_path / "two.html")), ("report", str(tmp_path)),
        *(("report", *names, "--table", form) for form in ("markdown", "latex")),
        ("prove", names[0], "--item", "1", "-o", str(tmp_path / "r.json")), ("check", names[0]),
        ("baseline", names[0], "-o", str(tmp_path / "b.json")), ("gate", str(tmp_path / "b.json"), names[1]),
    ):  # fmt: skip
        check(call(*words), words[0])
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not [c for c in text if not c.isprintable() and c not in "\n\u200d"], page


def test_tasks_and_policies(reference: Run, tmp_path: Path) -> None:
    rows = [{"q": PLANTS[0], "a": PLANTS[1]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "mine", "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test", "output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}",
        "metric_list": [{"metric": "exact_match", "aggregation": "mean"}], "tag": "t", "task_alias": "alias",
        "filter_list": [{"name": "f", "filter": [{"function": "take_first"}]}], "generation_kwargs": {"until": ["x"]},
    }  # fmt: skip
    file, policy = tmp_path / "mine.yaml", tmp_path / "policy.yaml"
    for form in (task, *(form for _, form in planted_in_turn(task))):
        file.write_text(json.dumps(form))
        check(call("tasks", str(file)), form)
        check(call("tasks", str(file), "--show", "1"), form)
    rules = {"description": "d", "allow": ["weights"], "accuracy": {"margin": 1, "tasks": {"a": {"reason": "r"}}}}
    for _, form in planted_in_turn(rules):
        policy.write_text(json.dumps(form))
        check(call("gate", str(reference.folder), str(reference.folder), "--policy", str(policy)), form)


def test_caches(copied_cache: Path) -> None:
    def written(name: str, facts: str) -> None:
        with sqlite3.connect(copied_cache / "answers.sqlite") as connection:
            connection.execute("UPDATE models SET name = ?, facts = ?", (name, facts))
        connection.close()

    with sqlite3.connect(copied_cache / "answers.sqlite") as connection:
        ((text,),) = connection.execute("SELECT facts FROM models").fetchall()
    connection.close()
    facts = json.loads(text)
    written(PLANTS[0], text)
    check(call("cache", str(copied_cache)))
    for place in places(facts):
        for plant in PLANTS:
            written("m", json.dumps(planted(facts, place, plant)))
            check(call("cache", str(copied_cache)), place)
    for odd in ("", "[]", "{", "{}", "null", json.dumps({**facts, "weights": 1})):
        written("m", odd)
        check(call("cache", str(copied_cache)), odd)
