"""`benchmarks host`: every step is really scheduled and launched, no kernel computes, and a table has the times."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import host
from benchmarks.arguments import OWN
from evalengine.bench.workload_files import SUFFIX
from evalengine.errors import ConfigError


def test_every_token_goes_through_the_engine(tmp_path: Path) -> None:
    lines = [{"kind": "generate", "prompt": [i + 1] * 70, "max_tokens": 5 + i} for i in range(20)]
    lines += [{"kind": "loglikelihood", "context": [99] * 70, "continuations": [[i], [i, 7, 8]]} for i in range(3)]
    file = tmp_path / f"mixed{SUFFIX}"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    row = host.measure("mixed", {"mixed": file}, None, 1)
    assert row["requests"] == 26 and row["generated_tokens"] == sum(5 + i for i in range(20))
    fed = 20 * 70 + sum(4 + i for i in range(20)) + 70 + 3 * 2
    assert row["computed_tokens"] == fed, "the shared context once, and each choice's own tokens"
    assert row["steps_ahead"] == row["steps"] - 1 and row["host_s"] > 0


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workloads", "random", "--requests", "3", "--rounds", "1", "--output", str(tmp_path / "new")]
    assert OWN["host"](words) == 0
    printed = capsys.readouterr().out
    (table,) = (tmp_path / "new").glob("host-*.md")
    (json_file,) = (tmp_path / "new").glob("host-*.json")
    assert printed.strip() in table.read_text() and "| random | 3 |" in printed
    assert json.loads(json_file.read_text())["rows"][0]["workload"] == "random"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "--ranks 2: this machine has 0 CUDA devices"),
        (["--ranks", "1"], "--ranks 1: one rank exchanges nothing"),
        (["--model", "gpt2"], "--model gpt2: there are Qwen3-0.6B, Qwen3-8B"),
    ],
)
def test_exchanges_need_ranks_that_are_there(
    words: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match=problem):
        OWN["push_gather"]([*words, "--output", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()


def test_an_unknown_workload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--workloads gsm: there are random, gsm8k_cot"):
        OWN["host"](["--workloads", "gsm", "--output", str(tmp_path)])
