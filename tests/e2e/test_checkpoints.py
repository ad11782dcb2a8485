"""`experiment=checkpoints`: which folders it takes, which training steps they stand for, and the curve it draws."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import evalengine
from tests.e2e.command import call

TINYMATH = Path(evalengine.__file__).parent / "assets" / "tinymath"
NAMES = ("checkpoint-1000", "checkpoint-200", "checkpoint-3000")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with checkpoints of three steps of one model: the less trained, the noisier its weights."""
    monkeypatch.chdir(tmp_path)
    for name, noise in zip(NAMES, (0.02, 0.2, 0.0), strict=True):
        place = tmp_path / "out" / name
        shutil.copytree(TINYMATH, place, ignore=shutil.ignore_patterns("*.jsonl", "*.md", "*.sha256", "*.safetensors"))
        weights, generator = load_file(TINYMATH / "model.safetensors"), torch.Generator().manual_seed(0)
        noisy_weights = {
            key: (value.float() + noise * torch.randn(value.shape, generator=generator)).to(value.dtype)
            for key, value in weights.items()
        }
        save_file(noisy_weights, place / "model.safetensors", {"format": "pt"})
    (tmp_path / "out" / "checkpoint-notes.txt").write_text("no model\n")
    return tmp_path / "out"


def test_a_pattern_of_folders_becomes_a_curve(folder: Path) -> None:
    words = ("experiment=checkpoints", "model.path=glob('out/checkpoint-*')", "limit=3", "engine.device=cpu")
    done = call(*words, "task.generation.max_gen_toks=4")
    assert done.code == 0, done.err
    (sweep_folder,) = Path("results").glob("checkpoints-*")
    run_names = [path.name for path in sorted(sweep_folder.iterdir()) if path.is_dir()]
    assert run_names == [f"{n}-path_out_checkpoint-{step}" for n, step in enumerate((200, 1000, 3000), 1)]
    content = json.loads((sweep_folder / "checkpoints.json").read_text(encoding="utf-8"))
    assert [run["step"] for run in content["runs"]] == [200, 1000, 3000]
    page, picture = (sweep_folder / "checkpoints.html").read_text(encoding="utf-8"), sweep_folder / "checkpoints.svg"
    assert "History" in page and '"in":["step"]' in page and picture.read_text(encoding="utf-8").count("<circle") == 3
    assert "3,000" in done.out and str(picture) in done.out
    assert evalengine.load_run(f"{sweep_folder}:2").manifest["model"]["name"] == "checkpoint-1000"
    assert call("compare", str(sweep_folder), "--history", "--format", "markdown").code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one checkpoint is no sweep"),
        (["model.path=glob('out/step-*')"], "no directory or .gguf file matches"),
        (["model.path=out/checkpoint-200,out/checkpoint-1000", "seed=1,2"], "seed: experiment=checkpoints sweeps"),
        (["model.path=out/a,out/b"], "contain no different steps"),
        (["model.path=out/checkpoint-200,out/b/checkpoint-200"], "contain no different steps"),
        (["model.path=out/a,out/b", "steps=[1]"], "steps=[1]: must be 2 different numbers"),
        (["model.path=out/a,out/b", "steps=[1,1]"], "steps=[1, 1]: must be 2 different numbers"),
    ],
)
def test_bad_sweeps_are_refused_before_the_first_run(words: list[str], message: str, folder: Path) -> None:
    done = call("experiment=checkpoints", *words)
    assert done.code == 2 and message in done.err, done.err
    assert not Path("results").exists()


def test_steps_can_be_given(folder: Path) -> None:
    """`steps` numbers checkpoints whose names hold no step, and the curve is in the order of the steps."""
    for name, new_name in zip(NAMES[:2], ("late", "early"), strict=True):
        (folder / name).rename(folder / new_name)
    words = ("experiment=checkpoints", "model.path=out/late,out/early", "steps=[5000,10]", "limit=2")
    done = call(*words, "task.generation.max_gen_toks=4", "engine.device=cpu")
    assert done.code == 0, done.err
    (results_file,) = Path("results").glob("checkpoints-*/checkpoints.json")
    runs = json.loads(results_file.read_text(encoding="utf-8"))["runs"]
    assert [(run["model"], run["step"]) for run in runs] == [("early", 10), ("late", 5000)]
