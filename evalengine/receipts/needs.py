"""What a machine must have to compute an item again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evalengine import version
from evalengine.errors import ConfigError

LEVELS = ("exact", "native")


def check_contract(computed_by: Any, whose: str) -> None:
    """Raises ConfigError if this evalengine computes by another contract."""
    if computed_by != version.CONTRACT_VERSION:
        raise ConfigError(
            f"{whose}: computed by contract {str(computed_by)[:20]}, and this evalengine computes by contract "
            f"{version.CONTRACT_VERSION}, whose bits are others; check it with an evalengine of that contract"
        )


def check_level(computed_by: Mapping[str, Any], whose: str) -> None:
    """Raises ConfigError that says what it takes, if this machine cannot compute at that numerics level."""
    level = computed_by["numerics"]
    if level not in LEVELS:
        raise ConfigError(
            f"{whose}: computed in {str(level)[:20]} numerics, and only exact and native give one item the same bits "
            "again: it cannot be checked"
        )
    if level == "exact":
        return
    import torch

    required = computed_by.get("gpu_architecture")
    here = "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    if here is None or here != required:
        raise ConfigError(
            f"{whose}: computed in native on a GPU of architecture {required}, whose bits only such a GPU gives; this "
            f"machine has {here or 'no usable GPU'}. Check it where there is one, or ask for a run in numerics=exact, "
            "which any machine can check"
        )
