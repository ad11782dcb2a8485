"""Launching a compiled Triton kernel by the CUDA driver's own cuLaunchKernelEx.

A forward step of a small model is bound by how fast the host issues its kernels. Triton's launcher parses every
argument again, queries the driver about each pointer and encodes each tensor map again. Here everything that stays the
same from one launch to the next is laid out once; a launch only writes the pointers that vary and makes one call.

Without it whole runs of the 0.6B shape on an H200 take longer (medians of two times four rounds): 512 gsm8k generations
6.35 s for 5.89 s, MMLU's 4,000 scores 0.45 s for 0.32 s, HellaSwag's 0.76 s for 0.54 s.

How Triton lays out a kernel's parameters is not its public interface, so nothing is assumed: the driver is queried for
every parameter's size, and a kernel that is not as expected is launched by Triton (`Unsupported`).
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evalengine.kernels.torch_private import current_device, raw_stream

# Tensor maps cached for one parameter: each layer's weight needs one, and each recycled activation a few.
MAX_MAPS = 1 << 12
MAP_BYTES, MAP_ALIGNMENT = 128, 64
MAP_KEYS = {"swizzle", "elem_size", "elem_type", "block_size", "fp4_padded"}
L2_PROMOTION_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B: Triton's own launcher uses it, too
# Triton's numbers 0 to 7 of element types equal the driver's CUtensorMapDataType; 8, 9 and 10 must be mapped.
ELEMENT_TYPES = {8: 10, 9: 8, 10: 9}
SIZES = {"i1": 4, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u8": 1, "u16": 2, "u32": 4, "u64": 8, "fp32": 4, "fp64": 8}
WARP = 32
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
WAITS = "griddepcontrol.wait"  # the instruction of device_math.after_previous_kernel
_lock = threading.Lock()  # held while a repeated launch's parameters are written in place and launched
_thread = threading.local()  # .has_context: whether this thread has a current CUDA context


class Unsupported(Exception):
    """This module cannot launch the kernel, so Triton's own launcher must."""


class _Config(ctypes.Structure):
    """The driver's struct CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


class _Attribute(ctypes.Structure):
    """The driver's struct CUlaunchAttribute; of its union only the int at the beginning is used."""

    _fields_ = [
        ("id", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_byte * 60),
    ]


class Parameter(NamedTuple):
    """One argument as the kernel takes it. A 2-D descriptor takes five parameters: its map, two sizes, two strides."""

    argument: int
    type: str  # "*bf16", "i32", "fp32", ...; "map"
    map: dict[str, Any] | None = None


class DriverKernel:
    """A compiled kernel's function and parameters. Raises Unsupported where Triton's launcher does more than launch."""

    def __init__(self, compiled: Any, device: int) -> None:
        """`compiled`: the result of `kernel[grid](...)` on the current device, whose index is `device`."""
        try:
            launcher, metadata = compiled.run, compiled.metadata
            extras = (launcher.launch_cooperative_grid, launcher.global_scratch_size, launcher.profile_scratch_size)
            self.function, self.shared = compiled.function, metadata.shared
            self.threads = WARP * metadata.num_warps
            if metadata.num_ctas != 1 or any(extras):
                raise Unsupported("a cluster, a cooperative launch or scratch memory")
            self.waits = WAITS in compiled.asm["ptx"]
            types = list(compiled.src.signature.values())
            maps = iter(metadata.tensordesc_meta or ())
            self.parameters = [
                Parameter(i, "map", next(maps)) if kind.startswith("tensordesc") else Parameter(i, kind)
                for i, kind in enumerate(types)
                if kind != "constexpr"
            ]
        except (AttributeError, KeyError, StopIteration, TypeError) as error:
            raise Unsupported(f"a Triton with other names ({error})") from error
        if any(p.map is not None and not p.map.keys() >= MAP_KEYS for p in self.parameters):
            raise Unsupported("tensor maps described in another way")
        self.device = device
        self.cuda = libcuda()
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Raises Unsupported unless the driver reports the parameters expected.

        After the arguments' own come at most two pointers to scratch memory, which such a kernel does not use.
        """
        expected = [size for parameter in self.parameters for size in _sizes(parameter)]
        actual = self.cuda.parameter_sizes(self.function)
        self.num_scratch = len(actual) - len(expected)
        if not 0 <= self.num_scratch <= 2 or actual != [*expected, *[8] * self.num_scratch]:
            raise Unsupported(f"parameters of {actual} bytes, expected {expected}")


class Repeat:
    """One launch, laid out: `repeat(*tensors)` makes it again with other tensors in the places `varying`.

    The compiled kernel and the grid were chosen for the first tensors, so the others must have their dtype, shape,
    strides, device and address modulo 16. The arguments that do not vary stay alive.
    """

    def __init__(self, kernel: DriverKernel, grid: tuple[int, int, int], args: tuple, varying: Sequence[int]) -> None:
        self._kernel, self._launch, self._device = kernel, kernel.cuda.launch, kernel.device
        self._kept: list[Any] = [arg for i, arg in enumerate(args) if i not in varying]
        self._pointers: list[tuple[int, int]] = []  # (position in `varying`, slot)
        self._maps: list[tuple[int, int, _Maps]] = []
        count = sum(len(_sizes(p)) for p in kernel.parameters) + kernel.num_scratch
        self._slots = (ctypes.c_uint64 * count)()
        first = ctypes.addressof(self._slots)
        self._params = (ctypes.c_void_p * count)(*(first + 8 * i for i in range(count)))
        slot = 0
        for parameter in kernel.parameters:
            slot = self._lay_out(parameter, args[parameter.argument], slot, varying)
        self._config = _Config(grid, (kernel.threads, 1, 1), kernel.shared, None, None, 0)
        if kernel.waits:  # The kernel itself waits for the one before it, so it may be on the GPU before that one ends.
            self._early = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
            self._config.attributes, self._config.num_attributes = ctypes.addressof(self._early), 1
        self._call = (ctypes.byref(self._config), kernel.function, self._params, None)

    def _lay_out(self, parameter: Parameter, value: Any, slot: int, varying: Sequence[int]) -> int:
        """Writes one argument's parameters from `slot` on; returns the next free slot."""
        varies = varying.index(parameter.argument) if parameter.argument in varying else None
        if parameter.map is not None:
            maps = _Maps(self._kernel.cuda, value, parameter.map)
            self._params[slot] = maps.address(value.base)
            if varies is not None:
                self._maps.append((varies, slot, maps))
            else:
                self._kept.append(maps)
            numbers = (*value.shape, *value.strides)
            for i, number in enumerate(numbers, slot + 1):
                self._slots[i] = number
            return slot + 1 + len(numbers)
        self._slots[slot] = _bits(parameter.type, value)
        if varies is not None:
            self._pointers.append((varies, slot))
        return slot + 1

    def __call__(self, *tensors: Tensor) -> None:
        """Launches on the current stream of the kernel's device. Raises RuntimeError if the driver refuses."""
        if current_device() != self._device:
            with torch.cuda.device(self._device):
                return self(*tensors)
        if not getattr(_thread, "has_context", False):
            self._kernel.cuda.give_context(self._device)
            _thread.has_context = True
        with _lock:
            for position, slot in self._pointers:
                self._slots[slot] = tensors[position].data_ptr()
            for position, slot, maps in self._maps:
                self._params[slot] = maps.address(tensors[position])
            self._config.stream = raw_stream(self._device)
            status = self._launch(*self._call)
        if status:
            raise RuntimeError(f"cuLaunchKernelEx gives CUDA error {status}")
        return None


class _Maps:
    """The tensor maps (CUtensorMap) of tensors that differ in their address alone, looked up by that address."""

    def __init__(self, cuda: _Cuda, descriptor: Any, meta: dict[str, Any]) -> None:
        if meta["fp4_padded"] or descriptor.padding == "nan" or getattr(descriptor, "round_f32_to_tf32", False):
            raise Unsupported("a tensor map of 4-bit numbers, padded with NaN, or that rounds to TF32")
        rank, size = len(descriptor.shape), meta["elem_size"]
        row_bytes = [stride * size for stride in reversed(descriptor.strides[:-1])]
        self._cuda, self._maps = cuda, dict[int, tuple[int, Any]]()
        self._type = ELEMENT_TYPES.get(meta["elem_type"], meta["elem_type"])
        self._rank, self._swizzle = rank, meta["swizzle"]
        self._shape = (ctypes.c_uint64 * rank)(*reversed(descriptor.shape))
        self._strides = (ctypes.c_uint64 * rank)(*row_bytes)
        self._block = (ctypes.c_uint32 * rank)(*reversed(meta["block_size"]))
        self._steps = (ctypes.c_uint32 * rank)(*[1] * rank)

    def address(self, tensor: Tensor) -> int:
        """The address of the tensor's map on the host, encoded the first time."""
        data = tensor.data_ptr()
        entry = self._maps.get(data)
        if entry is None:
            if len(self._maps) >= MAX_MAPS:
                self._maps.clear()
            memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
            address = -(-ctypes.addressof(memory) // MAP_ALIGNMENT) * MAP_ALIGNMENT
            status = self._cuda.encode(
                address, self._type, self._rank, data, self._shape, self._strides, self._block, self._steps,
                0, self._swizzle, L2_PROMOTION_128B, 0,
            )  # fmt: skip
            if status:
                raise RuntimeError(f"cuTensorMapEncodeTiled gives CUDA error {status}")
            entry = self._maps[data] = (address, memory)
        return entry[0]


class _Cuda:
    """The functions of libcuda, with the types of their arguments."""

    def __init__(self, library: Any) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        self.launch = library.cuLaunchKernelEx
        self.launch.argtypes = [pointer, pointer, pointer, pointer]
        self.encode = library.cuTensorMapEncodeTiled
        self.encode.argtypes = [pointer, number, number, pointer, *[pointer] * 4, *[number] * 4]
        self._parameter = library.cuFuncGetParamInfo  # CUDA 12.4
        self._parameter.argtypes = [pointer, ctypes.c_size_t, pointer, pointer]
        self._current, self._set_current = library.cuCtxGetCurrent, library.cuCtxSetCurrent
        self._current.argtypes = self._set_current.argtypes = [pointer]
        self._retain = library.cuDevicePrimaryCtxRetain
        self._retain.argtypes = [pointer, ctypes.c_int]

    def give_context(self, device: int) -> None:
        """Makes the device's primary context, in which torch works, this thread's context, unless the thread has one.

        A new thread gets a context with its first call of the CUDA runtime. That call need not come before the first
        launch: torch hands out memory that it holds already, and knows the device and the stream itself.
        """
        context = ctypes.c_void_p()
        status = self._current(ctypes.byref(context))
        if not status and not context.value:
            status = self._retain(ctypes.byref(context), device) or self._set_current(context)
        if status:
            raise RuntimeError(f"a thread's first launch: CUDA error {status}")

    def parameter_sizes(self, function: int) -> list[int]:
        """Bytes of each parameter of a CUfunction."""
        sizes: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        while not self._parameter(function, len(sizes), ctypes.byref(offset), ctypes.byref(size)):
            sizes.append(size.value)
        return sizes


@cache
def libcuda() -> _Cuda:
    """The loaded CUDA driver library. Raises Unsupported if it, or one of its functions, is missing."""
    try:
        return _Cuda(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError) as error:
        raise Unsupported(str(error)) from error


def driver_version() -> int | None:
    """The driver's CUDA version as cuDriverGetVersion numbers it (13000 is 13.0); None without a driver to ask."""
    try:
        get_version = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion
    except (OSError, AttributeError):
        return None
    version = ctypes.c_int()
    return None if get_version(ctypes.byref(version)) else version.value


def _sizes(parameter: Parameter) -> list[int]:
    """The sizes in bytes of the parameters that one argument takes."""
    if parameter.map is not None:
        rank = len(parameter.map["block_size"])
        return [MAP_BYTES, *[4] * rank, *[8] * rank]
    if parameter.type.startswith("*"):
        return [8]
    if parameter.type not in SIZES:
        raise Unsupported(f"a parameter of type {parameter.type}")
    return [SIZES[parameter.type]]


def _bits(kind: str, value: Any) -> int:
    """A parameter's value in the lowest bytes of 64 bits. The host is little-endian, as every GPU's host is."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if kind in ("fp32", "fp64"):
        return int(struct.unpack("<Q", struct.pack("<fxxxx" if kind == "fp32" else "<d", value))[0])
    return int(value) & 0xFFFFFFFFFFFFFFFF
