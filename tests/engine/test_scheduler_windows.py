"""Scheduler and block manager of layers with windows, driven as in `test_scheduler`."""

from __future__ import annotations

import pytest

from evalengine.engine.kv_layout import KVGroup
from evalengine.engine.request import GenerateRequest, SamplingParams
from evalengine.engine.schedule.block_manager import WHOLE
from evalengine.engine.schedule.sequence import Sequence
from evalengine.engine.schedule.snapshots import Snapshots
from tests.engine.test_scheduler import Driver, as_sequences


def generation(prompt: list[int], tokens: int) -> list[Sequence]:
    """One generation of so many tokens."""
    return as_sequences([GenerateRequest(0, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))], True)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_a_window_bounds_the_pages_of_a_long_generation(ahead: bool, caching: bool) -> None:
    """Five hundred tokens in pages of 4, where a window of 9 spans at most 4 pages with the step before."""
    windowed = Driver(5, 4, 1, 3, caching, ahead=ahead, groups=(KVGroup(9, 3),)).run(generation([7] * 20, 500))
    assert windowed.most_pages <= 3 * 5 and windowed.scheduler.num_preemptions == 0
    both = (KVGroup(), KVGroup(9, 3))
    mixed = Driver(140, 4, 1, 3, caching, ahead=ahead, groups=both).run(generation([7] * 20, 500))
    assert mixed.most_pages <= 130 + 3 * 5
    assert Driver(140, 4, 1, 3, caching, ahead=ahead, groups=WHOLE).run(generation([7] * 20, 500)).most_pages == 130


def test_a_prefix_is_found_where_each_group_has_what_it_sees() -> None:
    """A window needs the last pages of a prefix alone, and without them the prefix is as good as unknown."""
    prompt = [i % 50 for i in range(40)]
    driver = Driver(100, 4, 1, 100, True, groups=(KVGroup(), KVGroup(9, 1)))
    driver.run(as_sequences([GenerateRequest(0, [*prompt, 90], SamplingParams(max_tokens=1))], True))
    windowed = driver.manager.indexes[1]
    pages = sorted((b for b in windowed.by_hash.values()), key=lambda block: block.pages)
    assert len(pages) == 10

    def cached(forgotten: list[int]) -> int:
        """How many tokens a prompt that goes on otherwise finds, once the windowed layers lost these pages."""
        known = dict(windowed.by_hash)
        for page in forgotten:
            del windowed.by_hash[pages[page].hash]
        hit = driver.manager._match(as_sequences([GenerateRequest(1, [*prompt, 91, 92])], True)[0])
        windowed.by_hash.update(known)
        assert len(hit.shared[0]) == hit.num_blocks and len(hit.shared[1]) <= 3
        return hit.num_blocks

    assert cached([]) == 10
    assert cached([0, 1, 5, 7]) == 10, "no query after them sees these"
    assert cached([8]) == 8, "the queries after page 9 and the one before it see page 8"
    assert cached([1, 4, 7, 9]) == 7, "pages 5 and 6 are the last two of a prefix that pages 1 and 4 are not seen from"
    driver.manager.snapshots = Snapshots(range(2))  # as if there were recurrent layers, too
    (seq,) = generation(prompt, 1)
    for end in (24, 32):
        driver.manager.snapshots.new_slot(driver.manager.prefix(seq, end))
    assert cached([]) == 8 and cached([0, 9]) == 8, "the last prefix with a state"
    assert cached([6]) == 6, "the windowed layers lack what is seen from the other's end"


def test_blocks_before_a_window_are_found_again_by_another_sequence() -> None:
    """A sequence that went on for long has given its prompt's pages back; they serve the next one with that prompt."""
    prompt = [i % 50 for i in range(40)]
    first, second = (GenerateRequest(i, [*prompt, 90 + i], SamplingParams(max_tokens=60)) for i in range(2))
    sequences = as_sequences([first, second], True)
    Driver(60, 4, 1, 100, True, groups=(KVGroup(), KVGroup(9, 2))).run(sequences)
    assert sequences[1].num_cached_tokens == 40
