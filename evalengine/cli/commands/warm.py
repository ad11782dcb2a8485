"""The arguments of `warm`."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from evalengine.cli.commands.words import Command, setting_of
from evalengine.util.command import Namespace

OF_MODELS = ("model.", "engine.", "batch_invariant=", "numerics=")  # the settings on which kernels depend


def _words(
    model: Annotated[str, Argument(metavar="MODEL", help="a name of the shipped models, a folder, a Hub id or a .gguf "
                                   "file")],
    settings: Annotated[list[str] | None, Argument(metavar="[setting=value ...]", show_default=False,
                        parser=setting_of(*OF_MODELS), help="those of the runs to come: engine.*, model.*, numerics, "
                        "batch_invariant")] = None,
) -> Namespace:  # fmt: skip
    """Compiles and compares a model's kernels on this GPU before its first run needs them, for every batch size, and
    keeps them in the caches of the user (TRITON_CACHE_DIR, XDG_CACHE_HOME)."""
    return Namespace(model=model, settings=settings or [])


EPILOG = """\
  warm qwen3-8b
  warm ./checkpoint engine.max_num_seqs=64
  warm ./checkpoint model.load_format=dummy       reads config.json alone: kernels depend on shapes, not on weights

Exit codes: 0 done, or nothing to compile on a CPU; 1 the kernels differ on this GPU; 2 bad usage."""
main = Command("warm", _words, "evalengine.cli.warm:main", EPILOG)
