"""`EngineThread`: whatever comes between what, each request has one answer or one failure, and none waits for ever."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evalengine import LLM, SamplingParams
from evalengine.engine.request import GenerateRequest, Request, RequestOutput
from evalengine.engine.thread import SWITCH_SECONDS, EngineEnded, EngineFailure, EngineThread, Event

SECONDS = 60  # after which a request counts as forgotten


class Stepped:
    """Stands in for an engine: a step answers all requests that run. `at` is called in its thread, with the name of
    the place that it has come to, so that a test has its say between any two of them."""

    def __init__(self, at: Callable[[str], None]) -> None:
        self.at = at
        self.dropped: set[int] = set()
        self.scheduler = SimpleNamespace(sequences=[], drop=self.dropped.update)

    def run(self, requests: list[Request], on_step: Any, more: Any) -> Iterator[RequestOutput]:
        running = [*requests]
        self.at("admitted")
        while running:
            self.at("step")
            for request in running:
                if request.request_id not in self.dropped:
                    yield RequestOutput(
                        request.request_id, request.prompt_ids, [1], np.zeros(1, np.float32), "length", ""
                    )
            on_step(None)
            self.at("stepped")
            running = more()
            self.at("asked for more")


class Driven:
    """An `EngineThread` over `Stepped`, and what it has told, in order."""

    def __init__(self) -> None:
        self.told: SimpleQueue[Event] = SimpleQueue()
        self.acts: dict[str, Callable[[], Any]] = {}  # place -> what is done there, once
        self.thread = EngineThread(Stepped(self._at))  # type: ignore[arg-type]

    def _at(self, place: str) -> None:
        if act := self.acts.pop(place, None):
            act()

    def submit(self, listen: Callable[[Event], None] | None = None) -> int:
        (number,) = self.thread.new_ids(1)
        self.thread.submit([GenerateRequest(number, [5])], listen or self.told.put)
        return number

    def next(self) -> Event:
        return self.told.get(timeout=SECONDS)


@pytest.fixture
def driven() -> Iterator[Driven]:
    driven = Driven()
    driven.thread.start()
    yield driven
    driven.thread.stop(halt=True)


@pytest.mark.parametrize("place", ["admitted", "step", "stepped", "asked for more"])
def test_a_request_that_comes_at_any_moment_is_answered(driven: Driven, place: str) -> None:
    """The last place is behind the engine's last look for more: the run then ends with a request in the queue."""
    driven.acts[place] = driven.submit
    first = driven.submit()
    answers = [driven.next(), driven.next()]
    assert sorted(answer.request_id for answer in answers) == [first, first + 1]
    assert all(isinstance(answer, RequestOutput) for answer in answers)


@pytest.mark.parametrize("place", ["admitted", "step", "stepped", "asked for more"])
def test_a_drop_at_any_moment_drops_that_request_alone(driven: Driven, place: str) -> None:
    """Also between the moment in which the engine's thread takes requests and the one in which they run."""
    numbers: list[int] = []

    def drop() -> None:
        numbers.append(driven.submit())
        driven.thread.drop([numbers[0]])
        driven.submit()

    driven.acts[place] = drop
    driven.submit()
    told = {driven.next().request_id, driven.next().request_id}
    assert driven.thread.num_open == 0 and told.isdisjoint(numbers)


def test_a_failed_step_fails_what_ran_and_answers_what_waits(driven: Driven) -> None:
    later: list[int] = []

    def fail() -> None:
        later.append(driven.submit())
        raise RuntimeError("a step failed")

    driven.acts["step"] = fail
    first = driven.submit()
    failure, answer = driven.next(), driven.next()
    assert isinstance(failure, EngineFailure) and failure.request_id == first
    assert isinstance(answer, RequestOutput) and answer.request_id == later[0]
    assert driven.thread.healthy


def test_an_engine_whose_last_step_failed_is_not_healthy(driven: Driven) -> None:
    def fail() -> None:
        raise RuntimeError("a step failed")

    driven.acts["step"] = fail
    driven.submit()
    assert isinstance(driven.next(), EngineFailure) and not driven.thread.healthy and driven.thread.alive
    driven.submit()
    assert isinstance(driven.next(), RequestOutput) and driven.thread.healthy


def test_a_thread_that_dies_tells_who_runs_who_waits_and_who_comes_later(driven: Driven) -> None:
    """What is no `Exception` ends the thread: nobody waits for it."""

    def die() -> None:
        driven.submit()
        raise SystemExit("no step ends so")

    driven.acts["step"] = die
    driven.submit()
    told = [driven.next(), driven.next()]
    driven.thread.stop()
    driven.submit()
    told.append(driven.next())
    assert [isinstance(one, EngineFailure) for one in told] == [True] * 3
    assert sorted(one.request_id for one in told) == [0, 1, 2]
    assert not driven.thread.alive and not driven.thread.healthy and driven.thread.num_open == 0


def test_who_waits_when_the_thread_is_halted_is_told(driven: Driven) -> None:
    def halt() -> None:
        driven.submit()
        driven.thread._halting = driven.thread._stopping = True  # `stop` would wait for this very thread

    driven.acts["step"] = halt
    driven.acts["stepped"] = driven.submit
    driven.submit()
    told = [driven.next() for _ in range(3)]
    assert isinstance(told[0], RequestOutput)
    assert all(isinstance(one, EngineFailure) and isinstance(one.error, EngineEnded) for one in told[1:])


def test_a_listener_that_raises_loses_its_own_event_alone(driven: Driven) -> None:
    def raises(event: Event) -> None:
        raise RuntimeError("a listener failed")

    driven.acts["admitted"] = driven.submit
    driven.submit(raises)
    assert isinstance(driven.next(), RequestOutput)
    driven.submit()
    assert isinstance(driven.next(), RequestOutput) and driven.thread.healthy


def test_a_busy_thread_does_not_keep_the_interpreter_from_it(driven: Driven) -> None:
    before = sys.getswitchinterval()
    try:
        for interval, then in ((0.005, SWITCH_SECONDS), (SWITCH_SECONDS / 5, SWITCH_SECONDS / 5)):
            sys.setswitchinterval(interval)
            thread = EngineThread(driven.thread.engine)
            thread.start()
            thread.stop()
            assert sys.getswitchinterval() == pytest.approx(then, abs=2e-6)  # whole microseconds
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_and_go_at_random(make_llm: Callable[..., LLM], seed: int) -> None:
    """With a real engine: every request that is not dropped has its own answer, the bytes that it has alone."""
    llm, rng = make_llm(max_num_seqs=4, num_kv_blocks=32), random.Random(seed)
    prompts = [[rng.randrange(5, 900) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    params = SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True)
    alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    thread, told = EngineThread(llm), SimpleQueue[Event]()
    thread.start()
    asked: dict[int, int] = {}  # request -> prompt
    dropped: set[int] = set()
    answers: dict[int, RequestOutput] = {}
    for _ in range(120):
        place = rng.randrange(len(prompts))
        (number,) = thread.new_ids(1)
        asked[number] = place
        thread.submit([GenerateRequest(number, prompts[place], params)], told.put, tokens=rng.random() < 0.5)
        if rng.random() < 0.3:
            victim = rng.choice([*asked])
            thread.drop([victim])
            dropped.add(victim)
        while len(answers.keys() | dropped) < len(asked) - 8:
            _take(told, answers)
    while asked.keys() - answers.keys() - dropped:
        _take(told, answers)
    thread.stop()
    for number, output in answers.items():
        expected = alone[asked[number]]
        assert output.token_ids == expected.token_ids and output.logprobs.tobytes() == expected.logprobs.tobytes()
    assert thread.num_open == 0 and llm.block_manager.num_free_blocks == llm.num_kv_blocks


def _take(told: SimpleQueue[Event], answers: dict[int, RequestOutput]) -> None:
    event = told.get(timeout=SECONDS)
    assert not isinstance(event, EngineFailure), event.error
    if isinstance(event, RequestOutput):
        assert event.request_id not in answers, "a second answer"
        answers[event.request_id] = event
