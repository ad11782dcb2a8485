"""The workloads of `bench throughput`: those in code, those in files, and damaged files."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from evalengine.bench.floor import work_of
from evalengine.bench.workload_files import generation, read_workload, workload_files
from evalengine.bench.workloads import IN_CODE, fitted, make_workload
from evalengine.engine.request import GenerateRequest, ScoreRequest
from evalengine.errors import ConfigError
from tests.bench.workload_lines import SCORE, workload, write_lines

SEGMENT = {"kind": "segment", "ids": [5, 6]}

GENERATE = {"kind": "generate", "prompt": [1, 2], "max_tokens": 3}


def test_random_is_the_one_that_other_engines_were_timed_on() -> None:
    whole = workload("random")
    assert (len(whole.requests), whole.prompt_tokens, whole.output_tokens, whole.num_cut) == (256, 144_628, 133_292, 0)
    assert [r.request_id for r in whole.requests] == list(range(256))


def test_a_warm_up_has_other_requests_as_many_at_most() -> None:
    for name in IN_CODE:
        small = workload(name, most=3)
        assert len(small.warm_up) == len(small.requests) <= 3
        prompts = [[r.prompt_ids for r in part if isinstance(r, GenerateRequest)] for part in
                   (small.requests, small.warm_up)]  # fmt: skip
        assert not any(prompt in prompts[1] for prompt in prompts[0])


def test_shapes_of_the_workloads_in_code() -> None:
    """Every workload has the numbers of requests, prompt tokens and output tokens that it is known by."""
    shapes = {name: [(len(r.prompt_ids), r.params.max_tokens) for r in workload(name).requests] for name in IN_CODE}  # type: ignore[union-attr]
    assert shapes["batch1"] == [(1024, 256)] and shapes["long"] == [(16384, 128)] * 16
    rows = workload("gsm8k_cot").requests
    assert len(rows) == 512 and all(isinstance(r, GenerateRequest) for r in rows)
    work = work_of(rows, 256)
    assert work.prompt_tokens < 512 * 100 + 8 * 120, "the exemplars are computed once"


def test_lengths_and_ids_are_cut_to_what_the_model_takes() -> None:
    small = workload("random", most=8, vocab_size=1000, max_model_len=64)
    assert small.num_cut == len(small.requests) == 8
    for request in (*small.requests, *small.warm_up):
        assert isinstance(request, GenerateRequest) and max(request.prompt_ids) < 1000
        assert len(request.prompt_ids) + request.params.max_tokens <= 64
    kept, cut = fitted([ScoreRequest(0, list(range(50)), [7, 8]), ScoreRequest(1, [1], list(range(99)))], 32)
    scores = [r for r in kept if isinstance(r, ScoreRequest)]
    assert cut == 2 and scores[0].context_ids == list(range(20, 50)) and scores[0].continuation_ids == [7, 8]
    assert scores[1].context_ids == [1] and scores[1].continuation_ids == list(range(31))


def test_a_workload_has_its_own_cut_for_a_preset(tmp_path: Path) -> None:
    files = {"gsm8k": write_lines(tmp_path / "gsm8k.jsonl.gz", *[GENERATE] * 300)}
    sizes = [len(make_workload("gsm8k", files, p, 99, 99, None).requests) for p in ("qwen3-0.6b", "qwen3-8b")]
    assert sizes == [300, 256] and len(workload("gsm8k", files, most=5).requests) == 5


def test_a_file_s_lines_become_requests(tmp_path: Path) -> None:
    write_lines(tmp_path / "own.jsonl.gz", SEGMENT, GENERATE, "", {"kind": "segment", "ids": [4]}, SCORE)
    (path,) = workload_files(tmp_path).values()
    assert read_workload(path, 10) == [
        generation(0, [1, 2], 3),
        ScoreRequest(1, [4, 5, 6, 7], [8]),
        ScoreRequest(2, [4, 5, 6, 7], [9, 3]),
    ]
    warm_up = workload("own", {"own": path}, vocab_size=10).warm_up
    assert warm_up[2] == ScoreRequest(2, [5, 6, 7, 8], [0, 4]), "every id one higher"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ("[" * 100_000, "nested too deeply"),
        ([1], "no object whose kind is segment, generate, loglikelihood"),
        ({"kind": "rolling"}, "no object whose kind is"),
        ({"kind": "generate", "prompt": [1]}, "max_tokens: is missing"),
        ({**GENERATE, "segmets": [0]}, "segmets: no such setting"),
        ({**SEGMENT, "segments": [0]}, "segments: no such setting"),
        ({**GENERATE, "prompt": [1, 10]}, "token id 10 is beyond the model's vocabulary, 0 ... 9"),
        ({**GENERATE, "prompt": [True]}, "prompt=[True]: must be a list of token ids"),
        ({**GENERATE, "prompt": [-1]}, "prompt=[-1]: must be a list of token ids"),
        ({**GENERATE, "prompt": []}, "line 2: nothing precedes the first requested token"),
        ({**GENERATE, "max_tokens": 0}, "max_tokens=0: must be greater than or equal to 1"),
        ({**GENERATE, "max_tokens": 1.5}, "max_tokens=1.5: must be a valid integer"),
        ({**SCORE, "segments": [0, 1]}, "line 2: segment 1 is not in the file, which has 1"),
        ({**GENERATE, "max_tokens": 1 << 70}, "must be less than or equal to 16777216"),
        ({**SCORE, "segments": 0}, "segments=0: must be a list of the segments' numbers, from 0"),
        ({**SCORE, "segments": None, "context": []}, "line 2: nothing precedes the first requested token"),
        (
            {**SCORE, "segments": [], "continuations": []},
            "continuations=[]: must have at least 1 item",
        ),
        (
            {**SCORE, "segments": [], "continuations": [[]]},
            "continuations[0]=[]: must have at least 1 item",
        ),
        ({**SCORE, "segments": [], "continuations": [[11]]}, "token id 11 is beyond"),
    ],
)
def test_a_damaged_line_is_named(line: Any, message: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "bad.jsonl.gz", SEGMENT, line, GENERATE)
    with pytest.raises(ConfigError) as caught:
        read_workload(path, 10)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_a_segment_s_repeats_are_counted_before_they_are_made(tmp_path: Path) -> None:
    lines = {"kind": "segment", "ids": [1] * 70_000}, {**GENERATE, "segments": [0] * 256}
    with pytest.raises(ConfigError, match="line 2: its segments have more than 16,777,216 tokens"):
        read_workload(write_lines(tmp_path / "x.jsonl.gz", *lines), 10)


def test_a_file_that_is_no_gzip_or_empty_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl.gz", *[GENERATE] * 99)
    whole = path.read_bytes()
    for content, message in (
        (whole[:-9], "cannot be read as gzip"),
        (whole[:20] + b"\0" * 20 + whole[40:], "cannot be read as gzip"),
        (b"{}", "cannot be read as gzip"),
        (gzip.compress(b"\n"), "it holds no request"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read_workload(path, 10)
    path.unlink()
    with pytest.raises(ConfigError, match=r"no \*\.jsonl\.gz there"):
        workload_files(tmp_path)
