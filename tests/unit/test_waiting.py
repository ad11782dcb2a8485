"""Commands that wait say for what, and give up early: a Hub that does not answer, and lm-eval's index."""

from __future__ import annotations

import time
from typing import Any

import pytest
from huggingface_hub import constants

from evalengine.errors import ConfigError
from evalengine.util import hub
from evalengine.util.hub import offline_if_unreachable, said_if_long


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that are requested from now on. There is no answer, as from a silent name server."""
    requested: list[str] = []

    def urlopen(request: Any, **_: Any) -> None:
        requested.append(request.full_url)
        time.sleep(5)
        raise TimeoutError

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.5)
    monkeypatch.setattr(hub, "_known", {})
    monkeypatch.setattr(hub, "SILENCE", 0.1)
    return requested


def test_a_silent_hub_is_waited_for_once_and_said(requested: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    for _ in range(3):  # a run's model and its splits
        with offline_if_unreachable() as reason:
            assert reason == f"{constants.ENDPOINT} cannot be reached (no answer in 0.5 s)"
            assert constants.HF_HUB_OFFLINE
    assert time.monotonic() - start < 4 and len(requested) == 1  # an address that is waited for takes 5 s
    assert capsys.readouterr().err == (
        f"evalengine: waiting for {constants.ENDPOINT}; HF_HUB_OFFLINE=1 takes its local cache at once\n"
    )


def test_a_hub_is_asked_again_after_a_minute(requested: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with offline_if_unreachable() as reason:
        assert reason
    monkeypatch.setattr(hub, "REMEMBERED_SECONDS", 0)
    monkeypatch.setattr(hub, "_ask", lambda endpoint: "")
    with offline_if_unreachable() as reason:
        assert reason == "" and not constants.HF_HUB_OFFLINE


def test_what_is_quick_is_not_said(capsys: pytest.CaptureFixture[str]) -> None:
    with said_if_long("waiting"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("name", "hint"), [("nosuch", "ls tasks"), ("gsm9k", "lm_eval/gsm8k"), ("gsm8", "gsm8k")])
def test_a_name_that_no_file_mentions_needs_no_index(name: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Building the index takes lm-eval from ten seconds to two minutes."""
    pytest.importorskip("lm_eval")
    from evalengine.integrations.lm_eval_tasks import index as lm_eval_index

    class Indexed(Exception):
        pass

    def index() -> None:
        raise Indexed

    monkeypatch.setattr(lm_eval_index, "lm_eval_tasks", index)
    lm_eval_index.chosen.cache_clear()
    with pytest.raises(ConfigError, match=f"has no task, group or tag of that name; .*{hint}"):
        lm_eval_index.chosen(name)
    for there in ("gsm8k", "mmlu", "egymmlu_arabic_language_(general)"):
        with pytest.raises(Indexed):
            lm_eval_index.chosen(there)


@pytest.mark.slow  # three names of the index, above
def test_every_name_of_the_index_is_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    from evalengine.integrations.lm_eval_tasks.index import _is_mentioned, _texts, lm_eval_tasks

    words = set(_texts().translate(str.maketrans("'\"[],", "     ")).split())
    names = set(lm_eval_tasks()[0].task_index)
    assert len(names) > 10_000 and not names - words
    assert all(map(_is_mentioned, sorted(names)[::500]))
