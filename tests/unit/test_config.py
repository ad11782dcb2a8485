"""Overrides become frozen `Config`s; typos, wrong types and contradictions are refused, all at once."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalengine.config.check import config_problems, resolve_numerics
from evalengine.config.compose import compose_jobs, read_config
from evalengine.config.overrides import known_keys
from evalengine.config.schema import Config, EngineConfig, GenerationConfig, selection, to_yaml
from evalengine.config.shipped import available
from evalengine.errors import ConfigError
from evalengine.util.validation import read_as
from tests.unit.shipped_tasks import each_task


@functools.cache
def compose(*overrides: str) -> Config:
    """The frozen configuration of these overrides, composed once."""
    (job,) = compose_jobs(overrides)
    return job.config


def problems(*overrides: str, multirun: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose_jobs(overrides, multirun)
    assert "\n" not in caught.value.problems[0]
    return caught.value.problems


def test_defaults() -> None:
    """The default run is arithmetic with tinymath, invariant, on whatever device there is."""
    config = compose()
    assert list(config.tasks) == ["arithmetic"] and config.model.path == "asset:tinymath"
    assert config.model.name == "tinymath"
    assert config.batch_invariant and config.numerics == "auto" and config.fewshot_seed == 1234
    assert config.engine == EngineConfig()  # conf/engine/default.yaml repeats the schema's values


def test_shipped_files_are_composed_once_and_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    (plain,) = compose_jobs(["task=gsm8k"])
    monkeypatch.delattr("evalengine.config.compose.compose")
    (changed,) = compose_jobs(["task=gsm8k", "task.num_fewshot=1"])
    assert changed.config != plain.config and compose_jobs(["task=gsm8k"]) == [plain]


def test_everything_is_frozen() -> None:
    def check(value: Any) -> None:
        with pytest.raises(FrozenInstanceError):
            setattr(value, fields(value)[0].name, None)
        for item in fields(value):
            if is_dataclass(getattr(value, item.name)):
                check(getattr(value, item.name))

    check(compose())


@pytest.mark.parametrize("task", each_task())
def test_every_task_composes(task: str, task_alone: Callable[[str], Config]) -> None:
    config = task_alone(task)
    assert selection(config) == task and all(settings.cls for settings in config.tasks.values())


@pytest.mark.parametrize("model", available("model"))
def test_every_model_composes_and_has_a_name(model: str) -> None:
    config = compose(f"model={model}")
    assert config.model.name and config.model.path


def test_every_model_of_the_hub_is_pinned_to_a_commit() -> None:
    """A branch moves, and the same command would give another digest."""
    pins = {name: compose(f"model={name}").model for name in available("model")}
    on_the_hub = {name: model.revision or "" for name, model in pins.items() if not model.path.startswith("asset:")}
    assert on_the_hub, "no model of the Hub is shipped"
    assert [name for name, commit in on_the_hub.items() if not re.fullmatch("[0-9a-f]{40}", commit)] == []
    assert len({*on_the_hub.values()}) == len(on_the_hub)  # no pin is copied from another model's file


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("rows: many", "tasks.mine.dataset.rows=many: must be a valid integer"),
        ("roows: 3", r"tasks.mine.dataset.roows: no such setting; did you mean tasks.mine.dataset.rows\?"),
    ],
)
def test_a_wrong_type_in_a_tasks_file(setting: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"# @package tasks.mine\ncls: arithmetic:Arithmetic\ndataset: {{path: x, {setting}}}\n")
    with pytest.raises(ConfigError, match=problem):
        compose_jobs([f"task={file}"])


def test_several_tasks_in_one_run() -> None:
    """A setting of `task` reaches every task and leaves the task's other settings."""
    config = compose("task=[gsm8k,arc_easy]", "task.num_fewshot=3", "task.generation.max_gen_toks=9")
    assert list(config.tasks) == ["gsm8k", "arc_easy"]
    assert [task.num_fewshot for task in config.tasks.values()] == [3, 3]
    assert [task.generation.max_gen_toks for task in config.tasks.values()] == [9, 9]
    assert config.tasks["gsm8k"].generation.until == ["Question:", "</s>", "<|im_end|>"]  # unset fields keep the task's
    assert config.tasks["arc_easy"].dataset.name == "ARC-Easy"


def test_one_task_is_addressed_by_name_and_wins() -> None:
    config = compose("tasks.gsm8k.num_fewshot=1", "task=[gsm8k,arc_easy]", "task.num_fewshot=3")
    assert [task.num_fewshot for task in config.tasks.values()] == [1, 3]
    zero = compose("task=gsm8k", "task.num_fewshot=0")
    assert zero.tasks["gsm8k"].num_fewshot == 0


def test_a_path_alone_is_a_model() -> None:
    for path, name in [
        ("org/Some-Model-1B", "Some-Model-1B"),
        ("/models/some.gguf", "some"),
        ("folder/", "folder"),
        ("package:module/file.Q4_1.gguf", "file.Q4_1"),
        (".", Path.cwd().name),
    ]:
        assert compose(f"model.path={path}").model.name == name
    assert compose("model.path=a/b", "model.name=mine").model.name == "mine"


@pytest.mark.parametrize("where", ["task", "tasks.gsm8k"])
def test_a_dataset_given_drops_the_shipped_ones_configuration_and_commit(where: str) -> None:
    shipped = compose("task=gsm8k").tasks["gsm8k"].dataset
    assert shipped.name and shipped.revision
    tasks = compose("task=[gsm8k,arc_easy]", f"{where}.dataset.path=other/rows").tasks
    assert tasks["gsm8k"].dataset == replace(shipped, path="other/rows", name=None, revision=None)
    assert (tasks["arc_easy"].dataset.revision is None) == (where == "task")
    both = compose(
        "task=gsm8k", f"{where}.dataset.path=other/rows", f"{where}.dataset.revision=v2", "task.dataset.name=x"
    )
    assert both.tasks["gsm8k"].dataset == replace(shipped, path="other/rows", name="x", revision="v2")


def test_a_path_given_is_the_only_one_tried() -> None:
    assert compose("model=smollm2-135m").model.alternatives
    config = compose("model=smollm2-135m", "model.path=/elsewhere/weights")
    assert config.model.alternatives == [] and config.model.revision is None
    both = compose("model.path=a", "model.alternatives=[b]", "model.revision=c")
    assert both.model.alternatives == ["b"] and both.model.revision == "c"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("modle=x", "modle: no such setting; did you mean model?"),
        ("engine.max_num_seq=1", "did you mean engine.max_num_seqs?"),
        ("max_num_seqs=1", "did you mean engine.max_num_seqs?"),
        ("+anything=1", "anything: no such setting"),
        ("tasks.arithmetic.num_fewshots=1", "tasks.arithmetic.num_fewshots: no such setting"),
        ("task=gsm9k", "task=gsm9k: no such task; did you mean gsm8k? there are: aime, "),
        ("model=tinymoth", "model=tinymoth: no such model; did you mean tinymath?"),
        ("tasks.gsm8k.split=x", "tasks.gsm8k: this task is not selected; add it with task=gsm8k"),
        *(
            (f"task={value}", f"task={value}: task takes names, as in task=gsm8k")
            for value in ("null", "[[]]", "[gsm8k,3]", "[{a:1}]", "[null]", "3", "true", "[true,gsm8k]")
        ),
        ("task=[]", "task: no task is selected"),
        ("limit=abc", "limit=abc: must be a whole number"),
        ("limit=1.5", "limit=1.5: must be a whole number"),
        ("batch_invariant=maybe", "batch_invariant=maybe: must be true or false"),
        ("task=[gsm8k", "task=[gsm8k: no viable alternative"),
        ("model.path=a=b", "quote a value"),
        ("model.path=", "model.path: names no weights"),
        ("hydra.run.dir=x", "hydra.run.dir: Hydra's own settings have no effect"),
        ("hydra.searchpath=[file:///no/such/folder]", "is not available"),
        ("limit=1,2", "limit=1,2: has several values; for a run of each write run -m limit=1,2"),
        ("limit=0", "limit=0: must be greater than or equal to 1"),
        ("seed=-1", "seed=-1"),
        ("numerics=exakt", "numerics=exakt: must be 'auto', 'native', 'exact' or 'fast'"),
        ("numerics=fast", "batch_invariant=true contradicts numerics=fast"),
        ("engine.dtype=int8", "engine.dtype=int8: must be 'auto', 'bfloat16'"),
        ("engine.device=gpu", "engine.device=gpu: must be auto, cpu, cuda or cuda:<number>"),
        (
            "engine.attention_backend=flash",
            "engine.attention_backend=flash: must be 'auto', 'flash_attn', 'triton' or 'sdpa'",
        ),
        ("engine.block_size=0", "engine.block_size=0"),
        ("engine.block_size=true", "engine.block_size=True"),
        ("engine.block_size=small", "engine.block_size=small"),
        ("engine.max_num_seqs=65536", "engine.max_num_seqs=65536: must be less than or equal to 65535"),
        ("engine.max_num_batched_tokens=0", "engine.max_num_batched_tokens=0: must be greater than or equal to 1"),
        ("engine.kv_cache_memory_fraction=1.5", "must be in (0, 1]"),
        ("engine.kv_cache_memory_fraction=nan", "must be in (0, 1]"),
        ("long_prompts=drop", "long_prompts=drop: must be 'truncate' or 'error'"),
        ("resume=no/such/folder", "resume=no/such/folder: must be auto, never, or an existing run folder"),
        ("data_dir=no/such/folder", "data_dir=no/such/folder: no such folder"),
        (f"drafts={'x' * 300}", f"drafts={'x' * 300}: holds no records.parquet; name the folder of a finished run"),
        ("task.num_fewshot=-1", "task.num_fewshot=-1: must be greater than or equal to 0"),
        ('task.generation.until=["a",""]', "task.generation.until[1]='': must have at least 1 character"),
        ("task.generation.top_p=0", "task.generation.top_p=0: must be in (0, 1]"),
        ("task.generation.temperature=nan", "task.generation.temperature=nan: must be greater than or equal to 0"),
        ("model.load_format=pickle", "model.load_format=pickle: must be 'auto', 'safetensors'"),
        ("sequential.seed=3", "sequential.seed: no such setting; did you mean seed?"),
        ("hydra/launcher=submitit_slurm", "hydra/launcher: Hydra's own settings have no effect here"),
    ],
)
def test_refused_with_the_setting_and_the_cure(override: str, expected: str) -> None:
    (problem,) = problems(override)
    assert expected in problem


def test_all_problems_at_once() -> None:
    assert len(problems("limit=-1", "engine.dtype=x", "task.num_fewshot=-1")) == 3
    assert len(problems("modle=x", "limt=3")) == 2
    assert problems("limt=3", "endpoint.url=x", "limit=-1", "batch_invariant=true", "numerics=fast")[-1].startswith(
        "batch_invariant=true contradicts numerics=fast"
    )
    assert len(problems("limit=1,2", "limit=3", "hydra.job=1")) == 3


def test_both_contradictions() -> None:
    """`batch_invariant=false` contradicts both levels that promise equal bits, and none other."""
    assert problems("batch_invariant=false", "numerics=exact")
    assert problems("batch_invariant=false", "numerics=native")
    assert compose("batch_invariant=false", "numerics=fast").numerics == "fast"


@pytest.mark.parametrize("size", ["auto", "1", "64"])
def test_block_sizes(size: str) -> None:
    assert str(compose(f"engine.block_size={size}").engine.block_size) == size


def test_sweeps_are_a_product_in_order() -> None:
    jobs = compose_jobs(["engine.max_num_seqs=1,8", "limit=3", "batch_invariant=true,false"], multirun=True)
    assert [(j.config.engine.max_num_seqs, j.config.batch_invariant) for j in jobs] == [
        (1, True),
        (1, False),
        (8, True),
        (8, False),
    ]
    assert jobs[1].overrides == ("engine.max_num_seqs=1", "batch_invariant=False")
    by_task = compose_jobs(["task=gsm8k,arc_easy"], multirun=True)
    assert [list(j.config.tasks) for j in by_task] == [["gsm8k"], ["arc_easy"]]
    assert [j.config.limit for j in compose_jobs(["limit=range(1,4)"], multirun=True)] == [1, 2, 3]
    assert "can be swept" in problems("task=glob(*)", multirun=True)[0]
    assert "can be swept" in problems("seed=interval(0,1)", multirun=True)[0]


def test_a_bad_value_in_a_sweep_stops_it_before_it_starts() -> None:
    assert problems("engine.max_num_seqs=1,0", multirun=True) == [
        "engine.max_num_seqs=0: must be greater than or equal to 1"
    ]


def test_a_contradiction_in_a_sweep_stops_it_before_it_starts() -> None:
    swept = ["engine.kv_cache_memory_fraction=0.3", "engine.gpu_memory_utilization=null,0.4", "limit=0"]
    with pytest.raises(ConfigError) as caught:
        compose_jobs(swept[:2], multirun=True)
    assert "set it or engine.kv_cache_memory_fraction, not both" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        compose_jobs([swept[0], "engine.gpu_memory_utilization=0.4", swept[2]])
    assert len(caught.value.problems) == 2, "next to wrong values"


def test_a_mapping_replaces_the_one_before(tmp_path: Path) -> None:
    """Its keys may be labels, as a judge's."""
    (job,) = compose_jobs(["apply_chat_template=true", "chat_template_args={b: 2, c: {x: 1}}"])
    (tmp_path / "config.yaml").write_text(to_yaml(job.config))
    read = read_config(tmp_path / "config.yaml", ["chat_template_args={a: 1}"])
    assert read.chat_template_args == {"a": 1}
    given = {"tasks.gsm8k.generation": {"until": ["q"]}}
    (job,) = compose_jobs(["task=gsm8k"], settings=given)
    assert job.config.tasks["gsm8k"].generation == GenerationConfig(until=["q"])


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Composing writes no file."""
    monkeypatch.chdir(tmp_path)
    compose_jobs(["engine.max_num_seqs=1,8"], multirun=True)
    assert not list(tmp_path.iterdir())


def test_known_keys_cover_the_schema() -> None:
    keys = known_keys()
    assert {"limit", "engine.dtype", "task.dataset.files.<name>", "tasks.<name>.generation.top_k"} <= set(keys)


def test_a_users_own_folder_of_tasks(tmp_path: Path) -> None:
    """Its tasks are composed as shipped ones are, and a wrong key is named."""
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "mine.yaml").write_text("# @package tasks.mine\ncls: gsm8k:GSM8K\nsplit: test\n")
    config = compose("task=mine", f"hydra.searchpath=[file://{tmp_path}]")
    assert config.tasks["mine"].cls == "gsm8k:GSM8K"
    (tmp_path / "task" / "mine.yaml").write_text("# @package tasks.mine\nclass: gsm8k:GSM8K\n")
    assert (
        "tasks.mine.class: no such setting; did you mean tasks.mine.cls?"
        in problems("task=mine", f"hydra.searchpath=[file://{tmp_path}]")[0]
    )


def test_yaml_holds_every_setting() -> None:
    data = yaml.safe_load(to_yaml(compose("task=gsm8k", "limit=3")))
    assert set(data) == {item.name for item in fields(Config)}
    assert data["limit"] == 3 and data["tasks"]["gsm8k"]["num_fewshot"] == 5


@pytest.mark.parametrize(
    ("invariant", "numerics", "device", "level"),
    [
        (True, "auto", "cpu", "exact"),
        (True, "auto", "cuda", "native"),
        (True, "exact", "cuda", "exact"),
        (False, "auto", "cpu", "fast"),
        (False, "auto", "cuda", "fast"),
        (False, "fast", "cpu", "fast"),
        (True, "native", "cuda", "native"),
    ],
)
def test_numerics_levels(invariant: bool, numerics: str, device: str, level: str) -> None:
    """The level in force, by batch_invariant, the level asked for, and the device."""
    assert resolve_numerics(invariant, numerics, device) == level


@pytest.mark.parametrize(
    ("invariant", "numerics", "device"),
    [(True, "native", "cpu"), (True, "fast", "cpu"), (False, "exact", "cpu"), (True, "nonsense", "cpu")],
)
def test_numerics_refused(invariant: bool, numerics: str, device: str) -> None:
    with pytest.raises(ConfigError, match="numerics"):
        resolve_numerics(invariant, numerics, device)


def test_a_config_built_by_hand_is_checked() -> None:
    assert any("no task is selected" in problem for problem in config_problems(Config()))
    (problem,) = config_problems(replace(compose(), tasks={"x": compose().task}))
    assert "cls" in problem


@pytest.mark.parametrize("text", ["Cost ${price}", "${", "${oc.env:HOME}", "\\${a}\\", "\\\\${a}", "'${a}' \n"])
def test_a_runs_own_configuration_is_read_as_it_was_written(text: str, tmp_path: Path) -> None:
    """`${...}` may stand in a prompt; a file from elsewhere must not read the environment by it."""
    config = compose()
    (task,) = config.tasks.values()
    written = replace(config, tasks={"arithmetic": replace(task, description=text)}, system_instruction=text)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(written), encoding="utf-8")
    assert read_config(file) == written
    assert read_config(file, ["seed=3"]) == replace(written, seed=3)
    file.write_text(to_yaml(written).replace("sequential:\n", "sequential:\n  seed: 0\n"), encoding="utf-8")
    assert read_config(file) == written, "earlier runs have a setting that is removed"


@pytest.mark.parametrize("text", ["seed: ${oc.env:HOME}", "seed: [1]", "model: 3", "nosuch: 1", "- a", "a: [", "5"])
def test_a_damaged_configuration_of_a_run_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"{text}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.yaml: "):
        read_config(file)


@pytest.mark.parametrize("name", ["a/b", "..", "-a", "a b", "a\x1b[2J", "\u202eabc", "t\u00e4sk", "a.b", "", "x" * 101])
def test_a_task_whose_name_no_file_can_have_is_refused(name: str) -> None:
    config = compose("task=gsm8k")
    with pytest.raises(ConfigError) as caught:
        read_as(Config, replace(config, tasks={name: config.tasks["gsm8k"]}))
    (problem,) = caught.value.problems
    assert "a task's name is part of file names" in problem and problem.isprintable() and len(problem) < 250


@pytest.mark.parametrize("name", ["a", "0", "_x-1", "x" * 100, "bbh_web_of_lies", "truthfulqa-multi_mc1_ca"])
def test_usual_task_names_pass(name: str) -> None:
    config = compose("task=gsm8k")
    assert read_as(Config, replace(config, tasks={name: config.tasks["gsm8k"]}))
