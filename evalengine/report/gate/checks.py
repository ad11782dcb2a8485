"""One verdict of a gate's rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from evalengine.errors import first_of
from evalengine.report.read.run import Key

SHOWN = 5  # requests or documents named in a check's details
# undecided: could not see the loss that the policy names. excused: not passed, but another rule of an any_of decides
Status = Literal["pass", "fail", "undecided", "skip", "excused"]
DECIDED: tuple[Status, ...] = ("pass", "fail", "undecided")  # the statuses of what was judged


@dataclass(frozen=True)
class Check:
    """One verdict. Texts are plain, and may hold what a model or a task's author wrote: escape them."""

    rule: str  # digest | tokens | accuracy
    task: str
    name: str  # "metric,filter", or "" for the whole task
    status: Status
    message: str
    details: tuple[str, ...] = ()
    detects: str = ""  # the least change that this check would have seen, or the losses that it excludes
    risk: float | None = None  # P(loss > margin) (`LossBound.p_beyond`); None without a margin, or with one cluster

    @property
    def label(self) -> str:
        return " ".join(part for part in (self.rule, self.task, self.name) if part)


def first(keys: Iterable[Key], what: str = "", more: Mapping[Key, str] | None = None) -> Iterator[str]:
    """The first requests as details of a check, a line each. what: the line's beginning. more: its end, by key."""
    lines = [f"document {key[1]}, request {key[2]}, repeat {key[3]}{(more or {}).get(key, '')}" for key in keys]
    return (f"{what}{line}" for line in first_of(lines, SHOWN))
