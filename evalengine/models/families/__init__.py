"""The model families, a module each: importing this package registers them."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

FAMILIES = sorted(module.name for module in iter_modules(__path__))
for _name in FAMILIES:
    import_module(f"{__name__}.{_name}")
