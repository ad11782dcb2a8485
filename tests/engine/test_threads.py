"""One LLM, several threads: one runs requests, the others get an error that says so, and no answer is another's."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from evalengine import LLM, SamplingParams
from evalengine.engine.request import GenerateRequest
from evalengine.errors import EvalEngineError

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


def hammer(work: Callable[[int], Any], threads: int = 8) -> list[Any]:
    """What `work(number)` returned or raised in each thread, where all threads call it at the same moment."""
    results: list[Any] = [None] * threads
    together = threading.Barrier(threads)

    def call(number: int) -> None:
        together.wait()
        try:
            results[number] = work(number)
        except BaseException as error:
            results[number] = error

    started = [threading.Thread(target=call, args=(i,)) for i in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    return results


def test_only_one_thread_gets_in_at_a_time(llm: LLM) -> None:
    expected = [llm.generate([[i + 1, 5]], PARAMS)[0].token_ids for i in range(8)]
    answered = 0
    for _ in range(25):
        for i, result in enumerate(hammer(lambda i: llm.generate([[i + 1, 5]], PARAMS)[0].token_ids)):
            if isinstance(result, BaseException):
                assert type(result) is EvalEngineError and "running other requests" in str(result)
            else:
                assert result == expected[i]
                answered += 1
    assert answered >= 25
    assert not llm.scheduler.has_work
    llm.block_manager.check([])


def test_threads_that_wait_for_their_turn_all_get_their_answers(llm: LLM) -> None:
    turn = threading.Lock()
    expected = [llm.generate([[i + 1, 5]], PARAMS)[0].token_ids for i in range(8)]

    def work(number: int) -> list[int]:
        with turn:
            return llm.generate([[number + 1, 5]], PARAMS)[0].token_ids

    assert hammer(work) == expected


def test_all_that_uses_the_engine_is_refused_from_a_callback(llm: LLM) -> None:
    refused = []

    def on_step(_: object) -> None:
        for use in (
            lambda: llm.generate([[1]]),
            lambda: llm.score([([1], [2])]),
            lambda: llm.score_rolling(["a text"]),
            lambda: next(llm.run([GenerateRequest(9, [1])])),
            lambda: llm.reconfigure(max_num_seqs=2),
        ):
            with pytest.raises(EvalEngineError, match="running other requests"):
                use()
            refused.append(use)

    (output,) = llm.run([GenerateRequest(0, [5, 6], PARAMS)], on_step)
    assert len(refused) == 15 and output.token_ids == llm.generate([[5, 6]], PARAMS)[0].token_ids


@pytest.mark.parametrize("way", ["closed", "forgotten", "failed", "refused", "never started", "in a cycle"])
def test_an_iterator_that_is_left_gives_the_engine_back(llm: LLM, way: str) -> None:
    """However an unfinished run is left, the engine takes other requests afterwards."""
    requests = [GenerateRequest(i, [i + 1, 2], SamplingParams(max_tokens=2 + 5 * i)) for i in range(2)]
    outputs = llm.run(requests if way != "refused" else [*requests, requests[0]])
    if way == "failed":

        def fail(_: object) -> None:
            raise KeyboardInterrupt

        outputs = llm.run(requests, fail)
        with pytest.raises(KeyboardInterrupt):
            next(outputs)
    elif way == "refused":
        with pytest.raises(EvalEngineError, match="request_id"):
            next(outputs)
    elif way != "never started":
        next(outputs)
        with pytest.raises(EvalEngineError, match="running other requests"):
            llm.generate([[1]])
    if way == "closed":
        outputs.close()  # type: ignore[attr-defined]
    elif way == "forgotten":
        del outputs
    elif way == "in a cycle":
        cycle: list[Any] = [outputs]
        cycle.append(cycle)
        del outputs, cycle
        gc.collect()
    assert len(llm.generate([[5, 6]], PARAMS)[0].token_ids) == 3
    assert not llm.scheduler.has_work


def test_an_iterator_may_be_closed_by_another_thread(llm: LLM) -> None:
    outputs = llm.run([GenerateRequest(i, [i + 1, 2], SamplingParams(max_tokens=2 + 5 * i)) for i in range(2)])
    next(outputs)
    hammer(lambda _: outputs.close(), threads=1)  # type: ignore[attr-defined]
    assert llm.generate([[5]], PARAMS)


def test_closing_waits_for_the_step_and_ends_the_run_with_a_sentence(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.runner is not None
    real, entered, go_on = llm.runner.launch, threading.Event(), threading.Event()

    def execute(schedule: Any) -> Any:
        entered.set()
        assert go_on.wait(60)
        return real(schedule)

    monkeypatch.setattr(llm.runner, "launch", execute)

    def work(number: int) -> Any:
        if number == 0:
            return llm.generate([[5, 6]], PARAMS)
        assert entered.wait(60)
        closing = threading.Thread(target=llm.close)
        closing.start()
        while not llm._closed:
            time.sleep(0.001)
        waits = closing.is_alive() and llm.runner is not None
        go_on.set()
        closing.join(60)
        return waits and llm.runner is None

    run, closed_after_the_step = hammer(work, threads=2)
    assert closed_after_the_step is True
    assert type(run) is EvalEngineError and "closed while it ran requests" in str(run)
    with pytest.raises(EvalEngineError, match="this LLM is closed"):
        llm.generate([])
    llm.close()


def test_reconfiguring_is_for_one_thread(llm: LLM) -> None:
    for _ in range(5):
        results = hammer(lambda i: llm.reconfigure(max_num_seqs=i + 1) if i % 2 else llm.generate([[5]], PARAMS))
        for result in results:
            assert not isinstance(result, BaseException) or (
                type(result) is EvalEngineError and "running other requests" in str(result)
            )
        assert llm.scheduler.max_num_seqs == llm.config.max_num_seqs
    assert llm.generate([[5]], PARAMS)
