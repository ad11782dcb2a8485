"""One run over the replicas: leases go out, answers come in, replicas come and go. `Roster` says what each has done,
for the manifest and the progress display."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from evalengine.engine.request import Request, RequestOutput
from evalengine.engine.stats import EngineStats, FleetStats
from evalengine.engine.submission import check_requests
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.integrations.ray.pool import Event, Pool
from evalengine.integrations.ray.replica import Orders, ReplicaFacts, ReplicaReport
from evalengine.integrations.ray.work import Holder, Work, lease_size, most_in_hand
from evalengine.plain_text import warn

POLL_SECONDS = 0.25
SAY_SECONDS = 30.0  # between two messages that the run waits
WAIT_SECONDS = 60.0  # to keep a share for replicas that come, at the start; to wait for an audit's replica, at the end


@dataclass
class Member:
    """A replica that joined."""

    facts: ReplicaFacts
    joined: float  # `time.monotonic()`
    stats: EngineStats = field(default_factory=EngineStats)
    leases: int = 0
    lost_leases: int = 0
    answers: int = 0
    audited: int = 0
    lost: str | None = None  # why it was lost

    def book(self, holder: Holder) -> None:
        """Adds what the replica did in one run."""
        for name in ("leases", "lost_leases", "answers", "audited"):
            setattr(self, name, getattr(self, name) + getattr(holder, name))


class Roster:
    """All replicas that ever joined, and those that were refused."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.refused: list[str] = []
        self.failed: list[str] = []  # why replicas were lost before they could join
        self.suspects: dict[str, str] = {}
        self.audited = 0  # requests that two replicas have answered alike
        self.unaudited = 0  # requests to audit that only one replica has answered, for want of another

    def note(self, event: Event) -> None:
        """Notes that a replica joined, was refused or was lost, and says the last two on standard error."""
        if event.kind == "joined":
            assert event.facts is not None
            self.members[event.name] = Member(event.facts, time.monotonic())
        elif event.kind == "refused":
            self.refuse(event.why)
        elif event.kind == "lost":
            why, _, log = event.why.partition("\n")
            member = self.members.get(event.name)
            if member is None:
                self.failed.append(why)
            else:
                member.lost = why
            where = "a replica that was loading" if member is None else member.facts.where
            warn(f"{where} is lost: {why}")
            for line in log.splitlines():
                warn(line, "  | ")

    def refuse(self, why: str) -> None:
        """Notes that a replica is refused, and says a new reason on standard error."""
        if why not in self.refused:
            self.refused.append(why)
            warn(f"a replica is refused: {why}")

    @property
    def stats(self) -> EngineStats:
        """The statistics of all replicas together, lost ones included."""
        total = EngineStats()
        for member in self.members.values():
            total = total.plus(member.stats)
        return total

    def watched(self, holders: dict[str, Holder]) -> FleetStats:
        """The statistics during a run, with a line on each replica that takes part."""
        lines = []
        for name, holder in holders.items():
            member = self.members[name]
            rate = member.stats.num_computed_tokens / max(time.monotonic() - member.joined, 1e-9)
            lines.append(f"{holder.where}: {holder.answers} done, {len(holder.held)} in hand, {rate:,.0f} tokens/s")
        return FleetStats(**asdict(self.stats), lines=tuple(lines))

    def facts(self) -> dict[str, Any]:
        """The manifest's `cluster`, as plain JSON values."""
        return {
            "replicas": [
                {
                    "host": member.facts.host,
                    "device": member.facts.where.removeprefix(f"{member.facts.host} "),
                    **{name: getattr(member, name) for name in ("leases", "lost_leases", "answers", "audited", "lost")},
                    "suspect": self.suspects.get(member.facts.where),
                    "stats": asdict(member.stats),
                }
                for member in self.members.values()
            ],
            "refused": self.refused,
            "audited": self.audited,
            "unaudited": self.unaudited,
        }


class Dispatch:
    """Takes one run's requests from the work to the pool's replicas, and their answers back."""

    def __init__(
        self, pool: Pool, roster: Roster, work: Work, batch: Sequence[Request], run: int, max_num_seqs: int
    ) -> None:
        """run: this run's number among those of the pool. max_num_seqs: requests that fill a replica's engine."""
        self._pool, self._roster, self._work, self._batch = pool, roster, work, batch
        self._run, self._full = run, max_num_seqs
        self._begun = self._idle_since = self._last_message = time.monotonic()
        for name, member in roster.members.items():
            if member.lost is None:
                self._join(name, member.facts)

    def answers(
        self, on_step: Callable[[EngineStats], None] | None, stop: Callable[[], bool]
    ) -> Iterator[RequestOutput]:
        """Yields each answer once it stands, until there are all or `stop()` is true."""
        while not self._work.done and not stop():
            self._hand_out()
            for event in self._pool.poll(POLL_SECONDS):
                yield from self._handle(event)
            for note in self._work.new_notes():
                warn(note)
            if on_step is not None:
                on_step(self._roster.watched(self._work.holders))
            yield from self._without_help()

    def last_answers(self) -> Iterator[RequestOutput]:
        """Lets every replica finish its current step, and yields the answers that still come of it."""
        requested: set[str] = set()
        while True:
            busy = [name for name, holder in self._work.holders.items() if holder.held]
            for name in self._pool.idle():
                if name in busy and name not in requested:
                    requested.add(name)
                    self._pool.order(name, Orders(self._run, seconds=0.0, halt=True))
            idle = {*self._pool.idle()}
            if all(name in requested and name in idle for name in busy):
                return
            for event in self._pool.poll(POLL_SECONDS):
                yield from self._handle(event)

    def book(self) -> None:
        """Enters into the roster what each replica did."""
        for name, holder in self._work.holders.items():
            self._roster.members[name].book(holder)
        self._work.holders.clear()
        self._roster.suspects |= self._work.suspects
        self._roster.audited += self._work.audited
        self._roster.unaudited += self._work.unaudited

    # -- one turn -----------------------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Gives every idle replica enough requests to fill its engine, and collects its finished answers."""
        now, work = time.monotonic(), self._work
        replicas = len(work.holders) + (self._pool.coming if now - self._begun < WAIT_SECONDS else 0)
        for name in self._pool.idle():
            if name not in work.holders:
                continue
            holder, lease = work.holders[name], []
            room = most_in_hand(work.num_left, replicas, self._full) - len(holder.held)
            if room > 0:
                lease = work.take(name, lease_size(work.num_pending, replicas, room), now)
            if not holder.held:
                lease = work.take_over(name, now)
            if holder.held:
                self._pool.order(name, Orders(self._run, lease, POLL_SECONDS))

    def _handle(self, event: Event) -> Iterator[RequestOutput]:
        name = event.name
        if event.report is not None:
            yield from self._take(name, event.report)
            return
        self._roster.note(event)
        if event.kind == "joined" and event.facts is not None:
            self._join(name, event.facts)
        elif name in self._work.holders:
            holder = self._work.holders[name]
            lost = self._work.leave(name)
            self._roster.members[name].book(holder)
            if lost:
                warn(f"the {lost} requests that it was computing are rescheduled")

    def _join(self, name: str, facts: ReplicaFacts) -> None:
        """Lets a replica take part, unless its KV pool is too small for some request of the run."""
        if self._pool.first is not None and facts.engine.limits != self._pool.first.engine.limits:
            try:
                check_requests(self._batch, facts.engine.limits)
            except ConfigError as error:
                self._roster.refuse(f"{facts.where}: {error.problems[0]}")
                return
        self._work.join(name, facts.where)

    def _take(self, name: str, report: ReplicaReport) -> Iterator[RequestOutput]:
        self._roster.members[name].stats = report.stats
        if report.run != self._run or name not in self._work.holders:
            return
        for output in report.outputs:
            standing = self._work.answered(name, output, time.monotonic())
            if standing is not None:
                yield standing

    def _without_help(self) -> Iterator[RequestOutput]:
        """While no replica works: waits for replicas that come, goes on without them, or ends the run."""
        now, work = time.monotonic(), self._work
        if work.done or any(holder.held for holder in work.holders.values()):
            self._idle_since = now
            return
        if not work.holders and now - self._last_message > SAY_SECONDS:
            self._last_message = now
            warn(f"no replica is there; {self._pool.coming} are being placed or read weights")
        if not self._pool.coming or (work.holders and now - self._idle_since > WAIT_SECONDS):
            before, standing = work.unaudited, work.give_up()
            if work.unaudited > before:
                warn(f"{work.unaudited - before} requests that were to be audited are not: no second replica is there")
            yield from standing
            if not standing and not work.done and not work.can_go_on:
                reasons = [member.lost for member in self._roster.members.values() if member.lost]
                reasons += [*self._roster.suspects.values(), *work.suspects.values()]
                raise EvalEngineError(
                    f"no replica is left that could go on ({'; '.join(dict.fromkeys(reasons)) or 'all were refused'}); "
                    "the same command resumes"
                )
