"""Whether two runs may be compared, and which of their settings differ; every difference is one plain sentence. What
cannot be compared, since a source does not hold it. And what a difference between records comes from: the thing that
differs, with both values, not a class of things.

Documents and prompts are compared one by one (lm-eval's `doc_hash` and `prompt_hash`, and the SHA-256 of prompt ids),
so that runs of different length still compare on what they share. Settings that only shape prompts (`num_fewshot`, the
chat template, ...) count through the prompts: where those are equal, such a setting changed nothing.

A request is blamed on what differs and can change it: its document or prompt if those differ, and every setting that
differs, in its task. A setting that only ends an answer (`ENDS`) is to blame where an answer ends earlier with
equal bits before that, and nowhere else. Where both runs' numerics are fast, a schedule that differs can do alone what
a setting does: both are named. Several causes are joined by "or": nothing in the records distinguishes them. Where no
setting differs, what surrounds the runs remains (code, libraries, hardware), and else "unknown".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby
from typing import Any, Literal

from evalengine.errors import listed
from evalengine.records.manifest_data import resumed_fast
from evalengine.records.sealed import Names, differing
from evalengine.report.read.identities import (
    CONTENT,
    DATA_SETTINGS,
    MODEL_NAMES,
    NUMERIC_SETTINGS,
    PROMPT_SETTINGS,
    SEEDS,
    differing_settings,
    said,
    section,
    thing,
)
from evalengine.report.read.lm_eval import BY_CHOICE, ROLLING, aligned
from evalengine.report.read.run import UNBOUND, Item, Key, Run
from evalengine.util.command import PROGRAM

Subject = Literal["data", "configuration"]
Setting = tuple[Names, Any, Any]  # (its place in the identity, A's value, B's value)

MODEL_KEYS = ("weights", "model_spec", "tokenizer")  # identity keys that make a model
FEW_SETTINGS = 3  # settings of a model's configuration that are named one by one; more make it a different model
OTHER_MODEL = ("different model",)
CONTRACT = ("contract version",)  # the names of the finding that two runs follow different numerics contracts


@dataclass(frozen=True)
class Finding:
    """One way in which two runs differ."""

    text: str  # a sentence without its full stop
    subject: Subject
    refused: bool  # the runs are not comparable because of it
    names: tuple[str, ...] = ()  # the things that differ, as `identities.thing` names them; () if they change no record
    task: str | None = None  # the only task that it concerns; None: all


def incomparable(a: Run, b: Run) -> list[str]:
    """Why `a` and `b` must not be compared, a sentence each; empty if they may."""
    return [finding.text for finding in findings(a, b) if finding.refused]


def findings(a: Run, b: Run) -> list[Finding]:
    """Every difference of inputs and settings between two runs, refused ones first."""
    a, b = aligned(a, b)
    settings = [*differing_settings(a, b)]
    unsorted = [*_programs(a, b), *_requests(a, b), *_contents(a, b), *_prompts(a, b, settings)]
    unsorted += _settings(a, b, settings)
    return sorted(unsorted, key=lambda finding: not finding.refused)


def document_change(a: Run, b: Run, task: str, doc_id: int) -> Literal["documents", "targets", "prompts"] | None:
    """The first of a document's content, target and prompt whose hashes both runs hold, and in which they differ."""
    left, right = (run.hashes.get(task, {}).get(doc_id) for run in (a, b))
    if left is None or right is None:
        return None
    content, prompt, target = (bool(x and y) and x != y for x, y in zip(left, right, strict=True))
    return "documents" if content else "targets" if target else "prompts" if prompt else None


def prompt_differs(a: Run, b: Run, x: Item, y: Item) -> bool:
    """Whether one request's prompts differ: by their ids where both runs hold their hash, else by lm-eval's hash."""
    if x.prompt_sha256 and y.prompt_sha256:
        return x.prompt_sha256 != y.prompt_sha256
    left, right = (run.hashes.get(x.task, {}).get(x.doc_id) for run in (a, b))
    return left is not None and right is not None and left[1] != right[1]


def are_models(runs: Sequence[Run]) -> bool:
    """Whether some two of the runs are surely of different models: other weights, or in lm-eval's files another
    model's name or commit. Of a run of ours and one of lm-eval's, neither of which holds what the other does, nothing
    is sure."""
    known = [
        (run.identity.get("model_sha"), model_arguments(run)) if run.by_lm_eval else (run.identity.get("weights"),)
        for run in runs
    ]
    return any(
        bool(x) and bool(y) and x != y
        for left, right in combinations(known, 2)
        if len(left) == len(right)
        for x, y in zip(left, right, strict=True)
    )


def model_arguments(run: Run) -> dict[str, str]:
    """lm-eval's arguments that say which model it is."""
    return {name: str(value) for name, value in run.model_args.items() if name in MODEL_NAMES}


def resumed_words(run: Run, resumed: int) -> str:
    """The effect of an interruption on the bits of a fast run; completes a sentence about it."""
    return (
        f"was interrupted and resumed under fast numerics ({resumed} of {len(run.items)} requests resumed), so its "
        "batches, on which such bits depend, differ from those of an uninterrupted run"
    )


def _programs(a: Run, b: Run) -> Iterator[Finding]:
    """Differences in the engines and schedules: fast numerics depend on the batch, and an interrupted run's batches
    differ from an unbroken run's."""
    if a.program != b.program:
        yield Finding(f"A was run by {a.program} and B by {b.program}", "configuration", False, ("program",))
    for label, run in (("A", a), ("B", b)):
        if resumed := resumed_fast(run.manifest):
            yield Finding(f"{label} {resumed_words(run, resumed)}", "configuration", False, ("resumed",))


def _requests(a: Run, b: Run) -> Iterator[Finding]:
    """Tasks that only one run has, and requests that only one has in a task that both ran."""
    tasks = [{key[0] for key in run.items} | {key[0] for key in run.scores} for run in (a, b)]
    for label, only in (("A", tasks[0] - tasks[1]), ("B", tasks[1] - tasks[0])):
        if only:
            yield Finding(f"Only {label} ran {', '.join(sorted(only))}", "data", True)
    for task in sorted({key[0] for key in a.items} & {key[0] for key in b.items}):
        left, right = (_keys(run, task) for run in (a, b))
        if left != right:
            limits = _limits(a, b)
            counts = f"A has {len(left)} requests, B {len(right)}, and they share {len(left & right)}"
            yield Finding(f"{task}: {counts}{f' ({limits})' if limits else ''}", "data", True)


def _keys(run: Run, task: str) -> set[Key]:
    return {key for key in run.items if key[0] == task}


def _limits(a: Run, b: Run) -> str:
    """How the limits of documents differ; "" if they are equal."""
    limits = [run.identity.get("limit") for run in (a, b)]
    return said(("limit",), *limits) if limits[0] != limits[1] else ""


def _contents(a: Run, b: Run) -> Iterator[Finding]:
    """Differing rows of the datasets: by document where hashes are at hand, else by the hash of all evaluated rows,
    which tells nothing where a different limit has evaluated different rows."""
    for task in sorted({*a.hashes, *b.hashes} | {*section(a, "datasets"), *section(b, "datasets")}):
        shared = sorted({*a.hashes.get(task, {})} & {*b.hashes.get(task, {})})
        for place, label in ((0, "content"), (2, "target")):
            if changed := [doc for doc in shared if a.hashes[task][doc][place] != b.hashes[task][doc][place]]:
                count = f"{len(changed)} of {len(shared)} documents differ in {label}"
                yield Finding(f"{task}: {count} (first: doc {changed[0]})", "data", True)
        old, new = (section(run, "datasets").get(task, {}).get("sha256") for run in (a, b))
        if not shared and old and new and old != new and not (_limits(a, b) and _keys(a, task) != _keys(b, task)):
            text = f"{task}: the dataset's rows differ ({said(('sha256',), old, new)})"
            yield Finding(text, "data", True, ("documents",), task)


def _prompts(a: Run, b: Run, settings: Sequence[Setting]) -> Iterator[Finding]:
    """Differing prompts of requests that both runs have, with the settings that may have made the difference."""
    for task, group in groupby(sorted(a.items.keys() & b.items.keys()), key=lambda key: key[0]):
        keys = list(group)
        changed = [key for key in keys if prompt_differs(a, b, a.items[key], b.items[key])]
        if not changed:
            continue
        able = [
            (path, said(path, old, new))
            for path, old, new in settings
            if path[-1] in (*PROMPT_SETTINGS, "max_model_len") and path[-1] != "limit"
            if path[0] != "tasks" or path[1] == task
        ]
        why = f": {'; '.join(text for _, text in able)}" if able else ""
        yield Finding(
            f"{task}: {len(changed)} of {len(keys)} prompts differ (the first is of doc {changed[0][1]}){why}",
            "data",
            True,
            tuple(dict.fromkeys(thing(path) for path, _ in able)) or ("prompts",),
            task,
        )


def _settings(a: Run, b: Run, settings: Sequence[Setting]) -> Iterator[Finding]:
    """Every other difference between the two identities."""
    sampled = any(
        (task.get("generation") or task.get("generation_kwargs") or {}).get("temperature")
        for run in (a, b)
        for task in section(run, "tasks").values()
        if isinstance(task, Mapping)
    )
    of_model = [said(*setting) for setting in settings if setting[0][0] == "model_spec"]
    other_model = len(of_model) > FEW_SETTINGS
    if other_model:
        text = f"{CONTENT['model_spec']} ({len(of_model)} settings: {listed(of_model, FEW_SETTINGS, '; ')})"
        yield Finding(text, "configuration", True, OTHER_MODEL)
    for path, old, new in settings:
        top, leaf, difference = path[0], path[-1], said(path, old, new)
        if leaf in (*PROMPT_SETTINGS, *DATA_SETTINGS) or top in ("datasets", "prompts", "task_hashes"):
            continue
        if other_model and top == "model_spec":
            continue
        of_a_level = top in ("attention_backend", "gpu_architecture") and None in (old, new)  # `numerics` differs, too
        names, task = () if of_a_level else (thing(path),), path[1] if top == "tasks" and len(path) > 1 else None
        if top in NUMERIC_SETTINGS or (top == "model_args" and leaf not in MODEL_NAMES):
            yield Finding(difference, "configuration", False, names)
        elif top in SEEDS:
            matters = sampled or a.by_lm_eval  # some of lm-eval's kinds of models may draw by it
            yield Finding(f"The seeds differ ({difference})", "configuration", sampled, names if matters else ())
        elif top == "contract_version":
            only = "bits are not comparable; tokens, answers and scores are"
            fix = f"for a new baseline: {PROGRAM} baseline RUN -o FILE"
            yield Finding(f"{CONTENT[top]} ({difference}): {only}; {fix}", "configuration", True, CONTRACT)
        elif top in CONTENT:
            merged = [run.manifest.model.adapter.get("source") for run in (a, b)] if top == "weights" else [None]
            note = f"; {said(('adapter',), *merged)}" if any(merged) else ""
            names = OTHER_MODEL if other_model and top in MODEL_KEYS else names
            yield Finding(f"{CONTENT[top]} ({difference}{note})", "configuration", True, names)
        else:
            yield Finding(f"The settings differ ({difference})", "configuration", True, names, task)


_WEIGHTS = ("weights", "model_sha")


def unchecked(a: Run, b: Run) -> list[str]:
    """One sentence for each property that was not compared."""
    notes = []
    for label, run in (("A", a), ("B", b)):
        if run.kind == "lm-eval":
            notes.append(
                f"{label} is {run.files}: it holds texts, log-likelihood sums and scores, but no token ids, "
                "no logprobs by token and no digest; two such outputs are compared by those"
            )
        elif run.unbound:
            notes.append(f"{label}: {UNBOUND}")
        elif run.by_lm_eval:
            notes.append(
                f"{label} is a baseline of {run.files}: it holds log-likelihood sums, answers and scores, but no "
                "outputs and no digest; what was generated cannot be compared"
            )
        elif run.kind == "baseline":
            notes.append(f"{label} is a baseline: it holds hashes and scores, no tokens and no logprobs by token")
    notes += [
        f"{label} read {read} of its {len(run.items)} answers from a cache: an earlier run computed them, and "
        "what this one would have computed is not compared"
        for label, run in (("A", a), ("B", b))
        if (read := run.manifest.from_cache)
    ]
    for names, label in ((_WEIGHTS, "the model weights"), (("tokenizer",), "the tokenizer")):
        if lacking := _lacking(a, b, names):
            notes.append(f"{lacking} did not record a hash of {label}: equality was not checked")
    unhashed = {
        key[0]
        for key in a.items.keys() & b.items.keys()
        if not (a.items[key].prompt_sha256 and b.items[key].prompt_sha256)
        if not all(key[1] in run.hashes.get(key[0], {}) for run in (a, b))
    }
    notes += [f"{task}: no hashes of documents or prompts that both hold: equality was not checked"
              for task in sorted(unhashed)]  # fmt: skip
    notes += _unknown_choices(a, b)
    if a.by_lm_eval != b.by_lm_eval:
        notes += [f"{task}: lm-eval's files hold a log-likelihood a document, so the other run's windows were summed"
                  for task in sorted({item.task for item in a.items.values() if item.kind == ROLLING})]  # fmt: skip
    return notes


def unrecorded_weights(a: Run, b: Run) -> str:
    """Which of two runs recorded no hash of its weights that can be compared with the other's; "" if both did."""
    lacking = _lacking(a, b, _WEIGHTS)
    return f"{lacking} did not record a hash of the model weights" if lacking else ""


def _lacking(a: Run, b: Run, names: tuple[str, ...]) -> str:
    """Which runs lack a hash, such as `A and B`. lm-eval's model_sha, a commit on the Hub, compares with its like."""
    comparable = names if a.by_lm_eval == b.by_lm_eval else names[:1]
    return " and ".join(
        label for label, run in (("A", a), ("B", b)) if not any(run.identity.get(name) for name in comparable)
    )


def _unknown_choices(a: Run, b: Run) -> Iterator[str]:
    """Multiple-choice metrics whose choices a run does not hold, so that another wrong choice would pass unseen."""
    shared = sorted(a.scores.keys() & b.scores.keys())
    for task in sorted({key[0] for key, item in a.items.items() if item.kind == "loglikelihood" and key[2] > 0}):
        metrics = [key for key in shared if key[0] == task and key[1] in BY_CHOICE]
        metrics = [key for key in metrics if {*a.scores[key].values(), *b.scores[key].values()} <= {0.0, 1.0}]
        for label, run in (("A", a), ("B", b)):
            if unknown := dict.fromkeys(key[1] for key in metrics if key not in run.choices):
                baseline = run.kind == "baseline"
                why = "its baseline was written without" if baseline else "its scores follow no known rule"
                yield (
                    f"{task}: {label} does not say which choice {' and '.join(unknown)} took ({why}): another wrong "
                    "one would pass unseen"
                )


SURROUNDINGS = ("engine", "hardware", "libraries", "code", "python", "platform")  # manifest keys outside its identity
# Parts of SURROUNDINGS that change no bit.
NO_MATTER = (
    *(("engine", name) for name in ("stats", "self_test", "self_test_verdict")),
    ("hardware", "cpu_count"),
)
SCORER = "scorer"  # the cause of another answer or score for equal outputs
SAID = {
    "documents": "the documents' content differs",
    "targets": "the documents' targets differ",
    "prompts": "the prompts differ, and no recorded setting says why",
    "batches": "both ran under fast numerics, whose bits depend on the batches; nothing else recorded differs",
    SCORER: "the same outputs were scored in another way",
    "unknown": "nothing that the runs recorded differs",
}
ENDS = ("generation setting max_gen_toks", "generation setting until")  # they change no token before an answer's end
EITHER = "either alone can do this; a run of B's settings under A's schedule would distinguish them"
NO_OUTPUTS = "a run holds no outputs, so that nothing says whether they changed or how they were scored"


Blame = tuple[str, str]  # (name of a thing that differs, sentence that says how)


class Attribution:
    """Names causes, and says what each name means: `why` holds the sentences of those that were named."""

    def __init__(self, a: Run, b: Run, findings: list[Finding]) -> None:
        self.a, self.b, self.findings = a, b, findings
        self.why: dict[str, list[str]] = {}

    def of(self, x: Item, y: Item, computed: bool) -> str:
        """The cause of a difference between two records of one request.

        computed: whether its output or logprobs differ, not only the request or the target.
        """
        blamed = [*self._inputs(x, y)]
        if computed:
            settings = [*self._able(x, y, self._settings(x.task, x.kind == "generate_until"))]
            blamed += settings or ([] if blamed else self._without_settings())
        return self._named(blamed)

    def scorer(self, task: str) -> str:
        """The cause of another score or answer for equal outputs."""
        configurations = [f for f in self.findings if f.task == task and f.subject == "configuration"]
        settings = [(name, f.text) for f in configurations for name in f.names if name.startswith("task setting ")]
        return self._named(settings or [(SCORER, SAID[SCORER])])

    def document(self, task: str, doc_id: int) -> str | None:
        """The part of a document that differs, for a difference that its outputs do not explain."""
        name = document_change(self.a, self.b, task, doc_id)
        return None if name is None else self._named([(name, SAID[name])])

    def unknown(self) -> str:
        """The cause of another answer where a run holds no outputs."""
        return self._named([("unknown", NO_OUTPUTS)])

    def _named(self, blamed: Iterable[Blame]) -> str:
        """The cause's name, such as `weights or dtype`, whose sentences are added to `why`."""
        unique = [*dict.fromkeys(blamed)]
        cause = " or ".join(dict.fromkeys(name for name, _ in unique))
        sentences = self.why.setdefault(cause, [])
        sentences += [text for _, text in unique if text not in sentences]
        return cause

    def _inputs(self, x: Item, y: Item) -> Iterator[Blame]:
        """Which of a request's inputs differ, and the settings that shape its prompt if that does."""
        change = document_change(self.a, self.b, x.task, x.doc_id)
        if change in ("documents", "targets"):
            yield change, SAID[change]
        if change != "documents" and prompt_differs(self.a, self.b, x, y):
            shaping = [f for f in self.findings if f.subject == "data" and f.task == x.task]
            named = [(name, f.text) for f in shaping for name in f.names if name != "prompts"]
            yield from named or [("prompts", SAID["prompts"])]

    def _settings(self, task: str, generated: bool) -> list[Blame]:
        """Differences in the configuration of the task's requests."""
        configurations = [f for f in self.findings if f.subject == "configuration" and f.task in (None, task)]
        named = [(name, f.text) for f in configurations for name in f.names]
        named = [(name, text) for name, text in named if generated or not name.startswith("generation setting")]
        if named and (lacking := unrecorded_weights(self.a, self.b)):
            named.append(("unrecorded weights", lacking))
        return named

    def _able(self, x: Item, y: Item, settings: list[Blame]) -> Iterator[Blame]:
        """Which of the settings can have changed this request, and the schedule where it can have."""
        ends = [blame for blame in settings if blame[0] in ENDS]
        same = _same_before_the_end(x, y)
        if ends and same:
            yield from ends
            return
        able = settings if same is None else [blame for blame in settings if blame not in ends]
        yield from able
        schedule = [blame for blame in self._around if blame[0].startswith("schedule ")] if settings else []
        yield from schedule
        if able and schedule:
            yield schedule[0][0], EITHER

    @cached_property
    def _fast(self) -> bool:
        """Whether both runs' bits depend on the schedule."""
        return all((run.manifest.numerics or run.identity.get("numerics")) == "fast" for run in (self.a, self.b))

    @cached_property
    def _around(self) -> list[Blame]:
        """How what surrounds the runs differs; their schedules only where these can change a bit."""
        found = [(path, text) for path, text in surroundings(self.a, self.b) if path[0] != "engine" or self._fast]
        return [(f"schedule {path[-1]}" if path[0] == "engine" else path[0], text) for path, text in found]

    def _without_settings(self) -> list[Blame]:
        """The cause where no setting differs."""
        if lacking := unrecorded_weights(self.a, self.b):
            return [("unknown", f"nothing that both runs recorded differs, but {lacking}")]
        name = "batches" if self._fast else "unknown"
        return self._around or [(name, SAID[name])]


def _same_before_the_end(x: Item, y: Item) -> bool | None:
    """Whether tokens and logprobs are equal up to where the shorter output ends; None where that is not known."""
    if x.output_ids is None or y.output_ids is None:
        return None
    count = min(len(x.output_ids), len(y.output_ids))
    if x.output_ids[:count] != y.output_ids[:count]:
        return False
    if x.logprobs is None or y.logprobs is None:
        return None
    return x.logprobs[:count].tobytes() == y.logprobs[:count].tobytes()


def surroundings(a: Run, b: Run) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path in the manifest, sentence): machine, schedule and versions that differ, outside the identity."""
    if a.manifest and b.manifest:
        for name in SURROUNDINGS:
            for path, old, new in differing(a.manifest.content.get(name), b.manifest.content.get(name), (name,)):
                if path[:2] not in NO_MATTER and path[-1] not in NUMERIC_SETTINGS:  # those settings are findings
                    yield path, said(path, old, new)
