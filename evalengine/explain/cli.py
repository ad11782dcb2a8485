"""`python -m evalengine explain`: the first layer and op at which two runs part, and how the difference grows.

A trace may be written to a small file, so that two machines can be compared. It is JSON with a hash of itself
(`records.sealed`). All digests go in: 87 ops by 64 tokens take 70 kB. Outputs go in for a few token positions only,
because those of all tokens would take a thousand times as much.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from math import log10
from pathlib import Path
from typing import Any

import numpy as np

from evalengine.errors import ConfigError, readable
from evalengine.explain.trace import (
    DIGEST_BYTES,
    LOGITS,
    LOGPROB,
    Computation,
    Explanation,
    First,
    OpDifference,
    Side,
    Trace,
    check_prompts,
    explain,
    op_name,
    place,
)
from evalengine.plain_text import say, warn
from evalengine.records.evidence import file_problems
from evalengine.records.folder import write_text_file
from evalengine.records.schema import RecordKey
from evalengine.records.sealed import SealedFormat, differing
from evalengine.report.compare.as_json import write_json
from evalengine.report.compare.compare import compare
from evalengine.report.compare.item_differences import differing_leaves
from evalengine.report.compare.weight_tensors import differing_tensors
from evalengine.report.numbers import counted, finite_json, shown
from evalengine.report.read.baseline import fold, unfold
from evalengine.report.read.identities import said, short
from evalengine.report.read.load import load_run
from evalengine.report.read.names import inputs, item_name, named_item
from evalengine.report.read.run import UNBOUND, Run
from evalengine.util.command import Namespace
from evalengine.util.sheet import Line, Sheet
from evalengine.util.tables import bullets, print_lines

STREAM = "input_layernorm.residual"  # a layer's input: the sum of all that the layers before it have added
BAR = 24  # characters of the longest bar
DECADES = 2.0  # the least that the longest bar stands for, so that the scale does not magnify small differences

FORMAT = SealedFormat("evalengine-op-digests", 2, "digest file", "evalengine explain RUN --item ITEM --write FILE")
FIX = "copy it again, or write it anew: evalengine explain RUN --item ITEM --write {file}"
COLUMNS = ("position", "step_requests", "step_tokens", "reused")
PACKED = ("ops", "computations")  # fields of Trace; the others are plain JSON values


def main(arguments: Namespace) -> int:
    """Runs `explain` with its arguments; returns the exit code."""
    for option, name in (("write", arguments.write), ("json", arguments.json)):
        words, read = f"explain: --{option} {name}", inputs(arguments.sources)
        if name not in (None, "-") and (problems := [*file_problems(words, Path(name), (), read, new_folder=True)]):
            raise ConfigError(problems)
    sources = [_opened(name) for name in arguments.sources]
    runs = [source for source in sources if isinstance(source, Run)]
    key = _key(sources, arguments)
    prompts = [source.prompt_sha256 if isinstance(source, Trace) else source.items[key].prompt_sha256
               for source in sources]  # fmt: skip
    check_prompts(key, prompts[0], prompts[-1])
    side_of = partial(Side, places=tuple(arguments.places or ()), alone=arguments.alone)
    sides = [source if isinstance(source, Trace) else side_of(source) for source in sources]
    if arguments.write:
        return _write(sides[0], key, arguments)
    if arguments.against:
        sides.append(side_of(runs[0], tuple(arguments.against)))
    explanation = explain(*(_traced(side, key) for side in sides))
    if explanation.lacking:  # some sizes need outputs that had no room: run again, keeping these tokens'
        explanation = explain(*(_traced(side, key, explanation.lacking) for side in sides))
    notes = [f"{run.source}: {UNBOUND}." for run in runs if run.unbound]
    notes += _nothing_found(explanation, runs, key)
    weights = differing_weights(explanation, [side for side in sides if isinstance(side, Side)])
    if arguments.json:
        write_json("explain", as_json(explanation, notes, weights), arguments.json)
    if arguments.json != "-":
        print_lines(report(explanation, notes, weights))
    return 0 if explanation.first is None else 1


def _opened(name: str) -> Run | Trace:
    """A run to be run again, or a digest file, which may be another machine's."""
    path = Path(name)
    with readable(path):
        is_digests = path.is_file() and FORMAT.claimed_by(path)
    if is_digests:
        return read_trace(path)
    run = load_run(path)
    if run.kind != "run":
        raise ConfigError(f"explain: {path}: a {run.kind} cannot be run again; give a run's folder")
    if run.records is not None:
        raise ConfigError(f"explain: {path}: lm-eval ran it, so its command is lm-eval's; run the task itself "
                          "(python -m evalengine task=...), and give that run's folder")  # fmt: skip
    if run.unbound:
        warn(f"{path}: {UNBOUND}")
    return run


def _traced(side: Side | Trace, key: RecordKey, keep: Sequence[int] = ()) -> Trace:
    """keep: token positions whose outputs are wanted whatever room they take (a file holds what it holds)."""
    if isinstance(side, Trace):
        return side
    from evalengine.explain.rerun import rerun  # which imports the engine; comparing two files does not need it

    return rerun(side, key, keep)


def _key(sources: Sequence[Run | Trace], arguments: Namespace) -> RecordKey:
    """The key of the item to explain, which every source has."""
    files = [source for source in sources if isinstance(source, Trace)]
    runs = [source for source in sources if isinstance(source, Run)]
    shared = runs[0].items.keys() & runs[1].items.keys() if len(runs) == 2 else ()
    if arguments.write and files:
        raise ConfigError(f"explain: {arguments.sources[0]}: already such a file; --write takes a run's folder")
    if arguments.against and files:
        raise ConfigError(f"explain: {arguments.sources[0]}: a file cannot be run under other settings; give a run's "
                          "folder")  # fmt: skip
    if arguments.item is not None:
        keys = [named_item(run, arguments.item, "explain") for run in runs] or [_key_of_file(files[0], arguments.item)]
    elif files:
        keys = [files[0].key]
    else:
        keys = [key for key in differing_leaves(*runs) if key in shared] if shared else []
    if not keys:
        why = ""
        if len(runs) == 2:
            why = "every request that the runs share is equal; " if shared else "the runs share no request; "
        raise ConfigError(f"explain: {why}name the item, as in --item 3 (its document) or --item gsm8k/3")
    for name, source in zip(arguments.sources, sources, strict=True):
        if keys[0] not in (source.items if isinstance(source, Run) else [source.key]):
            raise ConfigError(f"explain: {name}: it does not have {item_name(keys[0])}; name another --item")
    return keys[0]


def _key_of_file(file: Trace, text: str) -> RecordKey:
    """The file's item, which `text` must name."""
    parts = [str(part) for part in file.key]
    if text.split("/") not in ([parts[1]], *(parts[:length] for length in (2, 3, 4))):
        raise ConfigError(f"explain: --item {text}: the files are of {item_name(file.key)}")
    return file.key


def _write(side: Side | Trace, key: RecordKey, arguments: Namespace) -> int:
    trace = _traced(side, key, arguments.values or ())
    tokens = arguments.values or [trace.prompt_tokens - 1]
    if beyond := [token for token in tokens if not 0 <= token < len(trace.fed_ids)]:
        raise ConfigError(f"explain: --values {beyond[0]}: the item was fed tokens 0 to {len(trace.fed_ids) - 1}")
    size = write_trace(arguments.write, trace, tokens)
    gave = {True: "the bytes of the run's record", False: "OTHER bytes than the run's record", None: "no record"}
    say(
        f"{arguments.write}: {item_name(key)}, {len(trace.ops)} ops at {len(trace.fed_ids)} tokens, "
        f"{size / 1000:.1f} kB; it gave {gave[trace.reproduced]}"
    )
    return 0


def _nothing_found(explanation: Explanation, runs: Sequence[Run], key: RecordKey) -> Iterator[str]:
    """Possible causes if the re-runs agree although the runs did not."""
    if explanation.first is not None or len(runs) != 2:
        return
    a, b = runs
    if a.items[key].leaf == b.items[key].leaf:
        yield "The two runs' records of this item are equal as well."
        return
    if explanation.next_differs:
        yield "The outputs differ although every op before gives equal outputs: the next token was sampled differently."
        return
    yield (
        "Run again here, both give the same bytes, yet the runs' records of this item differ. The difference came from "
        "what was not repeated: the machine, its libraries, the code, or an interruption."
    )
    comparison = compare(a, b)
    yield from bullets(
        "What the runs' manifests differ in", [f.text for f in comparison.findings] + comparison.surroundings
    )
    if not comparison.findings and not comparison.surroundings:
        yield "Their manifests do not differ: `verify engine` says whether that machine repeats its own arithmetic."


def differing_weights(explanation: Explanation, sides: Sequence[Side]) -> list[str]:
    """A sentence for each difference, without its full stop; none if the weights are equal, or a file does not tell.

    sides: what was run again. Raises `ConfigError` for weights that cannot be read.
    """
    hashes = [trace.settings.get("weights") for trace in (explanation.a, explanation.b)]
    if None in hashes or hashes[0] == hashes[1]:
        return []
    if len(sides) < 2:
        return [f"their hashes are {short(hashes[0])} in A and {short(hashes[1])} in B; the tensors are not in a file"]
    from evalengine.explain.rerun import weight_files_of

    files = []
    for label, side in zip("AB", sides, strict=True):
        try:
            files.append(weight_files_of(side))
        except ValueError as error:
            return [f"{label}'s {error}"]
    try:
        return differing_tensors(*files)
    except (OSError, ValueError) as error:
        raise ConfigError(f"explain: the weights cannot be compared ({error}); copy the checkpoint again") from error


def write_trace(file: Path, trace: Trace, positions: Iterable[int]) -> int:
    """Writes `file`, whole or not at all, with the outputs at `positions`, and returns its size in bytes.

    Raises `EvalEngineError` if the disk refuses.
    """
    return write_text_file(file, FORMAT.seal(_content(trace, frozenset(positions))))


def read_trace(file: Path) -> Trace:
    """Reads a trace. Raises `ConfigError` if the file is none, truncated, damaged or edited, or of another version."""
    fix = FIX.format(file=file)
    content = FORMAT.unseal(file, fix)
    try:
        return _trace(content)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{file}: its parts contradict each other ({error}); {fix}") from error


def _content(trace: Trace, positions: frozenset[int]) -> dict[str, Any]:
    plain = {item.name: getattr(trace, item.name) for item in fields(Trace) if item.name not in PACKED}
    return {
        **plain,
        "count": len(trace.computations),
        "computations": {name: fold([getattr(x, name) for x in trace.computations]) for name in COLUMNS},
        "ops": [[op, dtype, *_digests(op, trace.computations)] for op, dtype in trace.ops.items()],
        "values": [
            [index, op, base64.b85encode(values.astype("<f4").tobytes()).decode()]
            for index, computation in enumerate(trace.computations)
            for op, values in computation.values.items()
            if computation.position in positions or op == LOGPROB
        ],
    }


def _digests(op: str, computations: list[Computation]) -> tuple[int, Any, str]:
    """(count, which computations have an output of the op, their digests)."""
    having = [index for index, computation in enumerate(computations) if op in computation.digests]
    packed = b"".join(computations[index].digests[op] for index in having)
    return len(having), fold(having), base64.b85encode(packed).decode()


def _trace(content: Mapping[str, Any]) -> Trace:
    count, digests = content["count"], {op: base64.b85decode(packed) for op, *_, packed in content["ops"]}
    if count * DIGEST_BYTES != max(map(len, digests.values())):  # a made-up count must not unfold long columns
        raise ValueError(f"{count} computations, but no op has as many digests")
    columns = [unfold(content["computations"][name], count) for name in COLUMNS]
    computations = [Computation(*row) for row in zip(*columns, strict=True)]
    for op, _, number, having, _ in content["ops"]:
        if len(digests[op]) != number * DIGEST_BYTES:
            raise ValueError(f"{op}: {len(digests[op])} bytes of digests for {number} outputs")
        for at, index in enumerate(unfold(having, number)):
            computations[index].digests[op] = digests[op][at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
    for index, op, packed in content["values"]:
        values = np.frombuffer(base64.b85decode(packed), dtype="<f4").astype(np.float32)
        stored_digest = computations[index].digests[op]
        computations[index].take(op, values, keep=True)
        if computations[index].digests[op] != stored_digest:
            raise ValueError(f"{op}: its values do not give its digest")
    plain = {item.name: content[item.name] for item in fields(Trace) if item.name not in PACKED}
    task, doc_id, request_index, repeat = content["key"]
    plain["key"] = (str(task), doc_id, request_index, repeat)
    ops = {op: dtype for op, dtype, *_ in content["ops"]}
    trace = Trace(ops=ops, computations=computations, **plain)
    if not {LOGITS, LOGPROB} <= ops.keys():
        raise ValueError("it ends before the logits")
    if {computation.position for computation in computations} != {*range(len(trace.fed_ids))}:
        raise ValueError("it does not have every token")
    return trace


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
        return f"FIRST DIFFERENCE in {op_name(e.first.op)}, token {e.first.position}"
    compared = sum(op.compared for op in e.ops)
    drawn = "; the next token was sampled differently" if e.next_differs else ""
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
    sides = [
        {"label": x.label, "ran": x.extent, "reproduced": x.reproduced, "tokens": len(x.fed_ids)} for x in (e.a, e.b)
    ]
    first = None
    if e.first is not None:
        steps = [
            {"requests": x.step_requests, "tokens": x.step_tokens, "reused": x.reused} for x in (e.first.a, e.first.b)
        ]
        first = {**_op_json(e.first), "token": e.first.position, "steps": steps}
    return {
        "verdict": verdict(e),
        "item": list(e.a.key),
        "sides": sides,
        "weights": list(weights),
        "settings": settings(e),
        "machines": machines(e),
        "common_tokens": e.common,
        "until": e.until,
        "first": first,
        "ops": [{**_op_json(row), "compared": row.compared, "differing": row.differing} for row in e.ops],
        "notes": list(notes),
    }


def _op_json(row: First | OpDifference) -> dict[str, Any]:
    layer, name = place(row.op)
    return {"layer": layer or None, "op": name, "size": None if row.size is None else finite_json(asdict(row.size))}


def _tokens(e: Explanation) -> str:
    if e.common == len(e.a.fed_ids) == len(e.b.fed_ids):
        return f"{e.common} tokens fed alike"
    return f"{e.common} tokens fed alike, then the outputs part (A was fed {len(e.a.fed_ids)}, B {len(e.b.fed_ids)})"


def _first(first: First, until: int) -> Iterator[str]:
    yield f"First difference: {op_name(first.op)}, at token {first.position}. Every op before it gives equal outputs."
    s = first.size
    if s is None:
        tokens = " ".join(map(str, sorted({first.position, until})))
        yield f"  Its size (elements, max |delta|, ulps) is not in the files: write both again with --values {tokens}."
    else:
        yield (
            f"  {s.differing} of {s.elements} elements differ, by at most {s.max_abs:.3g} "
            f"({shown(s.max_relative, '.2g')} of the largest; {counted(s.max_ulps, f'{s.unit} ulp')})."
        )
    yield f"  A computed it in {_step(first.a)}, B in {_step(first.b)}."


def _step(computation: Computation) -> str:
    step = f"a step of {counted(computation.step_requests, 'request')} and {counted(computation.step_tokens, 'token')}"
    return f"{step}, for another request (the item took it from the prefix cache)" if computation.reused else step


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
