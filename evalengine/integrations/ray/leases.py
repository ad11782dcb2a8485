"""How a run's requests are divided: those that share a prefix stay together, and the longest go first."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evalengine.engine.request import GenerateRequest, Request


@dataclass(frozen=True)
class LeaseUnit:
    """Requests that one replica answers: one generation, or all scores after one context, which is computed once."""

    requests: tuple[Request, ...]
    cost: int  # the most tokens that it takes


def cost(request: Request) -> int:
    """Tokens that the request takes at most: its prompt's, and those that it generates or scores."""
    if isinstance(request, GenerateRequest):
        return len(request.prompt_ids) + request.params.max_tokens
    return len(request.context_ids) + len(request.continuation_ids)


def in_lease_order(requests: Iterable[Request], page: int) -> list[LeaseUnit]:
    """The units in the order in which they are handed out.

    Units that begin with the same pages of `page` tokens stand together, so that a lease, which is cut from this order,
    holds what a prefix cache can share; groups of them stand by their longest member, the longest first, and so do the
    units of a group: a run whose last lease is a long one waits for it.
    """
    units = _units(requests)
    chains = [_page_chain(unit.requests[0].prompt_ids, page) for unit in units]
    members = Counter(prefix for chain in chains for prefix in chain)
    wide, narrow = [], []  # a unit's group by its first page, and by all pages that it shares with another
    for place, chain in enumerate(chains):
        shared = [prefix for prefix in chain if members[prefix] > 1]
        wide.append(shared[0] if shared else -1 - place)
        narrow.append(shared[-1] if shared else -1 - place)
    rank = _ranks(units, wide), _ranks(units, narrow)
    places = sorted(range(len(units)), key=lambda i: (rank[0][wide[i]], rank[1][narrow[i]], -units[i].cost, i))
    return [units[place] for place in places]


class Unleased:
    """The units that no replica has been given yet."""

    def __init__(self, units: Sequence[LeaseUnit]) -> None:
        self._units = deque(units)
        self.num_requests = sum(len(unit.requests) for unit in units)

    def __bool__(self) -> bool:
        return bool(self._units)

    def take(self, most: int) -> list[Request]:
        """The next lease: `most` requests, or as many more as its last unit has."""
        lease: list[Request] = []
        while self._units and len(lease) < most:
            lease += self._units.popleft().requests
        self.num_requests -= len(lease)
        return lease


def lease_size(pending: int, replicas: int, most: int) -> int:
    """Requests of the next lease: a share of what is left that shrinks with it, so that all replicas end together
    (guided self-scheduling, Polychronopoulos and Kuck 1987; half of an equal share, as requests are not alike)."""
    return max(1, min(most, -(-pending // (2 * max(1, replicas)))))


def most_in_hand(left: int, replicas: int, most: int) -> int:
    """Requests that one replica may have in hand at once: an equal share of what is left, at most what fills its
    engine. A replica that comes a little later then finds its own share."""
    return min(most, -(-left // max(1, replicas)))


def _units(requests: Iterable[Request]) -> list[LeaseUnit]:
    contexts: dict[tuple[int, ...], list[Request]] = {}
    groups: list[list[Request]] = []
    for request in requests:
        if isinstance(request, GenerateRequest):
            groups.append([request])
            continue
        group = contexts.setdefault(tuple(request.context_ids), [])
        if not group:
            groups.append(group)
        group.append(request)
    return [LeaseUnit(tuple(group), sum(map(cost, group))) for group in groups]


def _page_chain(ids: list[int], page: int) -> list[int]:
    """A non-negative number for each prefix of whole pages; equal prefixes have equal ones."""
    chain: list[int] = []
    for start in range(0, len(ids) - page + 1, page):
        chain.append(hash((chain[-1] if chain else 0, *ids[start : start + page])) & (1 << 62) - 1)
    return chain


def _ranks(units: Sequence[LeaseUnit], groups: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Each group's sort key: the longest unit first; among groups with equally long units, the earlier group."""
    longest: dict[int, int] = {}
    first: dict[int, int] = {}
    for place, (unit, group) in enumerate(zip(units, groups, strict=True)):
        longest[group] = max(longest.get(group, 0), unit.cost)
        first.setdefault(group, place)
    return {group: (-longest[group], first[group]) for group in longest}
