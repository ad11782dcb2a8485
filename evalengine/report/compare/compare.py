"""Two runs side by side: a verdict, the items that differ, and what each difference comes from.

IDENTICAL: every request that both runs hold has the same digest leaf, and every answer and score is the same. SAME
TOKENS: the outputs are equal, logprobs are not (or, in lm-eval's files, cannot be compared). DIFFERENT: prompts,
outputs, answers or scores differ. Runs of unlike inputs are compared on what they share;
`comparability.incomparable` says whether that is wise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from evalengine.errors import ConfigError
from evalengine.report.compare.comparability import (
    CONTRACT,
    SCORER,
    Attribution,
    Finding,
    findings,
    surroundings,
    unchecked,
)
from evalengine.report.compare.item_differences import (
    KINDS,
    OF_ANSWER,
    Change,
    Divergence,
    Flip,
    ItemDifference,
    LogprobChange,
    changed_documents,
    divergence,
    flips,
    item_differences,
    logprob_change,
    outputs_known,
    pairs,
)
from evalengine.report.compare.metric_deltas import MetricDelta, metric_deltas
from evalengine.report.numbers import same_value
from evalengine.report.read.documents import Question, questions_of
from evalengine.report.read.lm_eval import aligned
from evalengine.report.read.run import Key, Run

Verdict = Literal["IDENTICAL", "SAME TOKENS", "DIFFERENT"]
Level = Literal["bitwise", "tokens", "answers"]
LEVELS: tuple[Level, ...] = ("bitwise", "tokens", "answers")
NO_REQUEST = "They have no request in common"


@dataclass(frozen=True, eq=False)
class Comparison:
    """Everything that `compare` tells of two runs."""

    a: Run
    b: Run
    verdict: Verdict
    common: int  # requests that both runs have
    only_a: int
    only_b: int
    findings: list[Finding]
    unchecked: list[str]
    differences: list[ItemDifference]
    logprobs: LogprobChange | None  # over the differing items
    divergences: list[Divergence]
    flips: list[Flip]
    metrics: list[MetricDelta]
    rescored: bool  # whether equal outputs or scores gave other aggregated results
    surroundings: list[str]  # how machine, schedule and versions differ, which are outside the identity
    why: dict[str, list[str]] = field(default_factory=dict)  # cause -> what it means, a sentence each
    tensors: list[str] = field(default_factory=list)  # which weights differ, if they could be read
    # (task, doc_id) -> the question of a document whose output or answer differs, if it was read
    questions: Mapping[tuple[str, int], Question] = field(default_factory=dict)

    @property
    def partial(self) -> bool:
        """Whether a run holds requests that the other lacks, which were left out."""
        return bool(self.only_a or self.only_b)

    @property
    def larger(self) -> int:
        """How many requests the larger run holds."""
        return self.common + max(self.only_a, self.only_b)

    @property
    def unlike(self) -> list[str]:
        """Why the runs are not comparable, although they were compared."""
        return [finding.text for finding in self.findings if finding.refused]

    @property
    def settings(self) -> list[str]:
        """Differences that may change bits between comparable runs."""
        return [finding.text for finding in self.findings if not finding.refused]

    @property
    def contracts(self) -> str:
        """`contracts 3 and 4` where the runs follow different numerics contracts, under which bits may differ."""
        differ = any(finding.names == CONTRACT for finding in self.findings)
        versions = (run.identity.get("contract_version") for run in (self.a, self.b))
        return "contracts {} and {}".format(*versions) if differ else ""

    @cached_property
    def other_prompts(self) -> set[Key]:
        """Requests whose prompts differ, so that their tokens cannot be compared one by one."""
        return {difference.key for difference in self.differences if "prompt" in difference.kinds}

    @property
    def outputs(self) -> int:
        """How many requests have differing outputs, whatever else differs."""
        return sum("output" in difference.kinds for difference in self.differences)

    @property
    def answers(self) -> dict[Change, int]:
        """How many documents have another answer or score, by what changed; each counts once."""
        return changed_documents(self.flips)

    @property
    def changed(self) -> int:
        """How many documents have another answer or score under some filter."""
        return sum(self.answers.values())

    @property
    def documents(self) -> int:
        """How many documents both runs hold."""
        return len({key[:2] for key in self.a.items} & {key[:2] for key in self.b.items})

    @property
    def logprob_counts(self) -> tuple[int, int]:
        """(logprobs that differ, logprobs compared), over the tokens that both outputs of a request begin with."""
        changed = {difference.key for difference in self.differences}
        same = [item for key, item in self.a.items.items() if key in self.b.items and key not in changed]
        equal = sum(len(item.logprobs) for item in same if item.logprobs is not None)
        return (0, equal) if self.logprobs is None else (self.logprobs.differing, equal + self.logprobs.compared)

    @property
    def largest_change(self) -> float:
        """The largest finite change of a logprob of the same token after the same tokens, nat."""
        return 0.0 if self.logprobs is None else self.logprobs.max_abs

    @property
    def largest(self) -> str:
        """`largest_change` for people, and how many logprobs have no distance: NaN is no change of 0."""
        return "0 nat" if self.logprobs is None else self.logprobs.largest

    @property
    def kinds(self) -> dict[str, int]:
        """How often each kind of difference occurs: requests whose document, prompt, output, logprobs or text differ,
        each counted under every kind; documents whose score, or whose answer alone, differs; requests that a run
        lacks."""
        counts = Counter(kind for difference in self.differences for kind in difference.kinds)
        answers = self.answers
        alone = sum(answers.get(change, 0) for change in OF_ANSWER)
        more = {"score": self.changed - alone, "answer": alone, "missing": self.only_a + self.only_b}
        return {**{kind: counts[kind] for kind in KINDS}, **more}

    @property
    def causes(self) -> dict[str, int]:
        """How many items each cause accounts for; how many documents, for a cause that no item has."""
        counts = Counter(difference.cause for difference in self.differences)
        scored = {flip.cause for flip in self.flips} - counts.keys()
        for cause in scored:
            counts[cause] = len({(flip.task, flip.doc_id) for flip in self.flips if flip.cause == cause})
        if self.rescored and not scored:
            counts[SCORER] = 1
        return {cause: count for cause, count in sorted(counts.items()) if count}

    def within(self, level: Level) -> bool:
        """Whether the runs agree at this level: every bit, every output token, or every answer and 0/1 score."""
        if level == "answers":
            return not self.flips and not self.rescored
        return self.verdict == "IDENTICAL" or (level == "tokens" and self.verdict == "SAME TOKENS")


def compare(a: Run, b: Run, found: list[Finding] | None = None) -> Comparison:
    """Compare two runs over the requests and documents that both hold. found: `findings`, if they are known."""
    a, b = aligned(a, b)
    found = findings(a, b) if found is None else found
    blame = Attribution(a, b, found)
    common = a.items.keys() & b.items.keys()
    differences = item_differences(a, b, blame)
    moved = _moved(a, b, differences, blame)
    flipped = [  # what no output explains comes from the document, or from how it was scored
        flip
        if flip.cause != SCORER
        else replace(flip, cause=blame.document(flip.task, flip.doc_id) or blame.scorer(flip.task))
        for flip in flips(a, b, moved)
    ]
    rescored = _rescored(a, b, {task for task, _ in moved})
    if rescored:
        blame.scorer("")
    asked_alike = [d.key for d in differences if "prompt" not in d.kinds]
    changed = rescored or flipped or any({"document", "prompt", "output"} & {*d.kinds} for d in differences)
    bits = not differences and all(x.leaf and y.leaf for x, y in pairs(a, b))
    return Comparison(
        a=a,
        b=b,
        verdict="DIFFERENT" if changed else "IDENTICAL" if bits else "SAME TOKENS",
        common=len(common),
        only_a=len(a.items) - len(common),
        only_b=len(b.items) - len(common),
        findings=found,
        unchecked=unchecked(a, b),
        differences=differences,
        logprobs=logprob_change((a.items[key], b.items[key]) for key in asked_alike),
        divergences=_divergences(a, b, [d.key for d in differences], {*asked_alike}),
        flips=flipped,
        metrics=metric_deltas(a, b),
        rescored=rescored,
        surroundings=[text for _, text in surroundings(a, b)],
        why=blame.why,
    )


def compare_alike(a: Run, b: Run, allow: bool) -> Comparison | list[str]:
    """The comparison, or why there is none: unlike inputs (unless `allow`), or no shared request. Runs of different
    numerics contracts are compared: only their bits cannot be."""
    found = findings(a, b)
    refused = [finding for finding in found if finding.refused]
    why = [finding.text for finding in refused] if any(finding.names != CONTRACT for finding in refused) else []
    if not a.items.keys() & b.items.keys():
        return why or [NO_REQUEST]
    return why if why and not allow else compare(a, b, found)


def compared(a: Run, b: Run, allow: bool) -> Comparison:
    """Two runs compared, with their weights where they differ and can be read, and the questions of changed documents.

    Raises `ConfigError` for unlike runs (unless `allow`), and for runs that share no request.
    """
    result = compare_alike(a, b, allow)
    if isinstance(result, list):
        shared = a.items.keys() & b.items.keys()
        fix = "--allow compares them on the requests that they share." if shared else f"{NO_REQUEST}."
        lines = (f"  - {line}" for line in result if line != NO_REQUEST)
        raise ConfigError(f"{a.source} (A) and {b.source} (B) are not comparable:", *lines, fix)
    weights = [run.identity.get("weights") for run in (a, b)]
    if None not in weights and weights[0] != weights[1]:
        from evalengine.report.compare.weight_tensors import differing_weights  # only these runs need it

        result = replace(result, tensors=differing_weights(a, b))
    return with_questions(result)


def with_questions(c: Comparison) -> Comparison:
    """The comparison, with the questions of documents whose output or answer differs."""
    changed = {(flip.task, flip.doc_id) for flip in c.flips} | {d.key[:2] for d in c.differences if "output" in d.kinds}
    return replace(c, questions=questions_of((c.a, c.b), changed))


def _divergences(a: Run, b: Run, keys: Sequence[Key], asked_alike: Collection[Key]) -> list[Divergence]:
    """Where the outputs of these requests part. After another prompt, no near-tie is judged."""
    greedy = {task: _greedy(a, task) and _greedy(b, task) for task in {key[0] for key in keys}}
    divergences = (divergence(a.items[key], b.items[key], greedy[key[0]] and key in asked_alike) for key in keys)
    return [d for d in divergences if d is not None]


def _moved(a: Run, b: Run, differences: list[ItemDifference], blame: Attribution) -> Mapping[tuple[str, int], str]:
    """Documents whose answer may differ because of what the requests gave, each with the cause.

    Logprobs decide the answer where given texts are scored. A generated answer depends on its tokens alone: where
    those are equal, only the scorer can have changed it.
    """
    why = [d for d in differences if {*d.kinds} != {"logprobs"} or a.items[d.key].kind != "generate_until"]
    moved: dict[tuple[str, int], str] = {d.key[:2]: d.cause for d in reversed(why)}
    for x, y in pairs(a, b):
        if not outputs_known(x, y) and (x.task, x.doc_id) not in moved:
            moved[x.task, x.doc_id] = blame.unknown()
    return moved


def _rescored(a: Run, b: Run, moved: set[str]) -> bool:
    """Whether results of equal outputs differ, which only the scorer or the aggregation can cause.

    moved: tasks with differing outputs. Results of no single task, such as a group's, depend on all tasks.
    """
    tasks = {key[0] for key in a.items} | {key[0] for key in b.items}
    moved = moved | {key[0] for key in a.items.keys() ^ b.items.keys()}
    keys = [k for k in a.results.keys() & b.results.keys() if k[0] not in moved and (k[0] in tasks or not moved)]
    pairs = [(a.results[key][0], b.results[key][0]) for key in keys]
    return any(not same_value(x, y) for x, y in pairs)


def _greedy(run: Run, task: str) -> bool:
    """Whether the likeliest token by the recorded logprobs was taken; processors choose by other logprobs."""
    settings = run.identity.get("tasks", {}).get(task) or {}
    return not run.manifest.model.processors and not (settings.get("generation") or {}).get("temperature")
