"""`python -m evalengine prove`: one item of a run as a receipt that anyone can check. `check`: a receipt's item, or a
sample of a run's, is computed again and compared bit by bit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalengine.errors import ConfigError, readable
from evalengine.plain_text import say
from evalengine.util.command import Namespace

if TYPE_CHECKING:
    from evalengine.report.read.run import Run


def prove(arguments: Namespace) -> int:
    """Runs `prove` with its arguments; returns the exit code."""
    from evalengine.records.evidence import file_problems
    from evalengine.report.read.names import inputs

    words = f"prove: -o {arguments.output}"
    if problems := [*file_problems(words, arguments.output, (), inputs([arguments.run]), new_folder=True)]:
        raise ConfigError(problems)
    from evalengine.receipts.of_run import prove as proved
    from evalengine.receipts.receipt import write_receipt
    from evalengine.report.read.load import load_run

    receipt = proved(load_run(arguments.run), arguments.item, arguments.places)
    size = write_receipt(arguments.output, receipt)
    record = receipt.record
    say(
        f"{arguments.output}: {'/'.join(map(str, receipt.key))}, {len(record.prompt_ids)} tokens in and "
        f"{len(record.output_ids)} out, {size / 1000:.1f} kB; leaf {receipt.index} of {receipt.count}"
    )
    say(f"digest: {receipt.digest}")
    return 0


def check(arguments: Namespace) -> int:
    """Runs `check` with its arguments; returns the exit code."""
    with readable(arguments.source):
        is_file = Path(arguments.source).is_file()
    if is_file:
        if arguments.model is None:
            raise ConfigError("check: --model names the model that is to compute the receipt's item; give its path")
        return _check_receipt(arguments)
    from evalengine.report.read.names import stands_for

    if not Path(stands_for(arguments.source)).exists():
        raise ConfigError(f"check: {arguments.source}: no such file or folder; give a receipt, as `prove` writes one, "
                          "or a run's folder")  # fmt: skip
    if arguments.model or arguments.digest or arguments.tokenizer or arguments.adapter:
        raise ConfigError(
            "check: --model, --tokenizer, --adapter and --digest are for a receipt; of a run, --with model.path=..."
        )
    return _check_run(arguments)


def _check_receipt(arguments: Namespace) -> int:
    from evalengine.receipts.receipt import read_receipt

    receipt = read_receipt(Path(arguments.source))
    name = "/".join(map(str, receipt.key))
    if not receipt.leads_to_digest():
        where = f"the digest {receipt.digest[:16]}..."
        return _differs(f"{name}: its prompt, output and logprobs do not lead to {where}: the receipt was edited")
    if arguments.digest and arguments.digest != receipt.digest:
        return _differs(f"{name}: of a run with the digest {receipt.digest}, not {arguments.digest}")
    from evalengine.config.schema import ModelConfig
    from evalengine.receipts.of_run import divergence

    model = ModelConfig(
        name=arguments.model, path=arguments.model, tokenizer=arguments.tokenizer, adapter=arguments.adapter
    )
    if difference := divergence(receipt, model, arguments.device, arguments.source):
        return _differs(f"{name}: {difference}")
    record = receipt.record
    say(
        f"{name}: {len(record.prompt_ids)} tokens in, {len(record.output_ids)} out, computed again in "
        f"{receipt.computed_by['numerics']} {receipt.computed_by['dtype']}: every bit agrees"
    )
    say(_asked(receipt.asked))
    say(f"digest: {receipt.digest} (leaf {receipt.index}, by {len(receipt.path)} hashes)")
    say("verdict: AGREES")
    return 0


def _asked(settings: Mapping[str, Any] | None) -> str:
    """The kind of request, which the digest does not hold: a reader must know whether the model wrote the output."""
    if settings is None:
        return "scored: the output tokens were given, and these are their logprobs; the model did not write them"
    chosen = "greedily" if not settings.get("temperature") else f"at temperature {settings['temperature']:g}"
    named = {name: settings[name] for name in ("top_k", "top_p", "stop", "processors") if settings.get(name)}
    return f"generated {chosen}: the model wrote the output tokens" + (f", under {json.dumps(named)}" if named else "")


def _check_run(arguments: Namespace) -> int:
    """Of a run whose answers a judge scored, the verdicts are checked, too."""
    from evalengine.report.read.load import load_run

    run = load_run(arguments.source)
    if code := _items_differ(run, arguments, arguments.places):
        return code
    if (judge := run.manifest.judge) is not None and judge.digest is None:
        say(f"its judge is behind {judge.api}: no verdict can be computed again")
    elif judge is not None:
        from evalengine.config.overrides import word

        verdicts = load_run(run.source / judge.run)
        if verdicts.digest != judge.digest:
            return _differs(f"{verdicts.name} has the digest {verdicts.digest}, and {run.name} names {judge.digest}")
        if code := _items_differ(verdicts, arguments, [word("data_dir", str(verdicts.source.parent))]):
            return code
    say("verdict: AGREES")
    return 0


def _items_differ(run: Run, arguments: Namespace, places: Sequence[str]) -> int:
    """The exit code; says which items differ, or how many agree."""
    from evalengine.receipts.of_run import differing

    checked, differences = differing(run, arguments.sample, arguments.seed, places)
    for line in differences:
        say(line)
    if differences:
        return _differs(f"{len(differences)} of {checked} items of {run.name}, drawn by seed {arguments.seed}, differ")
    say(f"{checked} of {len(run.items)} items of {run.name}, drawn by seed {arguments.seed}: every bit agrees")
    say(f"digest: {run.digest}")
    return 0


def _differs(why: str) -> int:
    say(why)
    say("verdict: DIFFERS")
    return 1
