"""`native` decode of sequences on one prefix: their shared blocks read once, compared with the same decode that reads
them for each.

    S sequences, Hq/Hkv heads, D head_dim. Heads and dtype are those of `benchmarks.attention`.

Pages are shuffled. Both must give the same bytes, or no time is printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from benchmarks.attention import DTYPE, HEAD_DIM, KV_HEADS, Q_HEADS, Batch
from benchmarks.measure import Timer, WrongResult, guarded, run_poisoned, seeded
from benchmarks.report import Line, Timing
from evalengine.bench.timing import free_memory
from evalengine.layers import shared_blocks
from evalengine.layers.metadata import AttentionMetadata

WHAT = "decode attention, shared prefix"
PAGE = 64


@dataclass(frozen=True)
class Case:
    """`families` of as many sequences each: `shared` tokens that a family has in common, then `own` of each one's."""

    sequences: int
    shared: int
    own: int
    families: int = 1
    target: float | None = None  # our time over that of reading everything for each sequence

    def __str__(self) -> str:
        on = "one prefix" if self.families == 1 else f"{self.families} prefixes"
        return f"batch {self.sequences}, {on} of {self.shared}, {self.own} own"


# The second shares 14 of a chunk's 16 blocks, as five-shot gsm8k does; the last saves little.
CASES = (
    Case(256, 1024, 256, target=0.35),
    Case(256, 896, 256),
    Case(256, 2048, 128),
    Case(256, 1024, 256, families=64),
    Case(64, 1024, 256),
    Case(16, 1024, 256),
)


def batch_of(case: Case, device: torch.device) -> Batch:
    """A decode step of the case, with what its sequences share found as the engine finds it."""
    generator = seeded(device, case.sequences + case.shared)
    prefix, rest = case.shared // PAGE, -(-case.own // PAGE)
    count = case.families * prefix + case.sequences * rest
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    prefixes = [[order.pop() for _ in range(prefix)] for _ in range(case.families)]
    pages = [prefixes[s % case.families] + [order.pop() for _ in range(rest)] for s in range(case.sequences)]
    lengths = [prefix * PAGE + case.own] * case.sequences
    shared = shared_blocks.find(np.array(pages, dtype=np.int32), np.array(lengths), PAGE)
    metadata = AttentionMetadata.build([1] * case.sequences, lengths, pages, PAGE, device, shared)
    shapes = (case.sequences, Q_HEADS, HEAD_DIM), *[(count, PAGE, KV_HEADS, HEAD_DIM)] * 2
    q, k, v = (torch.randn(shape, generator=generator, dtype=DTYPE, device=device) for shape in shapes)
    return Batch(q, k, v, metadata)


def measure(timer: Timer, device: torch.device) -> Iterator[Line]:
    """Yields a line for each case."""
    for case in CASES:
        yield from guarded(WHAT, str(case), partial(_compare, case, timer, device))
        free_memory()


def _compare(case: Case, timer: Timer, device: torch.device) -> list[Line]:
    once = batch_of(case, device)
    each = replace(once, metadata=replace(once.metadata, shared=None, plans={}))
    output = run_poisoned(lambda: [once.attend()])[0]
    once.check(str(case), output)
    if not torch.equal(output.view(torch.uint8), each.attend().view(torch.uint8)):
        raise WrongResult(f"{case}: reading once gives other bytes than reading for each sequence")
    reference = "read for each"
    seconds = timer({"ours": once.attend, reference: each.attend})
    tokens = case.families * case.shared + case.sequences * case.own
    work = 2 * tokens * KV_HEADS * HEAD_DIM * DTYPE.itemsize
    return [Timing(WHAT, str(case), seconds["ours"], reference, seconds[reference], "time", case.target, work, "TB/s")]
