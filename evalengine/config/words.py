"""The command line's overrides, one by one and beside each other: grammar, names of settings, sweeps, and what is given
twice. Every command that a message here tells to write is one that works (tests/unit/test_compose_words.py)."""

from __future__ import annotations

import difflib
import glob
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Quote, QuotedString
from hydra.errors import HydraException

from evalengine.config.schema import Config
from evalengine.config.shipped import GROUPS, ONE_OF
from evalengine.config.synonyms import DTYPES, REMOVED, SYNONYMS
from evalengine.config.texts import is_text
from evalengine.errors import ConfigError
from evalengine.util.plain_files import is_later_part

BARE = re.compile(r"(?!(?i:null|true|false|inf|nan)$)(?:[A-Za-z/]|\.\.?/)[A-Za-z0-9_./-]*")  # it needs no quotes
BARE_VALUE = re.compile(r"[A-Za-z0-9./_-]+")  # a value that a message may repeat: no shell reads anything into it
LISTS = ("task", "hydra.searchpath")  # what takes several names in one run, besides settings whose type is a list


def parse(overrides: Sequence[str], multirun: bool) -> list[Override]:
    """The overrides by Hydra's grammar. Raises `ConfigError` with all that is wrong with them."""
    parser = OverridesParser.create()
    parsed: list[Override] = []
    problems: list[str] = []
    for text in overrides:
        try:
            override = parser.parse_override(_in_full(text))
        except ValueError:  # the number has more than Python's limit of 4,300 digits
            problems.append(f"{text[:60]}...: a number of thousands of digits cannot be meant")
            continue
        except HydraException as error:
            problems.append(f"{_shown(text)}: {_shown(first_line(error))} ({_how_to_quote(text)})")
            continue
        parsed.append(override)
        problems.extend(_problems(override, multirun))
    if problems := [*problems, *_given_twice(parsed)]:
        raise ConfigError(problems)
    return parsed


def _in_full(text: str) -> str:
    """The override with `cache=FOLDER` written as `cache.path=FOLDER` and `judge.` as `task.judge.`, and with quotes
    around a value that holds the end of a line, as a shell's $'...' gives it: the grammar has no other place for one.
    """
    text = re.sub(r"^(\+*)cache=(?!\{)", r"\1cache.path=", text)
    text = re.sub(r"^(\+*)judge\.", r"\1task.judge.", text)
    name, _, value = text.partition("=")
    return f"{name}={quoted(value)}" if "\n" in value and value[0] not in "'\"[{" else text


def quoted(value: str) -> str:
    """A text in quotes, by which the grammar takes it as it is."""
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
    literal = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value if BARE.fullmatch(value) else str(QuotedString(literal, Quote.single).with_quotes())


def _shown(text: str) -> str:
    return text.replace("\n", "\\n")


def _how_to_quote(text: str) -> str:
    name, equals, value = text.partition("=")
    if not equals or value[:1] in ("'", '"', "[", "{"):
        return "quote each text that holds = , a quote or brackets, and close each bracket"
    return f"quote a value that holds = , or brackets: write {shlex.quote(f'{name}={quoted(_shown(value))}')}"


def _problems(override: Override, multirun: bool) -> Iterator[str]:
    key, value = override.key_or_group, value_text(override)
    if re.match("hydra[./]", key):
        if key != "hydra.searchpath":
            yield f"{key}: Hydra's own settings have no effect here, except hydra.searchpath"
        return
    if not any(re.fullmatch(pattern, key) for pattern in known_keys().values()):
        yield unknown(key, value) if key else f"{override.input_line}: names no setting; write NAME=VALUE"
    if key in GROUPS and override.is_add():
        yield f"{override.input_line}: is set already, and + only adds; write {shlex.quote(f'{key}={value}')}"
    yield from _choice_problems(override)
    if is_text(key) and re.search(r"\\\\[nrt]", value) and value[0] not in "'\"" and _has_bare_text(override.value()):
        yield f"{value}: two backslashes are one outside quotes; {_how_to_quote(f'{key}={value}')}"
    if override.is_sweep_override() and not multirun:
        yield f"{key}={value}: has several values; {_either_way(key, value, text=True)}"


def value_text(override: Override) -> str:
    """What follows the first = of an override; "" for `~task`, which has none and which Hydra raises for."""
    return str(override.input_line).partition("=")[2]


def unknown(key: str, value: str = "") -> str:
    """Return the message for a setting that does not exist. value: what the command line sets it to."""
    if key in REMOVED:
        return f"{key}: no longer a setting: {REMOVED[key]}"
    known, last = known_keys(), key.split(".")[-1]
    own = re.match(r"(tasks|groups)\.([^.]+)\.", key)
    depth = key.count(".") - (key.count(".", 0, own.end()) if own else 0)
    names: list[str] = []
    if depth <= 1 and (synonym := SYNONYMS.get(last)):  # before names that only look alike: no block_size for a batch
        synonym = re.sub(r"^task\.", f"tasks.{own[2]}.", synonym) if own else synonym
        names = [synonym + (f"={DTYPES.get(value, value)}" if BARE_VALUE.fullmatch(value) else "")]
    elif own:
        near = difflib.get_close_matches(key.replace(own[0], f"{own[1]}.<name>.", 1), known, 1, 0.7)
        names = [name.replace("<name>", own[2], 1) for name in near if name.startswith(own[1])]
    names = names or [name for name in known if name.split(".")[-1] == last and "<" not in name]
    names = names or difflib.get_close_matches(key, known, 2, 0.7)
    return f"{key}: no such setting" + (f"; did you mean {' or '.join(names)}?" if names else "; see --help")


def _choice_problems(override: Override) -> Iterator[str]:
    """No name for a group; or a list where a run has one: settings of several files would be mixed, under one name."""
    key, chosen = override.key_or_group, override.value()
    if key in GROUPS and key != "experiment" and chosen is None:
        yield f"{key}=null: a group needs a name; see --help for those there are"
    choices = chosen.list if isinstance(chosen, ChoiceSweep) else [chosen]
    lists = [one for one in choices if isinstance(one, list)]
    names = [name for one in lists for name in one] + [one for one in choices if isinstance(one, int | float)]
    if key in GROUPS and key not in ONE_OF and (odd := [n for n in names if not isinstance(n, str | QuotedString)]):
        named = "'task=[gsm8k,arc_easy]'" if key == "task" else f"{key}=NAME"
        yield f"{override.input_line}: {str(odd[0]) or 'an empty text'} is no name; write names, as in {named}"
    if key in ONE_OF and lists:
        written = value_text(override).replace("[", "").replace("]", "").strip()
        several = "," in written
        how = f"for a run of each write {_swept(key, written)}" if several else f"write {key}={written}"
        yield f"{override.input_line}: a run has one {key}" + (f"; {how}" if written else "; name one")


def _swept(key: str, values: str) -> str:
    """A sweep's words, those of the command `run` wherever they are printed: verify and tasks have no -m."""
    return f"run -m {shlex.quote(f'{key}={values}')}"


def _either_way(key: str, values: str, text: bool) -> str:
    """What to write for several values: a sweep or, where the setting allows it, a list; text: or one text of them."""
    sweep, kind = f"for a run of each write {_swept(key, values)}", _kind(key)
    if key == "experiment":
        return "name one experiment, each is a sweep of its own"
    if key in LISTS or _holds(kind, list):
        return f"for all in one run write {shlex.quote(f'{key}=[{values}]')}, {sweep}"
    if text and is_text(key):
        return f"for one text write {shlex.quote(f'{key}={quoted(values)}')}, {sweep}"
    return sweep


def _given_twice(parsed: Sequence[Override]) -> Iterator[str]:
    """Hydra takes the last of them, and the others would be dropped in silence. The same words twice do no harm."""
    given: dict[str, dict[str, Override]] = {}
    for override in parsed:
        for name in names_set(override.key_or_group, override.value()):
            given.setdefault(name, {})[_shown(str(override.input_line))] = override
    for name, overrides in given.items():
        if len(overrides) > 1:
            values = [re.sub(r"^\[(.*)\]$", r"\1", value_text(o).strip()) for o in overrides.values()]
            joined = not any(o.is_delete() or o.key_or_group != name for o in overrides.values())
            cure = f"; {_either_way(name, ','.join(filter(None, values)), text=False)}" if joined else ""
            yield f"{name}: is given as {' and as '.join(overrides)}; give it once{cure}"


def _has_bare_text(value: Any) -> bool:
    """Whether a value is a text without quotes, or holds one."""
    if isinstance(value, ChoiceSweep | list | dict):
        inner = value.list if isinstance(value, ChoiceSweep) else value.values() if isinstance(value, dict) else value
        return any(map(_has_bare_text, inner))
    return isinstance(value, str)


def names_set(name: str, value: Any) -> Iterator[str]:
    """The names of the settings that a value sets: those within a mapping one by one."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from names_set(f"{name}.{key}", inner)
    else:
        yield name


def first_line(error: BaseException) -> str:
    """The first line of a library's message, with the next one if that says what it is about."""
    first, *rest = str(error).split("\n")
    return f"{first} {rest[0]}" if rest and first.endswith(":") else first


@lru_cache(None)
def known_keys() -> dict[str, str]:
    """Every setting's dotted name -> a pattern that matches it (`tasks.<name>.split` stands for any task)."""
    return {name: re.escape(name).replace("<name>", r"[^.]+") for name in _kinds()}


@lru_cache(None)
def _kinds() -> dict[str, Any]:
    """Every setting's dotted name -> its type."""

    def walk(kind: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, hint in get_type_hints(kind).items():
            yield prefix + name, hint
            if is_dataclass(hint):
                yield from walk(hint, f"{prefix}{name}.")
            elif get_origin(hint) is dict:
                inner, kind = f"{prefix}{name}.<name>", get_args(hint)[1]
                yield inner, kind
                if is_dataclass(kind):
                    yield from walk(kind, inner + ".")

    return {**dict(walk(Config, "")), "experiment": str}  # its files set other settings, so it has no node


def _kind(key: str) -> Any:
    """The setting's type; None for one that is unknown."""
    return next((_kinds()[name] for name, pattern in known_keys().items() if re.fullmatch(pattern, key)), None)


def _holds(kind: Any, wanted: type) -> bool:
    """Whether a type, or one of those that it joins by |, is `wanted`."""
    return wanted in [get_origin(one) or one for one in (kind, *get_args(kind))] and get_origin(kind) is not dict


GLOBBED = "model.path"  # model.path=glob('out/checkpoint-*'): a sweep over the folders that a pattern matches


def with_folders(parsed: Sequence[Override]) -> list[str]:
    """The overrides' texts, with a glob of models replaced by the folders and .gguf files (of a split model: the first
    part) that it matches, sorted with numbers by value (checkpoint-900 before checkpoint-1000).

    Raises `ConfigError` for a pattern that matches nothing.
    """
    return [_listed(override) if _is_glob(override) else str(override.input_line) for override in parsed]


def _is_glob(override: Override) -> bool:
    return override.key_or_group == GLOBBED and isinstance(override.value(), Glob)


def _listed(override: Override) -> str:
    pattern = override.value()
    assert isinstance(pattern, Glob)
    found = {Path(path): path for include in pattern.include for path in glob.glob(include)}
    ggufs = {place for place in found if place.suffix == ".gguf" and not is_later_part(place)}
    matches = [path for place, path in found.items() if place.is_dir() or place in ggufs]
    models = sorted((path for path in matches if not any(fnmatch(path, out) for out in pattern.exclude)), key=_natural)
    if not models:
        raise ConfigError(f"{override.input_line}: no folder and no .gguf file is called so, seen from {Path.cwd()}")
    return f"{GLOBBED}={','.join(map(written, models))}"


def _natural(path: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", path)]
