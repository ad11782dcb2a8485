"""A receipt's item, computed again by a model that must be the receipt's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from evalengine.config.schema import EngineConfig, ModelConfig
from evalengine.engine.difference import difference
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint, resolve_checkpoint, weights_fingerprint
from evalengine.engine.request import GenerateRequest, Request, SamplingParams, ScoreRequest
from evalengine.engine.text.tokenizer import plain_tokenizer
from evalengine.errors import ConfigError
from evalengine.harness.identity import plain_spec
from evalengine.harness.same_run import answer_of
from evalengine.models.processors import LogitsProcessors
from evalengine.models.spec import dtype_name
from evalengine.receipts.needs import check_contract, check_level
from evalengine.receipts.receipt import Receipt
from evalengine.records.differences import differences

BLOCK = 64  # tokens of a KV page
MAX_LISTED = 3


def parted(receipt: Receipt, model: ModelConfig, device: str, whose: str) -> str | None:
    """Where the receipt's answer and the one computed here part, in words; None if every bit agrees.

    whose: names the receipt in messages.
    Raises: ConfigError if this model or this machine cannot compute the answer, in a sentence that names what differs.
    """
    check_contract(receipt.computed_by["contract_version"], whose)
    check_level(receipt.computed_by, whose)
    processes = LogitsProcessors() != _processors(receipt.computed_by["model_spec"])
    checkpoint = resolve_checkpoint(replace(model, generation_config="auto" if processes else "none"))
    if problems := list(_other_model(receipt, checkpoint, whose)):
        raise ConfigError(problems)
    request = _request(receipt, checkpoint)
    tokens = len(receipt.record.prompt_ids) + max(len(receipt.record.output_ids), _max_output(request))
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
    return difference(answer_of(receipt.record), output, "in the receipt")


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


def _max_output(request: Request) -> int:
    return request.params.max_tokens if isinstance(request, GenerateRequest) else len(request.continuation_ids)


def _processors(spec: Mapping[str, Any]) -> LogitsProcessors | None:
    """The logits processors of a spec in plain values; None if they are damaged."""
    try:
        return LogitsProcessors(**spec["processors"])
    except (KeyError, TypeError, ConfigError):
        return None
