"""`python -m benchmarks.engine_alone FILE [N]`: answers the (first N) requests of a file of `benchmarks harness`.

Its last line is JSON: seconds of the engine's start and of its steps.
"""

from __future__ import annotations

import gc
import json
import pickle
import sys
import time
from pathlib import Path

from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import resolve_checkpoint


def main(file: Path, most: int | None = None) -> None:
    """Loads the model that the file names and answers the file's requests, or the first `most` of them."""
    gc.set_threshold(3_000_000)  # as in `evalengine.__main__`
    config, requests = pickle.loads(file.read_bytes())
    requests = requests[:most]
    mode = {"batch_invariant": config.batch_invariant, "numerics": config.numerics}
    begin = time.perf_counter()
    with LLM(resolve_checkpoint(config.model), **mode, engine=config.engine) as llm:
        start = time.perf_counter() - begin
        answered = sum(1 for _ in llm.run(requests))
        assert answered == len(requests)
        print(json.dumps({"start_s": round(start, 2), "steps_s": round(llm.stats.seconds, 2)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    gc.freeze()  # as `python -m evalengine` does
