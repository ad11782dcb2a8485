"""The command line's overrides: Hydra's grammar, names of settings, and what is given twice or has several values.

Every command that a message here suggests is one that works (tests/unit/test_compose_words.py).
"""

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
from evalengine.config.synonyms import REMOVED, SYNONYMS
from evalengine.config.texts import is_text
from evalengine.errors import ConfigError
from evalengine.util.plain_files import is_later_part

SEARCHED = "hydra.searchpath"
BARE = re.compile(r"(?!(?i:null|true|false|inf|nan)$)(?:[A-Za-z/]|\.\.?/)[A-Za-z0-9_./-]*")  # it needs no quotes
LISTS = ("task", SEARCHED)  # what takes several names in one run, with the settings whose type is a list
GLOBBED = "model.path"  # model.path=glob('out/checkpoint-*'): a sweep over the models that a pattern matches
MOST_SHOWN = 200  # characters of an override that cannot be read, and of what the library says of it
NUMBERS = re.compile(r"(\D*)(\d*)")  # a text and the number after it


def parse(overrides: Sequence[str], multirun: bool) -> list[Override]:
    """The overrides by Hydra's grammar. Raises `ConfigError` with all that is wrong with them."""
    parser = OverridesParser.create()
    parsed: list[Override] = []
    problems: list[str] = []
    for given in overrides:
        text = _in_full(given)
        try:
            override = parser.parse_override(text)
        except (HydraException, ValueError) as error:  # ValueError: a number with more digits than Python reads
            name, _, value = text.partition("=")
            fix = f"quote a value that holds = , or brackets: write {shlex.quote(f'{name}={quoted(_shown(value))}')}"
            hint = f" ({fix})" if isinstance(error, HydraException) else ""
            problems.append(f"{_shown(text)[:MOST_SHOWN]}: {_shown(str(error).splitlines()[0])[:MOST_SHOWN]}{hint}")
            continue
        if override.key_or_group == GLOBBED and isinstance(override.value(), Glob):
            override = parser.parse_override(f"{GLOBBED}={','.join(map(written, _matches(override)))}")
        parsed.append(override)
        problems.extend(_problems(override, multirun))
    if problems := [*problems, *_given_twice(parsed)]:
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


def _problems(override: Override, multirun: bool) -> Iterator[str]:
    key, value, chosen = override.key_or_group, value_text(override), override.value()
    if re.match("hydra[./]", key) and key not in REMOVED:
        if key != SEARCHED:
            yield f"{key}: Hydra's own settings have no effect here, except {SEARCHED}"
        return
    if _kind(key) is None:
        yield unknown(key or str(override.input_line))
    for one in (chosen.list if isinstance(chosen, ChoiceSweep) else [chosen]) if key in GROUPS else ():
        names = one if isinstance(one, list) else [] if isinstance(one, dict) else [one]
        if any(name is None or isinstance(name, int | float | list | dict) for name in names):
            yield f"{override.input_line}: {key} takes names, as in task=gsm8k or 'task=[gsm8k,arc_easy]'"
        elif isinstance(one, list) and key in ONE_OF:
            way = f"; {_swept(key, re.sub(r'[][]', '', value))}" if one and key != "experiment" else ""
            yield f"{override.input_line}: a run has one {key}{way}"
    if override.is_sweep_override() and not multirun:
        ways = [f"for one text write {shlex.quote(f'{key}={quoted(value)}')}"] if is_text(key) else []
        if key in LISTS or list in [get_origin(kind) for kind in (_kind(key), *get_args(_kind(key)))]:
            ways.append(f"for all in one run write {shlex.quote(f'{key}=[{value}]')}")
        yield f"{key}={value}: has several values; {', '.join([*ways, _swept(key, value)])}"


def _swept(key: str, values: str) -> str:
    return f"for a run of each write run -m {shlex.quote(f'{key}={values}')}"


def value_text(override: Override) -> str:
    """What follows the first = of an override; "" for `~task`, which has none and which Hydra raises for."""
    return str(override.input_line).partition("=")[2]


def unknown(key: str) -> str:
    """Return the message for a setting that does not exist."""
    if key in REMOVED:
        return f"{key}: no longer a setting: {REMOVED[key]}"
    known, last = known_keys(), key.split(".")[-1]
    own = re.match(r"(tasks|groups)\.([^.]+)\.", key)
    near: list[str] = []
    if last in SYNONYMS and key.count(".") <= (3 if own else 1):  # before names that only look alike
        near = [SYNONYMS[last]]
    elif not own:
        near = [name for name in known if name.split(".")[-1] == last and "<" not in name]
    if not near:
        asked = key.replace(own[0], f"{own[1]}.<name>.", 1) if own else key
        near = difflib.get_close_matches(asked, known, 1 if own else 2, 0.7)
    if own:
        near = [re.sub(r"^task\.|^\w+\.<name>\.", f"{own[1]}.{own[2]}.", name) for name in near]
    return f"{key}: no such setting" + (f"; did you mean {' or '.join(near)}?" if near else "; see --help")


def _given_twice(parsed: Sequence[Override]) -> Iterator[str]:
    """Hydra takes the last of them, and the others would be dropped in silence. The same words twice do no harm."""
    given: dict[str, dict[str, None]] = {}
    for override in parsed:
        for name in names_set(override.key_or_group, override.value()):
            given.setdefault(name, {})[_shown(str(override.input_line))] = None
    for name, texts in given.items():
        if len(texts) > 1:
            yield f"{name}: is given as {' and as '.join(texts)}; give it once"


def names_set(name: str, value: Any) -> Iterator[str]:
    """The names of the settings that a value sets: those within a mapping one by one."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from names_set(f"{name}.{key}", inner)
    else:
        yield name


@lru_cache(None)
def known_keys() -> dict[str, Any]:
    """Every setting's dotted name -> its type (`tasks.<name>.split` stands for any task)."""

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
    patterns = ((re.escape(name).replace("<name>", r"[^.]+"), kind) for name, kind in known_keys().items())
    return next((kind for pattern, kind in patterns if re.fullmatch(pattern, key)), None)


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
    return sorted(models, key=lambda path: [(text, int(number or 0)) for text, number in NUMBERS.findall(path)])
