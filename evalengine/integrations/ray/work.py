"""Assignment of requests to replicas, until every answer is final. Pure: no Ray, no clock.

Requests that share a prefix stay together, and the longest go first (`in_lease_order`).
An answer is final at once, unless the request is audited or the answer is an error: then a second replica answers the
request, too. Requests of a lost replica are sent again; those of a slow one are sent to an idle one as well, and the
first answer counts.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from evalengine.engine.difference import difference
from evalengine.engine.request import GenerateRequest, Request, RequestOutput
from evalengine.errors import EvalEngineError, ReplicaMismatchError

MAX_LOSSES = 3  # replicas that may be lost with a request in hand before the run gives it up
# A request is late, and is also sent to an idle replica, after PATIENCE times the longest that another replica took for
# one, and LEAST_PATIENCE seconds more; after BLIND_PATIENCE seconds while no other replica has answered anything.
PATIENCE, LEAST_PATIENCE, BLIND_PATIENCE = 1.5, 1.0, 60.0


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


def sample(request_ids: Iterable[int], share: float, seed: int) -> set[int]:
    """The requests that are audited: each with probability `share`, by a hash of seed and number; at least one."""
    if share <= 0:
        return set()
    draws = {number: _draw(number, seed) for number in request_ids}
    chosen = {number for number, draw in draws.items() if draw < share}
    return chosen or set(sorted(draws, key=draws.__getitem__)[:1])


def _draw(number: int, seed: int) -> float:
    """Uniform in [0, 1)."""
    return int.from_bytes(hashlib.sha256(f"audit {seed} {number}".encode()).digest()[:7], "big") / 2**56


@dataclass
class Holder:
    """A replica, with the requests that it has in hand and counts of what it did."""

    where: str  # host and device; answers from one place count once in an audit
    held: dict[int, float] = field(default_factory=dict)  # request -> when the replica got it
    answers: int = 0
    leases: int = 0
    lost_leases: int = 0
    audited: int = 0  # requests that it answered and another did, too
    longest: float = 0.0  # seconds that the slowest answer took
    lease_of: dict[int, int] = field(default_factory=dict)  # request held -> number of its lease


@dataclass
class _Item:
    request: Request
    audited: bool = False
    answers: list[tuple[str, RequestOutput]] = field(default_factory=list)  # (where, output)
    losses: int = 0
    settled: bool = False


class Work:
    """The requests of one run. Replicas go by their names."""

    def __init__(self, requests: Sequence[Request], page: int, audited: Collection[int] = ()) -> None:
        """page: tokens of a page of the prefix cache. audited: the numbers of requests that two must answer."""
        self._items = {request.request_id: _Item(request) for request in requests}
        for number in audited:
            self._items[number].audited = True
        self._pending = Unleased(in_lease_order(requests, page))
        self._again: dict[int, None] = {}  # requests that need one more replica, in order
        self._left = len(self._items)
        self._answered_by: dict[int, list[str]] = {}  # request -> where its answer was computed
        self.holders: dict[str, Holder] = {}
        self.notes: list[str] = []  # messages for the user since the last `new_notes`
        self.suspects: dict[str, str] = {}  # where -> why nothing more is sent there
        self.audited = 0  # requests that two replicas have answered alike
        self.unaudited = 0  # requests to audit for which no second replica was left

    @property
    def done(self) -> bool:
        return self._left == 0

    @property
    def num_left(self) -> int:
        """Requests without an answer that stands."""
        return self._left

    @property
    def num_pending(self) -> int:
        """Requests that no replica has been given yet."""
        return self._pending.num_requests

    @property
    def can_go_on(self) -> bool:
        """Whether a replica that is here may be given a request."""
        free = any(holder.where not in self.suspects for holder in self.holders.values())
        return (free and bool(self._pending)) or any(self._eligible(self._items[number]) for number in self._again)

    def join(self, name: str, where: str) -> None:
        """Adds a replica, unless it is there already."""
        self.holders.setdefault(name, Holder(where))

    def take(self, name: str, most: int, now: float) -> list[Request]:
        """A lease for a replica: about `most` requests; none if there is nothing that it may answer."""
        holder = self.holders[name]
        if holder.where in self.suspects:
            return []
        lease: list[Request] = []
        for number in [*self._again]:
            if len(lease) < most and name in self._eligible(self._items[number]):
                del self._again[number]
                lease.append(self._items[number].request)
        if len(lease) < most:
            lease += self._pending.take(most - len(lease))
        return self._hand(holder, lease, now)

    def take_over(self, name: str, now: float) -> list[Request]:
        """Gives an idle replica what others have had for too long. They may still answer; the first answer counts."""
        holder = self.holders[name]
        late = []
        for other in self.holders.values():
            if other is not holder:
                patience = self._patience(other)
                old = [number for number, since in other.held.items() if now - since > patience]
                late += [number for number in old if not self._items[number].settled]
        shared = {number for number in late if sum(number in other.held for other in self.holders.values()) > 1}
        own = [number for number in late if number not in shared and name in self._eligible(self._items[number])]
        return self._hand(holder, [self._items[number].request for number in own], now)

    def answered(self, name: str, output: RequestOutput, now: float) -> RequestOutput | None:
        """Takes a replica's answer; returns the answer that stands, once one does.

        Raises ReplicaMismatchError if two answers differ that must be equal.
        """
        holder, number = self.holders[name], output.request_id
        if (since := holder.held.pop(number, None)) is None:
            return None
        holder.lease_of.pop(number)
        holder.longest = max(holder.longest, now - since)
        holder.answers += 1
        item = self._items[number]
        if item.settled or any(where == holder.where for where, _ in item.answers):
            return None
        request = item.request
        item.answers.append((holder.where, replace(output, prompt_ids=request.prompt_ids)))
        return self._consider(number)

    def leave(self, name: str) -> int:
        """Removes a lost replica; returns how many requests it had in hand.

        Raises EvalEngineError for a request that too many replicas were lost with.
        """
        holder = self.holders.pop(name)
        holder.lost_leases += len({*holder.lease_of.values()})
        lost = [number for number in holder.held if not self._items[number].settled]
        for number in lost:
            item = self._items[number]
            item.losses += 1
            if item.losses > MAX_LOSSES:
                raise EvalEngineError(
                    f"{item.losses} replicas were lost while they had the same requests in hand (number {number} is "
                    f"one), the last on {holder.where}: see their logs; the same command resumes"
                )
            if not any(number in other.held for other in self.holders.values()):
                self._again[number] = None
        return len(lost)

    def give_up(self) -> list[RequestOutput]:
        """Settles requests that wait for a replica that will not come."""
        standing = []
        for number in [*self._again]:
            item = self._items[number]
            if item.answers and not self._eligible(item):
                del self._again[number]
                self.unaudited += not item.answers[0][1].error
                standing.append(self._settle(number, item, *item.answers[0]))
        return standing

    def new_notes(self) -> list[str]:
        """The messages since the last call."""
        notes, self.notes = self.notes, []
        return notes

    # -- one request --------------------------------------------------------------------------------------------------

    def _consider(self, number: int) -> RequestOutput | None:
        """Returns the final answer; if there is none, has another replica compute it."""
        item = self._items[number]
        where, output = item.answers[0]
        if len(item.answers) == 2:
            return self._compared(number, item)
        if not item.audited and not (output.error and self._eligible(item)):
            return self._settle(number, item, where, output)
        if not any(number in holder.held for holder in self._others(item)):
            self._again[number] = None
        return None

    def _compared(self, number: int, item: _Item) -> RequestOutput:
        """Returns which of two answers stands. Raises ReplicaMismatchError if they differ."""
        (where, output), (other_where, other) = item.answers
        if not output.error and not other.error:
            if found := difference(output.answer, other, f"on {where}", f"on {other_where}"):
                raise self._doubt(item, found)
            self.audited += 1
            for holder in self.holders.values():
                holder.audited += holder.where in (where, other_where)
        elif output.error and not other.error:
            self._suspect(item.answers[0], other_where)
            where, output = other_where, other
        elif other.error and not output.error:
            self._suspect(item.answers[1], where)
        return self._settle(number, item, where, output)

    def _settle(self, number: int, item: _Item, where: str, output: RequestOutput) -> RequestOutput:
        item.settled = True
        self._left -= 1
        self._again.pop(number, None)
        self._answered_by[number] = [place for place, _ in item.answers]
        item.answers = [(where, output)]
        return output

    def _suspect(self, failed: tuple[str, RequestOutput], witness: str) -> None:
        """Gives no more work to a machine that alone failed a request; others get what it has in hand."""
        where, output = failed
        if where in self.suspects:
            return
        answered = sum(where in places for places in self._answered_by.values())
        self.suspects[where] = f"{output.error}; not so on {witness}"
        self.notes.append(
            f"{where} is suspect: a request failed there and not on {witness} ({output.error}). It gets no more "
            f"requests; {answered} answers of its stand (resume=never with cluster.audit=1 checks every one)"
        )
        for holder in self.holders.values():
            if holder.where == where:
                self._again |= {number: None for number in holder.held if not self._items[number].settled}
                holder.held.clear()
                holder.lease_of.clear()

    def _doubt(self, item: _Item, found: str) -> ReplicaMismatchError:
        """The error for two answers that differ. found: the first difference."""
        places = [where for where, _ in item.answers]
        numbers = [number for number, answered in self._answered_by.items() if {*places} & {*answered}]
        return ReplicaMismatchError(
            f"{' and '.join(places)} computed different bits: {found}; at least one of them is wrong, so check both; "
            f"{len(numbers)} answers from there are taken back, and the same command resumes",
            item.request.request_id,
            numbers,
        )

    def _eligible(self, item: _Item) -> set[str]:
        """Candidate replicas: those that have not answered the item, do not hold it, and are not suspect."""
        number, answered_at = item.request.request_id, {where for where, _ in item.answers}
        return {
            name
            for name, holder in self.holders.items()
            if holder.where not in answered_at and number not in holder.held and holder.where not in self.suspects
        }

    def _others(self, item: _Item) -> list[Holder]:
        """Replicas that have not answered the item."""
        answered_at = {where for where, _ in item.answers}
        return [holder for holder in self.holders.values() if holder.where not in answered_at]

    def _patience(self, holder: Holder) -> float:
        """Seconds after which a request that a replica holds is late, by how long the others take."""
        longest = max((other.longest for other in self.holders.values() if other is not holder), default=0.0)
        return PATIENCE * longest + LEAST_PATIENCE if longest else BLIND_PATIENCE

    def _hand(self, holder: Holder, lease: list[Request], now: float) -> list[Request]:
        if lease:
            holder.leases += 1
            holder.held |= dict.fromkeys([request.request_id for request in lease], now)
            holder.lease_of |= dict.fromkeys([request.request_id for request in lease], holder.leases)
        return lease
