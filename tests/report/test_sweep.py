"""An experiment's evidence: the promise of invariant runs, the noise floor's numbers, and the picture."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from evalengine.errors import EvalEngineError
from evalengine.records.manifest_data import Manifest
from evalengine.records.sealed import content_sha256
from evalengine.report.sweep.sweep import Cell, Sweep, agreement, print_sweep, sweep, verdict
from evalengine.report.sweep.write import picture, sweep_json, write_sweep
from tests.report.compared_runs import BASE, BIT, METRIC, TASK, TOKEN, run
from tests.report.page_content import words

Outputs = Mapping[int, Any]


def cell(outputs: Outputs, fast: bool, size: int, model: str = "tiny", **more: Any) -> Cell:
    """A cell of a sweep: a run with these outputs and the settings `fast` and `size`."""
    numerics = "fast" if fast else "exact"
    base = run(outputs, numerics=numerics, **more)
    manifest = Manifest({**base.manifest.content, "numerics": numerics, "model": {"name": model}})
    settings = {"batch_invariant": str(not fast), "max_num_seqs": str(size)}
    return Cell(settings, replace(base, manifest=manifest))


def swept(*fast: Outputs, invariant: tuple[Outputs, ...] = (BASE, BASE), **more: Any) -> Sweep:
    """A sweep of fast runs with these outputs, beside invariant ones."""
    cells = [cell(outputs, True, size, **more) for size, outputs in enumerate(fast, 1)]
    return sweep("x", cells + [cell(outputs, False, size) for size, outputs in enumerate(invariant, 1)])


def test_invariant_runs_come_first_and_are_equal() -> None:
    result = swept(BIT, TOKEN)
    assert [c.fast for c in result.cells] == [False, False, True, True]
    assert result.promise_kept and result.digests(fast=False) == (2, 1) and result.digests(fast=True) == (2, 2)
    assert [(f.invariant, f.fast, dict(f.settings)) for f in result.floors] == [
        (1, 3, {"max_num_seqs": "1"}), (2, 4, {"max_num_seqs": "2"})
    ]  # fmt: skip
    assert verdict(result).startswith("2 invariant runs: the same bits (1 digest); 2 fast runs: 2 digests; fast flips ")


def test_an_invariant_run_of_other_bits_breaks_the_promise() -> None:
    result = swept(BIT, TOKEN, invariant=(BASE, BIT))
    assert not result.promise_kept and "2 invariant runs: DIFFERENT BITS (2 digests)" in verdict(result)
    assert sweep_json(result, Path())["invariant_runs_equal"] is False
    assert picture(result).count('class="same"') == 2, "the fast run that happens to equal an invariant one"


def test_invariant_runs_of_other_inputs_may_differ() -> None:
    other = cell(BIT, False, 1, dtype="float32")
    lone = sweep("x", [cell(BASE, False, 1), other])
    assert lone.promise_kept and verdict(lone) == "2 invariant runs: 2 digests, no two of the same inputs"
    pairs = sweep("x", [*lone.cells, cell(BASE, False, 2), cell(BIT, False, 2, dtype="float32")])
    assert verdict(pairs) == "4 invariant runs of 2 inputs: the same bits for each (2 digests)"
    broken = sweep("x", [*lone.cells, cell(BASE, False, 2), cell(BASE, False, 2, dtype="float32")])
    assert not broken.promise_kept and verdict(broken).startswith("4 invariant runs of 2 inputs: DIFFERENT BITS")
    assert not sweep("x", [cell(BASE, False, 1), cell(BIT, False, 1)]).promise_kept


@pytest.mark.parametrize(
    ("runs", "lines"),
    [
        ([(1, True, "a" * 64), (2, True, "a" * 64), (3, False, "b" * 64), (4, False, "a" * 64)],
         ["batch_invariant=true: all 2 runs agree, digest aaaaaaaaaaaa",
          "batch_invariant=false: 2 runs, 2 digests: no two agree"]),
        ([(n, False, digest) for n, digest in enumerate("abacb", 1)],
         ["batch_invariant=false: 5 runs, 3 digests: runs 1, 3 agree; runs 2, 5 agree"]),
        ([(1, True, "a"), (2, True, None), (3, True, "a"), (4, False, "a"), (5, False, None)],
         ["batch_invariant=true: the finished 2 runs agree, digest a", "batch_invariant=false: 1 run, digest a"]),
        ([(n, True, "ab"[n > 11]) for n in range(1, 13)],
         ["batch_invariant=true: 12 runs, 2 digests: runs 1, 2, 3, 4, 5, 6, 7, 8 and 3 more agree"]),
        ([(1, True, None), (2, True, None)], []),
    ],
)  # fmt: skip
def test_each_mode_says_which_runs_agree(runs: list[tuple[int, bool, str | None]], lines: list[str]) -> None:
    assert [*agreement(runs)] == lines


def test_the_noise_floor_counts_what_moved() -> None:
    bit, token = (floor.comparison for floor in swept(BIT, TOKEN).floors)
    assert (len(bit.differences), bit.outputs, bit.changed, bit.logprob_counts) == (1, 0, 0, (1, 6))
    assert 0 < bit.largest_change < 1e-6
    assert (len(token.differences), token.outputs) == (1, 1)
    assert token.logprob_counts == (0, 5), "what follows another token is no pair"
    flipped = swept(TOKEN, BASE, scores={0: 0.0}).floors[0].comparison
    assert flipped.changed == 1
    row = sweep_json(swept(TOKEN, BASE, scores={0: 0.0}), Path())["noise_floor"][0]
    assert row["flipped_answers"] == 1 and row["metrics"][0]["metric"] == METRIC
    assert row["metrics"][0]["delta"] == pytest.approx(-1 / 3) and row["settings"] == {"max_num_seqs": "1"}
    same = swept(BASE, BASE).floors[0].comparison
    assert (same.differences, same.changed, same.logprob_counts, same.largest_change) == ([], 0, (0, 6), 0.0)


def test_the_table_holds_every_run_and_the_last_line_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    result = swept(BIT, TOKEN)
    print_sweep(result, [Path("x.svg"), Path("x.json")])
    out = capsys.readouterr().out
    swept_as = ("exact +1", "exact +2", "fast +1", "fast +2")
    for number, (c, settings) in enumerate(zip(result.cells, swept_as, strict=True), 1):
        row = rf"(?m)^ +{number} +{c.run.source.name} +{settings} .* {(c.run.digest or '')[:12]} *$"
        assert re.search(row, out), out
    assert out.splitlines()[-3:] == [*result.agreement, f"verdict: {verdict(result)}"] and "x.json\n" in out
    digest = result.cells[0].run.digest or ""
    assert result.agreement == [f"batch_invariant=true: all 2 runs agree, digest {digest[:12]}",
                                "batch_invariant=false: 2 runs, 2 digests: no two agree"]  # fmt: skip
    assert sweep_json(result, Path())["agreement"] == result.agreement
    assert re.search(r"1, 3 +1 +1 of 3 +0 +0 +16\.7% +1\.49e-08 nat +exact_match \(strict-match\) +1\.0000", out)
    assert "IDENTICAL" in out and "SAME TOKENS 1/3" in out and "DIFFERENT 1/3" in out
    assert "n/m after a verdict: n of m requests differ; for SAME TOKENS, only their logprobs or texts do." in out


def test_files_appear_whole_with_strict_json_and_xml(tmp_path: Path) -> None:
    result = swept(BIT, TOKEN)
    page, svg, file = write_sweep(result, tmp_path)
    assert "Noise floor" in words(page)
    content = json.loads(file.read_text())
    seal, drawn_sha256 = content.pop("sha256"), content.pop("picture_sha256")
    assert drawn_sha256 == hashlib.sha256(svg.read_bytes()).hexdigest()
    assert seal == content_sha256({**content, "picture_sha256": drawn_sha256})
    assert content == sweep_json(result, tmp_path) and content["experiment"] == "x" and len(content["pairs"]) == 6
    assert [r["settings"]["max_num_seqs"] for r in content["runs"]] == ["1", "2", "1", "2"]
    drawn = ElementTree.parse(svg).getroot()
    looks = [rect.get("class") for rect in drawn.iter("{http://www.w3.org/2000/svg}rect")]
    counts = {look: looks.count(look) for look in ("same", "tokens", "some", "other", "self", "paper")}
    assert counts == {"same": 2, "tokens": 4, "some": 6, "other": 0, "self": 4, "paper": 1}  # as on the page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.html", "x.json", "x.svg"]
    with pytest.raises(EvalEngineError, match="could not write"):
        write_sweep(result, tmp_path / "missing")


def test_the_picture_says_what_differs_of_the_same_tokens() -> None:
    drawn = picture(swept(BIT))
    assert drawn.count(">same tokens<") == 4 and drawn.count(">logprobs 1/3<") == 4
    assert picture(swept(TOKEN)).count(">1 output<") == 4


def test_runs_that_are_not_comparable_are_no_pair() -> None:
    result = sweep("x", [cell(BASE, False, 1), cell(BASE, True, 1, weights="f" * 64)])
    assert result.matrix.refused and not result.floors
    assert "unlike" in picture(result)
    assert verdict(result) == "1 invariant run: 1 digest; 1 fast run: 1 digest", "nothing is claimed of one run"


def test_the_picture_and_the_table_hold_the_scores(capsys: pytest.CaptureFixture[str]) -> None:
    result = swept(BIT, TOKEN, scores={0: 0.0})
    drawn = picture(result)
    assert drawn.count(">100.0 %<") == 2 and drawn.count(">66.7 %<") == 2 and "on the diagonal each run" in drawn
    print_sweep(swept(BIT), [])
    out = capsys.readouterr().out
    assert "0.0000" in out and not re.search(r"[+-]0\.0000", out), "no change has no sign"


def test_the_picture_is_as_wide_as_its_longest_line() -> None:
    widths = [
        int(
            ElementTree.fromstring(picture(sweep("x", [cell(BASE, False, 1, "m" * n), cell(BIT, True, 1)]))).get(
                "width", 0
            )
        )
        for n in (5, 150)
    ]
    assert widths[0] >= 32 + 64 * 6.5 and widths[1] >= 32 + 150 * 8


def test_names_from_outside_cannot_break_the_picture() -> None:
    hostile = '</text><script>alert(1)</script>"&\u202e'
    result = sweep("x", [cell(BASE, False, 1, hostile), cell(BIT, True, 1, hostile)])
    drawn = picture(result)
    assert "&lt;script&gt;alert(1)" in drawn, "it is shown"
    assert "<script" not in drawn and "\u202e" not in drawn and TASK in drawn
    ElementTree.fromstring(drawn)
