"""`report --table`, `--model-index` and `--samples`: what they write, alone and together, and what they refuse."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard_data import model_index_to_eval_results

from evalengine.__main__ import main
from evalengine.integrations.exports.tables import TABLES, results_sheet
from evalengine.report.python.results import load_run as load_results
from evalengine.report.read.load import load_run
from evalengine.report.read.names import SWEEP_FORMAT
from evalengine.util.sheet import Sheet, latex_table
from tests.report.model_runs import model
from tests.report.written_run import Doc, write_generations
from tests.run_double import ISO, bind_again, generated, write_run

HUB = {"dataset": "openai/gsm8k", "name": "main", "revision": "e53f048", "split": "test"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = write_run(tmp_path / "a_run", [generated(doc) for doc in range(6)])
    bind_again(path, model={"name": "my_model"}, numerics="exact", datasets={"sums": HUB})
    return path


def index_of(file: Path) -> ModelCardData:
    """What the Hub's own library reads from the file, as the front matter of a card."""
    return ModelCard(f"---\n{file.read_text(encoding='utf-8')}---\n").data


def test_a_markdown_table_has_a_column_for_each_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_run(tmp_path / "b", [generated(doc) for doc in range(6)], lambda doc: 1.0)
    assert main(["report", str(folder), str(other), "--table", "md"]) == 0
    head, rule, strict, flexible, empty, note = capsys.readouterr().out.rstrip("\n").split("\n")[-6:]
    assert head == "| Task | Metric | Filter | my_model | b |" and rule == "| :-- | :-- | :-- | --: | --: |"
    assert strict == "| sums | exact_match ↑ | strict | 0.3333 | 1.0000 |" and "flexible" in flexible and not empty
    assert f"exact numerics, digest {load_run(folder).digest[:12]}, 6 requests" in note  # type: ignore[index]


def test_latex_sets_a_minus_and_keeps_a_hyphen() -> None:
    text = latex_table(Sheet("gpt-4", ("a", "b"), [["gpt-4", "-1.5"], ["x", "[-2, -∞]"]], (0,)))
    assert "gpt-4 & $-$1.5" in text and "{[}$-$2, $-$$\\infty$]" in text


def test_a_latex_table_goes_to_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.tex"
    assert main(["report", str(folder), "--table", "latex", "-o", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    assert "\\toprule" in text and "my\\_model \\\\" in text
    assert "exact\\_match $\\uparrow$ & strict & 0.3333 \\\\" in text
    assert capsys.readouterr().out == f"{file}\n"


@pytest.mark.parametrize("form", ["md", "latex"])
def test_special_characters_are_escaped(form: str) -> None:
    text = TABLES[form](results_sheet([model("50%_a&b|c#{x}\\y^~$", {"t_1": [0.0, 1.0]})]))
    want = {"md": "50%&#95;a&b&#124;c#{x}&#92;y^&#126;&#36;", "latex": "50\\%\\_a\\&b$|$c\\#\\{x\\}\\textbackslash{}y"}
    assert want[form] in text


def test_errors_and_gaps_have_their_cells() -> None:
    first, second = model("a", {"x": [0.5, 1.0]}), model("b", {"y": [-2.0, 0.0]})
    first.results["x", "acc", "none"] = (0.75, 0.25)
    rows = results_sheet([first, second]).rows
    assert rows == [["x", "acc ↑", "", "0.7500 ± 0.2500", ""], ["y", "acc ↑", "", "", "-1.0000"]]
    assert "0.7500 $\\pm$ 0.2500 &  \\\\" in TABLES["latex"](results_sheet([first, second]))


def test_the_hubs_library_reads_the_model_index_back(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "index.yaml"
    assert main(["report", str(folder), "--model-index", str(file)]) == 0
    data = index_of(file)
    assert data.model_name == "my_model" and data.eval_results is not None
    one = next(result for result in data.eval_results if (result.metric_args or {})["filter"] == "strict")
    assert (one.dataset_type, one.dataset_config, one.dataset_split) == ("openai/gsm8k", "main", "test")
    assert (one.metric_type, one.metric_value) == ("exact_match", pytest.approx(1 / 3))
    assert one.dataset_revision == "e53f048" and one.metric_name == "sums exact_match (strict)"
    assert (one.metric_args or {})["digest"] == load_run(folder).digest and (one.metric_args or {})["documents"] == 6
    name, again = model_index_to_eval_results(data.to_dict()["model-index"])
    assert name == "my_model" and len(again) == len(data.eval_results) == 2


def test_a_path_is_no_dataset_of_the_hub(folder: Path, tmp_path: Path) -> None:
    bind_again(folder, datasets={"sums": {**HUB, "dataset": "/home/me/rows.jsonl"}})
    assert main(["report", str(folder), "--model-index", str(tmp_path / "i.yml")]) == 0
    results = index_of(tmp_path / "i.yml").eval_results
    assert results is not None and {(one.dataset_type, one.dataset_revision) for one in results} == {("sums", None)}
    assert "/home/me" not in (tmp_path / "i.yml").read_text(encoding="utf-8")


def test_nothing_finite_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", [generated(0)], lambda doc: float("nan"))
    (file,) = run.glob("results_*.json")
    assert "NaN" in file.read_text(encoding="utf-8") or json.loads(file.read_text(encoding="utf-8"))
    files = [tmp_path / "s.csv", tmp_path / "i.yaml"]
    assert main(["report", str(run), "--samples", str(files[0]), "--model-index", str(files[1])]) == 2
    assert "no finite results" in capsys.readouterr().err and not any(file.exists() for file in files)


def test_several_files_and_a_table_in_one_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is the file that a call of its own writes; standard output is the table's, or the list of the files."""
    run = str(write_generations(tmp_path / "run", [Doc("a"), Doc("b", score=0.5)]))
    names = {"--model-index": "i.yaml", "--samples": "s.csv", "--inspect-log": "l.json", "--every-eval": "store"}
    for place in ("alone", "together"):
        (tmp_path / place).mkdir()
    monkeypatch.chdir(tmp_path / "alone")
    for option, name in names.items():
        assert main(["report", run, option, name]) == 0
    capsys.readouterr()
    assert main(["report", run, "--table", "md"]) == 0
    table = capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "together")
    words = [word for pair in names.items() for word in pair]
    assert main(["report", run, *words, "--table", "md"]) == 0
    done = capsys.readouterr()
    assert done.out == table and "s.csv: 2 samples\n" in done.err and "i.yaml: 1 result\n" in done.err
    alone, together = ({path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
                       for root in (tmp_path / "alone", tmp_path / "together"))  # fmt: skip
    assert alone == together and len(alone) == 5
    assert main(["report", run, "--table", "md", "-o", "t.md", "--samples", "s.csv"]) == 0
    assert capsys.readouterr().out == "s.csv: 2 samples\nt.md\n" and Path("t.md").read_text() == table
    assert main(["report", run, "-o", "p.html", "--samples", "s.csv"]) == 0
    assert (
        capsys.readouterr().out.endswith(" MB\ns.csv: 2 samples\n") and "<!doctype html>" in Path("p.html").read_text()
    )


HOSTILE = ('a "b",\r\nc', "=1+1\r", "\n", "\\ud800 \u00e9 \u2028")


def test_samples_are_read_back_from_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever texts hold; a metric that another task lacks is an empty cell there."""
    run = write_run(
        tmp_path / "a", [generated(doc, task=task) for task in ("one", "two") for doc in range(len(HOSTILE))]
    )
    (changed,) = run.glob("samples_one_*.jsonl")
    samples = [json.loads(line) for line in changed.read_text(encoding="utf-8").splitlines()]
    for sample in samples:
        text = HOSTILE[sample["doc_id"]]
        sample |= {"target": text, "resps": [[text]], "doc": {"q": text}, "metrics": ["other"], "other": True}
    changed.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    bind_again(run)
    file = tmp_path / "samples.csv"
    assert main(["report", str(run), "--samples", str(file)]) == 0
    frame = load_results(run).samples
    assert capsys.readouterr().out == f"{file}: 16 samples\n" and len(frame) == 16
    with file.open(encoding="utf-8", newline="") as lines:
        rows = [*csv.DictReader(lines)]
    assert [*rows[0]] == [*frame.columns] and len(rows) == len(frame)
    for row, (_, sample) in zip(rows, frame.iterrows(), strict=True):
        assert (row["task"], int(row["doc_id"]), row["filter"]) == (sample.task, sample.doc_id, sample["filter"])
        assert row["target"] == sample.target == (HOSTILE[sample.doc_id] if sample.task == "one" else "t")
        assert all(json.loads(row[name]) == sample[name] for name in ("prompts", "responses", "answers", "doc"))
        score = str(float(sample.doc_id % 3 == 0))
        assert (row["other"], row["exact_match"]) == (("True", "") if sample.task == "one" else ("", score))


def test_a_baseline_has_no_samples(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["baseline", str(folder), "-o", str(tmp_path / "b.json")]) == 0
    assert main(["report", str(tmp_path / "b.json"), "--samples", str(tmp_path / "s.csv")]) == 2
    assert "a baseline holds no texts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--table", "html"], "--table"),
        (["--table", "md", "-o", "x.csv", "--samples", "x.csv"], "x.csv: two options name this file"),
        (["--samples", "s.csv", "-o", "s.csv"], "s.csv: two options name this file"),
        (["--model-index", "i.yaml", "--samples", "nowhere/s.csv"], "there is no folder nowhere"),
        (["--samples", "s.csv", "--every-eval", "a_run/digest.txt/x"], "digest.txt is not a writable folder"),
        (["--samples", "s.csv", "--log-to", "tensorboard"], "must be one of wandb, mlflow"),
        (["--model-index", "i.md"], "ends in .yaml"),
        (["--model-index", "nowhere/i.yaml"], "there is no folder nowhere"),
        (["a_run", "--table", "md", "--samples", "s.csv"], "--samples s.csv: exports one run; 2 are named"),
        (["--samples", "s.txt"], "ends in .csv"),
        (["--samples", "nowhere/s.csv"], "there is no folder nowhere"),
        (["--table", "md", "-o", "nowhere/t.md"], "there is no folder nowhere"),
    ],
)
def test_bad_usage_is_said(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert main(["report", str(folder), *words]) == 2
    done = capsys.readouterr()
    assert message in done.err and not done.out
    assert [path.name for path in folder.parent.iterdir()] == ["a_run"], "nothing is written"


AN_INPUT = {
    **dict.fromkeys(["gate b.json a_run --json b.json", "gate b.json a_run --summary linked.json",
                     "gate b.json a_run --html ./a_run/../b.json", "gate b.json a_run --noise b.json --junit b.json",
                     "gate b.json a_run --policy own.yaml --json own.yaml", "gate b.json --json b.json -- limit=1",
                     "gate b.json a_run --policy own.yaml --junit parent.yaml", "compare l.json l.json --json l.json",
                     "gate none.json --policy own.yaml --bootstrap own.yaml -- limit=1",
                     "gate b.json x-1 --json x-1/x.json", "report l.json --inspect-log l.json",
                     "gate b.json a_run --summary hard.json", "compare l.json a_run --json hard_l.json",
                     "baseline l.json -o l.json --force"], "this command reads that file"),
    "gate b.json a_run --summary hard.txt": "hard links give this file other names",
    **dict.fromkeys(["gate b.json a_run --junit -", "gate b.json a_run --html -"], "only --json writes to standard"),
    **dict.fromkeys(["gate b.json a_run --json=", "compare a_run a_run --json=", "compare a_run a_run --html=",
                     "explain a_run a_run --json=", "report a_run --samples=", "report a_run --output="],
                    "name a file"),
    **dict.fromkeys(["gate b.json a_run --json a_run/manifest.json", "report a_run -o a_run/manifest.json",
                     "gate b.json a_run --html a_run/report.html", "report a_run --inspect-log a_run/results_new.json",
                     "compare a_run a_run --json a_run/digest.txt", "compare a_run a_run -o a_run/report.html",
                     "report a_run a_run -o a_run/report.html", "report a_run --table md -o a_run/report.html",
                     "gate b.json b.json --json a_run/digest.txt",
                     f"report lm --inspect-log lm/results_{ISO}.json", "baseline a_run -o a_run/digest.txt --force",
                     "explain a_run --item 0 --write a_run/digest.txt", "prove a_run --item 0 -o a_run/digest.txt",
                     "explain a_run a_run --json a_run/records.parquet"], "a file of the run in"),
    **dict.fromkeys(["gate b.json a_run --json x.html --html x.html", "gate b.json a_run --junit new --summary new",
                     "gate none.json --bootstrap x.json --json x.json -- limit=1",
                     "compare a_run a_run --json x.html --html ./x.html",
                     "compare a_run a_run -o x.html --html x.html",
                     "gate b.json a_run --html one.html --junit twin.html"],
                    "two options name this file"),
}  # fmt: skip


def test_no_option_writes_over_an_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gate b.json RUN --json b.json` replaced the baseline, `report RUN -o RUN/manifest.json` the manifest."""
    monkeypatch.chdir(tmp_path)
    run = write_generations(tmp_path / "a_run", [Doc("a"), Doc("b", score=0.5)])
    several = write_run(tmp_path / "several", [generated(doc, task=task) for task in ("one", "two") for doc in (0, 1)])
    (tmp_path / "lm").mkdir()
    for file in (*several.glob("results_*"), *several.glob("samples_*")):
        file.rename(tmp_path / "lm" / file.name)
    write_run(tmp_path / "x-1" / "1-a" / "run", [generated(0)])
    (tmp_path / "x-1" / "x.json").write_text(json.dumps({"format": SWEEP_FORMAT, "runs": [{"source": "1-a/run"}]}))
    (tmp_path / "one.html").touch(), (tmp_path / "twin.html").hardlink_to(tmp_path / "one.html")
    (tmp_path / "own.yaml").write_text("extends: parent.yaml"), (tmp_path / "parent.yaml").write_text("digest: equal")
    assert main(["baseline", "a_run", "-o", "b.json"]) == main(["report", "a_run", "--inspect-log", "l.json"]) == 0
    (tmp_path / "linked.json").symlink_to("b.json")
    for name, source in {"hard.json": "b.json", "hard_l.json": "l.json", "hard.txt": "a_run/digest.txt"}.items():
        (tmp_path / name).hardlink_to(tmp_path / source)
    assert main(["report", str(run)]) == 0 == main(["report", str(run), "-o", "a_run/report.html"]), "its own page"
    capsys.readouterr()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for words, message in AN_INPUT.items():
        assert main(words.split()) == 2, words
        done = capsys.readouterr()
        assert message in done.err and not done.out, (words, done.err)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before, words
    for words, code in {"--json /dev/null --html /dev/null --junit a_run/gate.xml": 0,
                        "--json b.json/x --html nowhere/x.html --junit a_run": 2}.items():  # fmt: skip
        assert main(["gate", "b.json", "a_run", *words.split()]) == code
    assert "--json b.json/x: " in (err := capsys.readouterr().err) and "--junit a_run: a folder" in err
    assert "nowhere" not in err, "a gate makes the folder"
