"""`python -m benchmarks push_gather`: what the ranks of a tensor-parallel layer exchange, on this machine's GPUs.

    T tokens of a step.

The batch-invariant mode gathers four times a layer, `fast` sums twice. Timed are the mode's gathers by pushes
(kernels/push_gather.py), which must give the bytes of NCCL's first, the same gathers by NCCL, and fast's sums by NCCL;
and with the norms and the activation next to them: pushes, pushes in one with these ops where the tokens are few
(kernels/push_gather.py), which must give the same bytes first, and sums. It is GPU time of a CUDA graph of one
layer's calls, the ranks in step.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalengine.errors import ConfigError, EvalEngineError, readable
from evalengine.util.command import Namespace

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from evalengine.layers.ops import Ops

TOKENS = (1, 16, 64, 256, 1024, 2048, 8192)
REPLAYS = 50
EPS = 1e-6
COLUMNS = (
    ("pushes, us", "push_s"),
    ("NCCL's gathers, us", "nccl_s"),
    ("NCCL's sums, us", "sums_s"),
    ("pushes and ops, us", "push_and_ops_s"),
    ("fused, us", "fused_s"),
    ("sums and ops, us", "sums_and_ops_s"),
)

Row = dict[str, float]


def main(arguments: Namespace) -> int:
    """Runs `benchmarks push_gather` with its words; returns the exit code."""
    import torch
    import torch.multiprocessing as mp

    from benchmarks.models import published_spec
    from evalengine.bench.environment import environment

    if (devices := torch.cuda.device_count()) < arguments.ranks:
        raise ConfigError(f"benchmarks push_gather --ranks {arguments.ranks}: this machine has {devices} CUDA devices")
    with readable(arguments.output):
        arguments.output.mkdir(parents=True, exist_ok=True)
    spec = published_spec(arguments.model)
    gathered = (spec.num_heads * spec.head_dim, spec.hidden_size, spec.intermediate_size, spec.hidden_size)
    with tempfile.TemporaryDirectory(prefix="evalengine-bench-") as folder:
        try:
            mp.spawn(_rank, (arguments.ranks, folder, gathered), nprocs=arguments.ranks)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            said = str(error).strip().splitlines()[-1]
            raise EvalEngineError(f"benchmarks push_gather: a rank failed: {said}") from error
        rows = json.loads((Path(folder) / "rows.json").read_text(encoding="utf-8"))
    command = f"benchmarks push_gather --model {arguments.model} --ranks {arguments.ranks}"
    _write(rows, environment(["python", "-m", *command.split()]), arguments)
    print("\n".join(_table(rows)))
    return 0


def _rank(rank: int, size: int, folder: str, gathered: Sequence[int]) -> None:
    """One rank's process. Rank 0 leaves the rows in `folder`."""
    import torch

    from evalengine.engine.execute.parallel.group import connect, share_memory
    from evalengine.layers import create_ops

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with torch.inference_mode():
        tp = connect(Path(folder), rank, size, device)
        ops = create_ops("native", torch.bfloat16, device, tp=tp)
        share_memory(ops, max(TOKENS) * max(gathered) * torch.bfloat16.itemsize)
        if tp.peers is None:
            raise EvalEngineError("the GPUs cannot write to each other's memory")
        rows = [_measured(ops, tokens, gathered) for tokens in TOKENS]
        if rank == 0:
            (Path(folder) / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        tp.close()


def _measured(ops: Ops, tokens: int, gathered: Sequence[int]) -> Row:
    """Raises EvalEngineError if pushes give other bytes than NCCL's gather and the ops."""
    import torch

    from evalengine.layers.ops import Ops

    tp, generator = ops.tp, torch.Generator(ops.device).manual_seed(ops.tp.rank)
    alike = torch.Generator(ops.device).manual_seed(99)  # on every rank

    def randn(*shape: int, by: torch.Generator = generator) -> Tensor:
        return torch.randn(*shape, generator=by, device=ops.device).bfloat16()

    parts = [randn(tokens, columns // tp.size) for columns in gathered]
    gate_up = randn(tokens, 2 * gathered[2] // tp.size)
    whole, residual = (randn(tokens, gathered[1], by=alike) for _ in range(2))
    norm = residual, randn(gathered[1], by=alike), EPS

    def with_ops(form: Any) -> list[Tensor]:
        """A layer's gathers and their neighbouring ops; form: Ops, where each is separate, or the class of `ops`."""
        tp.gather_features(parts[0])
        after_attention = form.gather_add_rms_norm(ops, parts[1], *norm)
        activated = form.gather_silu_and_mul(ops, gate_up)
        return [*after_attention, activated, *form.gather_add_rms_norm(ops, parts[3], *norm)]

    def sums_and_ops() -> None:
        for _ in range(2):
            ops.add_rms_norm(tp.sum(whole), *norm)
        ops.silu_and_mul(gate_up)

    after = [ops.add_rms_norm(tp.gather(parts[i]), *norm) for i in (1, 3)]
    wanted = [*after[0], tp.gather(ops.silu_and_mul(gate_up)), *after[1]]
    for form in (Ops, type(ops)) * 2:  # twice, since a launch that is repeated goes another way
        are_equal = all(map(torch.equal, with_ops(form), wanted))
        # A rank may gather into this one's slots again only when this one has compared: a sum waits for every rank.
        tp.sum(torch.zeros(1, device=ops.device))
        if not are_equal:
            raise EvalEngineError(f"{tokens} tokens: the ops with pushes give other bytes than with NCCL's gather")
    for part in parts:
        if not torch.equal(tp.gather_features(part), tp.gather(part)):
            raise EvalEngineError(f"{tokens} tokens: pushes give other bytes than NCCL's gather")
    layers: dict[str, Callable[[], Any]] = {
        "push_s": lambda: [tp.gather_features(part) for part in parts],
        "nccl_s": lambda: [tp.gather(part) for part in parts],
        "sums_s": lambda: [tp.sum(whole) for _ in range(2)],
        "push_and_ops_s": lambda: with_ops(Ops),
        "fused_s": lambda: with_ops(type(ops)),
        "sums_and_ops_s": sums_and_ops,
    }
    times = {name: _seconds(tp, layer, ops.device) for name, layer in layers.items()}
    sent = sum(part.nbytes for part in parts) * (tp.size - 1)
    return {"tokens": tokens, **times, "pushed_bytes": sent}


def _seconds(tp: Any, layer: Callable[[], Any], device: torch.device) -> float:
    """Mean GPU time of a layer's calls in a CUDA graph, every rank replaying as often."""
    import torch

    layer()
    torch.cuda.synchronize(device)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        # In the mode "thread_local", NCCL's own threads may ask for their events meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        layer()
        graph.capture_end()
    torch.cuda.synchronize(device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for replay in range(REPLAYS + 3):
        if replay == 3:  # three to warm up, after which the ranks begin together
            tp.broadcast(torch.zeros(1, device=device))
            start.record()
        graph.replay()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3 / REPLAYS


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [["tokens", *(title for title, _ in COLUMNS), "pushed out, GB/s"], ["---:"] * (len(COLUMNS) + 2)]
    for row in rows:
        times = (f"{row[key] * 1e6:.1f}" for _, key in COLUMNS)
        lines.append([f"{row['tokens']:,}", *times, f"{row['pushed_bytes'] / row['push_s'] / 1e9:.0f}"])
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _write(rows: Sequence[Row], about: Mapping[str, Any], arguments: Namespace) -> None:
    from benchmarks.report import write_page
    from evalengine.bench.environment import slug

    stem = f"push-gather-{arguments.ranks}-{slug(str(about['gpu']))}"
    content = {"environment": about, "model": arguments.model, "ranks": arguments.ranks, "rows": rows}
    method = (
        f"`{about['command']}`, {about['date']}, commit {about['code']['commit']}. GPU time of what a layer of "
        f"{arguments.model} exchanges over {arguments.ranks} GPUs; the pushes' bytes were NCCL's."
    )
    title = f"What a layer's ranks exchange, on {about['gpu']}"
    write_page(arguments.output, stem, content, title, method, _table(rows))
