"""A run on replicas is the run on one engine, bit for bit, whatever becomes of the replicas."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalengine.config.schema import Config
from evalengine.engine.request import RequestOutput
from evalengine.errors import EvalEngineError
from evalengine.harness.runner import run
from evalengine.integrations.ray.work import Work
from evalengine.records import journal
from tests.cluster.conftest import DOCUMENTS, SETTINGS, Fleet
from tests.e2e.command import Run, finished, runs


@pytest.mark.slow  # its own replicas take ten seconds; the three of `fleet` are one engine in a quick test below
def test_two_replicas_are_one_engine(one_engine: Run, tmp_path: Path) -> None:
    """A run on two replicas has one engine's digest, results and identity; the manifest says which replica did what."""
    two = finished(tmp_path, *SETTINGS, "cluster=ray", "cluster.replicas=2", "cluster.audit=0.2")
    check_one_engine(two, one_engine, replicas=2)
    audited = {replica["audited"] for replica in two.manifest["cluster"]["replicas"]}
    assert audited == {audits(two)} and 0 not in audited


def test_three_replicas_are_one_engine(one_engine: Run, fleet: Fleet, config: Config) -> None:
    """So has a run on three, and what is audited twice counts once."""
    fleet.audit(0.25)
    run(config, llm=fleet.engines)
    (three,) = runs(Path(config.output_dir))
    check_one_engine(three, one_engine, replicas=3)
    assert sum(replica["audited"] for replica in three.manifest["cluster"]["replicas"]) == 2 * audits(three) > 0


def check_one_engine(run_: Run, one_engine: Run, replicas: int) -> None:
    """Asserts that a run on replicas is that of one engine, and that its manifest says what each replica did."""
    assert run_.digest == one_engine.digest and run_.results == one_engine.results
    assert run_.manifest["identity"] == one_engine.manifest["identity"]
    assert run_.folder.name[-8:] == one_engine.folder.name[-8:], "the run's id"
    assert "cluster" not in one_engine.manifest
    members = run_.manifest["cluster"]["replicas"]
    assert len(members) == replicas
    assert all(member["leases"] and member["answers"] and not member["lost_leases"] for member in members)
    assert all(member["device"].startswith("(CPU, process ") for member in members)


def audits(run_: Run) -> int:
    """How many requests of a run were audited. A busy machine's idle replica may answer others a second time, too."""
    audited: int = run_.manifest["cluster"]["audited"]
    assert sum(replica["answers"] for replica in run_.manifest["cluster"]["replicas"]) >= DOCUMENTS + audited
    return audited


@pytest.mark.slow
def test_another_seed_is_another_digest(one_engine: Run, fleet: Fleet, config: Config) -> None:
    """The comparison of digests can fail."""
    assert Run(run(replace(config, limit=4), llm=fleet.engines)).digest != one_engine.digest


def while_it_runs(monkeypatch: pytest.MonkeyPatch, after: int, act: Callable[[Work, str], None]) -> list[str]:
    """Calls `act` once `after` answers have come, with the work and the replica that gave the last one. Returns the
    replicas it was called with."""
    real, count, called_with = Work.answered, [0], []

    def answered(work: Work, name: str, *arguments: Any) -> Any:
        standing = real(work, name, *arguments)
        count[0] += 1
        if count[0] >= after and not called_with and work.holders[name].held:
            called_with.append(name)
            act(work, name)
        return standing

    monkeypatch.setattr(Work, "answered", answered)
    return called_with


@pytest.mark.slow  # its own replicas take nine seconds; unit/test_cluster_work loses members without Ray
def test_a_replica_is_killed_in_mid_lease(
    one_engine: Run, fleet: Fleet, config: Config, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    members = fleet.engines.roster.members
    killed = while_it_runs(monkeypatch, 3, lambda work, name: os.kill(members[name].facts.pid, signal.SIGKILL))
    assert Run(run(config, llm=fleet.engines)).digest == one_engine.digest
    (name,) = killed
    assert members[name].lost is not None and members[name].lost_leases >= 1
    log = capfd.readouterr().err
    assert f"{members[name].facts.where} is lost: " in log and "are rescheduled" in log
    (run_,) = runs(Path(config.output_dir))
    lost = [replica for replica in run_.manifest["cluster"]["replicas"] if replica["lost"]]
    assert len(lost) == 1 and lost[0]["lost_leases"] == members[name].lost_leases


@pytest.mark.slow
def test_a_full_disk_in_mid_run(one_engine: Run, fleet: Fleet, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[bytes] = []
    real = journal._encode

    def encode(*arguments: Any) -> bytes:
        if len(lines) == 7:
            raise OSError(errno.ENOSPC, "No space left on device")
        lines.append(real(*arguments))
        return lines[-1]

    monkeypatch.setattr(journal, "_encode", encode)
    with pytest.raises(OSError, match="No space left"):
        run(config, llm=fleet.engines)
    monkeypatch.undo()
    assert Run(run(config, llm=fleet.engines)).digest == one_engine.digest
    (resumed,) = runs(Path(config.output_dir))
    assert resumed.manifest["counts"]["resumed_requests"] == 7


def audit_the_third_answer_of(monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    """Has the replica's third answer audited, whatever the replicas' speed: it gets the first lease, which has three of
    16 requests, and nobody takes it over. Without this, two others could be quick enough to answer all of the sample.
    """
    take, answered = Work.take, Work.answered

    def take_after(work: Work, name: str, *arguments: Any) -> Any:
        return take(work, name, *arguments) if name == bad or work.holders[bad].leases else []

    def answered_and_audited(work: Work, name: str, output: RequestOutput, now: float) -> Any:
        if name == bad and work.holders[name].answers == 2:
            work._items[output.request_id].audited = True
        return answered(work, name, output, now)

    monkeypatch.setattr(Work, "take", take_after)
    monkeypatch.setattr(Work, "take_over", lambda *_: [])
    monkeypatch.setattr(Work, "answered", answered_and_audited)


def test_the_audit_finds_a_wrong_bit(
    one_engine: Run, fleet: Fleet, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names both replicas and the token; their answers are computed again."""
    fleet.audit(0.25)
    pid = next(iter(fleet.here()))
    bad = fleet.set_mood(pid, "wrong")
    members = fleet.engines.roster.members
    audit_the_third_answer_of(monkeypatch, next(name for name, member in members.items() if member.facts.pid == pid))
    with pytest.raises(EvalEngineError) as caught:
        run(config, llm=fleet.engines)
    message = str(caught.value)
    assert re.match(r"arithmetic, document \d+, request 0: ", message) and "computed different bits" in message
    assert re.search(r"the logprob of token \d+ \(id \d+\) is \S+ \(0x\w{8}\) on .* and \S+ \(0x\w{8}\) on ", message)
    assert sum(where in message for where in fleet.here().values()) == 2 and bad in message
    journals = {path: path.read_bytes() for path in Path(config.output_dir).glob("*/journal.jsonl")}
    fleet.restore()
    monkeypatch.undo()
    assert Run(run(config, llm=fleet.engines)).digest == one_engine.digest
    (resumed,) = runs(Path(config.output_dir))
    (lines,) = journals.values()
    assert resumed.manifest["counts"]["resumed_requests"] == lines.count(b"\n")


@pytest.mark.slow
def test_without_the_audit_a_wrong_bit_stays(one_engine: Run, fleet: Fleet, config: Config) -> None:
    """Without an audit the planted wrong bit reaches the digest, so the audit does find it."""
    fleet.set_mood(next(iter(fleet.here())), "wrong")
    assert Run(run(config, llm=fleet.engines)).digest != one_engine.digest


@pytest.mark.slow
def test_nan_on_one_replica_only(
    one_engine: Run, fleet: Fleet, config: Config, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = fleet.set_mood(next(iter(fleet.here())), "nan")
    assert Run(run(config, llm=fleet.engines)).digest == one_engine.digest
    log = capfd.readouterr().err
    assert f"{bad} is suspect: a request failed there and not on " in log and "a test says so" in log
    (run_,) = runs(Path(config.output_dir))
    suspects = [replica for replica in run_.manifest["cluster"]["replicas"] if replica["suspect"]]
    assert [f"{replica['host']} {replica['device']}" for replica in suspects] == [bad]


@pytest.mark.slow
def test_nan_everywhere_is_the_requests_own(fleet: Fleet, config: Config) -> None:
    """Where a request fails on every replica, the run ends with the request's own error."""
    for pid in fleet.here():
        fleet.set_mood(pid, "nan")
    with pytest.raises(
        EvalEngineError,
        match=rf"{DOCUMENTS} requests failed:\narithmetic, document \d+, request 0: layers.0.mlp: not finite",
    ):
        run(config, llm=fleet.engines)


@pytest.mark.slow
def test_a_slow_replica_holds_nothing_up(
    one_engine: Run, fleet: Fleet, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow replica waits three seconds a step: its first lease alone would take it 72 s."""
    taken_over: list[int] = []
    real = Work.take_over

    def take_over(work: Work, *arguments: Any) -> Any:
        lease = real(work, *arguments)
        taken_over.extend(request.request_id for request in lease)
        return lease

    monkeypatch.setattr(Work, "take_over", take_over)
    slow = fleet.set_mood(next(iter(fleet.here())), "slow")
    begin = time.monotonic()
    assert Run(run(config, llm=fleet.engines)).digest == one_engine.digest
    assert taken_over and time.monotonic() - begin < 60
    assert slow in fleet.here().values(), "it is no failure"


@pytest.mark.slow
def test_ctrl_c_keeps_what_arrived(
    one_engine: Run, fleet: Fleet, config: Config, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    while_it_runs(monkeypatch, 5, lambda work, name: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run(config, llm=fleet.engines)
    assert "finishing the step that runs" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.undo()
    assert Run(run(config, llm=fleet.engines)).digest == one_engine.digest
    (resumed,) = runs(Path(config.output_dir))
    assert 5 <= resumed.manifest["counts"]["resumed_requests"] < DOCUMENTS


@pytest.fixture(autouse=True)
def _no_endless_test() -> Iterator[None]:
    """Makes a run that hangs fail after two minutes."""

    def ring(number: int, frame: Any) -> None:
        raise TimeoutError("a run on replicas did not end in two minutes")

    old_handler = signal.signal(signal.SIGALRM, ring)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old_handler)
