"""The replicas that take part, and what each has done: for the manifest and the progress display."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from evalengine.engine.stats import EngineStats, FleetStats
from evalengine.integrations.ray.pool import Event
from evalengine.integrations.ray.replica import ReplicaFacts
from evalengine.integrations.ray.work import Holder
from evalengine.plain_text import warn


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
