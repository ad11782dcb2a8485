"""The committed evidence agrees with itself: one digest per run, whatever the machine and the schedule."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
MANIFESTS = sorted((REFERENCE / "exact-across-machines").glob("*.json"))


def load(stem: str) -> list[dict]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in MANIFESTS if path.name.startswith(stem)]


@pytest.mark.parametrize("stem", ["arithmetic-", "gsm8k-smollm2-"])
def test_one_digest_on_every_machine(stem: str) -> None:
    manifests = load(stem)
    assert {m["hardware"]["device"] for m in manifests} == {"cpu", "cuda"}
    assert len({m["hardware"]["cpu"] for m in manifests}) > 1
    assert {m["numerics"] for m in manifests} == {"exact"}
    assert len({m["digest"] for m in manifests}) == 1 and len({m["run_id"] for m in manifests}) == 1


def test_the_schedules_differ() -> None:
    assert {m["engine"]["max_num_seqs"] for m in load("gsm8k-smollm2-")} == {1, 16}


def test_the_default_run_is_the_golden_one() -> None:
    golden = json.loads((REFERENCE / "golden.json").read_text(encoding="utf-8"))
    digests = {m["contract_version"]: m["digest"] for m in load("arithmetic-")}
    for version, digest in digests.items():
        assert golden[str(version)]["digest"] == digest


def test_every_manifest_says_what_made_it() -> None:
    for path in MANIFESTS:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        assert manifest["code"]["commit"] and manifest["libraries"]["torch"], path.name
        sources = [dataset["source"] for dataset in manifest["datasets"].values()]
        assert not any(Path(source).is_absolute() for source in sources), path.name


def test_the_products_report_says_what_its_points_say() -> None:
    report = json.loads((REFERENCE / "matmul-nvidia-h200.json").read_text(encoding="utf-8"))
    points = report["times"]
    ratios = [point["seconds"] / point["cublas_seconds"] for point in points]
    assert len({(p["n"], p["k"], p["m"], p["out_dtype"]) for p in points}) == len(points) == report["points"] == 413
    assert statistics.median(ratios) == pytest.approx(report["ratio_to_cublas"]["median"], abs=1e-3)
    assert max(ratios) == pytest.approx(report["ratio_to_cublas"]["worst"], abs=1e-3)
    assert sum(ratio > 1.2 for ratio in ratios) == report["ratio_to_cublas"]["over 1.20"] == 3
    assert report["differing"] == [] and not any(point["differing"] for point in points)
    table = json.loads((REFERENCE.parents[1] / "kernels" / "matmul_table.json").read_text(encoding="utf-8"))
    tuned = table["NVIDIA H200"]["bfloat16"]
    assert sum(tuned[f"{p['n']},{p['k']}"][str(p["m"])] == p["schedule"] for p in points) == 305
