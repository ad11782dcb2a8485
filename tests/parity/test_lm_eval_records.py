"""compare, gate and report read runs by `lm_eval --model evalengine` as they read our own runs.

Needs lm-eval (`pip install evalengine[lm-eval]`) and EVALENGINE_DATA, the folder with the tasks' rows.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from evalengine.errors import ConfigError
from evalengine.integrations.lm_eval.cli import NAME, TARGET, register
from evalengine.records.evidence import open_run
from evalengine.records.schema import read_records
from evalengine.report.read.load import read_evidence
from tests.e2e.command import ROOT, Outcome, call
from tests.parity.lm_eval_runs import TINYMATH, WINDOW, command_line, evaluate, our_model, task_files

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")

LIMIT = 2
HAS_HF = importlib.util.find_spec("accelerate") is not None


def arguments(**given: Any) -> str:
    return ",".join(f"{name}={value}" for name, value in {"pretrained": TINYMATH, "dtype": "float32", **given}.items())


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return task_files(tmp_path_factory.mktemp("rows"), ("arc_easy", "gsm8k", "wikitext"))


@pytest.fixture(scope="module")
def runs(tasks: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder with the runs one, many, fast and, where its libraries are installed, hf."""
    ours, theirs = {"max_model_len": WINDOW}, {"max_length": WINDOW}
    root = tmp_path_factory.mktemp("lm_eval")
    common = ["--tasks", *tasks, "--limit", str(LIMIT), "--gen_kwargs", "max_gen_toks=16", "--log_samples"]
    models = {
        "one": ["--model", "evalengine", "--model_args", arguments(**ours, max_num_seqs=1)],
        "many": ["--model", "evalengine", "--model_args", arguments(**ours, max_num_seqs=16), "--batch_size", "16"],
        "fast": ["--model", "evalengine", "--model_args", arguments(**ours, batch_invariant=False)],
        "hf": ["--model", "hf", "--model_args", arguments(**theirs), "--device", "cpu"],
    }
    chosen = {name: words for name, words in models.items() if name != "hf" or HAS_HF}
    for name, words in chosen.items():
        done = command_line("run", *words, *common, "--output_path", str(root / name))
        assert done.code == 0, done.err
        assert ("batch_size=16 is ignored" in done.err) == (name == "many")
    return root


def compared(*words: str | Path) -> tuple[Outcome, dict[str, Any]]:
    outcome = call("compare", *map(str, words), "--json", "-")
    return outcome, json.loads(outcome.out) if outcome.out else {}


def records(run: Path) -> Path:
    """Returns the folder of records beside a run's results."""
    (folder,) = run.glob("*/records-*")
    return folder


def copied(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


def test_the_batch_changes_no_bit(runs: Path) -> None:
    outcome, result = compared(runs / "one", runs / "many")
    assert (outcome.code, outcome.err) == (0, "")
    assert result["verdict"] == "IDENTICAL" and result["digests_equal"] is True and result["settings"] == []


def test_lm_eval_runs_have_the_digests_of_our_own_run(runs: Path, tasks: list[str], tmp_path: Path) -> None:
    """lm-eval's prompts are ours, token for token, so the digests of a task's records are equal, too."""
    settings = ["engine.dtype=float32", "engine.device=cpu", "tasks.gsm8k.generation.max_gen_toks=16", f"limit={LIMIT}"]
    settings.append(f"engine.max_model_len={WINDOW}")
    where = [f"data_dir={Path(tasks[0]).parents[1]}", f"output_dir={tmp_path}"]
    outcome = call("task=[arc_easy,gsm8k]", *settings, *where)
    assert outcome.code == 0, outcome.err
    (own_run,) = (folder for folder in tmp_path.iterdir() if folder.is_dir())
    _, result = compared(runs / "one", own_run, "--allow")
    assert result["differences"] == [] or {d["task"] for d in result["differences"]} == {"wikitext"}
    digests = [
        json.loads((folder / "manifest.json").read_text())["task_digests"]
        for folder in (own_run, records(runs / "one"))
    ]
    assert {*digests[0].items()} < {*digests[1].items()}


def test_fast_differs_and_the_cause_is_named(runs: Path) -> None:
    outcome, result = compared(runs / "one", runs / "fast")
    assert outcome.code == 1 and result["verdict"] != "IDENTICAL"
    assert set(result["causes"]) == {"numerics level"} and result["unlike"] == []


@pytest.mark.skipif(not HAS_HF, reason="needs lm-eval's hf model (pip install lm-eval[hf])")
def test_a_run_of_lm_evals_own_model_is_compared(runs: Path) -> None:
    outcome, result = compared(runs / "one", runs / "hf")
    assert outcome.code in (0, 1) and result["unlike"] == [], outcome.err
    assert result["settings"][0] == "A was run by evalengine in lm-eval and B by lm-eval"
    assert result["requests"]["common"] == 4 * LIMIT + LIMIT + LIMIT, "windows are summed to documents"
    assert all(metric["a"] == pytest.approx(metric["b"], rel=1e-4) for metric in result["metrics"])


def test_gate_report_and_explain(runs: Path, tmp_path: Path) -> None:
    """baseline, gate, compare and report take the runs; explain, which would repeat them, refuses."""
    baseline, page = tmp_path / "baseline.json", tmp_path / "page.html"
    assert call("baseline", str(runs / "one"), "-o", str(baseline)).code == 0
    assert call("gate", str(baseline), str(runs / "many"), "--policy", "bitwise").code == 0
    assert call("gate", str(baseline), str(runs / "fast"), "--policy", "bitwise").code == 1
    assert compared(baseline, runs / "many")[1]["verdict"] == "IDENTICAL"
    assert call("report", str(runs / "one"), "-o", str(page)).code == 0
    text = page.read_text(encoding="utf-8")
    assert "run by lm-eval, which records no command" in text and "word_perplexity" in text
    refused = call("explain", str(runs / "one"), str(runs / "fast"), "--item", "0")
    assert refused.code == 2 and "lm-eval ran it" in refused.err


def test_what_lies_beside_the_results(runs: Path) -> None:
    """A run's folder of records has its files, rows, counts and identity, and the results name it."""
    folder = records(runs / "one")
    assert {file.name for file in folder.iterdir()} == {"digest.txt", "manifest.json", "records.parquet", "tokens.json"}
    rows = read_records(folder / "records.parquet")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {record.task for record in rows} == {"arc_easy", "gsm8k", "wikitext"}
    assert manifest["identity"]["harness"] == "lm-eval" and "lm-eval" in manifest["libraries"]
    assert manifest["counts"]["documents"] == 3 * LIMIT and manifest["model"]["weights_sha256"]
    (results,) = (runs / "one").glob("*/results_*.json")
    named = json.loads(results.read_text())["config"]["evalengine"]
    assert named == {"records": folder.name, "digest": manifest["digest"], "numerics": "exact"}
    refused = call("compare", str(folder), str(folder))
    assert refused.code == 2 and "give the folder of its results" in refused.err


def edit_response(run: Path) -> None:
    (file,) = run.glob("*/samples_gsm8k_*.jsonl")
    first, *rest = file.read_text(encoding="utf-8").splitlines(keepends=True)
    row = json.loads(first)
    file.write_text(json.dumps({**row, "resps": [["#### 1"]]}) + "\n" + "".join(rest), encoding="utf-8")


def edit_metric(run: Path) -> None:
    (file,) = run.glob("*/results_*.json")
    results = json.loads(file.read_text(encoding="utf-8"))
    results["results"]["arc_easy"]["acc,none"] = 1.0
    file.write_text(json.dumps(results), encoding="utf-8")


def edit_digest(run: Path) -> None:
    (records(run) / "digest.txt").write_text("0" * 64 + "\n", encoding="utf-8")


def remove_records(run: Path) -> None:
    shutil.rmtree(records(run))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit_response, "is not that of its records"),
        (edit_metric, "one of the two files was edited"),
        (edit_digest, "not the file that the run wrote"),
        (remove_records, "missing, but the results name it"),
    ],
)
def test_damage_is_found(damage: Callable[[Path], None], message: str, runs: Path, tmp_path: Path) -> None:
    """A run whose files were edited or removed is refused, with a message that names the damage."""
    run = copied(runs / "one", tmp_path / "run")
    assert compared(run, runs / "one")[0].code == 0
    damage(run)
    outcome = call("compare", str(run), str(runs / "one"))
    assert outcome.code == 2 and message in outcome.err


def test_bad_usage_is_a_sentence(tasks: list[str], tmp_path: Path) -> None:
    """Misspelt arguments and places that records cannot go to are refused with a sentence, before any record."""
    base = ["run", "--model", "evalengine", "--tasks", tasks[0], "--limit", "1", "--log_samples"]
    other = [*base, "--output_path", str(tmp_path / "a"), "--model_args", arguments(output_dir=tmp_path / "b")]
    unknown = [*base, "--output_path", str(tmp_path / "a"), "--model_args", arguments(max_num_seq=8, dtyp="float32")]
    cached = [*base, "--output_path", str(tmp_path / "c"), "--model_args", arguments(output_dir=tmp_path / "c")]
    done = [command_line(*words) for words in (other, unknown, [*cached, "--use_cache", str(tmp_path / "cache")])]
    assert [outcome.code for outcome in done] == [2, 2, 2]
    assert "records are written next to them; leave output_dir out, or name the same folder" in done[0].err
    assert "  - max_num_seq: no such model argument; did you mean max_num_seqs?" in done[1].err
    assert "  - dtyp: no such model argument; did you mean dtype?" in done[1].err
    assert "output_dir: with --use_cache not every answer is computed" in done[2].err
    assert not [*tmp_path.glob("*/*/records-*")]


def test_a_place_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output_dir=.*: cannot be made .*; name a folder that can be written"):
        our_model(output_dir=str(tmp_path / "file" / "out"))


def test_python_code_says_where_records_go(tasks: list[str], tmp_path: Path) -> None:
    """Evaluations by one model object are runs of their own, each recorded with or without a chat template."""
    model = our_model(dtype="float32", output_dir=str(tmp_path))
    chats = (True, False, False)
    infos = [evaluate(model, tasks[:1], 2, apply_chat_template=chat)["config"]["evalengine"] for chat in chats]
    assert infos[0]["digest"] != infos[1]["digest"] == infos[2]["digest"] and infos[1]["records"] != infos[2]["records"]
    manifests = [json.loads((file / "manifest.json").read_text()) for file in tmp_path.glob("*/records-*")]
    templates = {manifest["digest"]: manifest["identity"]["chat_template"] for manifest in manifests}
    assert len(manifests) == 3 and templates[infos[0]["digest"]] and not templates[infos[1]["digest"]]


def test_an_interrupted_write_leaves_nothing(tasks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    model = our_model(output_dir=str(tmp_path))
    monkeypatch.setattr("evalengine.records.folder.write_whole", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, tasks[:1], 1)
    assert [*tmp_path.glob("*/*")] == [*tmp_path.glob("*/.*")] == []


# lm-eval's index of 13,000 task files takes longer than the run, and tasks named by their files' paths need none.
KILLED = """
import functools, os, signal, sys
import lm_eval.tasks
from evalengine.__main__ import main
from evalengine.integrations.lm_eval import recorder
fill, calls = recorder.EvaluationRecorder._fill, []
def killed(*given):
    calls.append(fill(*given))
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return calls[-1]
recorder.EvaluationRecorder._fill = killed
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
main(["lm_eval", *sys.argv[1:]])
"""


def test_a_killed_run_leaves_the_calls_that_it_finished(tasks: list[str], tmp_path: Path) -> None:
    """After SIGKILL the records of finished calls can be read, and there are no results."""
    words = ["run", "--model", "evalengine", "--model_args", arguments(max_model_len=WINDOW), "--limit", "1"]
    words += ["--gen_kwargs", "max_gen_toks=4", "--tasks", *tasks[:2], "--output_path", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", KILLED, *words], cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    folder = records(tmp_path)
    evidence = read_evidence(folder, open_run(folder, judge=False))
    assert set(evidence["task_digests"]) == {"arc_easy"} and not [*tmp_path.glob("*/results_*")]


def test_our_model_is_registered_by_name_and_by_entry_point() -> None:
    from lm_eval.api.registry import get_model, model_registry

    from evalengine.integrations.lm_eval.model import EvalEngineLM

    register()
    register()
    assert get_model(NAME) is EvalEngineLM
    model_registry.register("by-entry-point", target=EntryPoint(NAME, TARGET, "lm_eval.models"))
    assert get_model("by-entry-point") is EvalEngineLM
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.entry-points."lm_eval.models"]\n{NAME} = "{TARGET}"\n' in text


def test_without_lm_eval_the_command_says_how_to_get_it() -> None:
    program = (
        "import sys; sys.modules['lm_eval'] = None; from evalengine.__main__ import main; sys.exit(main(['lm_eval']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "evalengine: lm_eval: lm_eval is not installed: pip install 'evalengine[lm-eval]'\n"
