"""Compares every schedule that the kernels may choose for a model with the reference schedule, by bytes.

The comparison runs on the live GPU, with random data, in the model's own shapes. A schedule that differs, or does not
run, is dropped: it enters its module's `excluded`, and `choose` names the reference schedule instead. The verdict is
cached, unless a schedule that may run next time was dropped for an error (any but Triton's OutOfResources). A
difference for which there is no other schedule (a fused kernel against its parts, decode against prefill) is in
`failed`: `native` must not run.

Before the comparison its kernels are compiled in parallel: one after another, a model's kernels take minutes. The
comparison is rehearsed: it makes its operands and calls every kernel, but no kernel runs. Triton hands over what it
would compile (`triton.AsyncCompileMode`), and as many forked processes as there are cores put it into Triton's cache on
disk, with the C stub by which Triton up to 3.6 launches it: most of a compilation holds Python's lock, so that threads
wait for each other.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple
from functools import partial
from itertools import chain
from typing import Any

import torch
import triton
from torch import Tensor

from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.kernels.launching.launch import observed_launches
from evalengine.kernels.row_variants import LLAMA
from evalengine.kernels.shapes import LinearShape, Shapes
from evalengine.util.forked import ForkedTask, cores
from evalengine.verification import verdict_cache
from evalengine.verification.comparisons import (
    PAGE,
    verify_attention,
    verify_experts,
    verify_matmul,
    verify_parted_read_out,
    verify_row_variants,
    verify_rows,
)
from evalengine.verification.verdict import KernelsVerdict, exclude

MOST = 16  # processes, or threads where no process can be forked


logger = logging.getLogger(__name__)


def verify(
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
    *,
    contract_version: int,
    lm_head_rows: int,
    page_sizes: Sequence[int] = (PAGE,),
    use_cache: bool = True,
    vocabulary: Sequence[range] = (),
    rank: int = 0,
) -> dict[str, Any]:
    """The verdict for a model's shapes, plain JSON values: {"schedules": n, "checked": n, "dropped": [...],
    "failed": [...], "cached": bool, "seconds": s}. Schedules that a cached verdict dropped are excluded in
    this process, too.

    The verdict is made and cached in parts (products, rows, attention for each page size), so that another page size
    costs only its own part.

    contract_version: a cached verdict holds for this one only. lm_head_rows: the most rows that lm_head computes at
    once. vocabulary: each rank's token ids, where several ranks share the model; each computes its own columns of every
    product, with the whole of K. rank: this rank's place among them.
    """
    started = time.perf_counter()
    ids = list(vocabulary) or [range(shapes.vocab_size)]
    ranks, vocab_size, own_ids = len(ids), shapes.vocab_size, len(ids[rank])
    num_heads, num_kv_heads = shapes.heads_of_rank(ranks)
    hidden_size, head_dim = shapes.hidden_size, shapes.head_dim
    variants = shapes.variants or (AttentionVariant(head_dim**-0.5),)
    layers = list(shapes.linear_layers(ranks).values())
    lm_head = [LinearShape(own_ids, hidden_size)] if own_ids else []
    mixture, experts = shapes.mixture, shapes.expert_layers(ranks)
    wide = [LinearShape(mixture.router.experts, hidden_size)] if mixture and mixture.router.wide else []

    def products(verdict: KernelsVerdict) -> None:
        verify_matmul(verdict, layers, dtype, device)
        verify_matmul(verdict, lm_head, dtype, device, torch.float32, lm_head_rows)
        if wide:
            verify_matmul(verdict, wide, torch.float32, device)
        if mixture is not None:
            verify_experts(verdict, experts, mixture.router.chosen, dtype, device)

    def rows(verdict: KernelsVerdict) -> None:
        verify_rows(verdict, hidden_size, num_heads, num_kv_heads, head_dim, vocab_size, dtype, device)
        if own_rows:
            sizes = hidden_size, num_heads, num_kv_heads, head_dim
            verify_row_variants(verdict, *sizes, dtype, device, shapes.row_variants)
        if ranks > 1:
            verify_parted_read_out(verdict, ids, dtype, device)

    def attention_of(page_size: int) -> Callable[[KernelsVerdict], None]:
        heads = num_heads, num_kv_heads, head_dim, page_size

        def run(verdict: KernelsVerdict) -> None:
            for variant in variants:
                verify_attention(verdict, *heads, dtype, device, variant)

        return run

    attention_sizes = [num_heads, num_kv_heads, head_dim, *(list(astuple(variant)) for variant in variants)]
    sharded = [f"{ranks} ranks"] if ranks > 1 else []
    own_experts = [mixture.router.chosen, *map(tuple, experts.values()), *map(tuple, wide)] if mixture else []
    own_rows = [shapes.row_variants] if shapes.row_variants != LLAMA else []
    parts: dict[str, tuple[list, Callable[[KernelsVerdict], None]]] = {
        "products": ([*(tuple(layer) for layer in (*layers, *lm_head)), *own_experts], products),
        "rows": ([hidden_size, num_heads, num_kv_heads, head_dim, vocab_size, *sharded, *own_rows], rows),
        **{f"attention, pages of {n}": (attention_sizes, attention_of(n)) for n in page_sizes},
    }
    environment = {**verdict_cache.environment(device, contract_version), "dtype": str(dtype)}
    keys = {name: {**environment, "part": name, "shapes": sizes} for name, (sizes, _) in parts.items()}
    known = {name: verdict_cache.load(key) if use_cache else None for name, key in keys.items()}
    unknown = [name for name, verdict in known.items() if verdict is None]
    if unknown and device.type == "cuda":
        shapes_of = [f"{name}: {parts[name][0]}" for name in unknown]
        logger.warning("comparing the kernels' schedules on this GPU, once for these shapes: %s", "; ".join(shapes_of))
        compile_ahead([parts[name][1] for name in unknown], device)
    verdicts = [_part(keys[name], run, device, known[name]) for name, (_, run) in parts.items()]
    return {**together(verdicts), "seconds": time.perf_counter() - started}


def together(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One verdict of several, say of a model's kinds of heads."""
    return {
        **verdicts[-1],
        "schedules": sum(part["schedules"] for part in verdicts),
        "checked": sum(part["checked"] for part in verdicts),
        "dropped": [drop for part in verdicts for drop in part["dropped"]],
        "failed": [failed for part in verdicts for failed in part["failed"]],
        "cached": all(part["cached"] for part in verdicts),
        "seconds": sum(part.get("seconds", 0.0) for part in verdicts),
    }


def _part(
    key: dict[str, Any], run: Callable[[KernelsVerdict], None], device: torch.device, known: dict[str, Any] | None
) -> dict[str, Any]:
    """One part's verdict. known: the cached verdict under this key; None if it has to be computed, and is cached
    then."""
    if known is not None:
        for drop in known["dropped"]:
            exclude(drop)
        return {**known, "cached": True}
    verdict = KernelsVerdict()
    with torch.inference_mode():
        run(verdict)
    result = {
        "schedules": len(verdict.schedules),
        "checked": verdict.checked,
        "dropped": verdict.dropped,
        "failed": verdict.failed,
    }
    if verdict.lasting:
        verdict_cache.save(key, result)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # The engine sizes its KV pool by the free memory.
    return {**result, "cached": False}


Work = Callable[[], Any]


class DryRun(KernelsVerdict):
    """A verdict on nothing: the comparison's function is called, and its results are ignored."""

    def compare(self, kernel: str, schedule: Any, where: str, run: Callable[[], Tensor], expected: Tensor) -> None:
        with suppress(Exception):  # it fails again where it counts
            run()

    def require_equal(self, what: str, found: Tensor, expected: Tensor) -> None:
        pass

    def fail(self, why: str) -> None:
        pass


class _Postponed(Executor):
    """Does nothing yet: it holds the work that it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[Future[Any], Work]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.given.append((future, partial(work, *args, **kwargs)))
        return future


def compile_ahead(comparisons: Sequence[Callable[[KernelsVerdict], None]], device: torch.device) -> None:
    """Compiles all kernels that the comparisons call on this GPU. What fails here fails again where it counts."""
    postponed = _Postponed()
    with triton.AsyncCompileMode(postponed, ignore_errors=True), torch.inference_mode(), torch.cuda.device(device):
        try:
            dry_run(comparisons, _compile)
            driver = triton.runtime.driver.active
            with fixed_target(driver), ThreadPoolExecutor(MOST) as pool:
                longest_first = reversed(postponed.given)  # attention's come last
                if raised := in_processes([partial(_with_stub, work, driver) for _, work in longest_first]):
                    logger.warning("%d kernels are compiled again, by slower threads: %s", len(raised), raised[0])
                # The threads only read what is in the cache now.
                list(pool.map(_settle, *zip(*postponed.given, strict=True)) if postponed.given else ())
        finally:
            for future, _ in postponed.given:  # Triton waits for each of them
                future.cancel()


def dry_run(comparisons: Sequence[Callable[[KernelsVerdict], None]], observer: Callable[..., None]) -> None:
    """Calls `observer` with every launch that the comparisons would make."""
    with observed_launches(observer):
        for compare in comparisons:
            with suppress(Exception):
                compare(DryRun())


def in_processes(works: Sequence[Work]) -> list[str]:
    """Do all of it in several processes, or in threads where no process can be forked; each takes the next when it is
    done with one. Return what was raised."""
    processes = min(cores(), MOST, len(works))
    if processes < 2:
        with ThreadPoolExecutor(min(MOST, os.cpu_count() or 1)) as pool:
            return [*chain.from_iterable(pool.map(_raised, works))]
    next_works, numbers = os.pipe()
    os.set_blocking(next_works, False)  # a process that another thread forks now would hold the pipe's other end
    os.write(numbers, b"".join(number.to_bytes(2, "little") for number in range(len(works))))
    os.close(numbers)

    def take() -> list[str]:
        raised = []
        with suppress(BlockingIOError):  # nothing is left
            while number := os.read(next_works, 2):
                raised += _raised(works[int.from_bytes(number, "little")])
        return raised

    with ExitStack() as started:
        started.callback(os.close, next_works)
        helpers = [started.enter_context(ForkedTask(take)) for _ in range(1, processes)]
        return [*take(), *chain.from_iterable(helper.result() for helper in helpers)]


def _raised(work: Work) -> list[str]:
    try:
        work()
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return []


@contextmanager
def fixed_target(driver: Any) -> Iterator[None]:
    """Inside the block, Triton's driver reports the current target. Kernels that start early need it while they are
    compiled, and in a forked process torch raises when the driver looks it up."""
    target = driver.get_current_target()
    driver.get_current_target = lambda: target
    try:
        yield
    finally:
        vars(driver).pop("get_current_target", None)


def _with_stub(compile_kernel: Work, driver: Any) -> None:
    compiled = compile_kernel()
    driver.launcher_cls(compiled.src, compiled.metadata)


def _settle(future: Future[Any], work: Work) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


def _compile(kernel: Any, grid: tuple[int, int, int], args: tuple, constants: tuple, options: dict[str, Any]) -> None:
    kernel.warmup(*args, *constants, grid=grid, **options)
