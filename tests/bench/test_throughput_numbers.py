"""The numbers beside a throughput: a step's floor, the busy share, and runs of another commit or engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from evalengine.bench.floor import (
    Ceilings,
    LeastWork,
    floor_seconds,
    measure_ceilings,
    work_of,
)
from evalengine.bench.throughput import HEAD, Measured, busy_share, kernel_times
from evalengine.bench.throughput_compare import read_others
from evalengine.bench.throughput_report import differing_digests, notes, sheet
from evalengine.bench.workload_files import generation
from evalengine.engine.request import Request, ScoreRequest
from evalengine.errors import ConfigError
from evalengine.kernels.mixture_variant import Mixture, Router
from evalengine.kernels.recurrent_variant import GatedDelta
from evalengine.models.decoder import weight_counts
from evalengine.models.spec import Block
from tests.bench.workload_lines import a_row, write_rows
from tests.unit.test_spec_problems import SPEC

TINY = replace(
    SPEC, architecture="Qwen3ForCausalLM", vocab_size=100, hidden_size=8, intermediate_size=16, num_heads=2,
    num_kv_heads=1, head_dim=4, max_position_embeddings=64, qk_norm=True, dtype=torch.bfloat16,
)  # fmt: skip


def test_work_counts_a_shared_prefix_once() -> None:
    # [1 2 3] and [1 2 4 5] share two tokens, so that 5 are computed: 3 for the first and 2 for the second.
    # These see 1+2+3 and 3+4 tokens. Decoding takes 2 and 4 steps: 6 one sequence at a time, 4 for both together.
    # The decode steps read 3+1 and 3+2 tokens' KV for the first, and 2+1, 2+2, 2+3 and 2+4 for the second.
    generations: list[Request] = [generation(0, [1, 2, 3], 3), generation(1, [1, 2, 4, 5], 5)]
    assert work_of(generations, 2) == LeastWork(5, 13, 2, 4, 9 + 18, decode_tokens=6)
    assert work_of(generations, 1).decode_steps == 6
    # For [8], [8 9] and [8 7], [1 2] and [1 2 8] are fed: 3 tokens. Logits are read after each of them: two rows.
    scores: list[Request] = [ScoreRequest(i, [1, 2], ids) for i, ids in enumerate(([8], [8, 9], [8, 7]))]
    assert work_of(scores, 256) == LeastWork(3, 6, 2, 0, 0)


def test_floor_of_a_hand_worked_example() -> None:
    # A layer has 600 weights: q, k, v and o 8 x (8 + 2 x 4) + 8 x 8, the MLP 3 x 8 x 16, the norms 2 x 8 + 2 x 4.
    # Two layers and the last norm have 1,208, lm_head 800. A token's KV has 2 x 2 layers x 4 numbers x 2 bytes = 32.
    work = LeastWork(prompt_tokens=10, pairs=55, prompt_rows=2, decode_steps=3, kv_tokens_read=40)
    flops = 2 * 1208 * 10 + 4 * 2 * 4 * 2 * 55 + 2 * 800 * 2
    moved = 3 * (1208 + 800) * 2 + 40 * 32
    seconds = floor_seconds(work, TINY, torch.bfloat16, Ceilings(1000.0, 100.0, 50.0))
    assert seconds == pytest.approx(flops / 100 + moved / 1000, rel=1e-12)


def test_states_are_read_by_decode_steps() -> None:
    # A delta rule of 2 x 8 x 16 numbers of state, and 3 inputs of 2 x 16 + 2 x 8 channels: 4 x 256 + 2 x 3 x 48 bytes.
    # A row of a chunk has 2 x 8 numbers of x, 2 x 64 of T, a key of 16 in bfloat16, its norm and two gates' sums.
    # Its weights are 8 x (48 + 16 + 2 + 2) + 4 x 48 + 2 + 2 + 8 + 8 x 16, and those of the layer around it 384 + 16.
    rule = GatedDelta(num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=8, taps=4)
    spec = replace(TINY, num_layers=2, blocks=(Block(recurrence=rule), Block()))
    work = LeastWork(prompt_tokens=10, pairs=55, prompt_rows=2, decode_steps=3, kv_tokens_read=40, decode_tokens=5)
    body = (544 + 192 + 4 + 8 + 128 + 400) + 600 + 8
    flops = 2 * body * 10 + 4 * 2 * 4 * 55 + 2 * 800 * 2
    moved = 3 * (body + 800) * 2 + 40 * 16 + 5 * (4 * 256 + 2 * 3 * 48 + 32 * (4 * 16 + 4 * 128 + 2 * 16 + 4 + 8))
    seconds = floor_seconds(work, spec, torch.bfloat16, Ceilings(1000.0, 100.0, 50.0))
    assert seconds == pytest.approx(flops / 100 + moved / 1000)


def test_windows_bound_what_the_floor_counts() -> None:
    # With a window of 3, [1 2 3] sees 1+2+3 tokens and [4 5] behind [1 2] 3+3. Steps 1 and 2 of the first read 3+3,
    # steps 1 to 4 of the second, whose own tokens are 2, read 3+3+3+3. One layer sees so much, and one everything.
    generations: list[Request] = [generation(0, [1, 2, 3], 3), generation(1, [1, 2, 4, 5], 5)]
    spec = replace(TINY, blocks=(Block(window=3), Block()))
    work = work_of(generations, 2, spec)
    assert work.of_windows == {3: (6 + 6, 6 + 12)} and (work.pairs, work.kv_tokens_read) == (13, 27)
    assert work.of_layers(spec) == (12 + 13, 18 + 27) and work.of_layers(TINY) == (2 * 13, 2 * 27)


def test_of_experts_the_floor_counts_those_in_use() -> None:
    # The layers of the example with 4 experts of 3 x 8 x 6 weights in the place of the MLP, and a router of 4 x 8.
    # A token has 1 of 4; a decode step of 2 sequences touches 4 (1 - (3/4)^2) = 7/4 of them by an even choice.
    spec = replace(TINY, blocks=(Block(mixture=Mixture(Router(4, 1), 6)),))
    assert weight_counts(spec) == (2 * (600 - 384 + 32 + 576) + 8 + 1600, 2 * 4 * 144)
    work = LeastWork(10, pairs=0, prompt_rows=0, decode_steps=3, kv_tokens_read=0, decode_tokens=6)
    body = 2 * (600 - 384 + 32) + 8
    seconds = floor_seconds(work, spec, torch.bfloat16, Ceilings(1000.0, 100.0, 50.0))
    flops, moved = 2 * (body + 2 * 144) * 10, 3 * (body + 2 * 144 * 7 / 4 + 800) * 2
    assert seconds == pytest.approx(flops / 100 + moved / 1000, rel=1e-12)
    packed = floor_seconds(work, replace(spec, packing="mxfp4, dummies"), torch.bfloat16, Ceilings(1000.0, 100.0, 50.0))
    moved -= 3 * 2 * 144 * 4 * (7 / 16) * (2 - 17 / 32)  # half a byte and a share of a scale in the place of two bytes
    assert packed == pytest.approx(flops / 100 + moved / 1000, rel=1e-12)


def test_ceilings_are_measured() -> None:
    ceilings = measure_ceilings(torch.device("cpu"), torch.bfloat16)
    assert ceilings.copy_bytes_per_s > 1e6 and ceilings.matmul_flops_per_s == ceilings.lasting_flops_per_s > 1e6


@pytest.mark.gpu
def test_what_lasts_is_no_quicker_than_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalengine.bench.floor.LASTING_SECONDS", 0.2)
    ceilings = measure_ceilings(torch.device("cuda"), torch.bfloat16)
    assert 0.3 < ceilings.lasting_flops_per_s / ceilings.matmul_flops_per_s < 1.1


def test_kernel_times_are_sums_per_step_without_what_a_kernel_waits() -> None:
    spans = [("b", 5, 25), ("a", 0, 10), ("a", 30, 33), ("c", 40, 40.5)]
    events = [SimpleNamespace(name=name, time_range=SimpleNamespace(start=x, end=y)) for name, x, y in spans]
    assert list(kernel_times(events, 2).items()) == [("b", 7.5), ("a", 6.5), ("c", 0.2)]


def test_busy_share_is_a_union_over_the_time_after_the_head() -> None:
    assert busy_share([]) is None and HEAD == 0.1
    assert busy_share([(0, 50), (20, 60), (90, 100)]) == pytest.approx((50 + 10) / 90)
    assert busy_share([(0, 100)]) == 1.0


def test_runs_are_compared_where_preset_workload_and_requests_agree(tmp_path: Path) -> None:
    other_rows = [
        a_row("fast", 4.0, engine="vllm"),
        a_row("fast", 9.0, engine="vllm", requests=128),
        a_row("fast", 9.0, engine="other", preset="qwen3-0.6b"),
        a_row("invariant", 3.0),
        a_row("invariant", 5.0, round=1),
    ]
    others = read_others(write_rows(tmp_path / "theirs.json", *other_rows))
    own_rows = [a_row("invariant", 2.0), a_row("invariant", 3.0, round=1), a_row("fast", 2.0), a_row("fast", 2.0)]
    table = sheet(own_rows, others)
    headings, lines = table.head, table.rows
    assert headings[-2:] == ["time / vllm, fast's", "time / evalengine, earlier's"], "no column without a match"
    assert lines == [
        [
            "qwen3-8b",
            "random",
            "256",
            "2.500",
            "2.000",
            "400 tok/s",
            "500 tok/s",
            "0.800",
            "0.40 / 0.50",
            "0.62 / 0.50 of 4.000 s",
            "0.62 / - of 4.000 s",
        ]
    ]
    lines = sheet([a_row("fast", 2.0, output_tokens=0)], others).rows
    assert lines[0][3:9] == ["-", "2.000", "-", "128 req/s", "-", "- / 0.50"]


def test_rounds_with_other_bytes_are_found() -> None:
    rows = [a_row("invariant", 1.0), a_row("invariant", 1.0, round=1), a_row("fast", 1.0, digest="x")]
    assert differing_digests(rows) == []
    assert differing_digests([*rows, a_row("invariant", 1.0, digest="x")]) == [("qwen3-8b", "random")]


def test_ranks_have_one_digest_and_are_timed_relative_to_one() -> None:
    two = {"preset": "qwen3-8b-tp2", "tensor_parallel_size": 2}
    rows = [a_row("invariant", 4.0), a_row("invariant", 2.5, **two)]
    assert differing_digests(rows) == []
    assert differing_digests([*rows, a_row("invariant", 2.5, **two, digest="x")]) == [("qwen3-8b", "random")]
    ceilings = dict.fromkeys(("copy_bytes_per_s", "matmul_flops_per_s", "lasting_flops_per_s"), 1e12)
    lines = list(notes(Measured({}, {}, ceilings, rows=[row | {"gpu_busy_share": None} for row in rows]), []))
    assert lines[1:] == [
        "qwen3-8b, random, invariant: 2 GPUs take 0.62 of one GPU's time",
        "digest: 2 runs of qwen3-8b, random, on 1, 2 GPUs: the invariant mode gave the same bytes",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "has no rows"),
        ('{"rows": []}', "has no rows"),
        ('{"rows": [1]}', "row 0: it=1: must be a mapping of names to values"),
        (json.dumps({"rows": [a_row("fast", 0.0)]}), "row 0: wall_s=0.0: must be greater than 0"),
        (json.dumps({"rows": [a_row("fast", 1.0, requests="2")]}), "row 0: requests='2': must be a valid integer"),
        (json.dumps({"rows": [a_row("fast", 1.0, preset=None)]}), "row 0: preset=None: must be a valid string"),
    ],
)
def test_a_damaged_file_to_compare_with_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "theirs.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_others(path)
