"""`manifest.json`: what is read is what was written, whatever version wrote it."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from evalengine.errors import ConfigError
from evalengine.records.manifest_data import Manifest, glance_at_manifest, load_manifest

REFERENCE = sorted((Path(__file__).parents[2] / "results" / "reference" / "exact-across-machines").glob("*.json"))
LEAST: dict[str, Any] = {"digest": "0" * 64, "task_digests": {}, "identity": {}}  # every version recorded these


def loaded(folder: Path, **parts: Any) -> Manifest:
    """A manifest of LEAST and these parts, as it is read from its file."""
    (folder / "manifest.json").write_text(json.dumps({**LEAST, **parts}), encoding="utf-8")
    return load_manifest(folder / "manifest.json", "fix")


@pytest.mark.parametrize("path", REFERENCE, ids=lambda path: path.stem)
def test_the_manifests_of_runs_read_back_to_their_bytes(path: Path) -> None:
    """Runs on three machines wrote them, some with older versions."""
    read = load_manifest(path, "fix")
    assert read.file_text() == path.read_text(encoding="utf-8")
    assert read.model.name and read.counts.requests and read.timings.run_seconds > 0 and read.engine.dtype
    assert read.code.commit and read.hardware.cpu and read.libraries["torch"]
    stats = read.engine.stats
    assert stats is not None and stats.num_steps > 0 and "stats" not in read.engine_settings


def test_what_an_older_version_did_not_record_is_neutral(tmp_path: Path) -> None:
    old = loaded(tmp_path, counts={"requests": 3}, engine=None)
    assert (old.counts.requests, old.counts.cached_requests, old.run_id, old.command) == (3, 0, None, None)
    assert (old.programs, old.cache, old.cluster, old.engine.stats, old.engine_settings) == (None, None, None, None, {})
    assert old.model.name == "" and old.model.source is None and old.datasets == {} and old.files is None


def test_what_a_newer_version_adds_is_kept(tmp_path: Path) -> None:
    new = loaded(tmp_path, energy={"joules": 5}, model={"name": "m", "adapter": "a"})
    assert new.model.name == "m" and json.loads(new.file_text())["model"]["adapter"] == "a"
    assert json.loads(new.file_text())["energy"] == {"joules": 5}


def test_a_value_of_another_type_is_as_if_not_recorded(tmp_path: Path) -> None:
    odd = loaded(tmp_path, model={"name": "m", "source": 7, "num_parameters": "many"}, hardware=[1])
    assert (odd.model.source, odd.model.num_parameters, odd.hardware.gpus) == (None, 0, [])


def test_parts_are_read_whole(tmp_path: Path) -> None:
    replica = {"host": "h", "device": "GPU 0", "lost": None, "suspect": "NaN", "answers": 4}
    cluster = {"replicas": [replica], "refused": ["old"], "audited": 2, "unaudited": 0}
    outcomes = {"humaneval": {"passed": 2}}
    read = loaded(tmp_path, cluster=cluster, programs={"isolated": False, "outcomes": outcomes}, cache={"hits": 3})
    assert read.cluster is not None and read.cluster.replicas[0].suspect == "NaN"
    assert read.cluster.replicas[0].lost is None and read.cluster.refused == ["old"]
    assert read.programs is not None and not read.programs.isolated and read.programs.outcomes == outcomes
    assert read.cache is not None and (read.cache.hits, read.cache.failed) == (3, None)


def test_attributes_cannot_contradict_the_content() -> None:
    read = Manifest(LEAST)
    with pytest.raises(FrozenInstanceError):
        read.numerics = "fast"  # type: ignore[misc]
    assert not Manifest({}) and read


def test_what_is_no_manifest_is_one_sentence(tmp_path: Path) -> None:
    for text, message in ("[]", "not the manifest of a run"), ("{", "missing or damaged"), ("{}", "digest: is missing"):
        (tmp_path / "manifest.json").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            load_manifest(tmp_path / "manifest.json", "fix")
    (tmp_path / "manifest.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="no JSON object"):
        glance_at_manifest(tmp_path / "manifest.json")
