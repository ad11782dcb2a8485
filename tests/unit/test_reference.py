"""The committed evidence agrees with itself: one digest per run, whatever the machine and the schedule."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from evalengine.kernels.matmul_schedules import CUBLASLT_ROWS

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
MANIFESTS = sorted((REFERENCE / "exact-across-machines").glob("*.json"))


def load(stem: str) -> list[dict]:
    """The manifests whose names begin with the stem."""
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


@pytest.fixture(scope="module")
def speed() -> dict:
    return json.loads((REFERENCE / "speed-nvidia-h200.json").read_text(encoding="utf-8"))


def test_the_products_are_those_of_the_committed_table(speed: dict) -> None:
    points = speed["explanations"]["matmul: every point"]
    assert len({(p["n"], p["k"], p["m"], p["out_dtype"]) for p in points}) == len(points) == 413
    tuned_later = json.loads((REFERENCE / "matmul-lm-head-nvidia-h200.json").read_text(encoding="utf-8"))
    assert tuned_later["ratio_to_cublas"]["worst"] <= 1.20 and len(tuned_later["times"]) == 98
    points = [point for point in points if point["out_dtype"] == "bfloat16"] + tuned_later["times"]
    assert len(points) == 448 and not any(point["differing"] for point in points)
    table = json.loads((REFERENCE.parents[1] / "kernels" / "matmul_table.json").read_text(encoding="utf-8"))
    tuned = table["NVIDIA H200"]["bfloat16"]
    beside = json.loads((REFERENCE / "matmul-cublaslt-nvidia-h200.json").read_text(encoding="utf-8"))["points"]
    assert len(beside) == 220 and all(point["cublaslt_has_the_references_bytes"] for point in beside)
    timed = {(p["n"], p["k"], p["m"]): p for p in beside if p["m"] >= CUBLASLT_ROWS}
    quicker = {place for place, p in timed.items() if p["us"] > 1.02 * p["cublaslt_us"]}
    expected = {(p["n"], p["k"], p["m"]): p["schedule"] for p in points}
    expected |= {place: p["schedule"] for place, p in timed.items() if p["us"] < 0.98 * p["cublaslt_us"]}
    of_ranks = json.loads((REFERENCE / "matmul-ranks-nvidia-h200.json").read_text(encoding="utf-8"))["times"]
    assert len(of_ranks) == 120 and not any(point["differing"] for point in of_ranks)
    tiles_of_ranks = [point for point in of_ranks if not point["schedule"].startswith("cublaslt")]
    expected |= {(p["n"], p["k"], p["m"]): p["schedule"] for p in tiles_of_ranks}
    shipped = {(*map(int, shape.split(",")), int(m)): text for shape, row in tuned.items() for m, text in row.items()}
    assert shipped == {place: text for place, text in expected.items() if place not in quicker}


def test_the_speed_that_the_readme_claims(speed: dict) -> None:
    points = speed["explanations"]["matmul: every point"]
    ratios = [point["seconds"] / point["cublas_seconds"] for point in points]
    assert statistics.median(ratios) <= 1.02 and max(ratios) <= 1.20
    steps = [line for line in speed["lines"] if line["what"].startswith("forward step")]
    assert len(steps) == 20 and all(line["seconds"] <= line["beside_seconds"] for line in steps)
    on_the_gpu = [line["seconds"] / line["beside_seconds"] for line in steps if line["what"].endswith("GPU time")]
    assert min(on_the_gpu) == pytest.approx(0.87, abs=0.005)
    rows = [line for line in speed["lines"] if line["beside"] == "copy of the same bytes"]
    assert len(rows) == 17 and min(line["beside_seconds"] / line["seconds"] for line in rows) >= 0.88


def test_the_second_run_reaches_what_the_first_did() -> None:
    page = (REFERENCE / "speed-again-nvidia-h200.md").read_text(encoding="utf-8")
    assert page.rstrip().endswith("45 of 45 targets reached.")
    steps = [line.split(" | ") for line in page.splitlines() if line.startswith("| forward step")]
    ratios = [float(step[5]) for step in steps if step[0].endswith("GPU time")]
    assert len(steps) == 20 and (min(ratios), max(ratios)) == (0.893, 1.003)
    (median,), (worst,) = ([line for line in page.splitlines() if f"{which} of 448" in line and "| matmul" in line]
                           for which in ("median", "worst"))  # fmt: skip
    assert " 0.987 " in median and " 1.182 " in worst


def test_the_gpu_tests_passed() -> None:
    results = json.loads((REFERENCE / "gpu-tests-nvidia-h200.json").read_text(encoding="utf-8"))
    assert results["failed"] == results["exit_status"] == 0 and results["passed"] == 650
    assert results["skipped_because"] == {"needs two GPUs": 1, "needs CUDA devices, two of them": 1}
    assert results["environment"]["code"]["commit"] and results["environment"]["libraries"]["flash-attn"]


def test_the_sweeps_that_the_readme_shows() -> None:
    sweeps = {path.parent.name: json.loads(path.read_text("utf-8")) for path in REFERENCE.glob("*/noise_floor.json")}
    assert sweeps.keys() == {"noise-floor-arithmetic", "noise-floor-gsm8k-smollm2-h200"}
    for sweep in sweeps.values():
        assert sweep["invariant_runs_equal"] is True and sweep["refused"] == [] and len(sweep["noise_floor"]) == 3
        assert all(run["requests"] == 200 for run in sweep["runs"])
    on_a_gpu = sweeps["noise-floor-gsm8k-smollm2-h200"]
    assert all("H200" in run["hardware"]["gpus"][0] for run in on_a_gpu["runs"])
    assert max(floor["flipped_answers"] for floor in on_a_gpu["noise_floor"]) == 48


def test_a_certificate_differs_nowhere_and_its_control_does() -> None:
    paths = sorted((REFERENCE / "certificates").glob("*.json"))
    assert paths
    for path in paths:
        certificate = json.loads(path.read_text(encoding="utf-8"))
        assert certificate["verdict"] == "IDENTICAL" and certificate["code"]["commit"], path.name
        total, control = certificate["total"], certificate["negative_control"]
        assert total["logprobs"] >= 100_000 and total["differing_bytes"] == 0 < control["differing_logprobs"], path.name
        if certificate["certificate_version"] > 2:
            assert control["attention_backend"] in ("flash_attn", "triton", "sdpa"), path.name
            assert len(certificate["code"]["kernels_sha256"]) == 64, path.name
