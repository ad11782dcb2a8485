"""A run's identity: everything that can change one of its numbers or words, by content, whatever its name and place.

Runs with equal identities may resume each other; a difference names the field that made two runs unlike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evalengine.config.schema import Config
from evalengine.engine.protocol import EngineProtocol
from evalengine.engine.text.tokenizer import plain_tokenizer
from evalengine.harness.plan import Plan
from evalengine.models.spec import ModelSpec, dtype_name
from evalengine.records.manifest import run_id, run_identity
from evalengine.records.sealed import canonical


@dataclass(frozen=True)
class Facts:
    """A run's identity, its short name, and where its rows came from."""

    run_id: str
    identity: dict[str, Any]
    datasets: dict[str, dict[str, Any]]  # task -> Task.fingerprint


def run_facts(
    config: Config, plan: Plan, llm: EngineProtocol, judge: Mapping[str, Any] | None = None, baseline: str | None = None
) -> Facts:
    """The run's facts. Hashing files and rows takes seconds, so that this is called once a run. judge: what the
    verdicts of its judge depend on; None for a run without one. baseline: the digest that orders the documents of a run
    in steps; None for any other run."""
    datasets = {p.task.name: p.task.fingerprint(config.limit) for p in plan.tasks}
    extra = {
        **engine_identity(config, llm),
        "datasets": {name: _rows_sha256(fingerprint) for name, fingerprint in datasets.items()},
        "prompts": plan.prompts_sha256,
    }
    if definitions := {p.task.name: definition for p in plan.tasks if (definition := p.task.definition())}:
        extra["definitions"] = definitions
    if judge is not None:
        extra["judge"] = judge
    if baseline is not None:
        extra["sequential"] = {"step": config.sequential.step, "baseline": baseline}
    return Facts(run_id(config, extra), run_identity(config, extra), datasets)


def engine_identity(config: Config, llm: EngineProtocol) -> dict[str, Any]:
    """The part of the identity that computes: the model by content, numerics and dtype. Hashes the weight files."""
    facts = llm.facts()
    identity = {
        "contract_version": llm.spec.contract_version,
        "weights": facts.weights_sha256,
        **model_identity(config, llm),
        "numerics": llm.settings.numerics,
        "dtype": dtype_name(llm.settings.dtype),
    }
    if llm.settings.numerics == "fast":
        identity["attention_backend"] = llm.settings.attention_backend
    if llm.settings.numerics == "native":  # native promises equal bits on one GPU architecture only
        identity["gpu_architecture"] = facts.gpu_architecture
    return identity


def model_identity(config: Config, llm: EngineProtocol) -> dict[str, Any]:
    """The model's identity besides its weights: the same weights under another `rope_theta` are another model."""
    template = llm.tokenizer.chat_template if config.apply_chat_template and llm.tokenizer is not None else None
    return {
        "model_spec": plain_spec(llm.spec),
        "tokenizer": plain_tokenizer(llm.tokenizer),
        "chat_template": None if template is None else _sha256(canonical(template)),
    }


def plain_spec(spec: ModelSpec) -> dict[str, Any]:
    """The spec as plain JSON values, without the checkpoint's dtype: the dtype that computes is the run's own."""
    values = spec.plain
    del values["dtype"]
    plain: dict[str, Any] = json.loads(canonical(values))
    return plain


def _rows_sha256(fingerprint: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: fingerprint[name] for name in ("sha256", "fewshot_sha256")}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
