"""`python -m benchmarks.served_sides offline|client FILE ...`: the two processes that `benchmarks served` times.

Both read the same requests, bodies of /v1/completions a line, and write a line an answer: text, token ids, logprobs (or
null) and why it ended. The last line of their output is JSON: seconds of the requests, and of the processor.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: %d\r\n\r\n"
Threads = dict[str, tuple[int, int]]
Answer = list[Any]  # text, token ids, logprobs or None, finish_reason


def offline(file: Path, answers: Path, words: Sequence[str]) -> None:
    """Has the engine answer all requests at once. words: the settings of the model and the engine."""
    from evalengine.config.compose import compose_jobs
    from evalengine.engine.llm import LLM
    from evalengine.engine.request import SamplingParams

    config = compose_jobs(words)[0].config
    mode: dict[str, Any] = {"batch_invariant": config.batch_invariant, "numerics": config.numerics}
    bodies = read_lines(file)
    with LLM(config.model, **mode, engine=config.engine) as llm:
        params = [SamplingParams(body["max_tokens"], body["temperature"], seed=body["seed"]) for body in bodies]
        begin, cpu, before = time.perf_counter(), time.process_time(), thread_times(os.getpid())
        outputs = llm.generate([body["prompt"] for body in bodies], params)
        _say(begin, cpu, waited_s=waited_seconds(before, thread_times(os.getpid())))
    _write(answers, [[one.text, list(one.token_ids), one.logprobs.tolist(), one.finish_reason] for one in outputs])


def client(file: Path, answers: Path, port: int, clients: int) -> None:
    """So many clients, each with its own connection, ask one request after another until all are answered.

    The protocol is spoken by hand: a client library would take most of the second core.
    """
    bodies = [json.dumps(body).encode() for body in read_lines(file)]
    begin, cpu = time.perf_counter(), time.process_time()
    contents = asyncio.run(_ask_all(port, bodies, clients))
    _say(begin, cpu)
    _write(answers, [_answer(content) for content in contents])


async def _ask_all(port: int, bodies: Sequence[bytes], clients: int) -> list[bytes]:
    contents: list[bytes] = [b""] * len(bodies)
    numbers = iter(range(len(bodies)))
    tasks = [asyncio.ensure_future(_ask(port, bodies, numbers, contents)) for _ in range(clients)]
    try:
        await asyncio.gather(*tasks)  # the first that raises ends all: none waits for an answer that never comes
    finally:
        for task in tasks:
            task.cancel()
    return contents


async def _ask(port: int, bodies: Sequence[bytes], numbers: Iterator[int], contents: list[bytes]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for number in numbers:
        body = bodies[number]
        writer.write(HEAD % len(body) + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        content = await reader.readexactly(length)
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"request {number}: {content.decode()}")
        contents[number] = content
    writer.close()


def _answer(content: bytes) -> Answer:
    (choice,) = json.loads(content)["choices"]
    logprobs = choice["logprobs"] and choice["logprobs"]["token_logprobs"]
    return [choice["text"], choice["token_ids"], logprobs, choice["finish_reason"]]


def thread_times(process_id: int) -> Threads:
    """Thread -> nanoseconds in which it ran, and in which it waited for a core that others had. Linux."""
    files = Path(f"/proc/{process_id}/task").glob("*/schedstat")
    values = {file.parent.name: file.read_text(encoding="utf-8").split() for file in files}
    return {thread: (int(ran), int(waited)) for thread, (ran, waited, _) in values.items()}


def waited_seconds(before: Threads, after: Threads) -> float:
    """How long the busiest thread, which is the engine's, has waited for a core since `before`."""
    spent = [(ran - before.get(thread, (0, 0))[0], waited - before.get(thread, (0, 0))[1])
             for thread, (ran, waited) in after.items()]  # fmt: skip
    return max(spent)[1] / 1e9


def read_lines(file: Path) -> list[Any]:
    """The JSON values of a file, a line each."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _write(answers: Path, values: Sequence[Answer]) -> None:
    answers.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")


def _say(begin: float, cpu: float, **more: Any) -> None:
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, **more}))


if __name__ == "__main__":
    side, requests, written, *rest = sys.argv[1:]
    if side == "offline":
        offline(Path(requests), Path(written), rest)
    else:
        client(Path(requests), Path(written), *map(int, rest))
