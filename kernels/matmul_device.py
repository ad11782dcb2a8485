"""The properties of a device that matter to products: its name, its SMs, the forms of schedules it can take."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from evalengine.kernels.cublaslt import CublasLt, cublaslt


class Gpu(NamedTuple):
    name: str
    multiprocessors: int
    descriptors: bool
    cublaslt: CublasLt | None

    def forms(self, aligned: bool, plain: bool) -> tuple[bool, bool]:
        """Whether schedules of the forms "tma" and "cublaslt" may be taken.

        aligned: the operands' rows lie as both forms need them. plain: nothing but the product and one rounding.
        """
        return self.descriptors and aligned, self.cublaslt is not None and aligned and plain


@cache
def gpu_of(device: int) -> Gpu:
    """The GPU of that index; -1, a CPU, stands for the interpreter."""
    if device < 0:  # The interpreter takes any tile; two SMs give a persistent program more than one.
        return Gpu("cpu", 2, True, None)
    properties = torch.cuda.get_device_properties(device)
    descriptors = properties.major in (9, 10)
    return Gpu(properties.name, properties.multi_processor_count, descriptors, cublaslt(device))
