"""What every evaluation by lm-eval in this folder shares."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from torch.utils import collect_env


@pytest.fixture(scope="session", autouse=True)
def _one_look_at_the_machine() -> Iterator[None]:
    """lm-eval writes a description of the machine into every result, for which it starts pip, nvidia-smi and others.

    No test reads it, and hundreds of them would wait a second each: the machine is described once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect_env, "get_pretty_env_info", functools.cache(collect_env.get_pretty_env_info))
        yield
