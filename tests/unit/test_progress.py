"""Time left: tokens before requests are done, an estimate after, and what a log and a sweep say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalengine.cli import experiment
from evalengine.config.compose import compose_jobs
from evalengine.config.schema import Config
from evalengine.engine.stats import EngineStats, FleetStats
from evalengine.util import progress
from evalengine.util.progress import RunProgress, duration


def test_the_time_left_follows_from_the_requests_that_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SHOWN_SECONDS", 0.0)
    with RunProgress("sums", 200, done=100) as bar:
        now = [0.0]
        bar._bar.get_time, bar._bar.tasks[0]._get_time = lambda: now[0], lambda: now[0]
        bar._bar.reset(bar._task, completed=100)
        left = []
        for now[0] in (20.0, 21.0, 22.0):
            for _ in range(10):
                bar.finished()
            bar.step(EngineStats(num_computed_tokens=1_000, num_generated_tokens=600))
            left.append(bar._bar.tasks[0].fields["left"])
    assert left == ["estimating, 600 tokens generated", "8 s left", "7 s left"]


def test_durations_are_said_as_exactly_as_they_are_known() -> None:
    texts = {0.4: "0 s", 89: "89 s", 90: "2 min", 1440: "24 min", 7140: "119 min", 11_100: "3 h 05 min"}
    assert {seconds: duration(seconds) for seconds in texts} == texts


def test_the_first_lines_of_a_log_say_what_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """None of a batch of 200 generations is done yet, as in the default run on a busy machine."""
    clock = iter([0.0, 0.0, 4.0, 11.0, 22.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock, 99.0))
    with RunProgress("sums", 200) as bar:
        bar._started = bar._last_line = 0.0
        for now in (4.0, 11.0, 22.0):
            monkeypatch.setattr(progress.time, "monotonic", lambda now=now: now)
            bar.step(EngineStats(num_computed_tokens=int(100 * now), num_generated_tokens=int(10 * now)))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"sums: 0/200 requests, 100 tokens/s, estimating, {n} tokens generated" for n in (110, 220)]


def test_steps_that_follow_each_other_at_once_cost_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of Qwen3-0.6B takes 1.2 ms on an H200 (819 tokens/s), and an update of the bar 0.1 ms on a CPU."""
    with RunProgress("sums", 4) as bar:
        updates: list[object] = []
        monkeypatch.setattr(bar._bar, "update", lambda *_, **fields: updates.append(fields))
        for now in (10.0, 10.1, 10.2, 10.4):
            monkeypatch.setattr(progress.time, "monotonic", lambda now=now: now)
            bar.finished()
            bar.step(EngineStats())
    assert [fields["completed"] for fields in updates if "completed" in fields] == [1, 4]


def test_a_sweep_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("experiment=noise_floor", f"output_dir={tmp_path}", "limit=2", "engine.device=cpu")
    swept = compose_jobs([*settings, "engine.max_num_seqs=1,4"])
    now = [0.0]
    monkeypatch.setattr(experiment.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(experiment, "_report", lambda *rest: 0)

    def run(config: Config) -> int:
        now[0] += 600.0 if config.engine.max_num_seqs == 1 else 60.0
        folder = Path(config.output_dir) / "run"
        folder.mkdir(parents=True)
        (folder / "digest.txt").write_text("0\n")
        return 0

    assert experiment.run_experiment("noise_floor", swept, run) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    assert not lines[0].endswith("left for 4 runs)"), "nothing is known before the first run"
    assert [line.partition(" (about ")[2] for line in lines[1:]] == [
        "30 min left for 3 runs)", "11 min left for 2 runs)", "7 min left for 1 run)"
    ]  # fmt: skip
    assert experiment.run_experiment("noise_floor", swept, run) == 0
    assert capsys.readouterr().err.count(": finished before") == 4


def test_replicas_have_lines_below_the_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich writes as to a terminal
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(progress, "SHOWN_SECONDS", 0.0)
    with RunProgress("sums", 4) as bar:
        bar.step(FleetStats(num_computed_tokens=8, lines=("hosta GPU 0: 3 done", "hostb GPU 1: 1 done")))
        bar._bar.refresh()
    shown = capsys.readouterr().err
    assert "  hosta GPU 0: 3 done" in shown and "  hostb GPU 1: 1 done" in shown
    assert bar._bar.lines and "sums" in shown
    bar.step(EngineStats())
    assert not bar._bar.lines, "one engine has none"
