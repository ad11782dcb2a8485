"""A replica that fails as a test tells it to, while it works: wrong bits, NaN, slowness. Only tests make one."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from evalengine.engine.request import Request, RequestOutput
from evalengine.integrations.ray.replica import Replica

STEP_SECONDS = 3.0  # A slow replica waits so long in every step.


def moody(folder: Path) -> type[Replica]:
    """A class whose replicas read their mood from the file `folder`/<process id>, if there is one: wrong, nan, slow.

    The class is made in a function so that Ray sends its code along: the workers need not find this module.
    """

    class Moody(Replica):
        def _mood(self) -> str:
            file = folder / str(os.getpid())
            return file.read_text() if file.exists() else ""

        def _more(self) -> list[Request]:
            if self._mood() == "slow":
                time.sleep(STEP_SECONDS)
            return super()._more()

        def _deliver(self, output: RequestOutput) -> None:
            mood = self._mood()
            if mood == "wrong":  # One bit of one number flips, as by a bad register.
                bits = output.logprobs.view(np.uint32).copy()
                bits[-1] ^= 1
                output = replace(output, logprobs=bits.view(np.float32))
            elif mood == "nan":
                output = replace(output, error="layers.0.mlp: not finite (a test says so)")
            super()._deliver(output)

    return Moody
