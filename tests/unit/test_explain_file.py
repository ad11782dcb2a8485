"""The file in which one machine hands its trace to another: nothing is lost, nothing can be changed unseen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalengine.__main__ import main
from evalengine.errors import ConfigError
from evalengine.explain.cli import FORMAT, read_trace, write_trace
from evalengine.explain.trace import explain
from evalengine.records.sealed import content_sha256
from tests.bitwise import check_that_a_cut_is_found, check_that_edits_are_found
from tests.unit.traces import OPS, computation, moved, trace


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of a trace with the values of token 2; token 1 was computed again."""
    recomputed = computation(1, {}, reused=True)
    write_trace(tmp_path / "a.json", trace(recomputed=[recomputed]), [2])
    return tmp_path / "a.json"


def test_everything_comes_back(file: Path) -> None:
    whole = trace(recomputed=[computation(1, {}, reused=True)])
    reread = read_trace(file)
    for name in ("label", "key", "prompt_sha256", "token_ids", "ops", "settings", "machine", "extent", "reproduced"):
        assert getattr(reread, name) == getattr(whole, name), name
    assert [item.digests for item in reread.computations] == [item.digests for item in whole.computations]
    assert [(item.position, item.reused) for item in reread.computations] == [
        (0, False), (1, False), (1, True), (2, False), (3, False), (4, False)
    ]  # fmt: skip
    kept = [set(item.values) for item in reread.computations]
    assert kept == [set(), set(), set(), set(OPS), {"logprob"}, {"logprob"}]  # token 2 and the logprobs have values
    for op in OPS:
        np.testing.assert_array_equal(reread.computations[3].values[op], whole.computations[3].values[op])
    assert explain(reread, whole).first is None


def test_a_difference_is_found_through_files(tmp_path: Path, file: Path) -> None:
    write_trace(tmp_path / "b.json", trace(moved(OPS[5], 2)), [2])
    explanation = explain(read_trace(file), read_trace(tmp_path / "b.json"))
    assert explanation.first is not None and (explanation.first.op, explanation.first.position) == (OPS[5], 2)
    assert explanation.first.size is not None and explanation.first.size.max_ulps == 1


def test_the_command_reads_two_files(tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "b.json", trace({**moved(OPS[3], 1), **moved("logprob", 3)}), [2])
    assert main(["explain", str(file), str(tmp_path / "b.json")]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "verdict: FIRST DIFFERENCE in layer 0, mlp.down_proj, token 1"
    assert "write both again with --values 1 3" in out
    assert main(["explain", str(file), str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("verdict: NO DIFFERENCE in")
    other = trace(prompt_sha256="ab" * 32)
    write_trace(tmp_path / "b.json", other, [])
    assert main(["explain", str(file), str(tmp_path / "b.json")]) == 2
    assert "prompts of sums doc 3 differ" in capsys.readouterr().err


def test_every_edit_is_found(file: Path) -> None:
    whole = file.read_text(encoding="utf-8")
    check_that_edits_are_found(file, 300, read_trace)
    file.write_text(whole, encoding="utf-8")
    assert read_trace(file).key == ("sums", 3, 0, 0)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.99, -2])
def test_a_truncated_file_is_found(file: Path, part: float) -> None:
    check_that_a_cut_is_found(file, part, read_trace, r"truncated.*--write")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["ops"].pop(2), "contradict"),  # the op's values are still there
        (lambda c: c.update(count=4), "contradict"),
        (lambda c: c.update(count=1 << 60), "no op has as many digests"),  # no list of that length is made
        (lambda c: c["ops"][2].__setitem__(2, 1 << 60), "bytes of digests"),
        (lambda c: (c["ops"].pop(-2), c.update(values=[])), "before the logits"),
        (lambda c: c["ops"][0].__setitem__(4, c["ops"][0][4][:-5]), "contradict"),
        (lambda c: c["values"][0].__setitem__(2, ""), "contradict"),
        (lambda c: c["token_ids"].pop(), "contradict"),
        (lambda c: c.pop("settings"), "contradict"),
        (lambda c: c.update(version=FORMAT.version + 1), "update evalengine"),
        (lambda c: c.update(format="other"), FORMAT.format),
    ],
)
def test_edits_that_renew_the_hash_still_meet_each_other(file: Path, change: Any, words: str) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    del content["sha256"]
    content["sha256"] = content_sha256(content)
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        read_trace(file)


def test_other_weights_are_said_before_the_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files hold the weights' hash and no tensors; a file without the hash says nothing of the weights."""
    planted, common = moved(OPS[3], 1), {"numerics": "fast", "max_num_seqs": 1}
    for name, weights in (("a", "a" * 64), ("b", "b" * 64)):
        write_trace(
            tmp_path / name, trace(planted if name == "b" else None, settings={**common, "weights": weights}), []
        )
    write_trace(tmp_path / "old", trace(planted, settings=common), [])
    assert main(["explain", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    lines = capsys.readouterr().out.splitlines()
    heading = lines.index("Weights that differ:")
    hashes = f"their hashes are {'a' * 12}... in A and {'b' * 12}... in B; the tensors are not in a file"
    assert lines[heading + 1] == f"  - {hashes}"
    assert heading < next(i for i, line in enumerate(lines) if line.startswith("First difference: "))
    assert "Settings that differ:" not in lines
    assert main(["explain", str(tmp_path / "a"), str(tmp_path / "old")]) == 1
    assert "eights" not in capsys.readouterr().out
