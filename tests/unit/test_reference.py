"""The committed evidence agrees with itself: one digest per run, whatever the machine and the schedule."""

from __future__ import annotations

import json
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
