"""cuBLASLt as a schedule: a stand-in library checks the calls to it; on a GPU its bytes are the reference's."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine.kernels import cublaslt, matmul
from evalengine.kernels.cublaslt import CublasLt, CublasLtError, Product
from evalengine.kernels.matmul_schedules import BUCKETS, CUBLASLT_BUCKETS, CUBLASLT_ROWS, bucket, by_cublaslt
from evalengine.verification import verdict_cache
from evalengine.version import CONTRACT_VERSION
from tests.bitwise import assert_bitwise_equal

DTYPES = {number: dtype for dtype, number in cublaslt.DATA_TYPES.items()}


class FakeLibrary:
    """Stands in for cuBLASLt, in the host's memory; `refuse` names a function that returns an error."""

    def __init__(self, refuse: str = "", algorithms: int = 1, workspace: int = 0) -> None:
        self.refuse, self.algorithms, self.workspace = refuse, algorithms, workspace
        self.made: list[tuple[Any, ...]] = []  # a description of each object; its pointer is its place + 1
        self.preferences: dict[int, int] = {}
        self.requested_rows: list[int] = []  # of each request for an algorithm
        self.used_algorithms: list[int] = []  # the number of each product's algorithm
        self.destroyed: set[int] = set()
        self.devices: set[int] = set()  # the current device of each call

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            if name == self.refuse:
                return 15
            if not name.endswith("Destroy"):  # needs no device, and may come with a later test's garbage collection
                self.devices.add(cublaslt.current_device())
            getattr(self, "_" + name.removeprefix("cublasLt"))(*arguments)
            return 0

        if not name.startswith("cublasLt"):
            raise AttributeError(name)
        return function

    def _make(self, pointer: Any, *description: Any) -> None:
        self.made.append(description)
        pointer._obj.value = len(self.made)

    def _Create(self, pointer: Any) -> None:
        self._make(pointer)

    def _MatmulDescCreate(self, pointer: Any, compute: int, scale: int) -> None:
        assert (compute, scale) == (68, 0), "sums in float32"
        self._make(pointer, "operation")

    def _MatmulDescSetAttribute(self, operation: Any, name: int, value: Any, size: Any) -> None:
        assert (name, value._obj.value, size.value) == (3, 1, 4), "W is transposed"

    def _MatrixLayoutCreate(self, pointer: Any, kind: int, height: Any, width: Any, stride: Any) -> None:
        self._make(pointer, DTYPES[kind], height.value, width.value, stride.value)

    def _destroy(self, pointer: Any) -> None:
        assert pointer.value not in self.destroyed, "twice"
        self.destroyed.add(pointer.value)

    _MatmulDescDestroy = _MatrixLayoutDestroy = _MatmulPreferenceDestroy = _destroy

    def _MatmulPreferenceCreate(self, pointer: Any) -> None:
        self._make(pointer, "preference")

    def _MatmulPreferenceSetAttribute(self, preference: Any, name: int, value: Any, size: Any) -> None:
        assert size.value == ctypes.sizeof(value._obj)
        self.preferences[name] = value._obj.value

    def _MatmulAlgoGetHeuristic(self, *arguments: Any) -> None:
        (_, _, _, x, *_), (_, most, heuristic, count) = arguments[:4], arguments[-4:]
        assert most == 1
        self.requested_rows.append(self.made[x.value - 1][2])
        heuristic._obj.algorithm[0], heuristic._obj.workspace = len(self.requested_rows), self.workspace
        count._obj.value = self.algorithms

    def _MatmulAlgoCheck(self, *arguments: Any) -> None:
        pass

    def _matrix(self, at: Any, layout: Any) -> Tensor:
        """Returns the matrix at an address, whose layout is column-major, as a tensor."""
        dtype, height, width, stride = self.made[layout.value - 1]
        count = (width - 1) * stride + height
        buffer = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(at.value)
        return torch.frombuffer(buffer, dtype=dtype).as_strided((height, width), (1, stride))

    def _Matmul(self, *arguments: Any) -> None:
        _, _, one, a, a_layout, b, b_layout, zero, c, c_layout, d, d_layout, algorithm, memory, size, stream = arguments
        assert (one._obj.value, zero._obj.value) == (1.0, 0.0)
        assert (c.value, c_layout.value, memory, size.value) == (d.value, d_layout.value, None, 0)
        assert stream.value == 77
        self.used_algorithms.append(algorithm[0])
        product = self._matrix(a, a_layout).float().t() @ self._matrix(b, b_layout).float()
        out = self._matrix(d, d_layout)
        out.copy_(product.to(out.dtype))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices, the first of which is current, and their stream."""
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(cublaslt, "current_device", lambda: current[0])
    monkeypatch.setattr(cublaslt, "raw_stream", lambda device: 77)


def run(handle: CublasLt, rows: int, algorithm_rows: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Checks a product's bytes.

    The operands are small whole numbers, which any order adds exactly; x's row stride exceeds its row length."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-4, 5, (rows, 24), generator=generator).to(dtype)[:, :16]
    weight = torch.randint(-4, 5, (5, 16), generator=generator).to(dtype)
    out = torch.full((rows, 5), torch.nan, dtype=out_dtype)
    strides = (x.stride(0), weight.stride(0))
    handle.product(Product(rows, algorithm_rows, 5, 16, strides, dtype, out_dtype))(x, weight, out)
    assert_bitwise_equal(out, (x.float() @ weight.float().t()).to(out_dtype))


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
                             (torch.bfloat16, torch.float32)], ids=str,
)  # fmt: skip
def test_x_times_w_transposed(rows: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """The calls give x @ w.t() and ask for algorithms without a workspace or a reduction between blocks."""
    library = FakeLibrary()
    run(CublasLt(library, 0), rows, rows, dtype, out_dtype)
    # Attribute 1 is the bytes of workspace, 3 the reduction schemes allowed, and 5-8 the operands' alignment.
    assert library.preferences == {1: 0, 3: 0, 5: 16, 6: 16, 7: 16, 8: 16}


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("device", [0, 1])
def test_its_own_device_is_current_during_each_call(device: int) -> None:
    """The library uses the current device and does not look at the stream's: with another one it reads memory that
    this device does not have."""
    library = FakeLibrary()
    handle = CublasLt(library, device)
    library.devices.clear()
    run(handle, 3, 3, torch.bfloat16, torch.bfloat16)
    assert library.devices == {device} and cublaslt.current_device() == 0


@pytest.mark.usefixtures("stream")
def test_the_rows_of_a_bucket_share_an_algorithm() -> None:
    library = FakeLibrary()
    handle = CublasLt(library, 0)
    for rows, algorithm_rows in ((33, 48), (48, 48), (40, 48), (49, 64)):
        run(handle, rows, algorithm_rows, torch.bfloat16, torch.bfloat16)
    assert library.requested_rows == [48, 64] and library.used_algorithms == [1, 1, 1, 2]


@pytest.mark.usefixtures("stream")
def test_what_was_made_is_destroyed_with_the_product() -> None:
    library = FakeLibrary()
    handle = CublasLt(library, 0)
    kept = handle.product(Product(3, 3, 5, 16, (16, 16), torch.bfloat16, torch.bfloat16))
    gc.collect()
    alive = {number + 1 for number, description in enumerate(library.made) if description} - library.destroyed
    assert sorted(len(library.made[number - 1]) for number in alive) == [1, 4, 4, 4], "an operation and three layouts"
    del kept
    gc.collect()
    assert {number + 1 for number, description in enumerate(library.made) if description} == library.destroyed


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize(
    "library",
    [FakeLibrary(algorithms=0), FakeLibrary(workspace=32), FakeLibrary("cublasLtMatmulAlgoCheck"),
     FakeLibrary("cublasLtMatmulAlgoGetHeuristic"), FakeLibrary("cublasLtMatmul")],
    ids=["none", "with workspace", "not for so many rows", "error", "error in the product"],
)  # fmt: skip
def test_what_the_library_refuses_is_an_error(library: FakeLibrary) -> None:
    with pytest.raises(CublasLtError):
        run(CublasLt(library, 0), 7, 7, torch.bfloat16, torch.bfloat16)


def test_without_cuda_there_is_no_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the CPU nor a torch for an unknown CUDA version has a cuBLASLt."""
    cublaslt.cublaslt.cache_clear()
    assert cublaslt.cublaslt(-1) is None
    monkeypatch.setattr(torch.version, "cuda", "1.0")
    assert cublaslt.cublaslt(0) is None
    cublaslt.cublaslt.cache_clear()


def test_another_version_of_the_library_has_verdicts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of kept verdicts holds cuBLASLt's version, and None where there is no library."""
    properties = {"major": 9, "minor": 0, "multi_processor_count": 132}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU X")
    keys = []
    for number in (130002, 130100):
        library = SimpleNamespace(cublasLtGetVersion=_Version(number))
        monkeypatch.setattr(cublaslt, "_library", lambda library=library: library)
        keys.append(verdict_cache.environment(torch.device("cuda"), CONTRACT_VERSION))
    assert [fields.pop("cublaslt") for fields in keys] == [130002, 130100] and keys[0] == keys[1]
    monkeypatch.setattr(cublaslt, "_library", lambda: None)
    assert cublaslt.version() is None


class _Version:
    """Stands in for a ctypes function, whose `restype` the caller sets."""

    restype: Any = None

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self) -> int:
        return self._number


def test_operands_that_do_not_suit_cublaslt_are_refused() -> None:
    x, weight = torch.randn(33, 64, dtype=torch.float16), torch.randn(48, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="of the form cublaslt"):
        matmul.matmul(x, weight.t(), schedule=by_cublaslt(48))  # there is no cuBLASLt in the interpreter


# -- on a GPU --------------------------------------------------------------------------------------------------------

SHAPES = [(4096, 1024), (1024, 3072), (24576, 4096), (4096, 12288), (1000, 520), (40, 72), (151936, 576)]


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_cublaslts_bytes_are_the_references(n: int, k: int) -> None:
    """For every bucket's algorithm, products of several numbers of rows have the reference's bytes."""
    generator = torch.Generator("cuda").manual_seed(n + k)
    weight = torch.randn(n, k, device="cuda", generator=generator, dtype=torch.bfloat16)
    out_dtype = torch.float32 if n == 151936 else None
    for most in CUBLASLT_BUCKETS:
        for rows in {1, most // 2 + 1, most - 1, most} - {0} if most in BUCKETS else {most - 1}:
            if most > 512 and n > 100_000:
                continue
            x = torch.randn(rows, k, device="cuda", generator=generator, dtype=torch.bfloat16)
            expected = matmul.matmul(x, weight.t(), out_dtype=out_dtype, schedule=matmul.REFERENCE)
            product = matmul.matmul(x, weight.t(), out_dtype=out_dtype, schedule=by_cublaslt(most))
            assert_bitwise_equal(product, expected, f"{rows} rows by the algorithm for {most}")


@pytest.mark.gpu
def test_cublaslt_is_chosen_between_tuned_numbers_of_rows_and_for_unknown_shapes() -> None:
    def chosen(rows: int, n: int, k: int, **changed: Any) -> str:
        x, weight = (torch.zeros(size, k, device="cuda", dtype=torch.bfloat16) for size in (rows, n))
        return matmul.schedule_for(x, weight.t(), **changed).form

    assert chosen(100, 520, 1000) == "cublaslt" and chosen(CUBLASLT_ROWS // 2, 520, 1000) != "cublaslt"
    assert chosen(100, 520, 1001) == "pointer", "rows that start anywhere"
    assert chosen(100, 520, 1000, plain=False) != "cublaslt"
    assert (cublaslt.version() or 0) > 110000
    assert bucket(150) == 160 and chosen(150, 24576, 4096) == "cublaslt"


@pytest.mark.gpu
def test_in_a_cuda_graph_and_on_another_stream() -> None:
    """A product captured in a CUDA graph on another stream gives the same bytes when the graph is replayed."""
    x, weight = (torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16) for rows in (100, 520))
    expected = matmul.linear(x, weight)
    assert matmul.schedule_for(x, weight.t()) == by_cublaslt(112)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=side):
        captured = matmul.linear(x, weight)
    x.copy_(x.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert_bitwise_equal(captured, expected.flip(0))
