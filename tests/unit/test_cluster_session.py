"""The Ray of a run: what a user reads where it does not start, and the signals that it leaves alone."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from evalengine.errors import ConfigError, EvalEngineError
from evalengine.integrations.ray.engines import ray_session

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'evalengine[ray]'")
SLOW = "The current node timed out during startup. This could happen because the GCS has become overloaded."


def slow(**settings: object) -> None:
    """Stands in for `ray.init` on a busy machine, where Ray raises a bare exception after 30 seconds."""
    raise Exception(f"{SLOW}\nmore")


@pytest.mark.parametrize(("address", "kind"), [(None, EvalEngineError), ("auto", ConfigError)])
def test_a_slow_start_is_a_sentence(
    address: str | None, kind: type[EvalEngineError], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(ray, "init", slow)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append("all that had started"))
    with pytest.raises(kind) as error, ray_session(address, 2):
        pytest.fail("it started")
    assert type(error.value) is kind and f"({SLOW})" in str(error.value)
    assert bool(ended) == (address is None), "what Ray had started here ends, too"


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN, lambda number, frame: None])
def test_sigterm_does_what_it_did(before: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own handler would be inherited by every process that is forked later."""
    kept = signal.signal(signal.SIGTERM, before)
    try:
        monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, lambda number, frame: None))
        monkeypatch.setattr(ray, "shutdown", lambda: None)
        with ray_session(None, 2):
            assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, kept)
