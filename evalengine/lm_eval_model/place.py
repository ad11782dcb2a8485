"""Finds the folder for a run's records: beside the results that lm-eval will write, so that readers find both.

lm-eval tells a model neither its `--output_path` nor when it is done. Its tracker holds the path, and is a local
variable of `simple_evaluate` while that function makes the model; the tracker is read from there.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from lm_eval import utils as lm_eval_utils

from evalengine.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """The folder of results that lm-eval writes, or that its Python caller writes."""

    root: Path  # lm-eval's output path
    model: str  # the model's name as lm-eval was given it
    tracker: Any = None

    @property
    def folder(self) -> Path:
        """<output path>/<model>, with the characters that lm-eval replaces; beside an output path that is a file."""
        if self.root.suffix == ".json":
            return self.root.parent
        sanitized = getattr(getattr(self.tracker, "general_config_tracker", None), "model_name_sanitized", None)
        return self.root / (sanitized or lm_eval_utils.sanitize_model_name(self.model))


def find_place(output_dir: str | None, model: str) -> Place | None:
    """The place by the model argument `output_dir`, else by lm-eval's `--output_path`; None without either.

    Raises: ConfigError if the two name different folders (results and records would not be found together), and for
    a folder that cannot be written.
    """
    tracker = running_tracker()
    path = getattr(tracker, "output_path", None) or None
    if output_dir is None:
        return _writable(Place(Path(path), model, tracker), "--output_path") if path else None
    if path and os.path.realpath(path) != os.path.realpath(output_dir):
        raise ConfigError(
            f"output_dir={output_dir}: lm-eval writes its results to {path}, and records lie beside them; leave "
            "output_dir out, or name the same folder"
        )
    return _writable(Place(Path(output_dir), model, tracker), "output_dir")


def _writable(place: Place, setting: str) -> Place:
    """The place, with its root made now, since failing after hours of answers would lose them. Raises ConfigError."""
    root = place.root.parent if place.root.suffix == ".json" else place.root
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{setting}={place.root}: cannot be made ({error.strerror})"
        raise ConfigError(f"{why}; name a folder that can be written") from error
    if not os.access(root, os.W_OK):
        raise ConfigError(f"{setting}={place.root}: cannot be written; name another folder, or mend its permissions")
    return place


def running_tracker() -> Any:
    """The tracker of the `simple_evaluate` that is making a model; None if Python code makes it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "simple_evaluate" and frame.f_globals.get("__name__") == "lm_eval.evaluator":
            return frame.f_locals.get("evaluation_tracker")
        frame = frame.f_back
    return None
