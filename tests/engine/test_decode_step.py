"""The files that a decode step goes through, all of them, are those that docs/request.md names."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import evalengine
from evalengine.engine.engine import Engine
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import GenerateRequest, RequestOutput, SamplingParams

PACKAGE = Path(evalengine.__file__).parent
PAGE = PACKAGE.parent / "docs" / "request.md"
ONLY_ON_A_GPU = {"engine/execute/cuda_graphs.py", "engine/execute/sharing.py", "layers/shared_blocks.py"}
MOST = 27  # files in all, eight of them the exact kernels; a change that needs one more says so here and on the page


def test_a_decode_step_is_read_in_the_files_of_the_page(
    small_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("file by file")[2]
    listed = re.findall(r"\]\(\.\./(?:evalengine/)?(\S+\.py)\)", section)
    assert len(listed) == len({*listed})
    entered: set[str] = set()
    steps = 0
    step = Engine._step

    def see(frame: FrameType, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            entered.add(file.relative_to(PACKAGE).as_posix())

    def traced(self: Engine) -> list[RequestOutput]:
        nonlocal steps
        steps += 1
        sys.setprofile(see if steps == 4 else None)
        try:
            return step(self)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(Engine, "_step", traced)
    with LLM(small_checkpoint, batch_invariant=True, numerics="exact") as llm:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        list(llm.run([GenerateRequest(i, [5, 6, 7 + i], params) for i in range(3)]))
    assert steps > 4
    assert entered == {*listed} - ONLY_ON_A_GPU
    assert len(entered) <= MOST
