"""A run's identity, and a finished run planned again from its folder.

The identity is everything that can change one of a run's numbers or words, by content, whatever its name and place.
Runs with equal identities may resume each other; a difference names the field that made two runs unlike. What
`explain`, `prove` and `check` compute again, they compute through `plan_again`: the run's configuration, its plan, and
an engine that loads its weights when the first request runs; rows, tokenizer, weights and model must be unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from evalengine.config.schema import Config
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint, weights_fingerprint
from evalengine.engine.protocol import EngineProtocol
from evalengine.engine.text.tokenizer import plain_tokenizer
from evalengine.models.spec import ModelSpec, dtype_name
from evalengine.records.manifest import run_identity
from evalengine.records.sealed import canonical


def identify(
    config: Config, llm: EngineProtocol, prompts: str | None, datasets: Mapping[str, Mapping[str, Any]], **more: Any
) -> dict[str, Any]:
    """The run's identity. Hashes the weight files.

    prompts: `requests_sha256`; None where requests are not known yet. datasets: task -> `Task.fingerprint`. more: what
    else can change a result, such as `judge`; entries that are None are left out.
    """
    rows = {name: {key: own[key] for key in ("sha256", "fewshot_sha256")} for name, own in datasets.items()}
    given = {name: value for name, value in more.items() if value is not None}
    return run_identity(config, {**engine_identity(config, llm), "datasets": rows, "prompts": prompts, **given})


def engine_identity(config: Config, llm: EngineProtocol) -> dict[str, Any]:
    """The part of the identity that computes: the model by content, numerics and dtype. Hashes the weight files."""
    facts = llm.facts()
    settings = facts.settings
    identity = {
        "contract_version": llm.checkpoint.spec.contract_version,
        "weights": weights_fingerprint(llm.checkpoint),
        **model_identity(config, llm.checkpoint),
        "numerics": settings.numerics,
        "dtype": dtype_name(settings.dtype),
    }
    if settings.numerics == "fast":
        identity["attention_backend"] = settings.attention_backend
    if settings.numerics == "native":  # native promises equal bits on one GPU architecture only
        identity["gpu_architecture"] = facts.gpu_architecture
    return identity


def model_identity(config: Config, model: Checkpoint) -> dict[str, Any]:
    """The model's identity without its weights: equal weights with a different `rope_theta` are a different model."""
    template = model.tokenizer.chat_template if config.apply_chat_template and model.tokenizer is not None else None
    return {
        "model_spec": plain_spec(model.spec),
        "tokenizer": plain_tokenizer(model.tokenizer),
        "chat_template": None if template is None else hashlib.sha256(canonical(template).encode()).hexdigest(),
    }


def plain_spec(spec: ModelSpec) -> dict[str, Any]:
    """The spec as plain JSON values, without the checkpoint's dtype: the dtype that computes is the run's own."""
    values = spec.plain
    del values["dtype"]
    plain: dict[str, Any] = json.loads(canonical(values))
    return plain


def deferred_llm(config: Config, checkpoint: Checkpoint) -> LLM:
    """The engine of the configuration, which loads its weights when they are first needed."""
    mode: Any = {"batch_invariant": config.batch_invariant, "numerics": config.numerics}
    return LLM(checkpoint, **mode, engine=config.engine, load=False)
