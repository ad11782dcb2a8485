r"""The command line's overrides: Hydra's grammar, names of settings, and what is given twice or has several values.

Every command that a message here suggests is one that works (tests/unit/test_compose_words.py).

A shell has no escapes in its quotes, and Hydra's grammar has none for `\n`: `task.description='Solve.\n\n'` would put a
backslash and an n into every prompt, and `task.generation.until=["\n\n"]` would stop none. So the command line's texts
are read as people mean them. YAML and Python have escapes in their quotes, `"\n"`; a text of theirs that still holds
the two characters is rejected. LaTeX's commands stay unchanged, and so does Jinja's code, whose texts Jinja reads.
"""

from __future__ import annotations

import difflib
import glob
import re
import shlex
from collections.abc import Iterator, Sequence, Set
from dataclasses import is_dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Quote, QuotedString
from hydra.errors import HydraException

from evalengine.config.schema import Config
from evalengine.config.shipped import GROUPS
from evalengine.errors import ConfigError
from evalengine.util.plain_files import is_later_part
from evalengine.util.validation import is_unicode

SEARCHED = "hydra.searchpath"
BARE = re.compile(r"(?!(?i:null|true|false|inf|nan)$)(?:[A-Za-z/]|\.\.?/)[A-Za-z0-9_./-]*")  # it needs no quotes
GLOBBED = "model.path"  # model.path=glob('out/checkpoint-*'): a sweep over the models that a pattern matches
MOST_SHOWN = 200  # characters of an override that cannot be read, and of what the library says of it
TEXTS = {  # settings whose values, at any depth, become part of a prompt or stop an answer
    *("description", "gen_prefix", "until", "doc_to_text", "doc_to_target", "doc_to_choice"),
    *("target_delimiter", "fewshot_delimiter", "system_instruction", "think_end_token", "chat_template_args"),
}
LATEX = (  # its commands that begin with \n; those with \r and \t are too many, and small letters follow these
    "abla|e|eq|eg|u|ot|otin|earrow|warrow|ewline|ewcommand|oindent|onumber|exists|leq|geq|mid|subseteq|supseteq"
)
# Jinja's code, which holds no other beginning of code, so that no text takes minutes; or an escape.
TOKEN = re.compile(
    r"\{\{(?:(?!\{\{).)*?\}\}|\{%(?:(?!\{%).)*?%\}"
    rf"|(?<!\\)(?P<slashes>\\\\?)(?P<letter>n(?!(?:{LATEX})(?![A-Za-z]))|[rt](?![a-z]))",
    re.DOTALL,
)
SYNONYMS = {  # a setting's last name in lm-eval or elsewhere -> ours
    name: ours
    for ours, names in {
        "task": "tasks dataset benchmark",
        "task.num_fewshot": "fewshot few_shot fewshots n_shot nshot shots",
        "task.generation.max_gen_toks": "max_gen_toks max_new_tokens max_tokens max_completion_tokens",
        "task.generation.until": "stop stop_strings",
        "task.generation.temperature": "temperature",
        "limit": "num_samples max_samples n_samples samples",
        "output_dir": "output_path output out out_dir output_folder",
        "cache": "use_cache",
        "apply_chat_template": "chat_template chat",
        "model.path": "pretrained path model_name",
        "model.adapter": "peft lora lora_path adapter_path peft_path",
        "model.api": "base_url api_base",
        "engine.max_num_seqs": "batch_size max_batch_size batch bs num_seqs max_batch",
        "engine.max_model_len": "max_length context_length max_seq_len max_seq_length",
        "engine.dtype": "precision torch_dtype",
        "engine.tensor_parallel_size": "tp tp_size tensor_parallel",
    }.items()
    for name in names.split()
}
MEANT = {"n": "\n", "r": "\r", "t": "\t"}


def parse(overrides: Sequence[str], multirun: bool) -> list[Override]:
    """The overrides by Hydra's grammar. Raises `ConfigError` with all that is wrong with them."""
    parser = OverridesParser.create()
    parsed: list[Override] = []
    problems: list[str] = []
    given: dict[str, dict[str, None]] = {}  # setting -> the words that set it
    for text in map(_in_full, overrides):
        try:
            override = parser.parse_override(text)
        except (HydraException, ValueError) as error:  # ValueError: a number with more digits than Python reads
            name, _, value = text.partition("=")
            fix = f" (quote a value that holds = , or brackets: write {shlex.quote(f'{name}={quoted(value)}')})"
            said = f"{text[:MOST_SHOWN]}: {str(error).splitlines()[0][:MOST_SHOWN]}"
            problems.append(said + fix * isinstance(error, HydraException))
            continue
        if override.key_or_group == GLOBBED and isinstance(override.value(), Glob):
            override = parser.parse_override(f"{GLOBBED}={','.join(map(written, _matches(override)))}")
        parsed.append(override)
        problems.extend(_problems(override, multirun))
        for name in names_set(override.key_or_group, override.value()):
            given.setdefault(name, {})[str(override.input_line)] = None
    # Hydra takes the last of them, and the others would be dropped in silence. The same words twice do no harm.
    problems += [f"{name}: is given as {' and as '.join(texts)}; give it once"
                 for name, texts in given.items() if len(texts) > 1]  # fmt: skip
    if problems:
        raise ConfigError(problems)
    return parsed


def _in_full(text: str) -> str:
    r"""The override with `cache=FOLDER` written as `cache.path=FOLDER` and `judge.` as `task.judge.`, and with quotes
    around a text that the grammar would change: one with the end of a line, or with `\\n`."""
    text = re.sub(r"^(\+*)cache=(?!\{)", r"\1cache.path=", text)
    text = re.sub(r"^(\+*)judge\.", r"\1task.judge.", text)
    name, _, value = text.partition("=")
    changed = "\n" in value or (is_text(name) and re.search(r"\\\\[nrt]", value))
    return f"{name}={quoted(value)}" if changed and value[0] not in "'\"[{" else text


def quoted(value: str) -> str:
    """A text in quotes, by which the grammar takes it unchanged."""
    return str(QuotedString(value, Quote.double).with_quotes())


def word(name: str, value: Any) -> str:
    """A setting with a plain value in the grammar of overrides, which gives it back unchanged."""
    return f"{name}={written(value)}"


def written(value: Any) -> str:
    """A plain value in the grammar of overrides: `${...}` in a text is no reference, and a text has no quotes where it
    needs none, since runs of a sweep are named after it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ",".join(f"{written(key)}:{written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if not isinstance(value, str):
        return repr(value)
    return value if BARE.fullmatch(value) else str(QuotedString(literal(value), Quote.single).with_quotes())


def literal(value: Any) -> Any:
    """A value with its texts escaped so that OmegaConf gives them back unchanged: a prompt's `${...}` is no reference,
    and no file reads the environment."""
    if isinstance(value, dict):
        return {key: literal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [literal(inner) for inner in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _problems(override: Override, multirun: bool) -> Iterator[str]:
    key, line, chosen = override.key_or_group, str(override.input_line), override.value()
    value = line.partition("=")[2]  # "" for `~task`, which Hydra raises for
    if not key or (key.startswith(("hydra.", "hydra/")) and key != SEARCHED):
        yield f"{key or line}: Hydra's own settings have no effect here, except {SEARCHED}" if key else unknown(line)
    each = "for a run of each write run -m "
    for one in (chosen.list if isinstance(chosen, ChoiceSweep) else [chosen]) if key in GROUPS else ():
        names = one if isinstance(one, list) else [one]
        if names is one and key != "task":
            swept = shlex.quote(f"{key}={re.sub(r'[][]', '', value)}")
            yield f"{line}: a run has one {key}{f'; {each}{swept}' if one and key != 'experiment' else ''}"
        elif not isinstance(one, dict) and any(isinstance(name, int | float | list | dict | None) for name in names):
            yield f"{line}: {key} takes names, as in task=gsm8k or 'task=[gsm8k,arc_easy]'"
    if override.is_sweep_override() and not multirun:
        ways = [f"for one text write {shlex.quote(f'{key}={quoted(value)}')}"] if is_text(key) else []
        if key == "task":
            ways.append(f"for all in one run write {shlex.quote(f'{key}=[{value}]')}")
        yield f"{line}: has several values; {', '.join([*ways, each + shlex.quote(f'{key}={value}')])}"


def unknown(key: str) -> str:
    """Return the message for a setting that does not exist."""
    known, last = known_keys(), key.rpartition(".")[2]
    near = [SYNONYMS[last]] if last in SYNONYMS else []  # before names that only look alike
    near = near or [name for name in known if name.rpartition(".")[2] == last and "<" not in name]
    own = re.match(r"(tasks\.|groups\.)[^.]+\.", key)
    general = key.replace(own[0], f"{own[1]}<name>.", 1) if own else key
    near = near or difflib.get_close_matches(general, known, 1 if own else 2, 0.7)
    if own:
        near = [re.sub(rf"^(task\.|{own[1]}<name>\.)", own[0], name) for name in near]
    hint = f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else "; see --help"
    return f"{key}: no such setting{hint}"


def names_set(name: str, value: Any) -> Iterator[str]:
    """The names of the settings that a value sets: those within a mapping one by one."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from names_set(f"{name}.{key}", inner)
    else:
        yield name


@lru_cache(None)
def known_keys() -> list[str]:
    """Every setting's dotted name (`tasks.<name>.split` stands for any task)."""

    def walk(kind: Any, prefix: str) -> Iterator[str]:
        if get_origin(kind) is dict:
            prefix, kind = f"{prefix}.<name>", get_args(kind)[1]
            yield prefix
        for name, hint in get_type_hints(kind).items() if is_dataclass(kind) else ():
            yield (inner := f"{prefix}.{name}".lstrip("."))
            yield from walk(hint, inner)

    return [*walk(Config, ""), "experiment"]  # its files set other settings, so it has no node


def _matches(override: Override) -> list[str]:
    """The folders and .gguf files (of a split model: the first part) that a pattern matches, sorted with numbers by
    value: checkpoint-900 before checkpoint-1000. Raises `ConfigError` for a pattern that matches nothing."""
    pattern = override.value()
    assert isinstance(pattern, Glob)
    found = {Path(path): path for include in pattern.include for path in glob.glob(include)}
    models = [
        path
        for place, path in found.items()
        if place.is_dir() or (place.suffix == ".gguf" and not is_later_part(place))
        if not any(fnmatch(path, out) for out in pattern.exclude)
    ]
    if not models:
        raise ConfigError(f"{override.input_line}: no directory or .gguf file matches (seen from {Path.cwd()})")
    return sorted(models, key=lambda path: [(t, int(number or 0)) for t, number in re.findall(r"(\D*)(\d*)", path)])


def is_text(name: str) -> bool:
    """Whether a setting's value becomes part of a prompt or stops an answer, or holds such texts."""
    return name.endswith("judge.template") or not TEXTS.isdisjoint(name.split("."))


def read_texts(node: Any, typed: Set[str], problems: list[str], where: str = "") -> Any:
    r"""A copy of the composed settings with the command line's `\n` read, and `\\n` as a backslash and an n.

    typed: the names of the settings that the command line sets. Each other text that holds a `\n`, and each one that
    no file can hold, adds a sentence to `problems`.
    """
    if isinstance(node, dict):
        return {name: read_texts(value, typed, problems, f"{where}.{name}".lstrip(".")) for name, value in node.items()}
    if isinstance(node, list):
        return [read_texts(value, typed, problems, where) for value in node]
    if isinstance(node, str) and not is_unicode(node):  # as bytes on the command line that are not UTF-8
        problems.append(f"{where}={node[:40]!r}: must be a text in UTF-8")
    elif not isinstance(node, str) or not is_text(where):
        return node
    if where in typed:
        return TOKEN.sub(_meant, node)
    problems.extend(escape_problems(node, where, r'YAML reads \n in double quotes, as "\n", and in no others'))
    return node


def escape_problems(text: str, where: str, fix: str) -> Iterator[str]:
    r"""Yields a sentence if the text holds a `\n`, `\r` or `\t` of two characters."""
    for found in TOKEN.finditer(text):
        if found["slashes"] == "\\":
            near = text[max(0, found.start() - 20) : found.end() + 10].replace("\n", " ")
            yield f"{where}: in {near!s} the {found[0]} is two characters, a backslash and {found['letter']}; {fix}"
            return


def _meant(found: re.Match[str]) -> str:
    """The meaning of an escape: a doubled backslash is one. Jinja's code has its own rules."""
    if not found["letter"]:
        return found[0]
    return MEANT[found["letter"]] if found["slashes"] == "\\" else found[0][1:]
