"""Memory of every rank that all ranks of one machine can write to; `kernels.push_gather` pushes into it."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from evalengine.kernels.push_gather import WORD, push_gather

logger = logging.getLogger(__name__)

NUM_SLOTS = 2  # slots are used by turns: see kernels/push_gather.py
FLAG_BYTES = 4096
LAST_TURN = (1 << 31) - 1  # a flag with this turn ends every wait, since no gather is later
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
        self._slot_bytes = -(-slot_bytes // FLAG_BYTES) * FLAG_BYTES
        self._opened: list[int] = []
        self._own, problem = 0, ""
        try:
            self._own = _allocate(NUM_SLOTS * self._slot_bytes + FLAG_BYTES)
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
        starts = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._tables = [starts + slot * self._slot_bytes for slot in range(NUM_SLOTS)]
        self._flag_tables = starts + NUM_SLOTS * self._slot_bytes
        torch.cuda.synchronize(device)

    def _open(self, handle: bytes) -> int:
        address = _open(handle)
        self._opened.append(address)
        return address

    def _lay_out(self) -> None:
        """Divides this rank's memory into slots and flags, and clears the flags before another rank could push."""
        memory = torch.as_tensor(_Array(self._own, NUM_SLOTS * self._slot_bytes + FLAG_BYTES), device=self._device)
        *self._slots, flags = memory.split([*[self._slot_bytes] * NUM_SLOTS, FLAG_BYTES])
        self._flags = flags.view(torch.int32)
        self._flags.zero_()
        self._state = torch.zeros(2, dtype=torch.int32, device=self._device)
        self._aside = torch.cuda.Stream(self._device)
        self._turn = 0
        torch.cuda.synchronize(self._device)

    def begin(self) -> None:
        """Called when a forward pass begins: all ranks take the same slot next, even if one gave up a capture."""
        self._turn = 0

    def gather(self, x: Tensor) -> Tensor | None:
        """Every rank's [T, n] -> [T, size x n] on each, in a slot that the gather after the next one overwrites.

        None if the tensor does not fit a slot or its rows are not whole words; shapes are the same on every rank, so
        all ranks get None or none does.
        """
        rows, columns = x.shape
        row_bytes = columns * x.element_size()
        whole = self._size * rows * row_bytes
        if not 0 < whole <= self._slot_bytes or row_bytes % WORD:
            return None
        if x.stride(1) != 1 or x.data_ptr() % WORD or x.stride(0) * x.element_size() % WORD:
            x = x.contiguous()
        tables, slot = self._tables[self._turn], self._slots[self._turn]
        self._turn = (self._turn + 1) % NUM_SLOTS
        tables_and_flags = tables, self._flag_tables, self._flags[: self._size], self._state
        push_gather(x.view(torch.int64), *tables_and_flags, self._rank, self._size)
        return slot[:whole].view(x.dtype).view(rows, self._size * columns)

    def abort(self) -> None:
        """Ends every wait on this device for another rank; the gathered values are then rubbish."""
        with torch.cuda.stream(self._aside):
            self._flags.fill_(LAST_TURN)

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
