"""The samples of a run: a row per document for the grid, and its texts and tokens for the panel behind it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from evalengine.records.tokens import token_texts
from evalengine.report.html.markup import Node, tag
from evalengine.report.html.page import LEAST, Page, in_blocks, pack, packed
from evalengine.report.html.parts import Column, beginning, grid
from evalengine.report.numbers import in_range
from evalengine.report.read.documents import continuations, prompt_of, target_index, target_of
from evalengine.report.read.run import Item, RunData, ScoreKey
from evalengine.util.forked import spread

BUDGET = 20_000_000  # bytes of compressed texts in a page; the limits below shrink until they fit
# Characters shown of a (prompt, other text), a quarter as many tokens: few-shot examples are the first to go.
LIMITS = ((20_000, 20_000), (6_000, 20_000), (2_000, 20_000), (1_000, 6_000), (600, 2_000), (300, 600), (150, 200),
          (60, 80))  # fmt: skip
FEW = 2_000  # documents whose texts are made and measured; of more, the size is estimated first
PREVIEW = 100  # characters in a cell, at most
CELL_BYTES = 6_000_000  # most of all cells' texts, three a row
SCORES = 4  # columns of metrics
Place = tuple[str, int]  # task, doc_id


def samples_section(page: Page, data: RunData) -> None:
    """Adds the section, its grid and its texts."""
    places = [(task, doc) for task in data.tasks for doc in data.samples[task]]
    columns = list(_columns(data, min(4 * PREVIEW, CELL_BYTES // (3 * max(1, len(places))))))

    def made(limits: tuple[int, int]) -> list[tuple[list[list[Any]], str, int]]:
        """Of each block of neighbours: their rows of the grid, their packed texts, and how many of these were cut."""

        def block(some: Sequence[Place]) -> tuple[list[list[Any]], str, int]:
            cut = Truncator(*limits)
            texts = pack([_texts(data, *place, cut) for place in some])
            return [[cell(*place) for _, cell in columns] for place in some], texts, cut.count

        return spread(lambda many: [block(some) for some in many], in_blocks(places), LEAST)

    many = len(places) > FEW
    for limits in LIMITS:
        if many and limits != LIMITS[-1] and _estimate(data, places, *limits) > BUDGET:
            continue
        blocks = made(limits)
        if many or sum(len(texts) for _, texts, _ in blocks) <= BUDGET:
            break
    rows = [row for own, _, _ in blocks for row in own]
    page.packed_blocks("samples", [texts for _, texts, _ in blocks], len(rows))
    body = grid(page, "samples", [column for column, _ in columns], rows, "sample", blocks="samples", noun="samples")
    note: list[Node] = ["Click a row for its prompt, output and tokens; search reads these texts and documents too."]
    if count := sum(cut for _, _, cut in blocks):
        cut_texts = f"{count:,} texts are" if count > 1 else "One text is"
        note += [f" {cut_texts} too long for this page and shown by the ends; ",
                 tag("code", "samples_<task>_<time>.jsonl"), " has all."]  # fmt: skip
    page.section("samples", "Samples", body, note=note)


class Truncator:
    """Cuts the middle out of long texts, and counts these texts."""

    def __init__(self, prompt: int, other: int) -> None:
        self.limits = (prompt, other)
        self.count = 0

    def prompt(self, text: str) -> str | list[Any]:
        """The prompt, or [its beginning, characters left out, its end]: a quarter and three quarters of the limit."""
        return self._cut(text, self.limits[0], self.limits[0] // 4)

    def other(self, text: str) -> str | list[Any]:
        """Any other text, cut likewise: three quarters and a quarter of the limit."""
        return self._cut(text, self.limits[1], self.limits[1] - self.limits[1] // 4)

    @property
    def tokens(self) -> int:
        """How many tokens of an output are shown."""
        return self.limits[1] // 4

    def _cut(self, text: str, limit: int, head: int) -> str | list[Any]:
        if len(text) <= limit:
            return text
        self.count += 1
        return [text[:head], len(text) - limit, text[head - limit :]]


def _columns(data: RunData, room: int) -> Iterator[tuple[Column, Callable[[str, int], Any]]]:
    """The grid's columns, each with its cell of a task's document: all metrics of one task, 0/1 ones first; for several
    tasks, one column with each one's first 0/1. room: bytes of a text."""

    def answer(task: str, doc: int) -> str:
        answers = (data.run.answers.get((task, row["filter"]), {}).get(doc) for row in data.samples[task][doc])
        return _preview(next((own for own in answers if own is not None), ""), room)

    def target(task: str, doc: int) -> str:
        sample = data.samples[task][doc][0]
        return _preview(target_of(sample, _choices(data, task, sample)), room)

    def score(key: ScoreKey | None, doc: int, binary: bool) -> float | bool | None:
        value = None if key is None else data.run.scores[key].get(doc)
        if value is None or not math.isfinite(value):
            return None
        return value == 1.0 if binary else round(value, 4)

    def logprob(task: str, doc: int) -> float | None:
        items = data.documents[task, doc]
        sums = [item.sum_logprob for item in items if item.sum_logprob is not None]
        count = sum(len(item.output_ids or ()) for item in items)
        return round(math.fsum(sums) / count, 4) if sums and count and all(map(in_range, sums)) else None

    keys = {task: sorted(data.score_keys(task), key=lambda key: not data.binary(key)) for task in data.tasks}
    titled = {mark_title(own, key): {task: key} for task, own in keys.items() for key in own[:SCORES]}
    if len(data.tasks) > 1:
        yield Column("Task", "text", "minmax(7ch, 14ch)", phone=False, choose=True), lambda task, doc: task
        firsts = {task: own[0] for task, own in keys.items() if own and data.binary(own[0])}
        titled = {"First metric": firsts} if firsts else {}
    yield Column("Doc", "number", "6ch", digits=0), lambda task, doc: doc
    yield (
        Column("Prompt", "text", "minmax(0, 2.2fr)"),
        lambda task, doc: _preview(prompt_of(data.samples[task][doc][0]), room),
    )
    yield Column("Answer", "text", "minmax(0, 1fr)", phone=False), answer
    yield Column("Target", "text", "minmax(0, 1fr)", phone=False), target
    for place, (title, own) in enumerate(titled.items()):
        width, binary = f"{min(max(11, len(title) + 1), 16)}ch", all(map(data.binary, own.values()))
        marks, digits = ("correct", "wrong"), None if binary else 3
        column = Column(title, "mark" if binary else "number", width, digits, phone=place == 0, marks=marks)
        yield column, lambda task, doc, own=own, binary=binary: score(own.get(task), doc, binary)  # type: ignore[misc]
    if any(item.logprobs is not None for item in data.run.items.values()):
        lengths = Column("Tokens", "number", "8ch", digits=0, phone=False)
        yield lengths, lambda task, doc: sum(len(item.output_ids or ()) for item in data.documents[task, doc])
        yield Column("Logprob", "number", "9ch", digits=3, phone=False), logprob


def _choices(data: RunData, task: str, sample: Mapping[str, Any]) -> list[str]:
    return continuations(sample) if data.kinds.get(task) == "loglikelihood" else []


def mark_title(keys: Sequence[ScoreKey], key: ScoreKey) -> str:
    """The shortest name that distinguishes this metric and filter from the task's others."""
    _, metric, name = key
    if len({k[2] for k in keys}) == 1:
        return metric
    return name if len({k[1] for k in keys}) == 1 else f"{metric} {name}"


def _texts(data: RunData, task: str, doc: int, cut: Truncator) -> list[Any]:
    """A sample as samples.js reads it: [task, doc, prompt, target, filters, requests, document]."""
    rows = data.samples[task][doc]
    answers = [data.run.answers.get((task, row["filter"]), {}).get(doc) for row in rows]
    return [
        task,
        doc,
        cut.prompt(prompt_of(rows[0])),
        cut.other(str(rows[0].get("target", ""))),
        [
            [row["filter"], own if own is None else cut.other(own), [[m, _plain(row.get(m))] for m in row["metrics"]]]
            for row, own in zip(rows, answers, strict=True)
        ],
        list(_requests(data, task, doc, cut)),
        [[str(k), cut.other(_plain(v))] for k, v in [*(rows[0].get("doc") or {}).items(), *_judge(rows)]],
    ]


def _judge(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """The judge's requests about the sample, and the items of its run with the verdicts."""
    for judge in (row["judge"] for row in rows if isinstance(row.get("judge"), Mapping)):
        prompts, items = (judge.get(name) or [] for name in ("prompts", "items"))
        for number, prompt in enumerate(prompts, 1):
            yield f"judge's prompt{f' {number}' if len(prompts) > 1 else ''}", str(prompt)
        yield f"judge's items in {judge.get('run')}", ", ".join(map(str, items))


def _requests(data: RunData, task: str, doc: int, cut: Truncator) -> Iterator[list[Any]]:
    """Per request: [kind, text, sum, is the target, facts, whole output, lengths of its tokens' texts, logprobs in
    1/1000 nat, tokens left out, tokens of the thinking]. The text is a length where the output begins with it, as it
    mostly does."""
    sample = data.samples[task][doc][0]
    texts = _choices(data, task, sample)
    target = target_index(sample, texts)
    for item in data.documents[task, doc]:
        place = item.request_index
        if len(texts) > 1 and (place >= len(texts) or item.repeat):
            continue  # the same choice without its context (acc_mutual_info), or repeated
        text = texts[place] if place < len(texts) else item.text
        ids = (item.output_ids or [])[: cut.tokens]
        pieces = token_texts(ids, data.pieces)
        whole = "".join(pieces)
        shown = [] if item.logprobs is None else item.logprobs[: cut.tokens].tolist()
        yield [
            item.kind,
            None if text is None else _units(text) if ids and whole.startswith(text) else cut.other(text),
            item.sum_logprob if item.sum_logprob is not None and math.isfinite(item.sum_logprob) else None,
            len(texts) > 1 and place == target,
            _facts(data, item),
            whole,
            [_units(piece) for piece in pieces],
            [round(value * 1000) if math.isfinite(value) else None for value in shown],
            len(item.output_ids or ()) - len(ids),
            data.thinking.get(item.key, (0, False))[0],
        ]


def _units(text: str) -> int:
    """The text's length as JavaScript counts: a character beyond U+FFFF is two."""
    return len(text) if text.isascii() else len(text) + sum(char > "\uffff" for char in text)


def _facts(data: RunData, item: Item) -> list[list[str]]:
    """The known facts about a request, in words."""
    reason, prompt = data.endings.get(item.key, (None, None))
    pairs = [] if prompt is None else [["prompt", f"{prompt:,} tokens"]]
    if item.output_ids is not None:
        scored = item.kind != "generate_until"
        pairs.append(["scored" if scored else "output", f"{len(item.output_ids):,} tokens"])
        pairs += [] if scored or reason is None else [["ended by", {"length": "the length limit"}.get(reason, reason)]]
    if (thought := data.thinking.get(item.key)) is not None:
        pairs.append(["thinking", f"{thought[0]:,} tokens" + (", cut short by the length limit" if thought[1] else "")])
    pairs += [["program", outcome]] if (outcome := data.outcomes.get(item.key)) is not None else []
    return pairs + ([["cut from the prompt's left", f"{item.truncated:,} tokens"]] if item.truncated else [])


def _estimate(data: RunData, places: Sequence[Place], prompt: int, other: int) -> int:
    """About how many bytes all texts take at these limits, from one document in 16."""
    cut = Truncator(prompt, other)
    return 16 * sum(len(block) for block in packed([_texts(data, *place, cut) for place in places[::16]]))


def _preview(text: str, room: int) -> str:
    """One line of at most so many bytes: the last paragraph (after the few-shot examples), its beginning."""
    last = text.strip()[-20 * PREVIEW :].split("\n\n")[-1]
    return beginning(" ".join(last[: 2 * PREVIEW].split()), room)[:PREVIEW]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
