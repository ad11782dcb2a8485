"""A transformers model inside `set_batch_invariant_mode()`, compared with the same model outside: the cost of the mode.

A figure is the wall-clock time of one forward pass of the model's body (no lm_head, which is one product more), from an
idle device until it is idle again. With many tokens that is the GPU's time; with one token it is the host's, for the
kernels take less than their launches. Weights are random. Both sides are the same model, by turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import WrongResult, guarded
from benchmarks.report import Line, Timing
from evalengine.bench.timing import free_memory
from evalengine.certify.model import shapes
from evalengine.invariant import set_batch_invariant_mode

BATCH_TARGET, LAUNCH_TARGET = 1.15, 1.3  # SDPA's time in the mode over its time without, at most
TURNS, CALLS = 5, 5  # of each side; calls in a turn
LARGEST_ERROR = 0.05  # norm of the difference of both sides' hidden states over their norm


@dataclass(frozen=True)
class RunShape:
    """The shape of a run: `rows` sequences of `tokens`, in the padded case every other one `padding` tokens shorter."""

    rows: int = 32
    tokens: int = 333
    padding: int = 33
    num_layers: int = 8
    dtype: torch.dtype = torch.bfloat16
    config: Mapping[str, Any] = field(default_factory=dict)  # fields of the models' published configs to change


def measure(device: torch.device, models: Sequence[str], sizes: RunShape | None = None) -> Iterator[Line]:
    """Yields a line for each model, kind of attention and batch."""
    sizes = sizes or RunShape()
    for model in models:
        for attention in ("sdpa", "eager"):
            yield from guarded(f"transformers, {attention}", model, partial(_compare, device, model, attention, sizes))
            free_memory()


def _compare(device: torch.device, name: str, attention: str, sizes: RunShape) -> list[Line]:
    body = _model(device, name, attention, sizes)
    lines: list[Line] = []
    with torch.inference_mode():
        for case, (call, target) in _cases(body, sizes, device).items():
            _check(call)
            inside, outside = _seconds(call, device)
            lines.append(Timing(
                f"transformers, {attention}, in the mode", f"{name}, {sizes.num_layers} layers, {case}", inside,
                "the mode off", outside, "time", target if attention == "sdpa" else None,
            ))  # fmt: skip
    return lines


def _model(device: torch.device, name: str, attention: str, sizes: RunShape) -> Any:
    """The body of a Qwen3 model of transformers with random weights."""
    from transformers import Qwen3Config, Qwen3Model

    fields = {**shapes()[name.lower()], **sizes.config, "num_hidden_layers": sizes.num_layers}
    config = Qwen3Config.from_dict({**fields, "attn_implementation": attention})
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Qwen3Model(config)
    return model.to(sizes.dtype).eval()


def _cases(body: Any, sizes: RunShape, device: torch.device) -> dict[str, tuple[Callable[[], Tensor], float | None]]:
    """Batch -> its forward pass, and what SDPA may take in the mode."""
    rows, tokens = sizes.rows, sizes.tokens
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, body.config.vocab_size, (rows, tokens), generator=generator).to(device)
    mask = torch.ones_like(ids)
    mask[::2, tokens - sizes.padding :] = 0

    def hidden(ids: Tensor, mask: Tensor | None = None) -> Tensor:
        result: Tensor = body(ids, attention_mask=mask, use_cache=False).last_hidden_state
        return result

    return {
        f"{rows} x {tokens} tokens": (partial(hidden, ids), BATCH_TARGET),
        f"{rows} x {tokens} tokens, padded": (partial(hidden, ids, mask), BATCH_TARGET),
        f"1 x {tokens} tokens": (partial(hidden, ids[:1]), None),
        "1 x 1 token": (partial(hidden, ids[:1, :1]), LAUNCH_TARGET),
    }


def _check(call: Callable[[], Tensor]) -> None:
    """Raises WrongResult if the two sides differ by more than roundings can make them."""
    stock = call().float()
    with set_batch_invariant_mode():
        ours = call().float()
    error = ((ours - stock).norm() / stock.norm()).item()
    if not error <= LARGEST_ERROR:
        raise WrongResult(f"hidden states differ by {error:.3g} of their norm, at most {LARGEST_ERROR} is rounding")


def _seconds(call: Callable[[], Tensor], device: torch.device) -> tuple[float, float]:
    """Median seconds of a call inside the mode, and outside."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(TURNS):
        for inside, taken in times.items():
            with set_batch_invariant_mode(inside):
                call()
                for _ in range(CALLS):
                    _wait(device)
                    start = time.perf_counter()
                    call()
                    _wait(device)
                    taken.append(time.perf_counter() - start)
    return statistics.median(times[True]), statistics.median(times[False])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
