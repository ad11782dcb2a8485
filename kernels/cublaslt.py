"""cuBLASLt's products without a split of K: one more schedule of the contract's `native` linear.

    M rows, N columns, K the reduced dimension.

cuBLASLt adds an output's products in one float32 chain over K, ascending, if it may not split K: the heuristic is
called for an algorithm without workspace and without a reduction between blocks. Over the shapes of Qwen3-0.6B and 8B
and 1 to 8192 rows all 220 products had the bytes of `matmul.REFERENCE` on an H200
(results/reference/matmul-cublaslt-nvidia-h200.json). Like every schedule, this one is compared on the live GPU before
it is used, and dropped where it differs (evalengine/verification).

The algorithm is requested once for a bucket of row numbers and then used for each of them, so the algorithm that was
compared is the one that runs. The interface is cuBLASLt's C API (docs.nvidia.com/cuda/cublas), by ctypes: torch offers
no way to ask for an algorithm, and its own limit of the workspace holds for the whole process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evalengine.kernels.torch_private import current_device, raw_stream

COMPUTE_32F, OP_T, REDUCTION_NONE = 68, 1, 0
DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
DESC_TRANSA = 3
PREFERENCES = {1: (ctypes.c_uint64, 0), 3: (ctypes.c_uint32, REDUCTION_NONE)}  # workspace bytes; reduction schemes
ALIGNMENTS = (5, 6, 7, 8)  # the preferences that state how the operands' addresses are aligned
ALIGNMENT = 16  # bytes


class _Heuristic(ctypes.Structure):
    """The library's struct cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Product(NamedTuple):
    """x [M, K] times W^T, W [N, K], with rows `row_strides` apart; `algorithm_rows`: the M that the algorithm is
    requested with."""

    rows: int
    algorithm_rows: int
    columns: int
    terms: int
    row_strides: tuple[int, int]
    dtype: torch.dtype
    out_dtype: torch.dtype


class CublasLtError(RuntimeError):
    """A cuBLASLt function returned an error status, or has no algorithm for a product."""


class _Owned(ctypes.c_void_p):
    """A handle to an object that the library created; it is destroyed with the last reference to the handle."""

    destroy: Callable[[ctypes.c_void_p], int] | None = None

    def __del__(self) -> None:
        if self.destroy is not None and self.value is not None:
            self.destroy(self)


class CublasLt:
    """The library's handle on one device, alive until the process ends."""

    def __init__(self, library: Any, device: int) -> None:
        self._library, self._device = library, device
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._algorithms: dict[Product, _Heuristic] = {}

    def product(self, p: Product) -> Callable[[Tensor, Tensor, Tensor], None]:
        """Returns `run(x, weight, out)`, which multiplies on the device's current stream; out [M, N] is contiguous.

        Raises CublasLtError if the library refuses.
        """
        with torch.cuda.device(self._device):
            return self._product(p)

    def _product(self, p: Product) -> Callable[[Tensor, Tensor, Tensor], None]:
        operation = self._operation()
        layouts, algorithm, checked = self._layouts(p, p.rows), self._algorithm(p), _Heuristic()
        own = (self._handle, operation, *layouts, algorithm.algorithm)
        self._call("cublasLtMatmulAlgoCheck", *own, ctypes.byref(checked))
        weight_layout, x_layout, out_layout, _ = layouts
        multiply, stream_of, device = self._library.cublasLtMatmul, raw_stream, self._device
        one, zero = ctypes.byref(self._one), ctypes.byref(self._zero)

        def run(x: Tensor, weight: Tensor, out: Tensor) -> None:
            if current_device() != device:  # the library launches on the current device, whatever the stream's is
                with torch.cuda.device(device):
                    return run(x, weight, out)
            out_data = ctypes.c_void_p(out.data_ptr())
            status = multiply(
                self._handle, operation, one, ctypes.c_void_p(weight.data_ptr()), weight_layout,
                ctypes.c_void_p(x.data_ptr()), x_layout, zero, out_data, out_layout, out_data, out_layout,
                algorithm.algorithm, None, ctypes.c_size_t(0), ctypes.c_void_p(stream_of(device)),
            )  # fmt: skip
            if status:
                raise CublasLtError(f"cublasLtMatmul gives status {status}")
            return None

        return run

    def _algorithm(self, p: Product) -> _Heuristic:
        """The heuristic's first algorithm for `algorithm_rows` rows."""
        key = p._replace(rows=p.algorithm_rows)
        if key not in self._algorithms:
            preference = self._created("MatmulPreference")
            wanted = {**PREFERENCES, **dict.fromkeys(ALIGNMENTS, (ctypes.c_uint32, ALIGNMENT))}
            for name, (kind, number) in wanted.items():
                value = kind(number)
                self._call("cublasLtMatmulPreferenceSetAttribute", preference, name, ctypes.byref(value),
                           ctypes.c_size_t(ctypes.sizeof(value)))  # fmt: skip
            algorithm, count = _Heuristic(), ctypes.c_int()
            own = (self._handle, self._operation(), *self._layouts(p, p.algorithm_rows), preference)
            self._call("cublasLtMatmulAlgoGetHeuristic", *own, 1, ctypes.byref(algorithm), ctypes.byref(count))
            if not count.value or algorithm.status or algorithm.workspace:
                raise CublasLtError(f"cuBLASLt has no algorithm without workspace for {p}")
            self._algorithms[key] = algorithm
        return self._algorithms[key]

    def _operation(self) -> _Owned:
        operation = self._created("MatmulDesc", COMPUTE_32F, DATA_TYPES[torch.float32])
        value = ctypes.byref(ctypes.c_int(OP_T))
        self._call("cublasLtMatmulDescSetAttribute", operation, DESC_TRANSA, value, ctypes.c_size_t(4))
        return operation

    def _layouts(self, p: Product, rows: int) -> tuple[_Owned, ...]:
        """The layouts of W, x, out and out. cuBLAS stores matrices by columns, so there they are W^T [K, N],
        x^T [K, M] and out^T [N, M]."""
        x_stride, weight_stride = p.row_strides
        sizes = ((p.dtype, p.terms, p.columns, weight_stride), (p.dtype, p.terms, rows, x_stride),
                 (p.out_dtype, p.columns, rows, p.columns))  # fmt: skip
        weight, x, out = (
            self._created("MatrixLayout", DATA_TYPES[dtype], ctypes.c_uint64(height), ctypes.c_uint64(width),
                          ctypes.c_int64(stride))
            for dtype, height, width, stride in sizes
        )  # fmt: skip
        return weight, x, out, out

    def _created(self, kind: str, *arguments: Any) -> _Owned:
        handle = _Owned()
        self._call(f"cublasLt{kind}Create", ctypes.byref(handle), *arguments)
        handle.destroy = getattr(self._library, f"cublasLt{kind}Destroy")
        return handle

    def _call(self, function: str, *arguments: Any) -> None:
        if status := getattr(self._library, function)(*arguments):
            raise CublasLtError(f"{function} gives status {status}")


@cache
def cublaslt(device: int) -> CublasLt | None:
    """The device's cuBLASLt; None where the library is missing or cannot be used."""
    library = _library() if device >= 0 else None
    if library is None:
        return None
    try:
        with torch.cuda.device(device):
            return CublasLt(library, device)
    except (AttributeError, CublasLtError):
        return None


def version() -> int | None:
    """cuBLASLt's own version (130002 is 13.0.2), which is not torch's; None where there is no such library."""
    library = _library()
    if library is None:
        return None
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return int(library.cublasLtGetVersion())


def _library() -> Any:
    """The cuBLASLt of torch's CUDA version, which torch has loaded; None without it."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
