"""The comparison of models itself: a contest for each metric, and one family of paired tests over all of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, combinations_with_replacement
from string import ascii_letters

from evalengine.report.compare.item_differences import changed_answers
from evalengine.report.leaderboard.pairing import Shared, related
from evalengine.report.numbers import in_range, mean
from evalengine.report.read.lm_eval import ROLLING
from evalengine.report.read.run import Run, ScoreKey, direction, key_name
from evalengine.report.stats.clusters import cautions
from evalengine.report.stats.metric_interval import interval_cautions, mean_interval, metric_interval
from evalengine.report.stats.paired import PairedResult
from evalengine.report.stats.perplexity import has_log_likelihoods, likelihoods
from evalengine.report.stats.scores import Scores, is_mean, paired_scores
from evalengine.report.stats.significance import ALPHA, one_test


@dataclass(frozen=True)
class Score:
    """One model's value of a metric, in the metric's units."""

    value: float
    interval: tuple[float, float] | None  # with 95 % confidence
    ranks: tuple[int, int] | None = None  # (best, worst) that the significant tests leave; None: nothing is tested
    tie_group: str = ""  # letters; models that share one are tied: no significant test shows which is better
    cautions: tuple[str, ...] = ()  # why the interval may be too narrow


@dataclass(frozen=True)
class PairTest:
    """Model `b` against model `a` (numbers from 1) on the same documents; differences are b - a."""

    a: int
    b: int
    result: PairedResult
    p_adjusted: float = math.nan  # Holm, over all tests of the comparison
    nats: bool = False  # the difference is of log-likelihoods, not of the metric
    changed: int | None = None  # documents with another answer, right or wrong; None where that is not known

    @property
    def significant(self) -> bool:
        return self.p_adjusted < ALPHA


@dataclass(frozen=True)
class Contest:
    """One metric, or the mean of several: every model's value, and the tests of all pairs."""

    key: ScoreKey  # for a mean: (the group's name, metric, filter)
    higher_is_better: bool | None
    share: bool  # whether values are shares of 1, which are shown in percent
    documents: int
    scores: list[Score | None]  # one for each model; None where it has no value
    tests: list[PairTest] = field(default_factory=list)
    mean: str = ""  # "macro" or "micro" for the mean of several metrics

    @property
    def name(self) -> str:
        return key_name(self.key) + (f" ({self.mean} mean)" if self.mean else "")

    @property
    def first(self) -> list[int]:
        """The places of the models that no test shows to be behind another; empty where nothing is tested."""
        return [n for n, score in enumerate(self.scores) if score is not None and score.ranks and score.ranks[0] == 1]

    @property
    def leader(self) -> int | None:
        """The place of the model that tests show to be ahead of every other."""
        return next((n for n, s in enumerate(self.scores) if s is not None and s.ranks == (1, 1)), None)

    def wins(self, test: PairTest) -> bool | None:
        """Whether b is better by a test; None where no direction is known or the two are equal."""
        if test.result.difference == 0 or (self.higher_is_better is None and not test.nats):
            return None
        return (test.result.difference > 0) == (test.nats or self.higher_is_better is True)


def contests(
    runs: Sequence[Run], shared: Shared, metrics: Mapping[ScoreKey, Scores], leave_out: Collection[ScoreKey] = ()
) -> Iterator[Contest]:
    """A contest for each of a task's metrics (`measured`), in the first run's order, except those in `leave_out` and
    those with the same numbers as one before (`one_test`)."""
    distinct = one_test(metrics, [runs[place] for place in shared.runs])
    rolling = any(item.kind == ROLLING for key, item in runs[shared.runs[0]].items.items() if key[0] == shared.task)
    tested = False
    for key, scores in metrics.items():
        if key in leave_out or key != distinct[key]:
            continue
        if scores.columns:
            entry = contest(scores, len(runs), bool(shared.rows))
            yield replace(entry, tests=[_with_churn(test, runs, shared, key) for test in entry.tests])
            continue
        values = [_score_of_whole(run, key) if key in run.results else None for run in runs]
        own = {place: runs[place].scores[key] for place in shared.runs if has_log_likelihoods(runs[place], key)}
        tests = [] if tested or not (own or rolling) else _likelihood_tests(runs, shared, scores, own)
        tested = tested or bool(tests)  # the other perplexities are made of the same log-likelihoods
        yield Contest(key, scores.higher_is_better, False, max(shared.totals), values, tests)


def measured(runs: Sequence[Run], shared: Shared) -> dict[ScoreKey, Scores]:
    """Each of a task's metrics with the scores (`values_of`) of every run that has them."""
    holding, clusters = [runs[place] for place in shared.runs], related(runs, shared)
    found = {}
    for key in dict.fromkeys(key for run in holding for key in run.results if key[0] == shared.task):
        columns = {place: own for place in shared.runs if (own := values_of(runs[place], key, shared, place))}
        found[key] = Scores(key, columns, direction(holding, key), clusters)
    return found


def _with_churn(test: PairTest, runs: Sequence[Run], shared: Shared, key: ScoreKey) -> PairTest:
    """The test, with how many answers differ between its two models: two that are wrong may be unlike."""
    a, b = test.a - 1, test.b - 1
    documents = zip(shared.documents(a), shared.documents(b), strict=True)
    return replace(test, changed=changed_answers(runs[a], runs[b], key, documents))


def contest(scores: Scores, count: int, tested: bool = True, key: ScoreKey | None = None) -> Contest:
    """The contest of `count` models, the runs of `scores`, on a metric that is a mean over documents.

    tested: whether pairs are tested, whose values must be of the same documents. key: instead of the scores'.
    """
    columns, better = scores.columns, scores.higher_is_better
    share = all(0 <= value <= 1 for values in columns.values() for value in values)
    values = [score_of(columns[place], share, scores.clusters) if place in columns else None for place in range(count)]
    tests = [] if better is None or not tested else pair_tests([scores])
    documents = max(map(len, columns.values()), default=0)
    return Contest(key or scores.key, better, share, documents, values, tests)


def values_of(run: Run, key: ScoreKey, shared: Shared, place: int) -> list[float]:
    """The metric's numbers of the shared documents, or of all the run's own where none can be paired; empty where the
    result is no mean of the documents' numbers, or a document has no number."""
    scores = run.scores.get(key)
    if not scores or key not in run.results or not is_mean(run, key):
        return []
    documents = shared.documents(place) if shared.rows else sorted(scores)
    return [scores[doc] for doc in documents] if all(doc in scores for doc in documents) else []


def score_of(values: Sequence[float], share: bool, clusters: Sequence[str] | None = None) -> Score:
    """The mean with its interval, which does not leave [0, 1] where the values cannot."""
    bounds = mean_interval(values, clusters=clusters)
    if bounds is not None and share:
        bounds = (max(0.0, bounds[0]), min(1.0, bounds[1]))
    found = cautions(values, clusters) if bounds is not None else ()
    return Score(mean(values), bounds, cautions=tuple(found))


def _score_of_whole(run: Run, key: ScoreKey) -> Score:
    bounds = metric_interval(run, key)
    return Score(run.results[key][0], bounds, cautions=tuple(interval_cautions(run, key) if bounds is not None else ()))


def pair_tests(parts: Sequence[Scores], nats: bool = False) -> list[PairTest]:
    """Every pair of models that both have finite scores of the same documents in all parts. nats: whether scores are
    log-likelihoods."""
    tests = []
    finite = [run for run in sorted(parts[0].columns) if all(all(map(in_range, p.columns[run])) for p in parts)]
    for i, j in combinations(finite, 2):
        sizes = [(len(part.columns[i]), len(part.columns[j])) for part in parts]
        if all(x == y for x, y in sizes) and sum(x for x, _ in sizes) > 1:
            tests.append(PairTest(i + 1, j + 1, paired_scores(parts, i, j, unbounded=nats), nats=nats))
    return tests


def with_family(family: Sequence[Contest], adjusted: Sequence[float]) -> list[Contest]:
    """The contests with their tests' adjusted p-values (in order), and the ranks and ties that those leave.

    With probability 1 - ALPHA or more, Holm's correction over the whole family leaves no significant test with the
    wrong winner. Every model's true rank in every contest is then in its interval (simultaneous confidence sets for
    ranks: Mogstad, Romano, Shaikh & Wilhelm 2024, Review of Economic Studies 91(1)).
    """
    remaining = iter(adjusted)
    tested = [replace(entry, tests=[replace(t, p_adjusted=next(remaining)) for t in entry.tests]) for entry in family]
    nats = {entry.key[0]: entry.tests for entry in tested if any(test.nats for test in entry.tests)}
    # A task's other perplexities, which have no tests, are made of the same log-likelihoods.
    return [replace(entry, scores=_ranked(entry, entry.tests or nats.get(entry.key[0], []))) for entry in tested]


def _ranked(entry: Contest, tests: Sequence[PairTest]) -> list[Score | None]:
    """The scores with ranks and tie groups; unchanged where nothing was tested, or on fewer documents than the values
    are of. A value that is not finite is ranked only where its log-likelihoods are tested."""
    if not any(test.result.n == entry.documents for test in tests):
        return entry.scores
    named = {number - 1 for test in tests for number in (test.a, test.b)}
    places = [n for n, s in enumerate(entry.scores) if s is not None and (n in named or math.isfinite(s.value))]
    ahead: dict[int, set[int]] = {place: set() for place in places}  # the models that are ahead of each one
    for test in tests:
        wins = entry.wins(test) if test.significant and {test.a - 1, test.b - 1} <= ahead.keys() else None
        if wins is not None:
            winner, loser = (test.b, test.a) if wins else (test.a, test.b)
            ahead[loser - 1].add(winner - 1)
    for middle in places:  # a chain of significant tests separates its ends too, with no further error
        for place in places:
            if middle in ahead[place]:
                ahead[place] |= ahead[middle]
    ranks = {n: (1 + len(ahead[n]), len(places) - sum(n in others for others in ahead.values())) for n in places}
    ties = tie_groups(sorted(places, key=ranks.__getitem__), ahead)
    return [
        replace(score, ranks=ranks[n], tie_group=ties[n]) if score is not None and n in ranks else score
        for n, score in enumerate(entry.scores)
    ]


def tie_groups(order: Sequence[int], ahead: Mapping[int, Collection[int]]) -> dict[int, str]:
    """Letters of each model in `order`: two share a letter exactly if neither is in the other's `ahead`.

    A compact letter display (Piepho 2004, Journal of Computational and Graphical Statistics 13(2)). Each group grows
    from a tie that no group covers yet, so that few letters are found in polynomial time (Gramm et al. 2007,
    Computational Statistics & Data Analysis 52(2)).
    """
    pairs = list(combinations_with_replacement(order, 2))  # a model and itself too: each has a letter
    ties = {frozenset(pair) for pair in pairs if pair[0] not in ahead[pair[1]] and pair[1] not in ahead[pair[0]]}
    uncovered, groups = set(ties), list[set[int]]()
    for pair in pairs:
        if frozenset(pair) in uncovered:
            group = {*pair}
            while more := [n for n in order if n not in group and all(frozenset((n, m)) in ties for m in group)]:
                group.add(max(more, key=lambda n: sum(frozenset((n, m)) in uncovered for m in group)))
            uncovered -= {frozenset(covered) for covered in combinations_with_replacement(group, 2)}
            groups.append(group)
    names = [*ascii_letters[: len(groups)], *(f"({n + 1})" for n in range(len(ascii_letters), len(groups)))]
    return {n: "".join(name for name, group in zip(names, groups, strict=True) if n in group) for n in order}


def _likelihood_tests(
    runs: Sequence[Run], shared: Shared, scores: Scores, by_place: Mapping[int, Mapping[int, float]]
) -> list[PairTest]:
    """Perplexities' tests, of the documents' log-likelihoods, which differ as perplexities do, whatever the tokens.
    by_place: the documents' scores, where these are the log-likelihoods; else those of rolling windows count."""
    sums = {place: by_place.get(place) or likelihoods(runs[place], shared.task) for place in shared.runs if shared.rows}
    missing = math.nan if by_place else 0.0  # an empty text has no window
    columns = {place: [own.get(doc, missing) for doc in shared.documents(place)] for place, own in sums.items() if own}
    return pair_tests([replace(scores, columns=columns, higher_is_better=True)], nats=True)
