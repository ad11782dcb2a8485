"""A run's requests, planned again from its folder: its rows, tokenizer and model must be unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from evalengine.config.compose import COMPUTED_AGAIN, read_config
from evalengine.config.schema import ClusterConfig, Config
from evalengine.engine.deferred import DeferredLLM
from evalengine.harness.plan import Plan, build_plan, prepare
from evalengine.harness.same_run import check_model, check_prompts, check_weights
from evalengine.receipts.needs import check_contract
from evalengine.report.read.run import Run


def planned(run: Run, places: Sequence[str]) -> tuple[Plan, DeferredLLM]:
    """The run's plan, and an engine without weights yet that computes its items, one at a time, in its numerics.

    places: where rows and weights lie here ("data_dir=/data"). Where the run's numerics cannot be had on this machine,
    the engine is one that only plans.
    Raises ConfigError for a run that cannot be planned again: its rows, tokenizer or model have changed.
    """
    check_contract(run.identity["contract_version"], run.name)
    config = _configuration(run, places)
    checkpoint, tasks = prepare(config, scores=False)
    check_weights(run.name, run.identity, checkpoint)
    mode: Any = {"batch_invariant": config.batch_invariant, "numerics": config.numerics}
    llm: Any = DeferredLLM(checkpoint, **mode, engine=config.engine)
    check_model(run.name, run.identity, config, llm)
    plan = build_plan(config, tasks, llm)
    check_prompts(run.name, run.identity, plan)
    return plan, llm


def _configuration(run: Run, places: Sequence[str]) -> Config:
    """The run's configuration, with the settings that concern only its machine decided anew."""
    config = read_config(run.source / "config.yaml", (*COMPUTED_AGAIN, *places))
    resolved = run.manifest.engine
    level = resolved.numerics
    has_gpu = torch.cuda.is_available()
    device = config.engine.device if any(place.startswith("engine.device=") for place in places) else None
    ranks_given = any(place.startswith("engine.tensor_parallel_size=") for place in places)
    if device is None:
        device = "cuda" if has_gpu and resolved.device.startswith("cuda") else "cpu"
    engine = replace(
        config.engine,
        device=device,
        dtype=resolved.dtype,
        max_model_len=resolved.max_model_len,
        num_kv_blocks=None,
        num_threads=None,
        gpu_memory_utilization=None,
        max_num_seqs=8,
        tensor_parallel_size=config.engine.tensor_parallel_size if ranks_given else 1,
    )
    numerics = "auto" if level == "native" and not has_gpu else level
    return replace(config, engine=engine, numerics=numerics, cluster=ClusterConfig())
