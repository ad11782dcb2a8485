"""Reads, without running it, what a function of lm-eval's task files returns, if it only returns a literal."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from evalengine.util.plain_files import Tagged


def returned(named: Tagged, folder: Path) -> Any:
    """The value of `!function module.name`. folder: the YAML file's.

    Raises ValueError for a function that does anything but return a literal, and for a function that is not there.
    """
    module, _, name = named.value.rpartition(".")
    file = folder / f"{module}.py"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{named}: {file} cannot be read ({error})") from error
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name and len(node.body) == 1:
            only = node.body[0]
            if isinstance(only, ast.Return) and only.value is not None:
                try:
                    return ast.literal_eval(only.value)
                except ValueError:
                    break
    raise ValueError(f"{named}: it is no function that only returns a value, and none is run")
