"""Which decoders of transformers run by its own module, at their default configurations: a table for docs/models.md.

`python -m tests.parity.module_list` writes the rows.
"""

from __future__ import annotations

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from evalengine.errors import ConfigError
from evalengine.models.hf_module.describe import spec_of_module
from evalengine.models.registry import find_family_of_type

RUNS = "runs"
OTHER = "rejected for a reason that the message names"
# A part of a refusal -> the row of the table.
REASONS = {
    "layers of ": "refused: layers of other kinds (recurrent, convolutions, chunked or indexed attention)",
    "recurrent state": "refused: layers of other kinds (recurrent, convolutions, chunked or indexed attention)",
    "AttentionInterface": "refused: attention that is not transformers' `AttentionInterface`, once in each layer",
    "not causal": "refused: no decoder (encoders, or both)",
    "only decoders": "refused: no decoder (encoders, or both)",
}


def group_of(model_type: str) -> str:
    """The row of a model type."""
    try:
        spec_of_module({"model_type": model_type})
    except ConfigError as error:
        return next((row for part, row in REASONS.items() if part in error.problems[0]), OTHER)
    return RUNS


def rows() -> list[str]:
    """The table's rows: a group and its model types."""
    groups: dict[str, list[str]] = {row: [] for row in (RUNS, *dict.fromkeys(REASONS.values()), OTHER)}
    for model_type in sorted(CONFIG_MAPPING):
        config = CONFIG_MAPPING[model_type]
        if find_family_of_type(model_type) is None and config in MODEL_FOR_CAUSAL_LM_MAPPING:
            groups[group_of(model_type)].append(model_type)
    return [f"| {row} | {', '.join(f'`{name}`' for name in names)} |" for row, names in groups.items()]


if __name__ == "__main__":
    print("\n".join(rows()))
