"""Ctrl-C while requests run: the step's answers are taken, then the run ends; a second Ctrl-C ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from evalengine.engine.interrupts import Interrupts
from evalengine.engine.llm import LLM
from evalengine.engine.request import SamplingParams

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread only"
)


def press() -> None:
    """Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_ctrl_c_ends_after_the_step_and_the_second_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        interrupts.after_a_step()
        press()
        assert interrupts.received and capsys.readouterr().err.count("Ctrl-C again ends at once") == 1
        with pytest.raises(KeyboardInterrupt):
            interrupts.after_a_step()
        with pytest.raises(KeyboardInterrupt):
            press()
        assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_no_signal_is_watched() -> None:
    before, states = signal.getsignal(signal.SIGINT), []

    def watch() -> None:
        with Interrupts() as interrupts:
            states.append((signal.getsignal(signal.SIGINT), interrupts.received))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert states == [(before, False)]


def test_the_answers_of_the_step_that_ran_are_taken() -> None:
    """Two requests that end in one step: Ctrl-C in that step loses neither, and the engine runs on afterwards."""
    taken: list[int] = []
    with LLM("asset:tinymath", device="cpu", max_num_seqs=2) as llm:
        assert llm.runner is not None
        real: Callable = llm.runner.results

        def results(launched: object) -> object:
            if len(llm.scheduler.sequences) <= 4:  # the first two requests are in their last step
                press()
            return real(launched)

        llm.runner.results = results  # type: ignore[method-assign]
        from evalengine.engine.request import GenerateRequest

        params = SamplingParams(max_tokens=1, ignore_eos=True)
        requests = [GenerateRequest(i, [5, 6 + i], params) for i in range(4)]
        with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
            for output in llm.run(requests, lambda stats: interrupts.after_a_step()):
                taken.append(output.request_id)
        assert taken == [0, 1]
        llm.runner.results = real  # type: ignore[method-assign]
        assert len(llm.generate([[1, 2]], params)) == 1
