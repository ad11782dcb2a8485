"""One Ray, and one fleet of three replicas, for the tests of a file: they start in seconds, and work while idle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import Config
from tests.e2e.command import Run, finished

DOCUMENTS = 16
SETTINGS = (
    *(f"limit={DOCUMENTS}", "engine.device=cpu", "engine.num_threads=1"),
    *("task.generation.max_gen_toks=12", "progress=false"),
)


@pytest.fixture(scope="module", autouse=True)
def ray_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray for this process, with room for more replicas than the machine has processors."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'evalengine[ray]'")
    from evalengine.integrations.ray.engines import ray_session

    with ray_session(None, cpus=16):
        yield


@pytest.fixture(scope="module")
def one_engine(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of one engine, which runs on replicas are compared with."""
    return finished(tmp_path_factory.mktemp("one"), *SETTINGS)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """The configuration of a run with SETTINGS, in the test's own folder."""
    (job,) = compose_jobs([*SETTINGS, f"output_dir={tmp_path / 'out'}"])
    return job.config


@dataclass
class Fleet:
    """Three replicas, and how to make one of them fail."""

    engines: Any
    moods: Path

    def here(self) -> dict[int, str]:
        """Process id -> host and device, of the replicas that are not lost."""
        members = self.engines.roster.members.values()
        return {member.facts.pid: member.facts.where for member in members if member.lost is None}

    def set_mood(self, pid: int, mood: str) -> str:
        """Makes the replica fail in this way from now on; returns its host and device."""
        (self.moods / str(pid)).write_text(mood)
        return self.here()[pid]

    def audit(self, share: float) -> None:
        """Sets the share of answers that runs from now on audit."""
        config = self.engines._run_config
        self.engines._run_config = replace(config, cluster=replace(config.cluster, audit=share))

    def restore(self) -> None:
        """Removes all moods and the audit, and waits until all three replicas are there."""
        for file in self.moods.iterdir():
            file.unlink()
        self.audit(0.0)
        while self.engines._pool.coming:
            for event in self.engines._pool.poll(0.1):
                self.engines.roster.note(event)
        assert len(self.here()) == 3


@pytest.fixture(scope="module")
def _three(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three replicas that fail as they are told, made once for a file."""
    from evalengine.harness.plan import prepare
    from evalengine.integrations.ray import pool
    from evalengine.integrations.ray.engines import RayEngines
    from tests.cluster.moody import moody

    moods = tmp_path_factory.mktemp("moods")
    (job,) = compose_jobs([*SETTINGS, "cluster=ray", "cluster.replicas=3", "engine.max_num_seqs=4"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "REPLICA", moody(moods))
        with RayEngines(job.config, prepare(job.config)[0]) as engines:
            yield Fleet(engines, moods)


@pytest.fixture
def fleet(_three: Fleet) -> Fleet:
    """The three replicas, in good health."""
    _three.restore()
    return _three
