"""A finished run's items: a receipt of one of them, or a sample of them computed again from its rows and its model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from evalengine.engine.deferred import DeferredLLM
from evalengine.engine.difference import difference
from evalengine.engine.request import GenerateRequest
from evalengine.errors import ConfigError, listed
from evalengine.harness.plan import Plan
from evalengine.harness.same_run import answer_of, config_again, plan_again
from evalengine.receipts.needs import check_contract, check_level
from evalengine.receipts.receipt import COMPUTED_BY, Receipt, plain_params
from evalengine.records.digest import merkle_path
from evalengine.records.folder import RECORDS
from evalengine.records.schema import read_records
from evalengine.report.read.names import named_item
from evalengine.report.read.run import Run

# The machine's memory and processors decide anew how an item is computed by itself.
ONE_BY_ONE: dict[str, int | None] = {
    **dict.fromkeys(("num_kv_blocks", "num_threads", "gpu_memory_utilization")),
    "max_num_seqs": 8,
    "tensor_parallel_size": 1,
}


def prove(run: Run, item: str, places: Sequence[str] = ()) -> Receipt:
    """The receipt of an item, named as in `--item`. The rows are planned again for the request; no weights are
    loaded. places: where rows and weights lie here ("data_dir=/data").

    Raises ConfigError for a run that has no such item or cannot be proved.
    """
    _check_kind(run, "prove")
    key = named_item(run, item, "prove")
    plan, llm = _planned(run, places)
    (matching,) = (planned_item for planned_item in plan.requests if planned_item.key == key)
    (record,) = (row for row in read_records(run.source / RECORDS) if row.key == key)
    request, params = matching.request, None
    if isinstance(request, GenerateRequest):
        params = plain_params(request.params, llm.settings.max_model_len - len(request.prompt_ids))
    keys = [*run.items]
    leaves = [bytes.fromhex(recorded.leaf) for recorded in run.items.values()]
    path = tuple(node.hex() for node in merkle_path(leaves, keys.index(key)))
    assert run.digest is not None
    computed_by = {name: run.identity[name] for name in COMPUTED_BY if name in run.identity}
    receipt = Receipt(record, params, run.digest, keys.index(key), len(keys), path, computed_by)
    assert receipt.leads_to_digest(), "the run was read with its digest checked"
    return receipt


def differing(run: Run, sample: int, seed: int, places: Sequence[str] = ()) -> tuple[int, list[str]]:
    """(how many items were computed again, a sentence for each of them that differs). places: as in `prove`.

    Raises ConfigError for a run that cannot be computed again here.
    """
    _check_kind(run, "check")
    check_level(run.identity, run.name)
    keys = {*random.Random(seed).sample([*run.items], min(sample, len(run.items)))}
    plan, llm = _planned(run, places)
    chosen = {item.request.request_id: item for item in plan.requests if item.key in keys}
    records = {record.key: record for record in read_records(run.source / RECORDS) if record.key in keys}
    sentences = {}
    with llm:
        for output in llm.run([item.request for item in chosen.values()]):
            key = chosen[output.request_id].key
            output.top_logprobs = None  # alternatives are no part of the digest
            if difference_in_words := difference(answer_of(records[key]), output, "in the run"):
                sentences[key] = f"{'/'.join(map(str, key))}: {difference_in_words}"
    return len(chosen), [sentences[key] for key in sorted(sentences)]


def _check_kind(run: Run, command: str) -> None:
    """Raises ConfigError for a run whose items cannot be computed again one by one."""
    if run.kind != "run" or run.records is not None:
        what = "lm-eval ran it, so its requests are lm-eval's"
        if run.records is None:
            what = f"it is {run.files}, of which nothing can be proved" if run.kind == "lm-eval" else "it is a baseline"
        raise ConfigError(f"{command}: {run.source}: {what}; give the folder of a run of evalengine's own")
    if lacking := [name for name in COMPUTED_BY if name not in run.identity and name != "gpu_architecture"]:
        raise ConfigError(f"{command}: {run.source}: its manifest does not say {listed(lacking, 3)}; run it again")
    if run.identity["numerics"] == "fast":
        raise ConfigError(
            f"{command}: {run.name} ran in fast numerics, whose bits depend on the batch: no item of it can be "
            "computed again by itself; run it with batch_invariant=true"
        )


def _planned(run: Run, places: Sequence[str]) -> tuple[Plan, DeferredLLM]:
    """The run's plan, and an engine without weights yet that computes its items, one at a time, in its numerics.

    Where the run's numerics cannot be had on this machine, the engine is one that only plans.
    Raises ConfigError for a run that cannot be planned again: its rows, tokenizer or model have changed.
    """
    check_contract(run.identity["contract_version"], run.name)
    resolved, has_gpu = run.manifest.engine, torch.cuda.is_available()
    device = "cuda" if has_gpu and resolved.device.startswith("cuda") else "cpu"
    pinned = {"device": device, "dtype": resolved.dtype, "max_model_len": resolved.max_model_len, **ONE_BY_ONE}
    numerics = "auto" if resolved.numerics == "native" and not has_gpu else resolved.numerics
    config = replace(config_again(run.source, pinned, places), numerics=numerics)  # type: ignore[arg-type]  # a level
    return plan_again(run.name, run.identity, config, run.source)
