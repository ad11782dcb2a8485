"""Which model a run is of: what each is called, and how far it was trained."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from evalengine.report.compare.comparability import model_arguments
from evalengine.report.read.run import Run

_STEP = re.compile(r"(?:global[-_]?step|step|checkpoint|ckpt|iter|epoch)s?[-_=]?0*(\d+)([kKmM]?)(?![A-Za-z\d])")
_THOUSANDS = {"": 1, "k": 1_000, "m": 1_000_000}


def labels(runs: Sequence[Run]) -> list[str]:
    """Each model's unique label: its name, and what distinguishes it from models of the same name
    (the parts of its path that differ, the run's id)."""
    names = [_name(run) for run in runs]
    for more in (_path_parts(runs, names), [(run.manifest.run_id or "") for run in runs]):
        counts = Counter(names)
        names = [f"{name} ({part})" if counts[name] > 1 and part else name
                 for name, part in zip(names, more, strict=True)]  # fmt: skip
    seen: Counter[str] = Counter()
    for place, name in enumerate(names):
        seen[name] += 1
        names[place] = name if seen[name] == 1 else f"{name} #{seen[name]}"
    return names


def steps(runs: Sequence[Run], names: Sequence[str]) -> list[int] | None:
    """How far each model was trained, from `step-1000`, `checkpoint_2k`, `epoch3` in its name or path; None unless
    every model names its own number."""
    places = names, [_source(run) for run in runs], [str(run.source) for run in runs]
    return next((found for texts in places if (found := named_steps(texts)) is not None), None)


def named_steps(texts: Sequence[str]) -> list[int] | None:
    """The last training step that each text names, as `checkpoint-1000`; None unless all have different ones."""
    matches = [_STEP.findall(text) for text in texts]
    numbers = [int(found[-1][0]) * _THOUSANDS[found[-1][1].lower()] for found in matches if found]
    return numbers if len({*numbers}) == len(matches) else None


def _name(run: Run) -> str:
    if run.by_lm_eval:
        arguments = model_arguments(run)
        path = arguments.get("pretrained") or arguments.get("model") or run.name
        return path.rstrip("/").rpartition("/")[2] or run.name
    return run.manifest.model.name or run.name


def _source(run: Run) -> str:
    """Where the model's weights lay."""
    if run.by_lm_eval:
        return model_arguments(run).get("pretrained", "")
    return run.manifest.model.source or ""


def _path_parts(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """The parts in which the paths of the weights differ between runs whose models have one name."""
    parts = [_source(run).strip("/").split("/") for run in runs]
    differing = []
    for own, name in zip(parts, names, strict=True):
        others = [other for other, alike in zip(parts, names, strict=True) if alike == name]
        if any(len(other) != len(own) for other in others):
            differing.append("/".join(own[-2:]))
            continue
        differing.append("/".join(part for place, part in enumerate(own) if any(o[place] != part for o in others)))
    return differing
