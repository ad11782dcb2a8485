"""`python -m benchmarks served`: the server's throughput compared with its engine's, and whether every answer is the
engine's.

The ratio is that of their throughputs, which a machine with other work shows as it pleases; so it is given, too,
without the time in which the engine's thread, here and there, waited for a core that others had (Linux tells it).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.served_sides import Answer, read_lines, thread_times, waited_seconds
from benchmarks.whole_run import timed, without_places
from evalengine.errors import EvalEngineError
from evalengine.util.command import Namespace

COLUMNS = ("requests", "clients", "tokens out", "engine, s", "server, s", "ratio", "engine, s less waits",
           "server, s less waits", "ratio less waits", "clients' CPU, s", "other answers")  # fmt: skip
SIDES = "benchmarks.served_sides"
NAMES = ("Arlo", "Malik", "Lotte", "Diego", "Priya", "Noor", "Ines", "Tom")
THINGS = ("flowers", "cookies", "stamps", "marbles", "shells")


def main(arguments: Namespace) -> int:
    """Runs `benchmarks served` with its words; returns the exit code, 1 if an answer of the server is another."""
    from evalengine.bench.environment import environment

    with tempfile.TemporaryDirectory(prefix="evalengine-bench-") as scratch:
        file = Path(scratch) / "requests.jsonl"
        bodies = made_up(arguments.requests, arguments.tokens, arguments.logprobs)
        file.write_text("".join(json.dumps(body) + "\n" for body in bodies), encoding="utf-8")
        rounds = []
        for _ in range(arguments.rounds):
            rounds.append(_round(arguments, file))
            print(f"bench: {rounds[-1]}", file=sys.stderr, flush=True)
    given = {name: str(getattr(arguments, name)) for name in ("requests", "clients", "tokens", "rounds")}
    options = [word for name, value in given.items() for word in (f"--{name}", value)]
    options += ["--logprobs"] if arguments.logprobs else []
    command = ["python", "-m", "benchmarks", "served", *without_places(arguments.settings), *options]
    _write(arguments, rounds, environment(command))
    print("\n".join(_table(rounds)))
    return int(any(taken["other_answers"] for taken in rounds))


def made_up(number: int, tokens: int, logprobs: bool) -> list[dict[str, Any]]:
    """Word problems, no two alike; every second answer is sampled."""
    bodies = []
    for i in range(number):
        first, second = NAMES[i % 8], NAMES[(i // 8 + 1 + i) % 8]
        collects = f"{first} collects {i % 97 + 3} {THINGS[i % 5]}. {second} has {i // 97 + 2} fewer."
        prompt = f"Question: {collects} How many do they have together?\nAnswer:"
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": i % 2, "seed": i, "return_token_ids": True}
        bodies.append({**body, "logprobs": 0} if logprobs else body)
    return bodies


def _round(arguments: Namespace, file: Path) -> dict[str, Any]:
    expected, found = file.with_name("offline.jsonl"), file.with_name("served.jsonl")
    alone = timed("benchmarks served", ["-m", SIDES, "offline", str(file), str(expected), *arguments.settings])
    with _serving(arguments.settings) as (port, process_id):
        before, threads = _cpu_seconds(process_id), thread_times(process_id)
        served = timed("benchmarks served", ["-m", SIDES, "client", str(file), str(found), str(port),
                                            str(arguments.clients)])  # fmt: skip
        server_cpu, waited = _cpu_seconds(process_id) - before, waited_seconds(threads, thread_times(process_id))
    engine, clients = (json.loads(side.out.splitlines()[-1]) for side in (alone, served))
    answers = read_lines(expected)
    alone_s, served_s = engine["seconds"] - engine["waited_s"], clients["seconds"] - waited
    return {
        "requests": arguments.requests,
        "clients": arguments.clients,
        "output_tokens": sum(len(one[1]) for one in answers),
        "engine_s": engine["seconds"],
        "served_s": clients["seconds"],
        "ratio": engine["seconds"] / clients["seconds"],
        "engine_cpu_s": engine["cpu_seconds"],
        "server_cpu_s": server_cpu,
        "engine_less_waits_s": alone_s,
        "served_less_waits_s": served_s,
        "ratio_less_waits": alone_s / served_s,
        "clients_cpu_s": clients["cpu_seconds"],
        "other_answers": other_answers(answers, read_lines(found)),
        "load_before": alone.load_before,
    }


def other_answers(expected: Sequence[Answer], found: Sequence[Answer]) -> int:
    """How many answers of the server are not the engine's. Logprobs count where the server gave any."""
    pairs = zip(expected, found, strict=True)
    return sum([text, ids, logprobs and values, reason] != [*theirs]
               for (text, ids, values, reason), theirs in pairs for logprobs in [theirs[2]])  # fmt: skip


@contextmanager
def _serving(settings: Sequence[str]) -> Iterator[tuple[int, int]]:
    """(port, process id) of a server, which is ended afterwards."""
    command = [sys.executable, "-m", "evalengine", "serve", *settings, "port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if " at http://127.0.0.1:" not in line:
                raise EvalEngineError("benchmarks served: the server did not start; its own lines have why")
            yield int(line.split("127.0.0.1:")[1].split("/")[0]), process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def _cpu_seconds(process_id: int) -> float:
    """A running process' own seconds of the processor; Linux says them."""
    values = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def _table(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    middle = {name: median(taken[name] for taken in rounds) for name in rounds[0]}
    counts = [f"{middle[name]:,.0f}" for name in ("requests", "clients", "output_tokens")]
    times = [f"{middle['engine_s']:.1f}", f"{middle['served_s']:.1f}", f"{middle['ratio']:.2f}"]
    times += [f"{middle['engine_less_waits_s']:.1f}", f"{middle['served_less_waits_s']:.1f}"]
    times += [f"{middle['ratio_less_waits']:.2f}", f"{middle['clients_cpu_s']:.1f}", f"{middle['other_answers']:.0f}"]
    lines = [list(COLUMNS), ["---:"] * len(COLUMNS), [*counts, *times]]
    return [f"| {' | '.join(line)} |" for line in lines]


def _write(arguments: Namespace, rounds: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    from benchmarks.report import write_page
    from evalengine.bench.environment import slug

    where = str(about["cpu"] if about["driver"] is None else about["gpu"])
    loads = [f"{taken['load_before']:.1f}" for taken in rounds]
    method = (
        f"`{about['command']}`, {about['date']}, commit {about['code']['commit']}. Engine and server by turns, median "
        f"of {len(rounds)}; the clients are a process of the same machine, whose seconds of the processor are given. "
        f"Load of the machine, which has {os.cpu_count()} cores, before each round: {', '.join(loads)}."
    )
    content = {"environment": about, "rounds": list(rounds)}
    name = "served" if arguments.name is None else f"served-{slug(arguments.name)}"
    write_page(arguments.output, f"{name}-{slug(where)}", content, f"The server and its engine, on {where}", method,
               _table(rounds))  # fmt: skip
