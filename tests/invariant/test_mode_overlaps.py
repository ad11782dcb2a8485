"""The mode in overlapping blocks of threads and asyncio tasks, in blocks entered again, and as a decorator."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import permutations

import pytest
import torch

from evalengine.errors import ConfigError
from evalengine.invariant import is_batch_invariant_mode, mode, set_batch_invariant_mode
from tests.random_tensors import randn

A, B = randn(64, 900), randn(900, 64, seed=1)
STOCK = torch.mm(A, B)


def is_on() -> bool:
    """Whether the overrides are live, by the bits of a product that stock torch rounds differently."""
    on = not torch.equal(torch.mm(A, B), STOCK)
    assert on == is_batch_invariant_mode()
    return on


@pytest.fixture(autouse=True)
def _off(collected: None) -> Iterator[None]:
    assert not is_on()
    yield
    set_batch_invariant_mode(False)
    gc.collect()
    assert not is_on() and not any(setting.is_block for setting in mode._settings)


def in_thread(function: Callable[[], object]) -> object:
    """The function's result in a new thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_threads_leave_in_any_order(order: tuple[int, ...]) -> None:
    inside, may_leave = threading.Barrier(4), [threading.Event() for _ in range(3)]
    last_results: list[bool] = []

    def block(at: int) -> None:
        with set_batch_invariant_mode():
            inside.wait(60)
            assert may_leave[at].wait(60)
            last_results.append(is_on())

    with ThreadPoolExecutor(3) as pool:
        blocks = [pool.submit(block, at) for at in range(3)]
        inside.wait(60)
        for at in order:
            assert is_on()
            may_leave[at].set()
            blocks[at].result()
    assert last_results == [True] * 3 and not is_on()


def test_tasks_leave_in_any_order() -> None:
    async def block(own: asyncio.Event, other: asyncio.Event) -> bool:
        with set_batch_invariant_mode():
            own.set()
            await other.wait()
            return is_on()

    async def main() -> list[bool]:
        first, second, last = (asyncio.Event() for _ in range(3))
        early, late = asyncio.create_task(block(first, second)), asyncio.create_task(block(second, last))
        results = [await early, is_on()]
        last.set()
        return [*results, await late]

    assert asyncio.run(main()) == [True] * 3 and not is_on()


@pytest.mark.parametrize("is_shared", [False, True])
def test_many_threads_enter_and_leave(is_shared: bool) -> None:
    """Each with objects of its own, or all with one."""

    def block(seed: int, common: set_batch_invariant_mode | None) -> int:
        chosen, wrong = random.Random(seed), 0
        for _ in range(60):
            with common or set_batch_invariant_mode(keep_weights=chosen.random() < 0.5):
                time.sleep(chosen.random() / 1000)  # so that blocks do overlap
                wrong += not is_on()
                if chosen.random() < 0.5:
                    with set_batch_invariant_mode():
                        wrong += not is_on()
                wrong += not is_on()
        return wrong

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(block, range(4), [set_batch_invariant_mode() if is_shared else None] * 4)) == 0
    assert not is_on()


def test_objects_that_are_made_before_one_of_them_is_entered() -> None:
    """Making the object turns the mode on, as a plain call; each `with` takes back its own call only."""
    for order in permutations(range(3)):
        blocks = [set_batch_invariant_mode() for _ in range(3)]
        for block in blocks:
            block.__enter__()
        for at in order:
            assert is_on()
            blocks[at].__exit__()
        assert not is_on()


def test_an_object_is_entered_again() -> None:
    block = set_batch_invariant_mode()
    assert is_on()  # It is a plain call so far.
    for _ in range(2):
        with block:
            assert is_on()
            with set_batch_invariant_mode(False):
                with block:
                    assert is_on()
                assert not is_on()
            assert is_on()
        assert not is_on()


def test_a_block_left_by_a_different_thread() -> None:
    def results() -> Generator[bool]:
        with set_batch_invariant_mode():
            yield is_on()

    generator = results()
    assert in_thread(partial(next, generator)) and is_on()
    generator.close()
    assert not is_on()


def test_plain_calls_inside_a_block_end_with_it() -> None:
    set_batch_invariant_mode(True)
    with set_batch_invariant_mode(False):
        set_batch_invariant_mode(True)
        assert is_on()
        set_batch_invariant_mode(False, weight_cache_bytes=5)
        assert not is_on() and mode._weights.limit == 5
    assert is_on() and mode._weights.limit == mode.DEFAULT_LIMIT
    in_thread(partial(set_batch_invariant_mode, False))
    assert not is_on()  # No block is active, so any thread may turn it off.


def test_plain_calls_do_not_pile_up() -> None:
    def call() -> None:
        for number in range(100):
            set_batch_invariant_mode(False, weight_cache_bytes=7 if number == 50 else None)

    call()
    held = set_batch_invariant_mode(False)
    call()
    with set_batch_invariant_mode(False):
        call()
        in_thread(call)
        assert mode._weights.limit == 7 and len(mode._settings) < 20
    call()
    assert mode._weights.limit == 7 and len(mode._settings) < 10
    del held
    set_batch_invariant_mode(False, weight_cache_bytes=mode.DEFAULT_LIMIT)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (partial(set_batch_invariant_mode), partial(set_batch_invariant_mode, False)),
        (partial(set_batch_invariant_mode, False), partial(set_batch_invariant_mode)),
        (
            partial(set_batch_invariant_mode, weight_cache_bytes=5),
            partial(set_batch_invariant_mode, weight_cache_bytes=6),
        ),
    ],
)
def test_overlapping_blocks_with_different_settings(outer: Callable[[], object], inner: Callable[[], object]) -> None:
    """One thread may nest them; a different thread or task may not change the mode under a block."""

    def enter() -> None:
        with inner():  # type: ignore[attr-defined]
            pytest.fail("entered")

    async def main() -> None:
        with outer():  # type: ignore[attr-defined]
            await asyncio.create_task(enter_in_task())

    async def enter_in_task() -> None:
        enter()

    message = r"set_batch_invariant_mode\(.*: a different thread .* is inside set_batch_invariant_mode\(.*same settings"
    with outer():  # type: ignore[attr-defined]
        before = is_on(), mode._weights.limit
        for attempt in (enter, inner):
            with pytest.raises(ConfigError, match=message):
                in_thread(attempt)
            assert (is_on(), mode._weights.limit) == before
        with inner():  # type: ignore[attr-defined]
            with pytest.raises(ConfigError, match=message):  # Neither of the two would be right.
                in_thread(inner)
            with pytest.raises(ConfigError, match=message):
                in_thread(outer)
        assert (is_on(), mode._weights.limit) == before
    with pytest.raises(ConfigError, match=message):
        asyncio.run(main())


def test_a_decorated_function_runs_in_the_mode() -> None:
    class Model:
        @set_batch_invariant_mode()
        def forward(self, depth: int) -> list[bool]:
            """The docstring."""
            return [is_on(), *(self.forward(depth - 1) if depth else [])]

        @staticmethod
        @set_batch_invariant_mode(False)
        def outside() -> bool:
            return is_on()

    @set_batch_invariant_mode()
    def fail() -> None:
        assert is_on() and not Model.outside() and is_on()
        raise KeyError

    assert not is_on() and Model.forward.__doc__ == "The docstring."
    for _ in range(2):
        assert Model().forward(2) == [True] * 3 and not is_on()
        with pytest.raises(KeyError):
            fail()
        assert not is_on()
    with set_batch_invariant_mode():
        assert not Model.outside() and is_on()


def test_a_decorated_coroutine_function_runs_in_the_mode() -> None:
    async def main() -> list[bool]:
        entered = asyncio.Event()

        @set_batch_invariant_mode()
        async def compute(waits: bool) -> bool:
            await entered.wait() if waits else entered.set()
            return is_on()

        both = await asyncio.gather(compute(True), compute(False))
        return [*both, is_on()]

    assert asyncio.run(main()) == [True, True, False]


def test_what_cannot_be_decorated() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    for wrong, message in (
        (generator, "generator function: its callers"),
        (async_generator, "generator function: its callers"),
        (torch.nn.Linear, "of a class decorate the methods"),
        (classmethod(generator), "below @staticmethod"),
        (staticmethod(is_on), "below @staticmethod"),
        (None, "decorate a function"),
    ):
        with pytest.raises(ConfigError, match=message):
            set_batch_invariant_mode()(wrong)  # type: ignore[type-var]
        assert not is_on()
    with pytest.raises(ConfigError, match="a decorator needs parentheses"):
        set_batch_invariant_mode(is_on)  # type: ignore[arg-type]
    assert not is_on()


def test_a_decorated_function_cannot_be_compiled() -> None:
    torch._dynamo.reset()
    with pytest.raises(ConfigError, match="enter it outside the compiled function"):
        torch.compile(set_batch_invariant_mode()(lambda x: x @ x.t()), backend="eager")(A)


def test_a_block_that_the_garbage_collector_ends_while_the_mode_is_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended generator may be collected anywhere, also where this thread has half installed the overrides."""

    def results() -> Generator[bool]:
        with set_batch_invariant_mode():
            yield is_on()

    install, suspended = mode._install, [results()]

    def collect_and_install() -> object:
        while suspended:
            suspended.pop().close()
        return install()

    assert next(suspended[0])
    with set_batch_invariant_mode(False):
        monkeypatch.setattr(mode, "_install", collect_and_install)
        with set_batch_invariant_mode():
            assert is_on() and not suspended
        assert not is_on()
    assert not is_on()


def test_a_failed_installation_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(mode, "_devices", fail)
        with pytest.raises(MemoryError):
            set_batch_invariant_mode()
    assert not is_on()
    with set_batch_invariant_mode():
        assert is_on()
    assert not is_on()
