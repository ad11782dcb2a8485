"""The arguments and options of `verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option

from evalengine.cli.command import SETTING, BadUsage, Command
from evalengine.util.command import Namespace

AXES = (
    *("batch", "order", "neighbours", "chunks", "prefix", "preemption", "pages", "decode", "asked", "ids", "nan"),
    *("threads", "graphs", "cascade", "speculation", "tensor_parallel", "busy", "mixed", "restart"),
)
PARTS = ("engine", "kernels")


def _json_file(text: str) -> Path:
    """A path that ends in .json; checked before minutes are spent, as the Markdown gets the same name with .md."""
    if not text.endswith(".json") or Path(text).is_dir():
        raise BadParameter(f"{text}: name a file that ends in .json; the Markdown goes beside it")
    return Path(text)


def _axis(text: str) -> str:
    if text not in AXES:
        raise BadParameter(f"{text!r} is not one of {', '.join(map(repr, AXES))}.")
    return text


def _words(
    words: Annotated[list[str] | None, Argument(metavar="[engine|kernels] [setting=value ...]", show_default=False,
                     help="what to certify (default: both), and settings as of a run")] = None,
    axes: Annotated[list[str] | None, Option(metavar="AXIS ...", parser=_axis, help="what to vary (default: all of "
                    f"{' '.join(AXES)})")] = None,
    logprobs: Annotated[int | None, Option(metavar="N", min=0, help="compare at least N, by random "
                        "schedules at the end (the axis mixed)")] = None,
    quick: Annotated[bool, Option("--quick", help="few and short requests: a minute less")] = False,
    layers: Annotated[int | None, Option(metavar="N", help="cut a shape's depth")] = None,
    no_cache: Annotated[bool, Option("--no-cache", help="check again what a cached verdict on native's schedules would "
                                     "answer")] = False,
    out: Annotated[Path | None, Option(metavar="FILE.json", parser=_json_file, help="where the certificate goes, as "
                   "JSON and, beside it, as Markdown (default: results/certificates/<tasks>-<model>-<time>.json)"
                   )] = None,
) -> Namespace:  # fmt: skip
    """Certify this installation, in under three minutes on a CPU: `engine`, `kernels`, or both by default."""
    arguments = Namespace(**locals())
    arguments.settings = tuple(word for word in words or () if SETTING.match(word))
    parts = [word for word in words or () if not SETTING.match(word)]
    what = parts[0] if parts else None
    if what not in (None, *PARTS):
        raise BadUsage(f"{what}: there are {' and '.join(PARTS)}")
    if parts[1:]:
        raise BadUsage(f"{' '.join(parts[1:])}: name one part, or none for both")
    arguments.what = what
    if what == "kernels":
        for name in ("axes", "logprobs", "quick", "out"):
            if getattr(arguments, name):
                raise BadUsage(f"--{name}: belongs to verify engine; verify kernels runs no requests")
    arguments.axes = axes or AXES
    if logprobs is not None and "mixed" not in arguments.axes:
        raise BadUsage(f"--logprobs={logprobs}: only the axis mixed goes on for longer; add it to --axes")
    return arguments


EPILOG = """\
  engine     runs the same requests under many schedules and compares bytes with each request alone, then does the same
             in the ordinary mode (batch_invariant=false), which must differ or the comparison has shown nothing
  kernels    compares exact's kernels with the bits that every machine must give; on CUDA also every schedule that
             native's may choose for this model with the reference schedule

Settings are those of a run: task=gsm8k model=qwen3-0.6b, model.path=FOLDER, limit=, engine.device=, engine.dtype=,
numerics=, data_dir=, ... The requests are those of the tasks' first documents (limit=: how many; answers are cut at 24
tokens on a CPU and 256 on a GPU, unless task.generation.max_gen_toks= says how long) and others whose lengths lie on
both sides of every page and chunk border. model.path=shape:qwen3-0.6b or shape:qwen3-8b is that model's
shape with dummy weights, and takes no task.

Exit codes: 0 identical, 1 differing, incomplete or failed, 2 bad usage."""
main = Command("verify", _words, "evalengine.certify.cli:main", EPILOG)
