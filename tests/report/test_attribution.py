"""What a difference is blamed on: the thing that differs, with both of its values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from evalengine.records.manifest_data import Manifest
from evalengine.report.compare.as_json import comparison_json
from evalengine.report.compare.compare import compare
from evalengine.report.compare.report import report
from evalengine.report.html.comparison_page import comparison_page
from evalengine.report.read.identities import thing
from evalengine.report.read.run import Run
from tests.report.compared_runs import BASE, BIT, IDENTITY, TASK, TOKEN, run

SHORTER = {**BASE, 0: (BASE[0][0][:2], BASE[0][1][:2])}  # the answer to document 0 ends a token earlier
LONGER = {TASK: {**IDENTITY["tasks"][TASK], "generation": {"max_gen_toks": 16, "temperature": 0.0}}}


def blamed(a: Run, b: Run) -> tuple[dict[str, int], list[str]]:
    """The comparison's causes, and the report's lines that say them."""
    c = compare(a, b)
    lines = [line for line in report(c) if isinstance(line, str) and line.startswith("Cause: ")]
    assert comparison_json(c)["causes"] == c.causes
    return c.causes, lines


@pytest.mark.parametrize(
    ("changed", "cause", "values"),
    [
        ({"weights": "e" * 64}, "weights", "weights is aaaaaaaaaaaa... in A and eeeeeeeeeeee... in B"),
        ({"dtype": "float32"}, "dtype", 'dtype is "bfloat16" in A and "float32" in B'),
        ({"numerics": "native"}, "numerics level", 'numerics is "exact" in A and "native" in B'),
        ({"numerics": "fast", "attention_backend": "sdpa"}, "numerics level", 'numerics is "exact" in A and "fast" in'),
        ({"tokenizer": {"sha256": "f" * 64}}, "tokenizer", "tokenizer.sha256 is bbbbbbbbbbbb... in A and ffffffffffff"),
        (
            {"model_spec": {"rope": {"theta": 1e6}}},
            "model configuration rope.theta",
            "model_spec.rope.theta is 10000.0 in A and 1000000.0 in B",
        ),
        (
            {"model_spec": {"rope": {"theta": 10000.0}, "packing": "nvfp4"}},
            "weights: packed otherwise",
            'model_spec.packing is none in A and "nvfp4" in B',
        ),
        ({"contract_version": 2}, "contract version", "contract_version is 1 in A and 2 in B"),
        ({"engine": {"max_model_len": 64}}, "engine setting max_model_len", "engine.max_model_len is none in A and 64"),
        ({"weights": "e" * 64, "dtype": "float32"}, "weights or dtype", "; dtype is"),
        ({"seed": 1}, "unknown", "nothing that the runs recorded differs"),  # greedy decoding draws with no seed
    ],
)
def test_the_thing_and_both_values_are_named(changed: dict[str, Any], cause: str, values: str) -> None:
    causes, (line,) = blamed(run(BASE), run(TOKEN, **changed))
    assert causes == {cause: 1}
    assert line.startswith(f"Cause: {cause} (1): ") and values in line


def test_a_setting_that_ends_answers_is_to_blame_for_their_ends_alone() -> None:
    """All 84 of 84 differences were once blamed on max_gen_toks, though each of them came from the schedule."""
    longer = "generation setting max_gen_toks"
    causes, (line,) = blamed(run(SHORTER), run(BASE, tasks=LONGER))
    assert causes == {longer: 1} and "tasks.sums.generation.max_gen_toks is 8 in A and 16 in B" in line
    assert blamed(run(BASE), run(TOKEN, tasks=LONGER))[0] == {"unknown": 1}, "the last token of three is another one"
    assert blamed(run(BASE), run(BIT, tasks=LONGER, weights="e" * 64))[0] == {"weights": 1}
    bare = as_lm_eval(run(TOKEN, tasks=LONGER), tasks=LONGER)
    assert longer in next(iter(blamed(as_lm_eval(run(BASE), tasks=IDENTITY["tasks"]), bare)[0])), "no tokens to tell by"


def test_a_schedule_is_named_beside_a_setting_where_fast_numerics_depend_on_it() -> None:
    engine: dict[str, Any] = {"engine": {"max_num_seqs": 64}}
    a, b = around(BASE, "fast"), around(TOKEN, "fast", **engine)
    cut = replace(b, identity={**b.identity, "tasks": LONGER})
    assert blamed(a, cut)[0] == {"schedule max_num_seqs": 1}, "the end of answers has nothing to do with it"
    causes, (line,) = blamed(a, replace(b, identity={**b.identity, "dtype": "float32"}))
    assert causes == {"dtype or schedule max_num_seqs": 1} and "either alone can do this" in line
    shorter = around(SHORTER, "fast", **engine)
    causes, _ = blamed(a, replace(shorter, identity={**shorter.identity, "tasks": LONGER}))
    assert causes == {"generation setting max_gen_toks": 1}
    exact = around(TOKEN, "exact", **engine)
    other = replace(exact, identity={**exact.identity, "dtype": "float32"})
    assert blamed(around(BASE, "exact"), other)[0] == {"dtype": 1}


def test_a_seed_is_to_blame_where_tokens_are_drawn() -> None:
    tasks = {TASK: {**IDENTITY["tasks"][TASK], "generation": {"temperature": 0.7}}}
    assert blamed(run(BASE, tasks=tasks), run(TOKEN, tasks=tasks, seed=1))[0] == {"seed": 1}


def test_a_generation_setting_is_not_to_blame_for_scored_texts() -> None:
    a, b = run(BASE, kind="loglikelihood"), run(BIT, kind="loglikelihood", tasks=LONGER)
    assert blamed(a, b)[0] == {"unknown": 1}


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"apply_chat_template": True, "chat_template": "f" * 64}, "chat template"),
        ({"system_instruction": "be brief"}, "system instruction"),
        ({}, "prompts"),  # nothing recorded says why
    ],
)
def test_other_prompts_are_blamed_on_what_shapes_them(changed: dict[str, Any], cause: str) -> None:
    asks = {doc: [doc, 2] for doc in BASE}
    causes, (line,) = blamed(run(BASE), run(TOKEN, asks=asks, **changed))
    assert causes == {cause: 3} and ("no recorded setting says why" in line) == (cause == "prompts")
    both = blamed(run(BASE), run(TOKEN, asks=asks, weights="e" * 64, **changed))[0]
    assert both == {f"{cause} or weights": 1, cause: 2}  # only one output differs: the weights may be why


def test_other_documents_and_targets_are_named() -> None:
    a = as_lm_eval(run(BASE))
    for place, cause in ((0, "documents"), (2, "targets")):
        hashes = {doc: tuple("new" if i == place else h for i, h in enumerate(a.hashes[TASK][doc])) for doc in BASE}
        b = replace(a, hashes={TASK: hashes})  # type: ignore[arg-type]
        assert blamed(a, b)[0] == {cause: 3}


def test_rows_that_no_hash_of_documents_tells_apart_are_told_by_the_datasets() -> None:
    """A baseline of evalengine's own runs holds no hashes of documents."""
    datasets = {TASK: {"sha256": "e" * 64, "fewshot_sha256": None}}
    a, b = (replace(r, hashes={}) for r in (run(BASE), run(TOKEN, asks={0: [9, 9]}, datasets=datasets)))
    causes, (line,) = blamed(a, b)
    assert causes == {"documents": 1} and "the dataset's rows differ (sha256 is dddddddddddd... in A" in line


def as_lm_eval(r: Run, **identity: Any) -> Run:
    """The run as an lm-eval folder tells it: without digests, token ids and the hash of a local model's weights."""
    bare: dict[str, Any] = {"leaf": "", "prompt_sha256": "", "output_sha256": "", "output_ids": None, "logprobs": None}
    items = {key: replace(i, **bare) for key, i in r.items.items()}
    changes = {"kind": "lm-eval", "digest": None, "task_digests": {}, "manifest": Manifest({}), "identity": identity}
    return replace(r, items=items, **changes)  # type: ignore[arg-type]


def test_weights_that_no_one_hashed_are_unknown() -> None:
    a, b = as_lm_eval(run(BASE)), as_lm_eval(run(TOKEN))
    causes, (line,) = blamed(a, b)
    assert causes == {"unknown": 1} and "but A and B did not record a hash of the model weights" in line
    b = as_lm_eval(run(TOKEN), model_dtype="torch.float32")
    causes, (line,) = blamed(as_lm_eval(run(BASE), model_dtype="torch.bfloat16"), b)
    assert causes == {"dtype or unrecorded weights": 1} and "A and B did not record" in line
    causes, (line,) = blamed(as_lm_eval(run(BASE)), run(TOKEN))
    assert causes == {"program or unrecorded weights": 1} and "A was run by lm-eval and B by evalengine" in line
    hub = {"model_sha": "e" * 40}
    assert blamed(as_lm_eval(run(BASE), **hub), as_lm_eval(run(TOKEN), **hub))[0] == {"unknown": 1}
    assert blamed(as_lm_eval(run(BASE), **hub), as_lm_eval(run(TOKEN), model_sha="f" * 40))[0] == {"weights": 1}


def around(outputs: Any, numerics: str, **manifest: Any) -> Run:
    """A run of these numerics whose manifest records what surrounded it: engine, code, libraries."""
    base = run(outputs, numerics=numerics)
    return replace(base, manifest=Manifest({**base.manifest.content, "numerics": numerics, **manifest}))


def test_equal_settings_leave_what_surrounds_the_runs() -> None:
    engine = {"engine": {"max_num_seqs": 64, "stats": {"seconds": 2.0}}}
    assert blamed(around(BASE, "fast"), around(TOKEN, "fast", **engine))[0] == {"schedule max_num_seqs": 1}
    causes, (line,) = blamed(around(BASE, "fast"), around(TOKEN, "fast"))
    assert causes == {"batches": 1} and "bits depend on the batches" in line
    assert blamed(around(BASE, "exact"), around(TOKEN, "exact", **engine))[0] == {"unknown": 1}, "exact: no schedule"
    code, libraries = {"code": {"commit": "one"}}, {"libraries": {"torch": "2.13", "numpy": "2"}}
    newer = {"code": {"commit": "two"}, "libraries": {"torch": "2.14", "numpy": "2"}}
    causes, (line,) = blamed(around(BASE, "exact", **code, **libraries), around(TOKEN, "exact", **newer))
    assert causes == {"libraries or code": 1} and 'libraries.torch is "2.13" in A and "2.14" in B' in line


def test_another_score_for_equal_outputs_is_the_scorers_or_its_versions() -> None:
    version = {TASK: {**IDENTITY["tasks"][TASK], "version": 2.0}}
    causes, (line,) = blamed(run(BASE), run(BASE, scores={0: 0.0}, tasks=version))
    assert causes == {"task setting version": 1} and "version is 1.0 in A and 2.0 in B" in line
    assert blamed(run(BASE), run(BASE, scores={0: 0.0}))[0] == {"scorer": 1}


def test_the_page_says_the_cause_too() -> None:
    page = comparison_page(compare(run(SHORTER), run(BASE, tasks=LONGER))).render()
    assert "generation setting max_gen_toks" in page
    assert "The settings differ (tasks.sums.generation.max_gen_toks is 8 in A and 16 in B)" in page


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("model_args", "dtype"), "dtype"),
        (("model_args", "pretrained"), "model argument pretrained"),
        (("gen_kwargs",), "generation settings"),
        (("tasks", "t", "generation_kwargs", "until"), "generation setting until"),
        (("tasks", "t", "num_fewshot"), "num_fewshot"),
        (("chat_template_sha",), "chat template"),
        (("random_seed",), "seed"),
        (("long_prompts",), "long_prompts"),
        (("attention_backend",), "attention backend"),
        (("something_new",), "something new"),
    ],
)
def test_settings_are_called_what_readers_call_them(path: tuple[str, ...], name: str) -> None:
    assert thing(path) == name
