"""Tells a model's layers how their inputs are quantised, as the checkpoint's packed weights ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from evalengine.engine.load.shards import StoredTensor, read_tensors
from evalengine.errors import EvalEngineError
from evalengine.layers.base import CheckpointTensor, Layer
from evalengine.layers.experts import ExpertDown, ExpertGateUp
from evalengine.layers.linear import MergedLinear, OutputLinear
from evalengine.layers.variants import Fp8Rows
from evalengine.models.file_values import plain


def set_input_rules(tensors: Iterable[CheckpointTensor], packed: Mapping[str, StoredTensor]) -> None:
    """Sets `Layer.input_rule` for every layer that has a weight whose input is quantised.

    packed: by the decoder's names, what the files hold of those weights. Of several constants for one input the largest
    counts. Raises EvalEngineError for constants that are no positive numbers, and for a layer that cannot do so.
    """
    shards: dict[Layer, dict[str, StoredTensor | None]] = {}
    for tensor in tensors:
        if tensor.name.endswith(".weight"):
            shards.setdefault(tensor.layer, {})[tensor.shard] = packed.get(tensor.name)
    for layer, own in shards.items():
        found = [stored for stored in own.values() if stored is not None]
        if not found:
            continue
        rules = {stored.activations for stored in found if stored.activations is not None}
        assert len(rules) == 1, "a checkpoint has one rule"
        rule = rules.pop()
        layer.input_rule = Fp8Rows(rule.group, max(map(_constant, found)) if rule.static else None, rule.power)
        if rest := [shard for shard, stored in own.items() if stored is None]:
            if not isinstance(layer, MergedLinear):
                raise _unsupported(found[0], "some of its neighbours' inputs are not")
            layer.leave_unquantized(rest)
        elif not isinstance(layer, MergedLinear | OutputLinear | ExpertGateUp | ExpertDown):
            raise _unsupported(found[0], "no layer of this kind does so")


def _constant(stored: StoredTensor) -> float:
    scale = stored.input_scale
    assert scale is not None, "a constant scale is a partner of the weight"
    ((_, value),) = read_tensors({scale.name: scale})
    number = float(value.float().item())
    if not 2.0**-126 <= number < 2.0**127:
        raise EvalEngineError(f"{scale.file}: {plain(scale.name)} is {number}, no scale; download or copy it again")
    return number


def _unsupported(stored: StoredTensor, why: str) -> EvalEngineError:
    return EvalEngineError(
        f"{stored.file}: the input of {plain(stored.name)} is to be quantised, and {why}; "
        "use the unquantised checkpoint"
    )
