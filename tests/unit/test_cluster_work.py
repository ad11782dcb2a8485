"""Which replica is asked which request, without Ray: leases, second answers, lost and slow replicas."""

from __future__ import annotations

import numpy as np
import pytest

from evalengine.engine.difference import difference
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, SamplingParams, ScoreRequest
from evalengine.errors import EvalEngineError, ReplicaMismatchError
from evalengine.integrations.ray.work import (
    BLIND_PATIENCE,
    MAX_LOSSES,
    Unleased,
    Work,
    in_lease_order,
    lease_size,
    most_in_hand,
    sample,
)

PAGE = 4


def generate(number: int, prompt: list[int], most: int = 8) -> GenerateRequest:
    return GenerateRequest(number, prompt, SamplingParams(max_tokens=most))


def answer(number: int, logprobs: tuple[float, ...] = (-1.0, -2.0), error: str | None = None) -> RequestOutput:
    """A replica's answer with these logprobs, or with this error."""
    ids = list(range(len(logprobs)))
    return RequestOutput(number, [], ids, np.array(logprobs, dtype=np.float32), "length", error=error)


def work_of(count: int, *replicas: str, audited: tuple[int, ...] = ()) -> Work:
    """Work of `count` requests, joined by these replicas."""
    work = Work([generate(number, [number]) for number in range(count)], PAGE, audited)
    for name in replicas:
        work.join(name, f"host {name}")
    return work


def numbers(requests: list[Request]) -> list[int]:
    return [request.request_id for request in requests]


def test_what_shares_a_prefix_stands_together_and_the_longest_first() -> None:
    a, b = [1] * PAGE, [2] * PAGE
    requests = [
        generate(0, [*a, 5]),
        generate(1, [*b, 5], 30),
        generate(2, [7], 9),
        generate(3, [*a, 6], 90),
        generate(4, [*b, 7]),
    ]
    order = [request.request_id for unit in in_lease_order(requests, PAGE) for request in unit.requests]
    assert order == [3, 0, 1, 4, 2]


def test_scores_of_one_context_are_never_parted() -> None:
    requests = [ScoreRequest(number, [number % 3], [1, number]) for number in range(9)]
    pending = Unleased(in_lease_order(requests, PAGE))
    leases = []
    while pending:
        leases.append(numbers(pending.take(1)))
    assert sorted(map(sorted, leases)) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert pending.num_requests == 0


def test_leases_shrink_towards_the_end() -> None:
    left, sizes = 1000, []
    while left:
        sizes.append(lease_size(left, 4, 100))
        left -= sizes[-1]
    assert sizes[0] == 100 and sizes[-1] == 1 and sizes == sorted(sizes, reverse=True)


def test_a_replica_leaves_a_share_to_replicas_that_join_later() -> None:
    assert most_in_hand(100, 4, 256) == 25 and most_in_hand(100, 4, 8) == 8
    assert most_in_hand(3, 4, 8) == 1 and most_in_hand(3, 0, 8) == 3


def test_every_request_is_answered_once() -> None:
    work, taken = work_of(20, "a", "b"), []
    while not work.done:
        for name in ("a", "b"):
            for request in work.take(name, 3, 0.0):
                taken.append(request.request_id)
                standing = work.answered(name, answer(request.request_id), 1.0)
                assert standing is not None and standing.prompt_ids == [request.request_id]
    assert sorted(taken) == list(range(20))
    assert work.answered("a", answer(0), 1.0) is None, "an answer that nobody waits for"


def test_what_a_lost_replica_had_is_asked_again() -> None:
    work = work_of(4, "a", "b")
    lost = numbers(work.take("a", 3, 0.0))
    holder = work.holders["a"]
    assert work.leave("a") == 3 and holder.lost_leases == 1
    assert numbers(work.take("b", 3, 0.0)) == lost
    for number in lost:
        assert work.answered("b", answer(number), 1.0) is not None


def test_a_request_that_replicas_die_of_ends_the_run() -> None:
    work = work_of(1)
    for number in range(MAX_LOSSES + 1):
        work.join(f"r{number}", f"host {number}")
        assert numbers(work.take(f"r{number}", 1, 0.0)) == [0]
        if number == MAX_LOSSES:
            with pytest.raises(EvalEngineError, match="4 replicas were lost while they had the same requests"):
                work.leave(f"r{number}")
        else:
            work.leave(f"r{number}")


def test_a_slow_replica_is_overtaken() -> None:
    work = work_of(4, "slow", "quick")
    late = numbers(work.take("slow", 2, 0.0))
    for request in work.take("quick", 2, 0.0):
        work.answered("quick", answer(request.request_id), 2.0)
    assert work.take_over("quick", 3.9) == [], "patience is 1.5 times what the others took, and a second"
    assert numbers(work.take_over("quick", 4.1)) == late
    assert work.take_over("quick", 9.0) == [], "it has them already"
    assert work.answered("quick", answer(late[0]), 5.0) is not None
    assert work.answered("slow", answer(late[0]), 6.0) is None
    assert work.answered("slow", answer(late[1]), 6.0) is not None and work.done


def test_an_answered_request_is_asked_of_nobody_though_a_slow_replica_still_has_it() -> None:
    work = work_of(4, "slow", "quick", "third")
    late = numbers(work.take("slow", 2, 0.0))
    for request in work.take("quick", 2, 0.0):
        work.answered("quick", answer(request.request_id), 1.0)
    assert numbers(work.take_over("quick", 9.0)) == late
    work.answered("quick", answer(late[0]), 10.0)
    assert work.take_over("third", 99.0) == [], "the one is answered, the other two replicas have"
    work.answered("quick", answer(late[1]), 10.0)
    assert work.done and work.take_over("third", 99.0) == []


def test_nobody_is_overtaken_while_nothing_is_known() -> None:
    work = work_of(2, "a", "b")
    held = numbers(work.take("a", 2, 0.0))
    assert work.take_over("b", BLIND_PATIENCE) == [] and numbers(work.take_over("b", BLIND_PATIENCE + 1)) == held


def test_an_audited_request_stands_once_two_agree() -> None:
    work = work_of(2, "a", "b", audited=(1,))
    work.take("a", 2, 0.0)
    assert work.answered("a", answer(0), 1.0) is not None
    assert work.answered("a", answer(1), 1.0) is None
    assert work.take("a", 2, 1.0) == [], "not the one who answered"
    assert numbers(work.take("b", 2, 1.0)) == [1]
    assert work.answered("b", answer(1), 2.0) is not None and work.done
    assert [holder.audited for holder in work.holders.values()] == [1, 1]


def test_two_processes_of_one_device_are_one_witness() -> None:
    work = work_of(1, audited=(0,))
    for name in ("a", "a again"):
        work.join(name, "host GPU 0")
    work.take("a", 1, 0.0)
    work.answered("a", answer(0), 1.0)
    assert work.take("a again", 1, 1.0) == [] and not work.can_go_on
    assert len(work.give_up()) == 1 and work.done and work.unaudited == 1


def test_a_difference_names_both_replicas() -> None:
    """And takes back what either of them answered."""
    work = work_of(4, "a", "b", "c", audited=(1,))
    for name, count in (("a", 2), ("c", 1), ("b", 2)):
        work.take(name, count, 0.0)
    work.answered("a", answer(0), 1.0)
    work.answered("c", answer(2), 1.0)
    assert work.answered("a", answer(1), 1.0) is None
    work.answered("b", answer(3), 1.0)
    assert numbers(work.take("b", 1, 1.0)) == [1]
    with pytest.raises(ReplicaMismatchError) as caught:
        work.answered("b", answer(1, (-1.0, -2.5)), 2.0)
    bits_of_both = "is -2.0 (0xc0000000) on host a and -2.5 (0xc0200000) on host b"
    found = f"host a and host b computed different bits: the logprob of token 1 (id 1) {bits_of_both}; at least one of"
    assert found in str(caught.value) and "2 answers from there" in str(caught.value)
    assert caught.value.request_id == 1 and caught.value.doubted == [0, 3]


def test_a_failure_on_one_replica_makes_it_suspect() -> None:
    work = work_of(3, "a", "b")
    work.take("a", 2, 0.0)
    assert work.answered("a", answer(0, error="nan"), 1.0) is None
    assert 0 in numbers(work.take("b", 1, 1.0))
    standing = work.answered("b", answer(0), 2.0)
    assert standing is not None and standing.error is None
    assert work.take("a", 3, 2.0) == [] and "host a is suspect" in work.new_notes()[0]
    assert sorted(numbers(work.take("b", 3, 2.0))) == [1, 2], "what the suspect had in hand, too"


def test_a_failure_on_all_is_the_requests_own() -> None:
    work = work_of(1, "a", "b")
    for name in ("a", "b"):
        work.take(name, 1, 0.0)
        standing = work.answered(name, answer(0, error=f"nan on {name}"), 1.0)
    assert standing is not None and standing.error == "nan on a" and not work.suspects


def test_a_failure_without_another_replica_stands() -> None:
    work = work_of(1, "a")
    work.take("a", 1, 0.0)
    standing = work.answered("a", answer(0, error="nan"), 1.0)
    assert standing is not None and standing.error == "nan" and work.done


def test_the_sample_is_seeded_and_of_its_share() -> None:
    chosen = sample(range(10_000), 0.02, seed=3)
    assert chosen == sample(reversed(range(10_000)), 0.02, seed=3) != sample(range(10_000), 0.02, seed=4)
    assert 150 < len(chosen) < 250
    assert (
        len(sample(range(5), 1e-9, 0)) == 1 and sample(range(5), 0.0, 0) == set() and len(sample(range(5), 1, 0)) == 5
    )


def test_a_difference_is_found_in_any_field() -> None:
    original = answer(0, (-1.0, 0.0)).answer
    assert difference(original, answer(0, (-1.0, 0.0)), "here") is None
    assert difference(original, answer(0, (-1.0, -0.0)), "here"), "zeros of unlike signs are unlike bits"
    assert difference(original, answer(0, (-1.0,)), "here"), "only one goes on"
    other = answer(0, (-1.0, 0.0))
    other.text = "x"
    assert difference(original, other, "here")
