"""A finished run's items: a receipt of one of them, or a sample of them computed again from its rows and its model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from evalengine.config.schema import EngineConfig, ModelConfig
from evalengine.engine.difference import difference
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint, resolve_checkpoint, weights_fingerprint
from evalengine.engine.request import GenerateRequest, Request, SamplingParams, ScoreRequest
from evalengine.engine.text.tokenizer import plain_tokenizer
from evalengine.errors import ConfigError, listed
from evalengine.harness.identity import plain_spec
from evalengine.harness.plan import config_again, plan_again
from evalengine.harness.requests import Plan
from evalengine.models.processors import LogitsProcessors
from evalengine.models.spec import ModelSpec, dtype_name
from evalengine.receipts.receipt import COMPUTED_BY, Receipt, plain_params
from evalengine.records.digest import merkle_path
from evalengine.records.folder import RECORDS
from evalengine.records.schema import read_records
from evalengine.records.sealed import differences
from evalengine.report.read.names import named_item
from evalengine.report.read.run import Run

LEVELS = ("exact", "native")

BLOCK = 64  # tokens of a KV page
MAX_LISTED = 3

# The machine's memory and processors decide again how a single item is computed.
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
            if difference_in_words := difference(records[key].without_top(), output, "in the run"):
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
            "computed again separately; run it with batch_invariant=true"
        )


def _planned(run: Run, places: Sequence[str]) -> tuple[Plan, LLM]:
    """The run's plan, and an engine without weights yet that computes its items, one at a time, in its numerics.

    Where the run's numerics cannot be had on this machine, the engine is one that only plans.
    Raises ConfigError for a run that cannot be planned again: its rows, tokenizer or model have changed.
    """
    resolved, has_gpu = run.manifest.engine, torch.cuda.is_available()
    device = "cuda" if has_gpu and resolved.device.startswith("cuda") else "cpu"
    pinned = {"device": device, "dtype": resolved.dtype, "max_model_len": resolved.max_model_len, **ONE_BY_ONE}
    numerics = "auto" if resolved.numerics == "native" and not has_gpu else resolved.numerics
    config = replace(config_again(run.source, pinned, places), numerics=numerics)  # type: ignore[arg-type]  # a level
    plan, llm = plan_again(run.name, run.identity, config, run.source)
    check_contract(run.identity["contract_version"], llm.spec, run.name)
    return plan, llm


def divergence(receipt: Receipt, model: ModelConfig, device: str, whose: str) -> str | None:
    """Where the receipt's answer and the one computed here diverge, in words; None if every bit agrees.

    whose: names the receipt in messages.
    Raises: ConfigError if this model or this machine cannot compute the answer, in a sentence that names what differs.
    """
    check_level(receipt.computed_by, whose)
    try:
        processes = LogitsProcessors() != LogitsProcessors(**receipt.computed_by["model_spec"]["processors"])
    except (KeyError, TypeError, ConfigError):  # they are damaged
        processes = True
    checkpoint = resolve_checkpoint(replace(model, generation_config="auto" if processes else "none"))
    check_contract(receipt.computed_by["contract_version"], checkpoint.spec, whose)
    if problems := list(_other_model(receipt, checkpoint, whose)):
        raise ConfigError(problems)
    request = _request(receipt, checkpoint)
    most = request.params.max_tokens if isinstance(request, GenerateRequest) else 0
    tokens = len(receipt.record.prompt_ids) + max(len(receipt.record.output_ids), most)
    engine = EngineConfig(
        dtype=receipt.computed_by["dtype"],
        device=device,
        num_kv_blocks=-(-tokens // BLOCK) + 1,
        block_size=min(BLOCK, checkpoint.spec.max_position_embeddings),
        max_num_seqs=1,
    )
    level = receipt.computed_by["numerics"]
    with LLM(checkpoint, batch_invariant=True, numerics=level, engine=engine) as llm:
        if (dtype := dtype_name(llm.settings.dtype)) != receipt.computed_by["dtype"]:
            raise ConfigError(f"{whose}: computed in {receipt.computed_by['dtype']}, and this engine in {dtype}")
        (output,) = llm.run([request])
    return difference(receipt.record, output, "in the receipt")


def _other_model(receipt: Receipt, checkpoint: Checkpoint, whose: str) -> Iterator[str]:
    """How the model at hand is not the receipt's, a sentence each."""
    recorded = receipt.computed_by
    if (weights := weights_fingerprint(checkpoint)) != recorded["weights"]:
        yield (
            f"{checkpoint.source}: another model than that of {whose}: its weights are {weights[:12]}..., the "
            f"receipt's {recorded['weights'][:12]}...; name the receipt's by --model, and its LoRA adapter by --adapter"
        )
        return
    if changed := list(differences(recorded["model_spec"], plain_spec(checkpoint.spec), "model_spec")):
        yield (
            f"{checkpoint.source}: the receipt's weights, otherwise configured: {'; '.join(changed[:MAX_LISTED])}; "
            "restore the model's configuration"
        )
    if changed := list(differences(recorded["tokenizer"], plain_tokenizer(checkpoint.tokenizer) or {}, "tokenizer")):
        yield (
            f"{checkpoint.source}: another tokenizer than that of {whose}: {'; '.join(changed[:MAX_LISTED])}; name the "
            "receipt's by --tokenizer"
        )


def _request(receipt: Receipt, checkpoint: Checkpoint) -> Request:
    """The item's request. Raises ConfigError for one that no run can have made."""
    record = receipt.record
    if receipt.asked is None:
        return ScoreRequest(0, list(record.prompt_ids), list(record.output_ids))
    try:
        params = SamplingParams.of_plain(receipt.asked)
    except TypeError as error:  # The engine knows no setting of that name.
        raise ConfigError(f"asked: {error}; ask for the receipt again") from error
    if params.max_tokens > checkpoint.spec.max_position_embeddings or params.n != 1 or params.logprobs:
        raise ConfigError("asked: more than one answer of the model's length; ask for the receipt again")
    return GenerateRequest(0, list(record.prompt_ids), params)


def check_contract(computed_by: Any, spec: ModelSpec, whose: str) -> None:
    """Raises ConfigError if this evalengine computes the model by another contract."""
    if computed_by != spec.contract_version:
        raise ConfigError(
            f"{whose}: computed by contract {str(computed_by)[:20]}, and this evalengine computes by contract "
            f"{spec.contract_version}, whose bits are others; check it with an evalengine of that contract"
        )


def check_level(computed_by: Mapping[str, Any], whose: str) -> None:
    """Raises ConfigError that says what it takes, if this machine cannot compute at that numerics level."""
    level = computed_by["numerics"]
    if level not in LEVELS:
        raise ConfigError(
            f"{whose}: computed in {str(level)[:20]} numerics, and only exact and native give one item the same bits "
            "again: it cannot be checked"
        )
    if level == "exact":
        return
    required = computed_by.get("gpu_architecture")
    here = "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    if here is None or here != required:
        raise ConfigError(
            f"{whose}: computed in native on a GPU of architecture {required}, whose bits only such a GPU gives; this "
            f"machine has {here or 'no usable GPU'}. Check it where there is one, or ask for a run in numerics=exact, "
            "which any machine can check"
        )
