"""Repeated launches by the CUDA driver: a stand-in for libcuda records what each call passes."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine.kernels.launching import driver
from evalengine.kernels.launching.driver import DriverKernel, Repeat, Unsupported
from evalengine.kernels.launching.launch import _Variant

GRID, DEVICE, STREAM, FUNCTION, CONTEXT = (7, 2, 3), 0, 4321, 99, 77


class FakeLibrary:
    """Stands in for libcuda; `sizes` are the bytes of the kernel's parameters, `status` is what calls return."""

    def __init__(self, sizes: list[int], status: int = 0) -> None:
        self.sizes, self.status = sizes, status
        self.launches: list[tuple[Any, ...]] = []
        self.encoded: list[tuple[Any, ...]] = []
        pointer, number, size_t = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 4)(self._launch)
        info = [ctypes.POINTER(size_t), ctypes.POINTER(size_t)]
        self.cuFuncGetParamInfo = ctypes.CFUNCTYPE(ctypes.c_int, pointer, size_t, *info)(self._parameter)
        kinds = [pointer, number, number, pointer, *[pointer] * 4, *[number] * 4]
        self.cuTensorMapEncodeTiled = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(self._encode)
        self.contexts: dict[int, int] = {}  # each thread's current context, by thread id
        context = ctypes.POINTER(pointer)
        self.cuCtxGetCurrent = ctypes.CFUNCTYPE(ctypes.c_int, context)(self._current)
        self.cuDevicePrimaryCtxRetain = ctypes.CFUNCTYPE(ctypes.c_int, context, ctypes.c_int)(self._retain)
        self.cuCtxSetCurrent = ctypes.CFUNCTYPE(ctypes.c_int, pointer)(self._set_current)

    def _current(self, context: Any) -> int:
        context[0] = self.contexts.get(threading.get_ident(), 0)
        return 0

    def _retain(self, context: Any, device: int) -> int:
        assert device == DEVICE
        context[0] = CONTEXT
        return 0

    def _set_current(self, context: int) -> int:
        self.contexts[threading.get_ident()] = context
        return 0

    def _parameter(self, function: int, index: int, offset: Any, size: Any) -> int:
        assert function == FUNCTION
        if index >= len(self.sizes):
            return 1
        size[0] = self.sizes[index]
        return 0

    def _launch(self, config: int, function: int, params: int, extra: int | None) -> int:
        assert function == FUNCTION and extra is None
        c = driver._Config.from_address(config)
        addresses = (ctypes.c_void_p * len(self.sizes)).from_address(params)
        values = [ctypes.string_at(addresses[i], size) for i, size in enumerate(self.sizes)]
        self.attributes = [driver._Attribute.from_address(c.attributes)] if c.attributes else []
        self.launches.append((tuple(c.grid), tuple(c.block), c.shared, c.stream, c.num_attributes, values))
        return self.status

    def _encode(self, memory: int, kind: int, rank: int, address: int, *rest: Any) -> int:
        shape, strides, block, steps, interleave, swizzle, promotion, fill = rest

        def numbers(pointer: int, kind: Any, count: int) -> list[int]:
            return list((kind * count).from_address(pointer))

        assert memory % 64 == 0 and (interleave, promotion, fill) == (0, 2, 0)
        assert numbers(steps, ctypes.c_uint32, rank) == [1] * rank
        self.encoded.append(
            (kind, address, swizzle, numbers(shape, ctypes.c_uint64, rank), numbers(strides, ctypes.c_uint64, rank - 1),
             numbers(block, ctypes.c_uint32, rank))
        )  # fmt: skip
        ctypes.memmove(memory, struct.pack("<Q", address) * 16, 128)
        return self.status


def compiled(signature: dict[str, str], **changed: Any) -> Any:
    """Returns a stand-in for a kernel that Triton compiled, with `changed` fields of its launcher or metadata."""
    launcher = {"launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0}
    launcher |= {"profile_scratch_size": 0}
    metadata = {"num_warps": 4, "num_ctas": 1, "shared": 1234, "tensordesc_meta": []}
    launcher |= {name: value for name, value in changed.items() if name in launcher}
    metadata |= {name: value for name, value in changed.items() if name in metadata}
    return SimpleNamespace(
        run=SimpleNamespace(**launcher), metadata=SimpleNamespace(**metadata), function=FUNCTION,
        src=SimpleNamespace(signature=signature), asm={"ptx": changed.get("ptx", "")},
    )  # fmt: skip


SIGNATURE = {
    "x": "*bf16",
    "n": "i32",
    "one": "constexpr",
    "stride": "i64",
    "eps": "fp32",
    "y": "*fp32",
    "B": "constexpr",
}

SIZES = [8, 4, 8, 4, 8, 8, 8]  # the last two parameters are pointers to scratch memory


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    fake = FakeLibrary(SIZES)
    monkeypatch.setattr(driver, "_thread", threading.local())
    monkeypatch.setattr(driver, "libcuda", lambda: driver._Cuda(fake))
    monkeypatch.setattr(driver, "current_device", lambda: DEVICE)
    monkeypatch.setattr(driver, "raw_stream", lambda device: STREAM)
    yield fake


def address(x: Tensor) -> bytes:
    return struct.pack("<Q", x.data_ptr())


def test_a_kernel_that_waits_by_itself_is_launched_early(library: FakeLibrary) -> None:
    """A kernel whose PTX waits for the previous kernel is launched with the attribute that lets it start early, by
    Triton's launcher as well."""
    x, y = torch.zeros(4), torch.zeros(4)
    args = (x, -5, 1, 1 << 33, 1e-6, y)
    for ptx, expected in (("griddepcontrol.wait;", [(6, 1)]), ("ret;", [])):
        repeat = Repeat(DriverKernel(compiled(SIGNATURE, ptx=ptx), DEVICE), GRID, args, varying=(5,))
        repeat(y)
        assert [(a.id, a.value) for a in library.attributes] == expected
        assert library.launches[-1][4] == len(expected)
        kernel = compiled(SIGNATURE, ptx=ptx)
        for _ in range(2):  # the kernel may belong to several variants
            assert _Variant(kernel, (), DEVICE).direct is not None
        assert kernel.run.launch_pdl == bool(expected)
    assert ctypes.sizeof(driver._Attribute) == 72 and driver._Attribute.value.offset == 8


def test_parameters_as_the_kernel_reads_them(library: FakeLibrary) -> None:
    """The driver gets the grid, block, stream and the arguments' bytes, with the varying argument replaced."""
    x, y, other = (torch.zeros(4) for _ in range(3))
    args = (x, -5, 1, 1 << 33, 1e-6, y)
    repeat = Repeat(DriverKernel(compiled(SIGNATURE), DEVICE), GRID, args, varying=(5,))
    repeat(y)
    repeat(other)
    scalars = [struct.pack("<i", -5), struct.pack("<q", 1 << 33), struct.pack("<f", 1e-6)]
    for (grid, block, shared, stream, attributes, values), last in zip(library.launches, (y, other), strict=True):
        assert (grid, block, shared, stream, attributes) == (GRID, (128, 1, 1), 1234, STREAM, 0)
        assert values == [address(x), *scalars, address(last), bytes(8), bytes(8)]


def test_a_thread_without_a_context_gets_the_devices(library: FakeLibrary) -> None:
    """A launch from a thread without a current context makes the device's primary context current."""
    x, y = torch.zeros(4), torch.zeros(4)
    repeat = Repeat(DriverKernel(compiled(SIGNATURE), DEVICE), GRID, (x, -5, 1, 1 << 33, 1e-6, y), varying=(5,))
    library.contexts[threading.get_ident()] = 5  # a call by torch gave this thread its context
    repeat(y)
    other = threading.Thread(target=lambda: (repeat(y), repeat(y)))
    other.start()
    other.join()
    assert sorted(library.contexts.values()) == [5, CONTEXT] and len(library.launches) == 3


def test_a_tensor_map_is_encoded_once_per_address(library: FakeLibrary) -> None:
    library.sizes = [128, 4, 4, 8, 8, 8]
    meta = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 32], "fp4_padded": False}
    first, second = torch.zeros(5, 48, dtype=torch.bfloat16), torch.ones(5, 48, dtype=torch.bfloat16)
    descriptor = SimpleNamespace(base=first, shape=[5, 40], strides=[48, 1], padding="zero")
    kernel = DriverKernel(compiled({"a": "tensordesc<bf16[64, 32]>", "y": "*fp32"}, tensordesc_meta=[meta]), DEVICE)
    y = torch.zeros(1)
    repeat = Repeat(kernel, GRID, (descriptor, y), varying=(0,))
    for tensor in (first, second, first, second):
        repeat(tensor)
    shared = (9, [40, 5], [96], [32, 64])  # innermost first, stride in bytes; type 10 in Triton is 9 in the driver
    assert [(kind, *rest) for kind, _, _, *rest in library.encoded] == [shared, shared]
    assert [(at, swizzle) for _, at, swizzle, *_ in library.encoded] == [(first.data_ptr(), 3), (second.data_ptr(), 3)]
    numbers = [struct.pack("<i", 5), struct.pack("<i", 40), struct.pack("<q", 48), struct.pack("<q", 1)]
    assert [values for *_, values in library.launches] == [
        [address(tensor) * 16, *numbers, address(y)] for tensor in (first, second, first, second)
    ]


@pytest.mark.parametrize(
    "changed",
    [{"num_ctas": 2}, {"launch_cooperative_grid": True}, {"global_scratch_size": 8}, {"profile_scratch_size": 8}],
)
def test_what_triton_must_launch_itself(library: FakeLibrary, changed: dict[str, Any]) -> None:
    """Kernels with clusters, cooperative launches or scratch memory are left to Triton's launcher."""
    with pytest.raises(Unsupported):
        DriverKernel(compiled(SIGNATURE, **changed), DEVICE)


@pytest.mark.parametrize("sizes", [SIZES[:4], [*SIZES, 8], [8, 8, 8, 4, 8], [8, 4, 8, 4, 8, 8, 4]])
def test_parameters_of_another_layout_are_not_guessed(library: FakeLibrary, sizes: list[int]) -> None:
    library.sizes = sizes
    with pytest.raises(Unsupported, match="bytes"):
        DriverKernel(compiled(SIGNATURE), DEVICE)


@pytest.mark.parametrize("changed", [{"padding": "nan"}, {"round_f32_to_tf32": True}])
def test_maps_that_only_triton_encodes(library: FakeLibrary, changed: dict[str, Any]) -> None:
    """Tensor maps with NaN padding or rounding to TF32 are left to Triton's launcher."""
    library.sizes = [128, 4, 4, 8, 8]
    meta = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [64, 32], "fp4_padded": False}
    kernel = DriverKernel(compiled({"a": "tensordesc<fp32[64, 32]>"}, tensordesc_meta=[meta]), DEVICE)
    plain = {"base": torch.zeros(5, 48), "shape": [5, 40], "strides": [48, 1], "padding": "zero"}
    Repeat(kernel, GRID, (SimpleNamespace(**plain, round_f32_to_tf32=False),), varying=(0,))
    with pytest.raises(Unsupported, match="tensor map"):
        Repeat(kernel, GRID, (SimpleNamespace(**{**plain, **changed}),), varying=(0,))


def test_another_triton_or_none_is_unsupported(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="signature"):
        DriverKernel(SimpleNamespace(**{**vars(compiled(SIGNATURE)), "src": SimpleNamespace()}), DEVICE)
    with pytest.raises(Unsupported, match="tuple"):
        DriverKernel(compiled(SIGNATURE | {"n": "tuple"}), DEVICE)
    monkeypatch.undo()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    driver.libcuda.cache_clear()
    with pytest.raises(Unsupported, match="cuLaunchKernelEx"):
        driver.libcuda()


def test_tensor_maps_described_in_another_way_are_unsupported(library: FakeLibrary) -> None:
    library.sizes = [128, 4, 4, 8, 8]
    meta = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 32], "fp4_padded": False}
    signature = {"a": "tensordesc<bf16[64, 32]>"}
    DriverKernel(compiled(signature, tensordesc_meta=[meta]), DEVICE)
    del meta["fp4_padded"]
    with pytest.raises(Unsupported, match="another way"):
        DriverKernel(compiled(signature, tensordesc_meta=[meta]), DEVICE)


def test_the_drivers_refusal_is_an_error(library: FakeLibrary) -> None:
    x, y = torch.zeros(4), torch.zeros(4)
    repeat = Repeat(DriverKernel(compiled(SIGNATURE), DEVICE), GRID, (x, 1, 1, 1, 0.5, y), varying=(0,))
    library.status = 700
    with pytest.raises(RuntimeError, match="700"):
        repeat(x)
