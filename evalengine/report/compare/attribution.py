"""What the differences between two runs come from: the thing that differs, with both values, not a class of things.

A request is blamed on what differs and can change it: its document or prompt if those differ, and every setting that
differs, of its own task. A setting that only ends an answer (`ENDS`) is to blame where an answer ends earlier with
equal bits before that, and nowhere else. Where both runs' numerics are fast, a schedule that differs can do alone what
a setting does: both are named. Several causes are joined by "or": nothing in the records distinguishes them. Where no
setting differs, what surrounds the runs remains (code, libraries, hardware), and else "unknown".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

from evalengine.records.differences import differing
from evalengine.report.compare.comparability import Finding, document_change, prompt_differs, unrecorded_weights
from evalengine.report.compare.flips import SCORER
from evalengine.report.read.identities import NUMERIC_SETTINGS, said
from evalengine.report.read.run import Item, Run

SURROUNDINGS = ("engine", "hardware", "libraries", "code", "python", "platform")  # manifest keys outside its identity
# Parts of SURROUNDINGS that change no bit.
NO_MATTER = (
    *(("engine", name) for name in ("stats", "self_test", "self_test_verdict")),
    ("hardware", "cpu_count"),
)
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

        computed: whether its output or logprobs differ, not only what was asked or expected.
        """
        blamed = [*self._inputs(x, y)]
        if computed:
            settings = [*self._able(x, y, self._settings(x.task, x.kind == "generate_until"))]
            blamed += settings or ([] if blamed else self._surroundings)
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
        """What differs in the configuration of the task's requests."""
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
        if settings and self._schedule:
            yield from self._schedule
            if able:
                yield self._schedule[0][0], EITHER

    @cached_property
    def _fast(self) -> bool:
        """Whether both runs' bits depend on the schedule."""
        return all((run.manifest.numerics or run.identity.get("numerics")) == "fast" for run in (self.a, self.b))

    @cached_property
    def _schedule(self) -> list[Blame]:
        """How the schedules differ, where that can change a bit."""
        found = surroundings(self.a, self.b) if self._fast else ()
        return [(_place(path), text) for path, text in found if path[0] == "engine"]

    @cached_property
    def _surroundings(self) -> list[Blame]:
        """What to blame where no setting differs. The schedule changes no bit unless both runs' numerics are fast."""
        if lacking := unrecorded_weights(self.a, self.b):
            return [("unknown", f"nothing that both runs recorded differs, but {lacking}")]
        differences = [(path, text) for path, text in surroundings(self.a, self.b) if path[0] != "engine" or self._fast]
        name = "batches" if self._fast else "unknown"
        return [(_place(path), text) for path, text in differences] or [(name, SAID[name])]


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


def _place(path: tuple[str, ...]) -> str:
    """The name of a place in the manifest: `schedule max_num_seqs`, `code`, `libraries`, ..."""
    return f"schedule {path[-1]}" if path[0] == "engine" else path[0]
