"""`warm MODEL` makes a model's kernels before its first run; a CPU has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from evalengine.cli.commands import warm
from evalengine.engine import llm as llm_module
from evalengine.engine import settings as settings_module
from evalengine.engine import warm_up as warm_up_module
from evalengine.errors import ConfigError


def test_a_cpu_has_nothing_to_compile(capsys: pytest.CaptureFixture[str]) -> None:
    assert warm(["tinymath", "engine.device=cpu"]) == 0
    assert capsys.readouterr().out == "tinymath: computes on the CPU here, for which nothing is compiled\n"


def test_on_a_gpu_the_engine_is_warmed_up_and_every_graph_captured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[Any] = []

    class Engine:
        def __init__(self, checkpoint: Any, **about: Any) -> None:
            self.kernels_verdict = {"schedules": 31}
            done.append((checkpoint.source, about["batch_invariant"], about["engine"].max_num_seqs))

        def __enter__(self) -> Engine:
            return self

        def __exit__(self, *_: object) -> None:
            done.append("closed")

        def capture_graphs(self) -> None:
            done.append("captured")

    def resolved(*about: Any, **others: Any) -> Any:
        settings = real(*about, **others)
        object.__setattr__(settings, "device", torch.device("cuda"))
        return settings

    real = settings_module.resolve_settings
    monkeypatch.setattr(settings_module, "resolve_settings", resolved)
    monkeypatch.setattr(llm_module, "LLM", Engine)
    monkeypatch.setattr(warm_up_module, "warm_up", lambda engine: done.append("warm"))
    assert warm(["tinymath", "engine.max_num_seqs=8", "engine.device=cpu"]) == 0
    assert done == [("asset:tinymath", True, 8), "warm", "captured", "closed"]
    assert capsys.readouterr().out.startswith("tinymath: 31 schedules compared, kernels compiled, in ")


def test_a_models_folder_is_found_and_what_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        warm([str(tmp_path / "nowhere")])
    with pytest.raises(ConfigError, match="must set one of model"):
        warm(["tinymath", "task=gsm8k"])
