"""The verdict on the kernels' schedules, and its consequence: a schedule that differs is not chosen again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from evalengine.kernels import attention, expert_matmul, matmul, matmul_schedules, softmax

MODULES: dict[str, ModuleType] = {
    "matmul": matmul_schedules,
    "attention": attention,
    "softmax": softmax,
    "experts": expert_matmul,
}

logger = logging.getLogger(__name__)


@dataclass
class KernelsVerdict:
    """The schedules that were compared, and the results."""

    schedules: set[tuple[str, Any]] = field(default_factory=set)  # every (kernel, schedule) that was compared
    checked: int = 0  # comparisons
    dropped: list[dict[str, Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    lasting: bool = True  # whether another process would reach the same verdict

    def drop(self, kernel: str, schedule: Any, where: str, reason: str) -> None:
        """Records a schedule that this process must not choose again."""
        self.dropped.append({"kernel": kernel, "schedule": asdict(schedule), "where": where, "reason": reason})
        exclude(self.dropped[-1])

    def compare(self, kernel: str, schedule: Any, where: str, run: Callable[[], Tensor], expected: Tensor) -> None:
        """Runs a schedule; drops it if a byte differs, or if it does not run at all (its tile may not fit this GPU).

        The reference schedule cannot be dropped, because it takes the others' place: the kernel fails instead.
        """
        self.schedules.add((kernel, schedule))
        self.checked += 1
        try:
            different = count_differing(run(), expected)
        except torch.OutOfMemoryError:  # The data did not fit, which is no fault of the schedule.
            raise
        except Exception as error:
            self.lasting &= isinstance(error, OutOfResources)
            reason = f"does not run: {type(error).__name__}: {error}"[:300]
        else:
            if not different:
                return
            reason = f"{different} of {expected.numel()} elements differ"
        if schedule == MODULES[kernel].REFERENCE:
            self.fail(f"{kernel}, the reference schedule ({where}): {reason}")
        else:
            self.drop(kernel, schedule, where, reason)

    def require_equal(self, what: str, found: Tensor, expected: Tensor) -> None:
        """Compares the results of two kernels that must give the same bytes."""
        self.checked += 1
        if different := count_differing(found, expected):
            self.fail(f"{what}: {different} of {expected.numel()} elements differ")

    def fail(self, why: str) -> None:
        """Records a failure because of which `native` must not run on this machine."""
        self.failed.append(why)
        logger.error("%s", why)


def exclude(drop: dict[str, Any]) -> None:
    """Excludes a dropped schedule in this process, with a warning the first time."""
    module = MODULES[drop["kernel"]]
    schedule = type(module.REFERENCE)(**drop["schedule"])
    if schedule not in module.excluded:
        module.excluded.add(schedule)
        matmul.forget_launches()
        expert_matmul.forget_launches()
        words = (drop["kernel"], schedule, drop["where"], drop["reason"])
        logger.warning("%s schedule %s is not used on this machine (%s): %s", *words)


def count_differing(left: Tensor, right: Tensor) -> int:
    """Elements whose bytes differ: -0 is not +0, and NaN equals the same NaN."""
    integer = {2: torch.int16, 4: torch.int32}[right.element_size()]
    assert left.dtype == right.dtype and left.shape == right.shape
    return int((left.contiguous().view(integer) != right.contiguous().view(integer)).sum())
