"""Another process that keeps the device busy, so that a GPU switches between the two in the middle of kernels.

`python -m evalengine.certify.busy DEVICE` multiplies matrices until it is killed, and says "busy" once it does.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from evalengine.certify.process import own_command, own_environment
from evalengine.errors import EvalEngineError

SIZE = {"cuda": 8192, "cpu": 512}  # rows and columns of a matrix, whose product takes a millisecond or two
AT_ONCE = 20  # products between two synchronisations


class NoNeighbour(EvalEngineError):
    """No second process could use the device: its compute mode is exclusive, or its memory full."""


@contextmanager
def busy_neighbour(device: str) -> Iterator[None]:
    """Keeps the device busy with another process. Raises `NoNeighbour` with its last line of output if it cannot
    start."""
    command, pipe = own_command("busy", device), subprocess.PIPE
    with subprocess.Popen(command, env=own_environment(), text=True, stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "busy\n":
                words = process.communicate()[1].strip().splitlines()
                raise NoNeighbour(f"no other process could keep {device} busy: {words[-1] if words else 'it ended'}")
            yield
        finally:
            process.kill()


def _main(device: str) -> None:
    import torch

    size = SIZE[torch.device(device).type]
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    print("busy", flush=True)
    while True:
        for _ in range(AT_ONCE):
            x @ x
        if x.is_cuda:
            torch.cuda.synchronize(x.device)


if __name__ == "__main__":
    _main(sys.argv[1])
