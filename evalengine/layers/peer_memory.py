"""Memory of every rank that all ranks of one machine can write to; `kernels.push_gather` pushes into it.

    T tokens, n columns of one rank.

A gather's shape decides how it is made, and is the same on every rank: so all ranks get None, or none does.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from evalengine.kernels.push_gather import (
    ALIGNMENT,
    MAX_PROGRAMS,
    WORD,
    Peers,
    as_words,
    push_add_rms_norm,
    push_gather,
    silu_and_mul_push,
)

logger = logging.getLogger(__name__)

NUM_SLOTS = 2  # slots are used by turns: see kernels/push_gather.py
LAST_TURN = (1 << 63) - 1  # a flag with this turn ends every wait, since no gather is later
_LAZY_PEER_ACCESS = 1  # the driver's CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """The driver's CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_byte * 64)]


class _Array:
    """Device memory that torch did not allocate, in the form that `torch.as_tensor` takes."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class NoPeerMemory(Exception):
    """The ranks cannot write to each other's memory."""


class PeerMemory:
    """This rank's slots, and the other ranks' slots mapped into this process. Each rank of a model has one."""

    def __init__(self, tp: Any, slot_bytes: int, device: torch.device) -> None:
        """tp: the ranks' collectives, which exchange the handles; slot_bytes: bytes of a whole gathered tensor.

        Raises NoPeerMemory on every rank if any of them cannot open another's memory.
        """
        self._rank, self._size, self._device = tp.rank, tp.size, device
        self._slot_bytes = -(-slot_bytes // ALIGNMENT) * ALIGNMENT
        self._flag_bytes = MAX_PROGRAMS * tp.size * torch.int64.itemsize
        self._opened: list[int] = []
        self._own, problem = 0, ""
        try:
            self._own = _allocate(NUM_SLOTS * self._slot_bytes + self._flag_bytes)
            self._lay_out()
            handle = _handle_of(self._own)
        except OSError as error:
            handle, problem = bytes(64), str(error)
        handles = tp.gather(torch.frombuffer(bytearray(handle), dtype=torch.uint8).view(1, -1).to(device))
        addresses = []
        try:
            for rank, of_rank in enumerate(handles.view(self._size, -1).cpu()):
                addresses.append(self._own if rank == self._rank else self._open(bytes(of_rank.tolist())))
        except OSError as error:
            problem = problem or str(error)
        failed = tp.sum(torch.tensor([float(bool(problem))], device=device)).item()
        if failed:
            self.close()
            raise NoPeerMemory(problem or "another rank cannot")
        own_sms = torch.cuda.get_device_properties(device).multi_processor_count
        programs = min(MAX_PROGRAMS, *tp.gather(torch.tensor([[own_sms]], device=device))[0].tolist())
        memories = torch.tensor(addresses, dtype=torch.int64, device=device)
        counts = torch.zeros(1 + MAX_PROGRAMS, dtype=torch.int64, device=device)
        flags = NUM_SLOTS * self._slot_bytes
        self._turns = [
            Peers(tp.rank, tp.size, memories, slot * self._slot_bytes, flags, counts, programs, {})
            for slot in range(NUM_SLOTS)
        ]
        torch.cuda.synchronize(device)

    def _open(self, handle: bytes) -> int:
        address = _open(handle)
        self._opened.append(address)
        return address

    def _lay_out(self) -> None:
        """Divides this rank's memory into slots and flags, and clears the flags before another rank could push."""
        sizes = [*[self._slot_bytes] * NUM_SLOTS, self._flag_bytes]
        *self._slots, flags = torch.as_tensor(_Array(self._own, sum(sizes)), device=self._device).split(sizes)
        self._flags = flags.view(torch.int64)
        self._flags.zero_()
        self._ended = torch.full(self._flags.shape, LAST_TURN).pin_memory()
        self._aside = torch.cuda.Stream(self._device)
        self._turn = 0
        torch.cuda.synchronize(self._device)

    def begin(self) -> None:
        """Called when a forward pass begins: all ranks take the same slot next, even if one gave up a capture.

        The pass before may have used that slot last. Nothing reads it any more: a pass begins with a sum over the ranks
        (`VocabEmbedding`), which ends on no rank before all ranks have come to it.
        """
        self._turn = 0

    def gather(self, x: Tensor) -> Tensor | None:
        """Every rank's [T, n] -> [T, size x n] on each, in a slot that may be overwritten from the next gather on.

        None if the tensor does not fit a slot or its rows are not whole words.
        """
        rows, columns = x.shape
        if not self._fits(rows, columns, x.dtype) or columns * x.element_size() % WORD:
            return None
        push_gather(as_words(x), self._turns[self._turn])
        return self._gathered(rows, columns, x.dtype)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor | None:
        """`gather` of `activation.silu_and_mul` of every rank's [T, 2 n]; None if it does not fit a slot, or T is not
        small."""
        rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
        fits = self._fits(rows, columns, gate_up.dtype)
        if not fits or not silu_and_mul_push(gate_up, self._turns[self._turn]):
            return None
        return self._gathered(rows, columns, gate_up.dtype)

    def add_rms_norm(self, part: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
        """`rms_norm.add_rms_norm` of the gathered parts [T, n] and residual [T, size x n], in their own memory; None
        if the parts do not fit a slot, or T is not small."""
        if not self._fits(part.shape[0], part.shape[1], part.dtype):
            return None
        result = push_add_rms_norm(part, residual, weight, eps, self._turns[self._turn])
        if result is not None:
            self._turn = (self._turn + 1) % NUM_SLOTS
        return result

    def _fits(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        return 0 < self._size * rows * columns * dtype.itemsize <= self._slot_bytes

    def _gathered(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """The slot of this turn, into which [rows, columns] of every rank come; the next turn begins."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % NUM_SLOTS
        return slot[: self._size * rows * columns * dtype.itemsize].view(dtype).view(rows, self._size * columns)

    def abort(self) -> None:
        """Ends every wait on this device for another rank; the gathered values are then rubbish.

        It is a copy, which needs no SM: waiting programs and those behind them may hold all.
        """
        with torch.cuda.stream(self._aside):
            self._flags.copy_(self._ended, non_blocking=True)

    def close(self) -> None:
        """Gives the memory back, once nothing on the device uses it. Idempotent."""
        if self._own:
            torch.cuda.synchronize(self._device)
        for address in self._opened:
            _driver().cuIpcCloseMemHandle(ctypes.c_uint64(address))
        if self._own:
            _driver().cuMemFree_v2(ctypes.c_uint64(self._own))
        self._opened, self._own = [], 0


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *arguments: Any) -> None:
    if code := getattr(_driver(), function)(*arguments):
        raise OSError(f"{function}: CUDA error {code}")


def _allocate(size: int) -> int:
    """Allocates device memory outside torch's allocator, since an IPC handle stands for a whole allocation."""
    address = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    return address.value


def _handle_of(address: int) -> bytes:
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle)


def _open(handle: bytes) -> int:
    address = ctypes.c_uint64()
    structure = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), structure, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return address.value
