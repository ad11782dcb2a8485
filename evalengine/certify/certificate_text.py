"""A certificate for people: the table and lines of the terminal, and one page of Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from evalengine.certify.fault_injection import FEW_ROWS
from evalengine.certify.kernels import kernels_summary

HEADINGS = ("Axis", "Schedules", "Logprobs", "Differing", "Result")
MEANING = {
    "IDENTICAL": "No schedule changed a bit.",
    "DIFFERENT": "A schedule changed bits: results of this installation depend on how requests are scheduled.",
    "INCOMPLETE": "No logprob differed, but the evidence is incomplete.",
    "FAILED": "No logprob differed, but some kernels do not return the bytes that they must return.",
}
METHOD = """\
Each request runs alone first. Every schedule runs the same requests again, and every token id and float32 logprob is
compared with the request alone, byte by byte. The control runs the ordinary mode (batch_invariant=false), which must
differ: otherwise the comparison shows nothing."""
LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")  # on the page; the JSON has all

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
    yield from _findings(content)
    yield f"requests: {_requests(content)}"
    yield f"numerics: {_where(content)}: {_machine(content)}"
    yield _control(content["negative_control"])
    yield f"answers: {content['requests']['answers_sha256']}"
    yield f"verdict: {content['verdict']}: {_total(content)}"


def _findings(content: Content) -> Iterator[str]:
    """The differences, the kernels' verdict, and the reason for everything that was not compared."""
    if first := content["first_difference"]:
        yield f"first difference: {_place(first)}: {first['found']}, alone {first['expected']}"
    others = (axis["first_difference"] for axis in content["axes"].values())
    yield from (f"different: {_place(other)}" for other in others if other and other != first)
    if kernels := content["kernels"]:
        yield from (f"kernels: {line}" for line in kernels_summary(kernels))
    yield from (f"incomplete: {reason}" for reason in content["incomplete"])
    skipped = {name: axis["skipped"] for name, axis in content["axes"].items() if axis["skipped"]}
    yield from (f"skipped: {name}: {reason}" for name, reason in skipped.items())


def markdown(content: Content) -> str:
    """Return the certificate as one page; the JSON has every schedule."""
    subject, code, libraries = content["subject"], content["code"], content["libraries"]
    findings = list(_findings(content))
    headings = ("Axis", "What varies", *HEADINGS[1:])
    about = [axis["varies"] for axis in content["axes"].values()]
    rows = [
        (row[0], what, *row[1:]) for row, what in zip(_rows(content), [*about, "", "the ordinary mode"], strict=True)
    ]
    changed = " with uncommitted changes" if code["dirty"] else ""
    facts = {
        "Model": _model(subject),
        "Requests": _requests(content),
        "Settings": " ".join(subject["settings"]) or "the defaults",
        "Numerics": f"{_where(content)}; contract version {content['contract_version']}",
        "Control": _control(content["negative_control"]),
        "Self-test": _self_test(subject.get("self_test")),
        "Answers": f"sha256 {content['requests']['answers_sha256']}",
        "Weights": f"sha256 {subject['weights_sha256']}",
        "Code": f"evalengine {code['version']}, commit {code['commit'] or 'unknown'}{changed}",
        "Kernels": f"sha256 {code['kernels_sha256']}",
        "Machine": f"{_machine(content)}, {content['hardware']['cpu_count']} CPUs, {content['platform']}",
        "Python": content["python"],
        "Libraries": ", ".join(f"{name} {libraries[name]}" for name in LIBRARIES if libraries.get(name)),
        "Finished": content["finished"],
    }
    return "\n".join(
        [
            f"# {content['verdict']}: {', '.join([subject['model'], *subject['tasks']])}",
            "",
            f"{MEANING[content['verdict']]} {_total(content)}.",
            "",
            METHOD,
            "",
            *_table(headings, rows),
            "",
            *(f"- {_escaped(line)}" for line in findings),
            *([""] if findings else []),
            *_table(("", ""), [(name, text) for name, text in facts.items() if text]),
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
        return "DIFFERENT"
    if axis["not_exercised"]:
        return "not exercised"
    return "skipped" if axis["skipped"] else "identical"


def _control_verdict(control: Content) -> str:
    largest = f"{control['largest_difference']:.2g}"
    return f"differs, as it must (by up to {largest})" if control["differing_logprobs"] else "no difference found"


def _control(control: Content) -> str:
    counts = f"{control['differing_bytes']:,} differing bytes in {control['logprobs']:,} logprobs"
    fault = f", injected fault: products of up to {FEW_ROWS} rows split over K" if control.get("planted") else ""
    return f"fast (control) with {control['attention_backend']} attention{fault}: {counts}"


def _requests(content: Content) -> str:
    requests = content["requests"]
    counts = [f"{number} of {task}" for task, number in requests["of_tasks"].items()]
    generated = requests["count"] - sum(requests["of_tasks"].values())
    counts.append(f"{generated} with lengths around page and chunk borders")
    limit = f", answers truncated at {requests['answers_cut_at']} tokens" if requests["answers_cut_at"] else ""
    return f"{requests['count']} ({', '.join(counts)}), longest {requests['longest']} tokens{limit}"


def _model(subject: Content) -> str:
    weights = "random weights" if subject["format"] == "dummy" else f"{subject['format']} weights"
    millions = subject["num_parameters"] / 1e6
    size = f"{millions / 1e3:.3g} B" if millions >= 1e3 else f"{millions:.3g} M"
    return f"{subject['architecture']}, {subject['num_layers']} layers, {size} parameters, {weights}"


def _where(content: Content) -> str:
    subject = content["subject"]
    return f"{subject['numerics']} ({subject['dtype']}) on {subject['device']}"


def _machine(content: Content) -> str:
    return ", ".join(content["hardware"]["gpus"]) or str(content["hardware"]["cpu"])


def _place(difference: Content) -> str:
    return f"{difference['schedule']}: {difference['request']}, token {difference['token']}"


def _total(content: Content) -> str:
    total, schedules = content["total"], sum(len(axis["schedules"]) for axis in content["axes"].values())
    counts = f"{total['differing_bytes']:,} differing bytes in {total['logprobs']:,} logprobs"
    return f"{counts} of {schedules} schedules, {content['seconds']:.0f} s"


def _self_test(verdict: Mapping[str, Any] | None) -> str:
    if verdict is None or verdict["status"] != "passed":
        return "" if verdict is None else verdict["status"]
    text = f"passed: {', '.join(verdict['axes'])}"
    if errors := verdict["errors"]:
        ours, plain = errors["ours"]["rms"], errors["plain"]["rms"]
        text += f"; RMS error against float32 {ours:.2g} nats, of plain PyTorch ops {plain:.2g}"
    return text


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    yield from (f"| {' | '.join(map(_escaped, row))} |" for row in rows)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
