"""What the engine's thread tells comes into the event loop: all of it, in order, by few wake-ups."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from evalengine.engine.thread import Event, NewTokens
from evalengine.integrations.openai_server.answering import Mailbox


class Loop:
    """Stands in for an event loop: what it is to do is done when the test says so."""

    def __init__(self) -> None:
        self.waking: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, act: Callable[[], None]) -> None:
        self.waking.append(act)


def told(number: int) -> Event:
    return NewTokens(number, [], [], [])


def numbers(queue: asyncio.Queue[Event]) -> list[int]:
    return [queue.get_nowait().request_id for _ in range(queue.qsize())]


def test_the_loop_is_woken_once_for_all_that_comes_before_it_looks() -> None:
    loop: Any = Loop()
    mailbox, queue = Mailbox(loop), asyncio.Queue[Event]()
    for number in range(3):
        mailbox.put(queue, told(number))
    assert len(loop.waking) == 1
    loop.waking.pop()()
    assert numbers(queue) == [0, 1, 2]
    mailbox.put(queue, told(3))
    assert len(loop.waking) == 1, "what comes after it has looked wakes it anew"
    loop.waking.pop()()
    assert numbers(queue) == [3]


def test_nothing_is_lost_of_what_several_threads_tell() -> None:
    """The engine's thread as it ends, and the loop's own that asks too late."""
    most, tellers = 2000, 4

    async def take() -> list[int]:
        mailbox, queue = Mailbox(asyncio.get_running_loop()), asyncio.Queue[Event]()

        def tell(first: int) -> None:
            for number in range(first, most * tellers, tellers):
                mailbox.put(queue, told(number))

        threads = [threading.Thread(target=tell, args=(first,)) for first in range(tellers)]
        for thread in threads:
            thread.start()
        return [(await asyncio.wait_for(queue.get(), 60)).request_id for _ in range(most * tellers)]

    taken = asyncio.run(take())
    for first in range(tellers):
        assert [n for n in taken if n % tellers == first] == [*range(first, most * tellers, tellers)]


def test_a_loop_that_is_closed_is_told_nothing() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    loop.close()
    mailbox.put(asyncio.Queue(), told(0))
