"""How many features a token has at the widest places of a model, read from the model's own layers."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from evalengine.layers.experts import ExpertDown
from evalengine.layers.linear import OutputLinear
from evalengine.models.decoder import without_storage
from evalengine.models.spec import ModelSpec


class Widths(NamedTuple):
    """Numbers of features of one token, all ranks' together; the widest layer's."""

    hidden: int
    heads: int  # what the last product of attention, or of a recurrence, takes
    inner: int  # what a feed-forward's last products take, its experts' together
    outputs: int  # what they give, a row for each expert of the token
    shared: dict[str, int]  # what every rank needs an equal part of, by its name


@lru_cache(maxsize=16)
def widths(spec: ModelSpec) -> Widths:
    """The widths of a model. One that runs by transformers' module has those of a decoder of its sizes."""
    heads, inner, outputs = 0, 0, spec.hidden_size
    shared: dict[str, int] = {}
    chosen = 1 if spec.mixture is None else spec.mixture.router.chosen
    for layer in without_storage(spec.of_each_kind).model.layers:
        features = rows = 0
        for path, part in layer.named_modules():
            if not isinstance(part, OutputLinear | ExpertDown):
                continue
            out, taken = part.shape
            shared["hidden features"] = out
            if not path.startswith("mlp."):
                heads = max(heads, taken)
                continue
            experts = isinstance(part, ExpertDown)
            times = chosen if experts else 1
            features, rows = features + times * taken, rows + times * out * experts
            of = " of an expert" if experts else " of the shared expert" if "shared_expert" in path else ""
            shared[f"intermediate features{of}"] = taken
        inner, outputs = max(inner, features), max(outputs, rows)
    return Widths(spec.hidden_size, heads, inner, outputs, shared)
