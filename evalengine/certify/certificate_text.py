"""A certificate for people: the table and the lines of the terminal, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from evalengine.certify.fault_injection import FEW_ROWS
from evalengine.certify.kernels import kernels_summary
from evalengine.certify.proof import NONE_FOUND

HEADINGS = ("Axis", "Schedules", "Logprobs", "Differing", "Verdict")
MEANING = {
    "IDENTICAL": "No schedule changed a bit.",
    "DIFFERENT": "A schedule changed bits: results of this installation depend on how the work is batched.",
    "INCOMPLETE": "Nothing differed, but that proves too little.",
    "FAILED": "No request differed, but kernels that must give equal bytes do not.",
}

Content = Mapping[str, Any]


def axes_table(content: Content) -> Table:
    """A row for each axis, then the total and the control."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(HEADINGS):
        table.add_column(name, justify="right" if 1 <= number <= 3 else "left", no_wrap=number < 4)
    *axes, total, control = _rows(content)
    for row in axes:
        table.add_row(*(Text(cell) for cell in row))
    table.add_section()
    for row in (total, control):
        table.add_row(*(Text(cell) for cell in row))
    return table


def summary(content: Content) -> Iterator[str]:
    """The lines below the table; the verdict is the last."""
    if first := content["first_difference"]:
        yield f"first difference: {first['schedule']}: {first['request']}, token {first['token']}:"
        yield f"  {first['found']}"
        yield f"  {first['expected']} alone"
    if kernels := content["kernels"]:
        yield from (f"kernels: {line}" for line in kernels_summary(kernels))
    yield from (f"incomplete: {reason}" for reason in content["incomplete"])
    yield _requests(content)
    yield _where(content)
    yield _control(content["negative_control"])
    yield f"answers: {content['requests']['answers_sha256']}"
    total = content["total"]
    yield (
        f"verdict: {content['verdict']}: {total['differing_bytes']} differing bytes in {total['logprobs']:,} logprobs, "
        f"{content['seconds']:.0f} s"
    )


def markdown(content: Content) -> str:
    """The whole certificate on a page."""
    *lines, verdict = summary(content)
    subject, code = content["subject"], content["code"]
    tasks = ", ".join(subject["tasks"]) or "no task"
    headings = ("Axis", "What varies", *HEADINGS[1:])
    about = [axis["varies"] for axis in content["axes"].values()]
    rows = [
        (row[0], what, *row[1:])
        for row, what in zip(_rows(content), [*about, "", "batch_invariant=false"], strict=True)
    ]
    facts = {
        "Settings": " ".join(subject["settings"]) or "the defaults",
        "Weights": f"sha256 {subject['weights_sha256']}",
        "Numerics contract": f"version {content['contract_version']}",
        "Code": f"evalengine {code['version']}, commit {code['commit'] or 'unknown'}"
        + (" with changes" if code["dirty"] else "")
        + f"; kernels sha256 {code['kernels_sha256']}",
        "Machine": f"{_machine(content)}, {content['hardware']['cpu_count']} CPUs, {content['platform']}",
        "Python": content["python"],
        "Libraries": ", ".join(f"{name} {version}" for name, version in content["libraries"].items()),
        "Finished": content["finished"],
    }
    return "\n".join(
        [
            f"# {content['verdict']}: {subject['model']}, {tasks}",
            "",
            f"{MEANING[content['verdict']]} {_sentence(verdict)}",
            "",
            *(f"- {_escaped(line)}" for line in lines),
            "",
            *_table(headings, rows),
            "",
            *_table(("", ""), list(facts.items())),
            "",
        ]
    )


def _rows(content: Content) -> Iterator[tuple[str, ...]]:
    """The cells of each axis, of the total and of the control."""
    for name, axis in content["axes"].items():
        yield (name, *_counts(axis), _verdict(axis))
    total, schedules = content["total"], sum(len(axis["schedules"]) for axis in content["axes"].values())
    yield "total", str(schedules), f"{total['logprobs']:,}", f"{total['differing_logprobs']:,}", content["verdict"]
    control = content["negative_control"]
    yield ("fast (control)", *_counts(control), _control_verdict(control))


def _counts(axis: Content) -> tuple[str, str, str]:
    return str(len(axis["schedules"])), f"{axis['logprobs']:,}", f"{axis['differing_logprobs']:,}"


def _verdict(axis: Content) -> str:
    if axis["differing_logprobs"]:
        first = axis["first_difference"]
        where = f"{first['schedule']}: {first['request']}, token {first['token']}"
        return f"DIFFERENT: {where}: {first['found']} against {first['expected']} alone"
    if axis["not_exercised"]:
        return f"not exercised: {'; '.join(axis['not_exercised'])}"
    return f"skipped: {axis['skipped']}" if axis["skipped"] else "identical"


def _control_verdict(control: Content) -> str:
    if not control["differing_logprobs"]:
        return NONE_FOUND
    return f"differs, as it should: by up to {control['largest_difference']:.2g} for the same token"


def _control(control: Content) -> str:
    counts = f"{control['differing_bytes']:,} differing bytes in {control['logprobs']:,} logprobs"
    fault_injected = f" and products of up to {FEW_ROWS} rows split over K" if control.get("planted") else ""
    return f"fast (control) with {control['attention_backend']} attention{fault_injected}: {counts}"


def _requests(content: Content) -> str:
    requests = content["requests"]
    counts = [f"{number} of {task}" for task, number in requests["of_tasks"].items()]
    counts.append(f"{requests['count'] - sum(requests['of_tasks'].values())} of lengths around page and chunk borders")
    cut = f", answers cut at {requests['answers_cut_at']}" if requests["answers_cut_at"] else ""
    return f"{requests['count']} requests: {', '.join(counts)}; the longest {requests['longest']} tokens{cut}"


def _where(content: Content) -> str:
    subject = content["subject"]
    return f"numerics {subject['numerics']} ({subject['dtype']}) on {subject['device']}: {_machine(content)}"


def _machine(content: Content) -> str:
    return ", ".join(content["hardware"]["gpus"]) or str(content["hardware"]["cpu"])


def _sentence(verdict: str) -> str:
    return f"{verdict.removeprefix('verdict: ').partition(': ')[2]}."


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    yield from (f"| {' | '.join(map(_escaped, row))} |" for row in rows)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
