"""The committed evidence against what it is evidence for: the pages' figures, the shipped table, today's code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from evalengine.certify.certificate import markdown
from evalengine.kernels.matmul_schedules import CUBLASLT_ROWS
from evalengine.records.sealed import content_sha256

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "results" / "reference"
MANIFESTS = sorted((REFERENCE / "exact-across-machines").glob("*.json"))
STEP = re.compile(
    r"^\| (decode|prefill), ([^|]+) \| ([\d.]+)[^|(]*\(([\d.]+)\) \| ([\d.]+) \(([\d.]+)\) \|$", re.MULTILINE
)


def load(path: str | Path) -> dict:
    content: dict = json.loads((REFERENCE / path).read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_committed_run_has_the_identity_that_this_code_computes(path: Path) -> None:
    """So that a run of today can still be told to be, or not to be, the committed one."""
    manifest = load(path)
    assert content_sha256(manifest["identity"])[:8] == manifest["run_id"]


def test_the_default_run_is_the_golden_one() -> None:
    """`test_golden` holds a run of today to the same file."""
    golden = load("golden.json")
    manifests = [load(path) for path in MANIFESTS if "arithmetic-" in path.name]
    assert len({manifest["hardware"]["device"] for manifest in manifests}) == 2
    assert {(str(m["contract_version"]), m["digest"]) for m in manifests} <= {
        (v, g["digest"]) for v, g in golden.items()
    }


def test_the_products_are_those_of_the_committed_table() -> None:
    speed = load("speed-nvidia-h200.json")
    points = speed["explanations"]["matmul: every point"]
    assert len({(p["n"], p["k"], p["m"], p["out_dtype"]) for p in points}) == len(points) == 413
    tuned_later = load("matmul-lm-head-nvidia-h200.json")
    assert tuned_later["ratio_to_cublas"]["worst"] <= 1.20 and len(tuned_later["times"]) == 98
    points = [point for point in points if point["out_dtype"] == "bfloat16"] + tuned_later["times"]
    assert len(points) == 448 and not any(point["differing"] for point in points)
    table = json.loads((REFERENCE.parents[1] / "kernels" / "matmul_table.json").read_text(encoding="utf-8"))
    tuned = table["NVIDIA H200"]["bfloat16"]
    beside = load("matmul-cublaslt-nvidia-h200.json")["points"]
    assert len(beside) == 220 and all(point["cublaslt_has_the_references_bytes"] for point in beside)
    timed = {(p["n"], p["k"], p["m"]): p for p in beside if p["m"] >= CUBLASLT_ROWS}
    quicker = {place for place, p in timed.items() if p["us"] > 1.02 * p["cublaslt_us"]}
    again = load("matmul-cublaslt-again-nvidia-h200.json")["points"]
    assert len(again) == 195
    quicker |= {(p["n"], p["k"], p["m"]) for p in again if round(p["cublaslt_us"] / p["us"], 3) < 0.97}
    expected = {(p["n"], p["k"], p["m"]): p["schedule"] for p in points}
    expected |= {place: p["schedule"] for place, p in timed.items() if p["us"] < 0.98 * p["cublaslt_us"]}
    of_ranks = load("matmul-ranks-nvidia-h200.json")["times"]
    assert len(of_ranks) == 120 and not any(point["differing"] for point in of_ranks)
    tiles_of_ranks = [point for point in of_ranks if not point["schedule"].startswith("cublaslt")]
    expected |= {(p["n"], p["k"], p["m"]): p["schedule"] for p in tiles_of_ranks}
    shipped = {(*map(int, shape.split(",")), int(m)): text for shape, row in tuned.items() for m, text in row.items()}
    assert shipped == {place: text for place, text in expected.items() if place not in quicker}


def test_the_page_of_speed_has_the_measured_ratios() -> None:
    """Every step of its table: our time over the ordinary mode's, on the GPU alone and (in brackets) eagerly."""
    lines = load("speed-nvidia-h200.json")["lines"]
    steps = {(line["what"], line["case"]): line for line in lines if line["what"].startswith("forward step")}
    rows = STEP.findall((ROOT / "docs" / "speed.md").read_text(encoding="utf-8"))
    shown = 0
    for kind, words, *figures in rows:
        for model, pair in (("Qwen3-0.6B", figures[:2]), ("Qwen3-8B", figures[2:])):
            for what, figure in zip(("GPU time", "eager"), pair, strict=True):
                step = f"{words.replace(',', '').removesuffix(' context 1024')}"
                case = f"prefill of {step}" if kind == "prefill" else f"decode, {step}, context 1024"
                line = steps[f"forward step, {what}", f"{model}, {case}"]
                assert line["seconds"] / line["beside_seconds"] == pytest.approx(float(figure), abs=0.0051), (
                    model,
                    case,
                )
                shown += 1
    assert shown == len(steps)


def test_the_front_page_counts_as_the_sweep_did() -> None:
    pairs = load("noise-floor-gsm8k-smollm2-h200/noise_floor.json")["pairs"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ((differing, requests),) = re.findall(r"differs from fast at 8 in (\d+) of (\d+) requests", text)
    assert {pair["requests"] for pair in pairs} == {int(requests)}
    assert int(differing) in {pair["differing_requests"] for pair in pairs}


@pytest.mark.parametrize("path", sorted((REFERENCE / "certificates").glob("qwen*.json")), ids=lambda path: path.stem)
def test_a_committed_certificate_is_written_as_it_was(path: Path) -> None:
    """Today's code makes the committed page of the committed numbers, with the verdict in it."""
    page = path.with_suffix(".md").read_text(encoding="utf-8")
    assert markdown(load(path)).strip() == page.strip() and "IDENTICAL" in page
