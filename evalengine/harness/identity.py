"""A run's identity, and a finished run planned again from its folder.

The identity is everything that can change one of a run's numbers or words, by content, whatever its name and place.
Runs with equal identities may resume each other; a difference names the field that made two runs unlike. What
`explain`, `prove` and `check` compute again, they compute through `plan_again`: the run's configuration, its plan, and
an engine that loads its weights when the first request runs; rows, tokenizer, weights and model must be unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evalengine.config.compose import COMPUTED_AGAIN, read_config
from evalengine.config.schema import ClusterConfig, Config
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint, resolve_checkpoint, weights_fingerprint
from evalengine.engine.protocol import EngineProtocol
from evalengine.engine.text.tokenizer import plain_tokenizer
from evalengine.errors import ConfigError
from evalengine.harness.plan import Plan, build_plan, prepare
from evalengine.harness.requests import SERVED, in_order, read_requests, requests_sha256
from evalengine.models.spec import ModelSpec, dtype_name
from evalengine.records.evidence import CLIENT_REQUESTS, CONFIG
from evalengine.records.manifest import run_identity
from evalengine.records.sealed import canonical, differences

MAX_LISTED = 5  # changed fields of the model that are listed
NAME_IT = "by --with model.path=..."


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


def config_again(folder: Path, pinned: Mapping[str, Any], words: Sequence[str]) -> Config:
    """The configuration of the run in `folder`, for one process that reads and keeps no answers.

    pinned: fields of the engine's settings that are not the file's. words: settings that hold over both.
    """
    given = {word.lstrip("+").partition("=")[0] for word in words}
    settings = {f"engine.{name}": "null" if value is None else value for name, value in pinned.items()}
    pins = [f"{name}={value}" for name, value in settings.items() if name not in given]
    config = read_config(
        folder / CONFIG, (*COMPUTED_AGAIN, *pins, *words), selects=not (folder / CLIENT_REQUESTS).exists()
    )
    return replace(config, cluster=ClusterConfig())


def plan_again(
    name: str, identity: Mapping[str, Any], config: Config, folder: Path, same_model: bool = True
) -> tuple[Plan, LLM]:
    """The plan of the run called `name`, whose recorded identity is given, and an engine without weights yet.

    folder: the run's, which holds the requests of a server. same_model: whether the model must be the run's. Raises
    ConfigError for weights (whose files it hashes), a model or requests that are not the run's.
    """
    served = identity.get("harness") == SERVED
    checkpoint, tasks = (resolve_checkpoint(config.model), []) if served else prepare(config, scores=False)
    if same_model and weights_fingerprint(checkpoint) != identity["weights"]:
        raise ConfigError(f"{checkpoint.source}: these are not the weights of {name}; name them {NAME_IT}")
    llm = deferred_llm(config, checkpoint)
    now = model_identity(config, checkpoint) if same_model else {}
    pairs = [(identity[part], value, part) for part, value in now.items() if part in identity]
    if changed := [words for pair in pairs for words in differences(*pair)]:
        raise ConfigError(
            f"{checkpoint.source}: no longer the model of {name}: {'; '.join(changed[:MAX_LISTED])}; restore its "
            f"configuration, or name the run's own model {NAME_IT}"
        )
    if served:
        requests = in_order(read_requests(folder))
        plan = Plan([], requests, prompts_sha256=requests_sha256((item.key, item.request) for item in requests))
    else:
        plan = build_plan(config, tasks, llm)
    if plan.prompts_sha256 != identity["prompts"]:
        raise ConfigError(
            f"{name}: the rows, the tokenizer or the prompts made of them are no longer the run's; name the run's own "
            f"by --with data_dir=... or --with model.path=..."
        )
    return plan, llm


def deferred_llm(config: Config, checkpoint: Checkpoint) -> LLM:
    """The engine of the configuration, which loads its weights when they are first needed."""
    mode: Any = {"batch_invariant": config.batch_invariant, "numerics": config.numerics}
    return LLM(checkpoint, **mode, engine=config.engine, load=False)
