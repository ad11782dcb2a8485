"""Time vLLM on the workloads of `bench throughput`, as lm-eval's backend drives it; docs/speed.md has the commands.

It needs vLLM, and nothing of evalengine. Like lm-eval (`lm_eval/models/vllm_causallms.py`), it gives `LLM.generate` all
requests of a workload at once, the longest first. A generation is greedy and ignores EOS. A log-likelihood is one
request for each continuation: context and continuation with `prompt_logprobs=1` and one generated token.
`--batch-invariant` sets VLLM_BATCH_INVARIANT=1.

Weights are random (`--load-format dummy`) and there is no tokenizer. 256 other requests run twice before a workload is
timed, and the prefix cache is emptied. The file has the keys that `bench throughput --compare` reads.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

WARM_UP = 256  # requests
VOCAB_SIZE = 151936  # ids of `random` are below this
SHORTEST, LONGEST, WINDOW = 100, 1024, 4096  # tokens of `random`


class Request(NamedTuple):
    """A generation of `output_tokens` after the ids; a log-likelihood if these are None."""

    ids: list[int]
    output_tokens: int | None


def random_workload(seed: int) -> list[Request]:
    """256 generations without a shared prefix."""
    rng = random.Random(seed)
    requests = []
    for _ in range(256):
        n = rng.randint(SHORTEST, LONGEST)
        ids = [rng.randrange(10, VOCAB_SIZE) for _ in range(n)]
        requests.append(Request(ids, min(rng.randint(SHORTEST, LONGEST), WINDOW - n)))
    return requests


def read_workload(path: Path) -> Iterator[Request]:
    """The requests of a file of token ids (evalengine/bench/workload_files.py has the format)."""
    segments: list[list[int]] = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            before = [i for number in line.get("segments", ()) for i in segments[number]]
            if line["kind"] == "segment":
                segments.append(line["ids"])
            elif line["kind"] == "generate":
                yield Request(before + line["prompt"], line["max_tokens"])
            else:
                yield from (Request(before + line["context"] + c, None) for c in line["continuations"])


def workload(name: str, files: Path | None, most: int | None) -> tuple[list[Request], list[Request]]:
    """The requests to time, and others to warm up with: of another seed, or the last ones with every id one higher."""
    if name == "random":
        requests, others = random_workload(0), random_workload(1)
    elif files is None or not (path := files / f"{name}.jsonl.gz").is_file():
        raise SystemExit(f"--workloads {name}: there is no {name}.jsonl.gz in --files {files}")
    else:
        requests = list(read_workload(path))
        others = [Request([i + 1 for i in ids], n) for ids, n in requests[-WARM_UP:]]
    requests = requests[:most]
    return requests, others[-min(WARM_UP, len(requests)) :]


def answer(llm: Any, requests: Sequence[Request], sampling: Any) -> float:
    """Answer all requests in one call, the longest first; return the seconds."""
    ordered = sorted(requests, key=lambda request: -len(request.ids))
    params = [
        sampling(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        if request.output_tokens is None
        else sampling(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True, detokenize=False)
        for request in ordered
    ]
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": request.ids} for request in ordered], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    for request, output in zip(ordered, outputs, strict=True):
        if len(output.outputs[0].token_ids) != (request.output_tokens or 1):
            raise SystemExit(
                f"a request of {len(request.ids)} tokens was answered by {len(output.outputs[0].token_ids)}"
            )
    return seconds


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time every workload; return the file's content."""
    if arguments.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"  # before the import, which reads it
    vllm: Any = importlib.import_module("vllm")  # seconds, and nothing else needs it

    llm = vllm.LLM(
        model=arguments.model,
        load_format=arguments.load_format,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        gpu_memory_utilization=0.9,
    )
    mode, rows = "batch-invariant" if arguments.batch_invariant else "ordinary", []
    for text in arguments.workloads.split(","):
        name, _, most = text.partition(":")
        requests, others = workload(name, arguments.files, int(most) if most else None)
        for _ in range(2):
            answer(llm, others, vllm.SamplingParams)
        for _ in range(arguments.rounds):
            llm.reset_prefix_cache()
            rows.append({
                "engine": f"vllm {vllm.__version__}",
                "mode": mode,
                "preset": arguments.preset,
                "workload": name,
                "requests": len(requests),
                "prompt_tokens": sum(len(request.ids) for request in requests),
                "output_tokens": sum(request.output_tokens or 0 for request in requests),
                "wall_s": answer(llm, requests, vllm.SamplingParams),
            })  # fmt: skip
            print(f"{name}: {rows[-1]['wall_s']:.3f} s", flush=True)
    settings = {name: getattr(arguments, name) for name in ("model", "load_format", "max_model_len", "max_num_seqs")}
    return {"vllm": vllm.__version__, "settings": settings, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hub id, or a folder with config.json")
    parser.add_argument(
        "--preset", required=True, help="the model's name in bench throughput: qwen3-8b for shape:qwen3-8b"
    )
    parser.add_argument("--load-format", default="dummy", help="as vLLM's: dummy (the default), auto, ...")
    parser.add_argument(
        "--workloads", default="random", help="random, and files of --files; gsm8k:256 is its first 256 requests"
    )
    parser.add_argument("--files", type=Path, help="a folder of NAME.jsonl.gz")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--batch-invariant", action="store_true", help="vLLM's batch-invariant mode")
    parser.add_argument("--output", type=Path, required=True, help="a JSON file for --compare")
    arguments = parser.parse_args()
    content = json.dumps(measure(arguments), indent=1)
    arguments.output.write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
