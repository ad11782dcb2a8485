"""`explain` on real runs of the bundled model: it finds where two runs part, and says so where they do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import evalengine
from evalengine.records.digest import digests
from evalengine.records.schema import RequestRecord, write_records
from tests.e2e.command import Outcome, Run, call, finished
from tests.run_double import bind_again

SETTINGS = ("limit=4", "task.generation.max_gen_toks=4")
FAST = ("batch_invariant=false", "engine.dtype=float32")
ITEM = 3


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs of the same requests one at a time and in a batch, each in fast and in exact arithmetic."""
    root = tmp_path_factory.mktemp("cells")
    modes = {"fast": FAST, "exact": ()}
    return {
        f"{mode} {seqs}": finished(root / f"{mode}{seqs}", *SETTINGS, *settings, f"engine.max_num_seqs={seqs}")
        for mode, settings in modes.items()
        for seqs in (1, 8)
    }


def explained(*arguments: str | Path) -> Outcome:
    """Runs `evalengine explain` in this process."""
    return call("explain", *map(str, arguments))


def verdict(done: Outcome) -> str:
    """The output's last line."""
    return done.out.splitlines()[-1]


def parted(a: Run, b: Run) -> list[int]:
    """Documents whose records differ."""
    return [key[1] for key in a.leaves if a.leaves[key] != b.leaves[key]]


def test_what_another_batch_changes_in_fast_arithmetic_is_found(cells: dict[str, Run]) -> None:
    a, b = cells["fast 1"], cells["fast 8"]
    document = parted(a, b)[0]  # `explain` takes this document where none is named.
    done = explained(a.folder, b.folder, "--json", "-")
    report = json.loads(done.out)
    assert done.code == 1 and report["item"] == ["arithmetic", document, 0, 0]
    assert [side["reproduced"] for side in report["sides"]] == [True, True]
    assert report["settings"][0] == "max_num_seqs is 1 in A and 8 in B"
    first_op = report["first"]
    names = [(row["layer"], row["op"]) for row in report["ops"]]
    ops_before = report["ops"][: names.index((first_op["layer"], first_op["op"]))]
    assert ops_before and not any(row["differing"] for row in ops_before)
    assert first_op["size"]["differing"] > 0 and 0 < first_op["size"]["max_relative"] < 1e-4
    assert first_op["steps"][0]["requests"] == 1 < first_op["steps"][1]["requests"]
    logprob = report["ops"][-1]
    assert logprob["op"] == "logprob" and logprob["differing"] == 1 and logprob["size"]["max_abs"] > 0
    lines = explained(a.folder, b.folder, "--item", document).out.splitlines()
    place = f"layer {first_op['layer']}, {first_op['op']}" if first_op["layer"] else first_op["op"]
    assert lines[-1] == f"verdict: FIRST DIFFERENCE in {place}, token {first_op['token']}"
    assert any("lm_head" in line and "█" in line for line in lines)


def test_exact_has_no_difference_on_two_schedules(cells: dict[str, Run]) -> None:
    done = explained(cells["exact 1"].folder, cells["exact 8"].folder, "--item", ITEM)
    assert (done.code, done.err) == (0, "")
    assert verdict(done).startswith("verdict: NO DIFFERENCE in")
    assert "The two runs' records of this item are equal as well." in done.out


def test_a_run_against_its_own_other_settings(cells: dict[str, Run]) -> None:
    """A run is explained against its own requests under other settings: other schedules agree, other arithmetic
    differs."""
    folder = cells["exact 8"].folder
    rescheduled = explained(folder, "--item", ITEM, "--against", "engine.max_num_seqs=2", "engine.block_size=16")
    assert rescheduled.code == 0 and "block_size is 64 in A and 16 in B" in rescheduled.out
    small = explained(folder, cells["exact 1"].folder, "--item", ITEM, "--with", "engine.num_kv_blocks=20")
    assert small.code == 0 and "num_kv_blocks" not in small.out, "both pools have 20 pages"
    fast = explained(folder, "--item", ITEM, "--against", "batch_invariant=false")
    assert fast.code == 1 and 'numerics is "exact" in A and "fast" in B' in fast.out
    narrow = explained(cells["fast 8"].folder, "--item", ITEM, "--alone", "--against", "engine.dtype=bfloat16")
    assert narrow.code == 1 and "the item alone, without the requests" in narrow.out


def test_outputs_without_room_are_run_for_once_more(cells: dict[str, Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that find no room are computed in one more run, and the output is the same."""
    words = (cells["fast 1"].folder, cells["fast 8"].folder, "--json", "-")
    roomy = explained(*words)
    monkeypatch.setattr("evalengine.explain.rerun.VALUES_BYTES", 0)
    assert explained(*words) == roomy
    assert json.loads(roomy.out)["first"]["size"] is not None


def test_other_weights_are_named_before_any_op(cells: dict[str, Run], tmp_path: Path) -> None:
    """One changed bit of a weight in layer 3 is named, for a model that `--against` gives and for a run of that
    model."""
    model = tmp_path / "model"
    shutil.copytree(Path(evalengine.__file__).parent / "assets" / "tinymath", model)
    weights = load_file(model / "model.safetensors")
    name = "model.layers.3.mlp.down_proj.weight"
    weights[name].view(torch.int16)[5, 7] ^= 1 << 10
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    run = cells["exact 8"].folder
    done = explained(run, "--item", ITEM, "--against", f"model.path={model}")
    lines = done.out.splitlines()
    heading = lines.index("Weights that differ:")
    assert done.code == 1 and lines[heading + 1] == "  - 1 of 57 tensors differs"
    assert lines[heading + 2].startswith(f"  - {name}: 1 of 131,072 elements, by at most ")
    op_line = next(i for i, line in enumerate(lines) if line.startswith("First difference: layer 3, mlp.down_proj"))
    assert op_line > heading
    other_run = finished(tmp_path / "run", *SETTINGS, f"model.path={model}", "engine.max_num_seqs=8")
    report = json.loads(explained(run, other_run.folder, "--item", ITEM, "--json", "-").out)
    assert report["weights"] == [line.removeprefix("  - ") for line in lines[heading + 1 : heading + 3]]
    assert (report["first"]["layer"], report["first"]["op"]) == ("3", "mlp.down_proj")
    assert not any("weights" in line for line in report["settings"])
    for name, folder in (("a", run), ("b", other_run.folder)):
        assert explained(folder, "--item", f"arithmetic/{ITEM}", "--write", tmp_path / name).code == 0
    (line,) = json.loads(explained(tmp_path / "a", tmp_path / "b", "--json", "-").out)["weights"]
    assert line.startswith("their hashes are 3af1282d213b... in A and ") and line.endswith("are not in a file")


def test_files_say_what_the_runs_say(cells: dict[str, Run], tmp_path: Path) -> None:
    """Two written files, or a file and a run, give the report of the two runs; files that do not fit are refused."""
    a, b = cells["fast 1"], cells["fast 8"]
    document = parted(a, b)[0]
    direct = json.loads(explained(a.folder, b.folder, "--item", document, "--json", "-").out)
    tokens = [direct["first"]["token"], direct["until"]]
    for name, run in (("a", a), ("b", b)):
        words = ("--write", tmp_path / name, "--values", *tokens)
        written = explained(run.folder, "--item", f"arithmetic/{document}", *words)
        assert written.code == 0 and "it gave the bytes of the run's record" in written.out
    through = explained(tmp_path / "a", tmp_path / "b", "--json", "-")
    assert through.code == 1 and json.loads(through.out) == direct
    mixed = explained(tmp_path / "a", b.folder, "--json", "-")
    assert mixed.code == 1 and json.loads(mixed.out) == direct
    elsewhere = explained(tmp_path / "a", b.folder, "--item", document + 1 if document < 3 else 0)
    assert elsewhere.code == 2 and "it does not have arithmetic doc" in elsewhere.err
    wrong = explained(tmp_path / "a", tmp_path / "b", "--item", "99")
    assert wrong.code == 2 and "the files are of arithmetic doc" in wrong.err
    (tmp_path / "b").write_text((tmp_path / "b").read_text().replace('"reused"', '"used"', 1))
    assert explained(tmp_path / "a", tmp_path / "b").code == 2


def rewritten(run: Run, records: Sequence[RequestRecord], folder: Path) -> Path:
    """A copy of the run's folder with other records, and the digests that belong to them."""
    folder.mkdir()
    for file in run.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    write_records(folder / "records.parquet", records)
    digest = digests(records).run
    (folder / "digest.txt").write_text(digest + "\n")
    libraries, counts = (
        {**run.manifest["libraries"], "torch": "0.0.1"},
        {**run.manifest["counts"], "resumed_requests": 2},
    )
    bind_again(folder, digest=digest, task_digests=digests(records).tasks, libraries=libraries, counts=counts)
    return folder


def test_runs_that_differ_by_what_is_not_repeated_are_told_so(cells: dict[str, Run], tmp_path: Path) -> None:
    """Where both runs give the same bytes here, the output says which record is another and what parts the runs."""
    run = cells["exact 8"]
    records = run.records
    logprobs = records[ITEM].logprobs.copy()
    logprobs[2] = np.nextafter(logprobs[2], np.float32(0))
    records[ITEM] = RequestRecord(**{**vars(records[ITEM]), "logprobs": logprobs})
    done = explained(run.folder, rewritten(run, records, tmp_path / "other"))
    assert done.code == 0 and f"item: arithmetic doc {records[ITEM].doc_id}," in done.out
    assert done.out.count("the item's bytes are the run's own") == 1
    assert done.out.count("BUT the item's bytes are not those of the run's record") == 1
    assert "Run again here, both give the same bytes, yet the runs' records of this item differ." in done.out
    assert done.out.count("the run was interrupted after 2 requests, so its own batches were others") == 1
    (line,) = [line for line in done.out.splitlines() if "libraries.torch is " in line]
    assert "0.0.1" in line and verdict(done).startswith("verdict: NO DIFFERENCE in")


def test_bad_words_are_refused(cells: dict[str, Run], tmp_path: Path) -> None:
    """Arguments that cannot be meant are refused with the reason, and nothing is printed."""
    a, b = cells["exact 1"].folder, cells["exact 8"].folder
    for words, message in [
        ((a,), "give two RUNs"),
        ((a, b, a), "give two RUNs"),
        ((a, b), "every request that the runs share is equal; name the item"),  # None differs, so none is the default.
        ((a, b, "--item", "99"), "no such request"),
        ((a, b, "--item", "gsm8k/1"), "no such request; its tasks are arithmetic"),
        ((a, b, "--item", "x"), "name a task and a document, such as arithmetic/0"),
        (
            (a, "--item", "1", "--against", "seed=3"),
            "'seed=3' must set one of batch_invariant, numerics, engine, model",
        ),
        ((a, "--item", "1", "--against", "engine.max_seqs=3"), "engine.max_seqs: no such setting"),
        ((a, "--item", "1", "--against", "engine.max_num_seqs=many"), "engine.max_num_seqs=many: "),
        ((a, "--item", "1", "--against", "numerics=fast"), "contradicts numerics=fast"),
        ((a, "--item", "1", "--values", "3", "--against", "numerics=exact"), "--values is for --write"),
        ((a, "--item", "1", "--write", tmp_path / "x", "--values", "4000"), "--values 4000: the item was fed tokens 0"),
        ((a, b, "--item", "1", "--with", "seed=3"), "'seed=3' must set one of data_dir, model, tasks"),
        ((a, tmp_path / "none"), "no such file or folder"),
    ]:
        done = explained(*words)
        assert done.code == 2 and message in done.err, (words, done.err)
        assert done.out == ""


def test_other_prompts_are_refused(cells: dict[str, Run], tmp_path: Path) -> None:
    other = finished(tmp_path, "limit=2", "task.generation.max_gen_toks=2", "task.description='Do the sum. '")
    done = explained(cells["exact 8"].folder, other.folder, "--item", "1")
    assert done.code == 2 and "the prompts of arithmetic doc 1 differ" in done.err


def test_other_rows_or_weights_than_the_runs_are_refused(cells: dict[str, Run], tmp_path: Path) -> None:
    run = cells["exact 8"]
    copy = rewritten(run, run.records, tmp_path / "copy")
    config = copy / "config.yaml"
    before = config.read_text()
    config.write_text(before.replace("limit: 4", "limit: 3"))
    assert "config.yaml: not the file that the run wrote" in explained(run.folder, copy, "--item", ITEM).err
    bind_again(copy)
    done = explained(run.folder, copy, "--item", ITEM)
    assert done.code == 2 and "no longer the run's" in done.err
    config.write_text(before.replace("limit: 4", "limits: 4"))
    bind_again(copy)
    assert "of another version" in explained(run.folder, copy, "--item", ITEM).err
    config.write_text(before)
    bind_again(copy, identity={**run.manifest["identity"], "weights": "0" * 64})
    done = explained(run.folder, copy, "--item", ITEM)
    assert done.code == 2 and "these are not the weights of copy" in done.err


def test_a_device_that_is_not_here_asks_for_a_file(cells: dict[str, Run], tmp_path: Path) -> None:
    run = cells["fast 8"]
    copy = rewritten(run, run.records, tmp_path / "copy")
    bind_again(copy, engine={**run.manifest["engine"], "device": "cuda"})
    done = explained(run.folder, copy, "--item", ITEM)
    if torch.cuda.is_available():
        assert done.code in (0, 1)
    else:
        assert done.code == 2 and "explain RUN --item ITEM --write FILE" in done.err
