"""The default run's bits: the committed digest, on every CPU and under every schedule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evalengine import CONTRACT_VERSION
from tests.e2e.command import LIMIT, SHORT, Outcome, Run, check_output, finished
from tests.e2e.golden import ON_CUDA, default_run, explain, facts, read_golden

# engine/test_schedule_invariance.py has quick sizes that are no powers of two, test_tensor_parallel.py has quick ranks.
REPEATED = ("odd pages", "odd chunks", "two ranks")
SCHEDULES = {
    "alone": ("limit=3", "engine.max_num_seqs=1"),
    "small pages": ("limit=3", "engine.block_size=16"),
    "odd pages": ("limit=5", "engine.block_size=7"),
    "chunked prefill": (f"limit={LIMIT}", "engine.max_num_batched_tokens=64"),
    "odd chunks": ("limit=5", "engine.max_num_batched_tokens=37", "engine.max_num_seqs=3"),
    "no prefix cache": ("limit=4", "engine.enable_prefix_caching=false"),
    "one thread": ("limit=2", "engine.num_threads=1"),
    "two ranks": ("limit=2", "engine.num_threads=1", "engine.tensor_parallel_size=2"),
    "two threads": ("limit=2", "engine.num_threads=2"),  # Few rows, as on busy cores the two wait for each other.
}
ASKED = [
    pytest.param(settings, id=name, marks=pytest.mark.slow if name in REPEATED else ())
    for name, settings in SCHEDULES.items()
]
# A line now and then, on a slow machine.
PROGRESS = r"arithmetic: \d+/200 requests, [\d,]+ tokens/s(, (.* left|estimating(, [\d,]+ tokens (generated|read))?))?"
FILES = (
    "config.yaml",
    "manifest.json",
    "results_*.json",
    "samples_arithmetic_*.jsonl",
    "records.parquet",
    "tokens.json",
    "digest.txt",
    "report.html",
)


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Run]:
    """What the default run printed, in a process of its own, and what it left."""
    return default_run(tmp_path_factory.mktemp("default"))


def test_the_default_run_is_the_golden_one(default: tuple[Outcome, Run], reference: Run) -> None:
    _, run = default
    problem = explain(facts(run), read_golden()[str(CONTRACT_VERSION)])
    assert not problem, problem
    assert 0.5 <= run.results["arithmetic"]["exact_match,strict-match"] <= 0.95, "a flipped answer must show"
    leaves = run.leaves
    assert {key: leaves[key] for key in reference.leaves} == reference.leaves, (
        "a small batch or one of 200: the same bits"
    )


def test_the_command_and_its_folder(default: tuple[Outcome, Run]) -> None:
    """The command prints a short table, the folder and the digest, and leaves a run's files and no others."""
    done, run = default
    assert [line for line in done.err.splitlines() if not re.fullmatch(PROGRESS, line)] == []
    check_output(done, run)
    table = [line.split() for line in done.out.splitlines() if "exact_match" in line]
    columns = ["arithmetic", "1.0", "strict-match", "0", "exact_match", "↑"]
    assert [row[: len(columns)] for row in table] == [columns]
    assert f"{float(table[0][len(columns)]):.4f}" == f"{run.results['arithmetic']['exact_match,strict-match']:.4f}"
    assert "Traceback" not in done.out and len(done.out.splitlines()) < 12
    for pattern in FILES:
        assert len(list(run.folder.glob(pattern))) == 1, pattern
    assert len(list(run.folder.iterdir())) == len(FILES), "nothing else: no journal, lock or scratch file"
    assert run.folder.name.startswith("arithmetic-tinymath-")


@pytest.mark.gpu
def test_exact_on_a_gpu_is_the_golden_run(tmp_path: Path) -> None:
    # On one thread, because a thread for each core would compete with a dozen busy test processes.
    on_the_cpu = finished(tmp_path / "cpu", f"limit={LIMIT}", "engine.num_threads=1").leaves
    _, run = default_run(tmp_path / "cuda", ON_CUDA)
    assert run.manifest["hardware"]["gpus"], "it ran on a CPU: this test shows nothing"
    leaves = run.leaves
    different = [key for key, leaf in on_the_cpu.items() if leaves[key] != leaf]
    assert not different, f"documents whose bits differ from this CPU's: {different}"
    problem = explain(facts(run), read_golden()[str(CONTRACT_VERSION)])
    assert not problem, problem


@pytest.mark.parametrize("settings", ASKED)
def test_no_schedule_changes_a_bit(settings: tuple[str, ...], short_reference: Run, tmp_path: Path) -> None:
    run = finished(tmp_path, SHORT, *settings)
    leaves = run.leaves
    assert leaves == {key: short_reference.leaves[key] for key in leaves}
    if len(leaves) == LIMIT:
        assert run.digest == short_reference.digest


def test_preemption_changes_no_bit(short_reference: Run, tmp_path: Path) -> None:
    """The pool holds few of six documents, so that the others are preempted and computed again."""
    run = finished(tmp_path, "limit=6", SHORT, "engine.block_size=4", "engine.num_kv_blocks=41")
    assert run.manifest["engine"]["stats"]["num_preemptions"] > 0
    leaves = run.leaves
    assert leaves == {key: short_reference.leaves[key] for key in leaves}


def test_ordinary_arithmetic_depends_on_the_batch(tmp_path: Path) -> None:
    """The inverse: without invariance the same comparison shows a difference, so it can fail."""
    settings = (SHORT, "batch_invariant=false", "engine.dtype=float32")
    together = finished(tmp_path / "together", f"limit={LIMIT}", *settings).leaves
    alone = finished(tmp_path / "alone", "limit=3", "engine.max_num_seqs=1", *settings).leaves
    assert alone != {key: together[key] for key in alone}


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"weights_sha256": "0"}, "bundled weights"),
        ({"prompts_sha256": "0", "digest": "0"}, "tokenizer, the task or its rows"),
        ({"digest": "0"}, "arithmetic, the sampler or the stop handling"),
        ({"exact_match": 0.0}, "arithmetic, the sampler or the stop handling"),
    ],
)
def test_a_difference_is_named_as_what_it_is(changed: dict[str, object], cause: str) -> None:
    """The message tells other weights, other prompts and other arithmetic apart."""
    golden = read_golden()[str(CONTRACT_VERSION)]
    assert explain(dict(golden), golden) == ""
    text = explain({**golden, **changed}, golden)
    assert cause in text and "python -m tests.e2e.golden" in text
    assert all(f"  {name}: golden {golden[name]}, found " in text for name in changed)
