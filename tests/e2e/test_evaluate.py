"""`evalengine.evaluate` beside the command line: both make the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import evalengine
from evalengine.records.folder import IDENTITY
from tests.e2e.command import LIMIT, Run, runs


def test_it_is_the_commands_run(tmp_path: Path, short_reference: Run) -> None:
    """`evaluate` gives the command line's digest, and leaves the files that it leaves."""
    settings = {"engine": {"device": "cpu"}, "task": {"generation": {"max_gen_toks": 8}}}
    result = evalengine.evaluate("tinymath", "arithmetic", limit=LIMIT, output_dir=tmp_path, progress=False, **settings)
    reference = short_reference
    assert result.digest == reference.digest and result.manifest["run_id"] == reference.manifest["run_id"]
    (run,) = runs(tmp_path)
    names = {path.name.split("_2")[0] for path in reference.folder.iterdir()}
    assert {path.name.split("_2")[0] for path in run.folder.iterdir()} == names
    assert (tmp_path / "index.html").exists() and not (run.folder / IDENTITY).exists()
    assert result.manifest["command"][:2] == ["task=arithmetic", "model=tinymath"]
    assert evalengine.compare(result, reference.folder).same


def test_a_lent_llm_stays_open_and_its_counters_are_the_runs_own(tmp_path: Path, short_reference: Run) -> None:
    cut = {"generation": {"max_gen_toks": 8}}
    with evalengine.LLM("asset:tinymath", max_num_seqs=3, device="cpu") as llm:
        short = evalengine.SamplingParams(max_tokens=4)
        llm.generate("Question: 1 + 1?\nAnswer:", short)
        steps = llm.stats.num_steps
        results = [
            evalengine.evaluate(llm, ["arithmetic"], limit=3, output_dir=tmp_path / name, progress=False, task=cut)
            for name in ("a", "b")
        ]
        assert llm.generate("Question: 1 + 1?\nAnswer:", short)[0].text
        assert llm.stats.num_steps > steps
    assert results[0].digest == results[1].digest
    (run,) = runs(tmp_path / "a")
    leaves = run.leaves
    assert leaves == {key: short_reference.leaves[key] for key in leaves} != {}
    engines = [run.manifest["engine"] for run in results]
    assert engines[0]["max_num_seqs"] == 3 and results[0].manifest["model"]["source"] == "asset:tinymath"
    for name in ("num_steps", "num_computed_tokens", "num_cached_tokens", "num_generated_tokens"):
        assert engines[0]["stats"][name] == engines[1]["stats"][name], name


def test_a_lent_llms_settings_are_its_own(tmp_path: Path) -> None:
    """`evaluate` on a lent LLM refuses settings of the engine and the model, and a closed LLM."""
    with evalengine.LLM("asset:tinymath", device="cpu") as llm:
        with pytest.raises(evalengine.ConfigError) as refused:
            evalengine.evaluate(
                llm,
                "arithmetic",
                output_dir=tmp_path,
                **{"numerics": "fast", "engine": {"max_num_seqs": 1}, "model.path": "x"},
            )
        refused_settings = [problem.partition(":")[0] for problem in refused.value.problems]
        assert refused_settings == ["numerics", "engine.max_num_seqs", "model.path"]
        result = evalengine.evaluate(
            llm,
            "arithmetic",
            limit=1,
            output_dir=tmp_path / "out",
            progress=False,
            task={"generation": {"max_gen_toks": 4}},
            **{"model.name": "mine"},
        )
        assert result.manifest["model"]["name"] == "mine"
    with pytest.raises(evalengine.EvalEngineError, match="closed"):
        evalengine.evaluate(llm, "arithmetic", limit=1, output_dir=tmp_path / "closed", progress=False)
    assert not (tmp_path / "closed").exists()


def test_an_adapter_is_of_the_run(tmp_path: Path) -> None:
    """Its answers are not the base model's from the cache, and the manifest names it."""
    adapter, name = tmp_path / "lora", "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    adapter.mkdir()
    factors = {name.format("A"): torch.ones(2, 256), name.format("B"): torch.ones(256, 2)}
    save_file(factors, adapter / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["layers.0.self_attn.q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    settings = {"cache.path": str(tmp_path / "cache"), "task.generation.max_gen_toks": 4, "engine.device": "cpu"}
    base, merged, again = (
        evalengine.evaluate("tinymath", "arithmetic", limit=2, output_dir=tmp_path / place, progress=False, **given)
        for place, given in (
            ("base", settings),
            *((place, {**settings, "model.adapter": str(adapter)}) for place in ("merged", "again")),
        )
    )
    assert base.digest != merged.digest == again.digest
    assert [run.manifest["counts"]["cached_requests"] for run in (base, merged, again)] == [0, 0, 2]
    model = merged.manifest["model"]
    assert model["name"] == "tinymath+lora" and model["adapter"]["source"] == str(adapter)
    assert model["weights_sha256"] != base.manifest["model"]["weights_sha256"]
    assert "Adapter, merged" in next(merged.path.glob("*.html")).read_text(encoding="utf-8")


def test_a_task_file_of_ones_own(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"q": "2 + 2 =", "a": "four"}\n{"q": "3 + 3 =", "a": "six"}\n', encoding="utf-8")
    task = tmp_path / "my sums.yaml"
    task.write_text(
        f"task: my_sums\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: '{rows}'}}}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: [four, six]\ndoc_to_target: '{{a}}'\n",
        encoding="utf-8",
    )
    result = evalengine.evaluate("tinymath", str(task), output_dir=tmp_path / "out", progress=False)
    assert set(result.metrics.task) == {"my_sums"} and len(result.samples) == 2 and len(result.records) == 4
