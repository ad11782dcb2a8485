"""`python -m evalengine bench push_gather`: what the ranks of a tensor-parallel layer exchange, on this machine's GPUs.

    T tokens of a step.

The batch-invariant mode gathers four times a layer, `fast` sums twice. Timed are the mode's gathers by pushes
(kernels/push_gather.py), which must give the bytes of NCCL's first, the same gathers by NCCL, and fast's sums by NCCL:
GPU time of a CUDA graph of a layer's calls, the ranks in step.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalengine.command import Namespace
from evalengine.errors import ConfigError, EvalEngineError, readable

if TYPE_CHECKING:
    import torch

TOKENS = (1, 16, 64, 256, 1024, 2048, 8192)
REPLAYS = 50
COLUMNS = ("tokens", "pushes, us", "NCCL's gathers, us", "NCCL's sums, us", "pushed out, GB/s")

Row = dict[str, float]


def main(arguments: Namespace) -> int:
    """Runs `bench push_gather` with its words; returns the exit code."""
    import torch
    import torch.multiprocessing as mp

    from evalengine.bench.models import published_spec
    from evalengine.bench.report import environment

    if (devices := torch.cuda.device_count()) < arguments.ranks:
        raise ConfigError(f"bench push_gather --ranks {arguments.ranks}: this machine has {devices} CUDA devices")
    with readable(arguments.output):
        arguments.output.mkdir(parents=True, exist_ok=True)
    spec = published_spec(arguments.model)
    gathered = (spec.num_heads * spec.head_dim, spec.hidden_size, spec.intermediate_size, spec.hidden_size)
    with tempfile.TemporaryDirectory(prefix="evalengine-bench-") as folder:
        try:
            mp.spawn(_rank, (arguments.ranks, folder, gathered), nprocs=arguments.ranks)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise EvalEngineError(f"bench push_gather: a rank failed: {str(error).strip().splitlines()[-1]}") from error
        rows = json.loads((Path(folder) / "rows.json").read_text(encoding="utf-8"))
    command = f"bench push_gather --model {arguments.model} --ranks {arguments.ranks}"
    _write(rows, environment(["python", "-m", "evalengine", *command.split()]), arguments)
    print("\n".join(_table(rows)))
    return 0


def _rank(rank: int, size: int, folder: str, gathered: Sequence[int]) -> None:
    """One rank's process. Rank 0 leaves the rows in `folder`."""
    import torch

    from evalengine.engine.parallel.group import connect
    from evalengine.layers.peer_memory import PeerMemory

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with torch.inference_mode():
        tp = connect(Path(folder), rank, size, device)
        peers = PeerMemory(tp, max(TOKENS) * max(gathered) * torch.bfloat16.itemsize, device)
        rows = [_measured(tp, peers, tokens, gathered, device) for tokens in TOKENS]
        if rank == 0:
            (Path(folder) / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        peers.close()
        tp.close()


def _measured(tp: Any, peers: Any, tokens: int, gathered: Sequence[int], device: torch.device) -> Row:
    """Raises EvalEngineError if pushes give other bytes than NCCL's gather."""
    import torch

    generator = torch.Generator(device).manual_seed(tp.rank)
    parts = [
        torch.randn(tokens, columns // tp.size, generator=generator, device=device).bfloat16() for columns in gathered
    ]
    for part in parts:
        if not torch.equal(peers.gather(part), tp.gather(part)):
            raise EvalEngineError(f"{tokens} tokens: pushes give other bytes than NCCL's gather")
    whole = torch.randn(tokens, gathered[1], generator=generator, device=device).bfloat16()
    pushed = _seconds(tp, lambda: [peers.gather(part) for part in parts], device)
    nccl = _seconds(tp, lambda: [tp.gather(part) for part in parts], device)
    sums = _seconds(tp, lambda: [tp.sum(whole) for _ in range(2)], device)
    sent = sum(part.nbytes for part in parts) * (tp.size - 1)
    return {"tokens": tokens, "push_s": pushed, "nccl_s": nccl, "sums_s": sums, "pushed_bytes": sent}


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
    lines = [list(COLUMNS), ["---:"] * len(COLUMNS)]
    for row in rows:
        times = (f"{row[key] * 1e6:.1f}" for key in ("push_s", "nccl_s", "sums_s"))
        lines.append([f"{row['tokens']:,}", *times, f"{row['pushed_bytes'] / row['push_s'] / 1e9:.0f}"])
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _write(rows: Sequence[Row], about: Mapping[str, Any], arguments: Namespace) -> None:
    from evalengine.bench.report import slug, write_page

    stem = f"push-gather-{arguments.ranks}-{slug(str(about['gpu']))}"
    content = {"environment": about, "model": arguments.model, "ranks": arguments.ranks, "rows": rows}
    method = (
        f"`{about['command']}`, {about['date']}, commit {about['code']['commit']}. GPU time of what a layer of "
        f"{arguments.model} exchanges over {arguments.ranks} GPUs; the pushes' bytes were NCCL's."
    )
    title = f"What a layer's ranks exchange, on {about['gpu']}"
    write_page(arguments.output, stem, content, title, method, _table(rows))
