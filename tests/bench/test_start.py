"""`bench start` runs real commands from empty caches, and says where their time went."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evalengine.bench import start
from evalengine.bench.start import Started, TimedCommand, phases_of, table
from evalengine.cli.commands import START
from evalengine.cli.commands import bench as main
from evalengine.errors import ConfigError


def test_phases_that_overlap_count_once_and_what_none_covers_is_said() -> None:
    spans = [("imports", (2.0, 5.0)), ("settings", (2.0, 3.0)), ("rows", (6.0, 7.0)), ("rows", (6.5, 8.0))]
    found = phases_of(spans, 1.0, 10.0)
    assert found == {"interpreter": 1.0, "settings": 1.0, "imports": 3.0, "rows": 2.0, "between": 1.0, "exit": 2.0}
    assert phases_of([], 1.0, 3.0) == {"between": 2.0}


def test_the_table_has_medians_of_the_first_and_of_the_later_commands() -> None:
    walls = ((True, 9.0), (False, 3.0), (False, 5.0), (False, 4.0))
    commands = [TimedCommand(fresh, wall, "d", {"imports": wall / 2, "exit": 0.1}) for fresh, wall in walls]
    lines = table([Started("m", commands, [3.0, 2.0])])
    assert lines[0] == "| seconds | m, first | m, later |"
    assert "| imports | 4.50 | 2.00 |" in lines
    assert "| **the whole command** | **9.00** | **4.00** |" in lines
    assert lines[-1] == "m, twice in one process: 3.00 and 2.00 s, 1.50 times"


def test_real_commands_are_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "forget_files", lambda: None)  # other tests run on this machine
    words = ["task=arithmetic", "limit=2", "task.generation.max_gen_toks=4", "engine.device=cpu", "--rounds", "1"]
    options = ["--models", "asset:tinymath", "--twice", "task=arithmetic limit=1", "--output", str(tmp_path)]
    assert main(["start", *words, *options]) == 0
    (file,) = tmp_path.glob("start-*.json")
    (model,) = json.loads(file.read_text())["models"]
    first, later = model["commands"]
    assert first["fresh"] and not later["fresh"] and len(model["twice_s"]) == 2
    assert len(first["digest"]) == 64 and first["digest"] == later["digest"]
    phases = first["phases"]
    assert phases.keys() >= {"interpreter", "imports", "settings", "weights", "steps", "records", "page", "exit"}
    assert all(0 <= seconds < first["wall_s"] for seconds in phases.values())
    assert "| **the whole command** |" in capsys.readouterr().out
    assert "| imports |" in next(tmp_path.glob("start-*.md")).read_text()


def test_an_unknown_shape_is_said_before_a_command_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--models shape:qwen9: no such shape; there are shape:qwen3-0.6b"):
        main(["start", "--models", "shape:qwen9", "--output", str(tmp_path)])


def test_nothing_is_noted_unless_a_file_is_named(tmp_path: Path) -> None:
    program = "from evalengine.util.phases import phase\nwith phase('a'): pass\nwith phase('b'): 1 / 0"
    for file in (None, tmp_path / "phases"):
        environment = {name: value for name, value in os.environ.items() if name != "EVALENGINE_PHASES"}
        environment |= {} if file is None else {"EVALENGINE_PHASES": str(file)}
        done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True)
        assert b"ZeroDivisionError" in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "phases").read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["a", "b"]  # a phase that fails ends as well
    assert [path.name for path in tmp_path.iterdir()] == ["phases"]


def test_the_measurement_itself_keeps_no_files_of_torch_in_use() -> None:
    """`forget_files` cannot take a file out of memory that a process uses, so the benchmark must not load torch."""
    program = "import sys, evalengine.bench.start; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_settings_without_a_task_are_those_of_the_usual_run() -> None:
    def settings(*words: str) -> list[str]:
        asked: list[str] = START.parse(list(words)).settings
        return asked

    assert settings() == ["task=mmlu", "limit=20"]
    assert settings("data_dir=rows") == ["task=mmlu", "limit=20", "data_dir=rows"]
    assert settings("task=gsm8k", "limit=3") == ["task=gsm8k", "limit=3"]


def test_a_published_command_names_no_folder_of_this_machine() -> None:
    words = ["data_dir=/home/me/data", "--twice", "", "--output", "/home/me/out", "task=a limit=3"]
    assert start._without_places(words) == ["data_dir=data", "--twice", "''", "--output", "out", "'task=a limit=3'"]
