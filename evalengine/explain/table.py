"""An explanation on the terminal: what was run again, the first difference, how it grows, and a verdict at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import log10
from typing import Any

from evalengine.explain.align import Explanation, First, OpDifference, Size
from evalengine.explain.trace import LOGITS, LOGPROB, Computation, Trace, in_words, place
from evalengine.records.differences import differing
from evalengine.report.numbers import shown
from evalengine.report.read.identities import said
from evalengine.report.read.names import item_name
from evalengine.report.terminal.tables import bullets
from evalengine.util.sheet import Line, Sheet

STREAM = "input_layernorm.residual"  # a layer's input: the sum of all that the layers before it have added
BAR = 24  # characters of the longest bar
DECADES = 2.0  # the least that the longest bar stands for, so that the scale does not magnify small differences


def report(e: Explanation, notes: Sequence[str] = (), weights: Sequence[str] = ()) -> Iterator[Line]:
    """Everything to print, in order; a string is one line. `notes` come before the verdict, `weights` (which of them
    differ) before the ops: other weights are no op's doing."""
    for label, trace in (("A", e.a), ("B", e.b)):
        yield f"{label}: {trace.label}"
        yield f"   ran again: {trace.extent}{REPRODUCED[trace.reproduced]}"
    yield f"item: {item_name(e.a.key)}, {e.a.prompt_tokens} prompt tokens; {_tokens(e)}"
    yield from bullets("Weights that differ", weights)
    yield from bullets("Settings that differ", settings(e))
    yield from bullets("Machines and versions that differ", machines(e))
    yield ""
    if e.first is not None:
        yield from _first(e.first, e.until)
        yield growth_table(e)
        yield (
            f"Tokens: at how many of the tokens up to {e.until} the op's output differs. Elements, and max relative "
            f"(max |delta| over the output's largest magnitude): at token {e.until}, {_why_there(e)}. Bars: log scale."
        )
    yield from notes
    yield f"verdict: {verdict(e)}"


REPRODUCED = {
    True: "; the item's bytes are the run's own",
    False: "; BUT the item's bytes are not those of the run's record, so this may not be what the run computed",
    None: "",
}


def verdict(e: Explanation) -> str:
    """The verdict, on one line."""
    if e.first is not None:
        return f"FIRST DIFFERENCE in {in_words(e.first.op)}, token {e.first.position}"
    compared = sum(op.compared for op in e.ops)
    drawn = "; the token that follows was sampled otherwise" if e.parting else ""
    return f"NO DIFFERENCE in {compared} outputs of {len(e.ops)} ops at {e.until + 1} tokens{drawn}"


def settings(e: Explanation) -> list[str]:
    """The engine's settings, as resolved, and the seed, where the two sides do not share them."""
    return [said(path, x, y) for path, x, y in differing(e.a.settings, e.b.settings) if path != ("weights",)]


def machines(e: Explanation) -> list[str]:
    """Hardware, libraries and code that the two re-runs do not share."""
    return [said(path, x, y) for path, x, y in differing(e.a.machine, e.b.machine)]


def growth_table(e: Explanation) -> Sheet:
    """Every op of the first layer that differs, then each layer's input, then the last ops. `--json` holds all."""
    ops, rows, above = list(_shown(e)), [], None
    bars = _bars([row.size.max_relative if row.size else 0.0 for row in ops])
    for row, bar in zip(ops, bars, strict=True):
        layer, name = place(row.op)
        size = (
            [f"{row.size.differing} of {row.size.elements}", shown(row.size.max_relative, ".2g")]
            if row.size
            else ["", ""]
        )
        rows.append([layer if layer != above else "", name, f"{row.differing} of {row.compared}", *size, bar])
        above = layer
    return Sheet("Ops", ("Layer", "Op", "Tokens", "Elements", "Max relative", ""), rows, (0, 1, 5))


def _shown(e: Explanation) -> Iterator[OpDifference]:
    assert e.first is not None
    layer = place(e.first.op)[0] or next((place(r.op)[0] for r in e.ops if r.differing and place(r.op)[0]), "")
    started = False
    for row in e.ops:
        started |= row.op == e.first.op
        here, name = place(row.op)
        if started and (here in (layer, "") or name == STREAM):
            yield row


def as_json(e: Explanation, notes: Sequence[str] = (), weights: Sequence[str] = ()) -> dict[str, Any]:
    """Everything, as plain JSON values."""
    return {
        "verdict": verdict(e),
        "item": list(e.a.key),
        "sides": [_side(trace) for trace in (e.a, e.b)],
        "weights": list(weights),
        "settings": settings(e),
        "machines": machines(e),
        "common_tokens": e.common,
        "until": e.until,
        "first": None if e.first is None else _first_json(e.first),
        "ops": [_op_json(row) for row in e.ops],
        "notes": list(notes),
    }


def _side(trace: Trace) -> dict[str, Any]:
    return {"label": trace.label, "ran": trace.extent, "reproduced": trace.reproduced, "tokens": len(trace.fed_ids)}


def _first_json(first: First) -> dict[str, Any]:
    layer, name = place(first.op)
    sides = (first.a, first.b)
    steps = [{"requests": x.step_requests, "tokens": x.step_tokens, "reused": x.reused} for x in sides]
    return {"layer": layer or None, "op": name, "token": first.position, "size": _size_json(first.size), "steps": steps}


def _op_json(row: OpDifference) -> dict[str, Any]:
    layer, name = place(row.op)
    size = _size_json(row.size)
    return {"layer": layer or None, "op": name, "compared": row.compared, "differing": row.differing, "size": size}


def _size_json(size: Size | None) -> Mapping[str, Any] | None:
    if size is None:
        return None
    return {**asdict(size), "max_relative": None if size.max_relative == float("inf") else size.max_relative}


def _tokens(e: Explanation) -> str:
    if e.common == len(e.a.fed_ids) == len(e.b.fed_ids):
        return f"{e.common} tokens fed alike"
    return f"{e.common} tokens fed alike, then the outputs part (A was fed {len(e.a.fed_ids)}, B {len(e.b.fed_ids)})"


def _first(first: First, until: int) -> Iterator[str]:
    yield f"First difference: {in_words(first.op)}, at token {first.position}. Every op before it gives equal outputs."
    s = first.size
    if s is None:
        tokens = " ".join(map(str, sorted({first.position, until})))
        yield f"  Its size (elements, max |delta|, ulps) is not in the files: write both again with --values {tokens}."
    else:
        yield (
            f"  {s.differing} of {s.elements} elements differ, by at most {s.max_abs:.3g} "
            f"({shown(s.max_relative, '.2g')} of the largest; {_count(s.max_ulps, f'{s.unit} ulp')})."
        )
    yield f"  A computed it in {_step(first.a)}, B in {_step(first.b)}."


def _step(computation: Computation) -> str:
    step = f"a step of {_count(computation.step_requests, 'request')} and {_count(computation.step_tokens, 'token')}"
    return f"{step}, for another request (the item took it from the prefix cache)" if computation.reused else step


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _why_there(e: Explanation) -> str:
    rows = {row.op: row for row in e.ops}
    for op, words in ((LOGPROB, "the first whose logprob differs"), (LOGITS, "the first whose logits differ")):
        if rows[op].differing:
            return words
    return "the last; no logits differ"


def _bars(relatives: list[float]) -> list[str]:
    """A bar each on one logarithmic scale, from the smallest to the largest; no bar for 0."""
    logs = [log10(min(relative, 1e300)) for relative in relatives if relative]
    low, span = min(logs, default=0.0), max(max(logs, default=0.0) - min(logs, default=0.0), DECADES)
    return ["█" * round(1 + (BAR - 1) * (log10(min(x, 1e300)) - low) / span) if x else "" for x in relatives]
