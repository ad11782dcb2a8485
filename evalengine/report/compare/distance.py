"""How far two compared runs lie apart, in a few numbers: requests, outputs, answers and logprobs that differ."""

from __future__ import annotations

from dataclasses import dataclass

from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.divergence import LogprobChange


@dataclass(frozen=True, eq=False)
class Distance:
    """The distance between the two runs of a comparison."""

    comparison: Comparison

    @property
    def requests(self) -> int:
        """Requests that both runs hold."""
        return self.comparison.common

    @property
    def documents(self) -> int:
        """Documents that both runs hold."""
        return len({key[:2] for key in self.comparison.a.items} & {key[:2] for key in self.comparison.b.items})

    @property
    def differing(self) -> int:
        """Requests whose bits differ."""
        return len(self.comparison.differences)

    @property
    def outputs(self) -> int:
        """Requests whose tokens differ."""
        return self.comparison.outputs

    @property
    def answers(self) -> int:
        """Documents whose answer or score differs under some filter."""
        return sum(self.comparison.answers.values())

    @property
    def answers_alone(self) -> int:
        """Documents whose answer differs and whose score does not: another wrong answer, for instance."""
        return self.comparison.kinds["answer"]

    @property
    def change(self) -> LogprobChange | None:
        """How logprobs changed in the requests that differ; None if none does."""
        return self.comparison.logprobs

    @property
    def logprobs(self) -> tuple[int, int]:
        """(logprobs that differ, logprobs compared), over the tokens that both outputs of a request begin with."""
        c, changed = self.comparison, {difference.key for difference in self.comparison.differences}
        same = [item for key, item in c.a.items.items() if key in c.b.items and key not in changed]
        equal = sum(len(item.logprobs) for item in same if item.logprobs is not None)
        return (0, equal) if c.logprobs is None else (c.logprobs.differing, equal + c.logprobs.compared)

    @property
    def largest_change(self) -> float:
        """The largest finite change of a logprob of the same token after the same tokens, nat."""
        return 0.0 if self.change is None else self.change.max_abs

    @property
    def largest(self) -> str:
        """`largest_change` for people, and how many logprobs have no distance: NaN is no change of 0."""
        return "0 nat" if self.change is None else self.change.largest

    @property
    def share(self) -> str:
        """The share of logprobs that differ, of those that can be compared: `12.5%`."""
        differing, compared = self.logprobs
        return f"{differing / compared:.1%}" if compared else "none"
