"""A run's identity (what can change a result) and its `manifest.json` (what it ran on, and how it went)."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from evalengine import version
from evalengine.config.schema import (
    OUTPUT_FIELDS,
    SCHEDULE_FIELDS,
    Config,
    JudgeConfig,
    TemplateConfig,
    template_date,
)
from evalengine.records.digest import Digests
from evalengine.records.manifest_data import Code, Hardware, Manifest, Model, RunCounts, RunTimings
from evalengine.records.sealed import canonical, run_id_of
from evalengine.util.libraries import library_versions
from evalengine.util.plain_files import YAML_SUFFIXES

# What the configuration names but only the run can know; each stands for the settings in `_STANDS_FOR`.
IDENTITY_KEYS = ("contract_version", "weights", "model_spec", "tokenizer", "chat_template", "datasets", "prompts",
                 "numerics", "dtype")  # fmt: skip
NEW_SETTINGS = ("enable_thinking", "chat_template_args")  # null has no effect
# A task's; null has no effect.
NEW_TASK_SETTINGS = ("repeats", "pass_at", "gen_prefix", "code_timeout", "choice_order")
FAST_IDENTITY_KEYS = ("attention_backend",)  # resolved too; at the other levels they change nothing
_STANDS_FOR = ("model", "batch_invariant", "numerics", "task")


def run_identity(config: Config, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that can change a result, as plain JSON values.

    extra: what stands for files, by content, at least `IDENTITY_KEYS`: the model's contract version, fingerprints of
    weights, tokenizer, chat template, dataset rows and prompts, the resolved model spec, numerics level and dtype, and
    `FAST_IDENTITY_KEYS` where that level is `fast`. Where a model or dataset lies is no part of the identity, nor which
    rows are related: that changes how sure a result is, not the result.
    """
    needed = (*IDENTITY_KEYS, *(FAST_IDENTITY_KEYS if extra.get("numerics") == "fast" else ()))
    missing = [name for name in needed if name not in extra]
    assert not missing, f"a run's identity needs {missing}"
    settings: dict[str, Any] = {**asdict(config), "chat_template_date": template_date(config)}
    for name in (*OUTPUT_FIELDS, *_STANDS_FOR):
        del settings[name]
    for name in (*SCHEDULE_FIELDS, "dtype", *FAST_IDENTITY_KEYS):
        del settings["engine"][name]
    del settings["logprobs"]  # how much is stored; the requests' hash distinguishes such runs where one resumes
    del settings["groups"]  # they say how results are added up
    for task in settings["tasks"].values():
        for name in ("dataset", "fewshot_file", "cluster", "items", "alias"):
            del task[name]
        for name in NEW_TASK_SETTINGS:
            if task[name] is None:
                del task[name]
        if task["template"] == asdict(TemplateConfig()):  # none: the identity of runs from before there were templates
            del task["template"]
        if task["judge"] == asdict(JudgeConfig()):
            del task["judge"]
        else:  # which model it is, and whose answers these are compared with, is in the run's `judge` by content
            for name in ("model", "revision", "api", "against"):
                del task["judge"][name]
        if not task["lm_eval"]["name"] or task["lm_eval"]["name"].endswith(YAML_SUFFIXES):
            del task["lm_eval"]  # a file's content is in `definitions`
    del settings["sequential"]  # of a run in steps `extra` has it, with the baseline by content
    for name in NEW_SETTINGS:
        if settings[name] is None:  # not used: the identity of runs from before there was the setting
            del settings[name]
    scores_unfinished = settings.pop("score_unfinished_thinking")
    if (end := config.model.think_end_token) is not None:
        settings |= {"think_end_token": end, "score_unfinished_thinking": scores_unfinished}
    plain: dict[str, Any] = json.loads(canonical({**settings, **extra}))
    return plain


def build_manifest(
    identity: Mapping[str, Any],
    *,
    digests: Digests,
    started: float,
    device: str,
    command: Sequence[str] | None = None,
    libraries: Mapping[str, str] = MappingProxyType({}),
    cluster: Mapping[str, Any] = MappingProxyType({}),
    **parts: Any,
) -> Manifest:
    """`manifest.json`. No environment variables and user names go in, and no host names but those of replicas, by which
    a bad machine is found.

    started: UNIX seconds. device: as torch names it. command: the words after `python -m evalengine`; None for a run
    that Python code started. libraries: versions of what the run depends on except `LIBRARIES`. cluster: of a run on
    replicas, `cluster` (who they are) and `hardware` (theirs); this machine computed nothing then. parts: further
    fields of `Manifest` in the file's order, dataclasses or plain JSON values; those that are None are left out.
    """
    machine = machine_facts("cpu" if cluster else device)
    given = {name: part for name, part in parts.items() if part is not None}
    typed = {name: asdict(part) for name, part in given.items() if isinstance(part, Model | RunCounts | RunTimings)}
    content = {
        "run_id": run_id_of(identity),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "command": None if command is None else list(command),
        "digest": digests.run,
        "task_digests": dict(digests.tasks),
        "contract_version": identity["contract_version"],
        "numerics": identity["numerics"],
        "identity": dict(identity),
        **given | typed,
        **machine,
        "libraries": {**machine["libraries"], **libraries},
        **cluster,
    }
    return Manifest(content)


def machine_facts(device: str) -> dict[str, Any]:
    """Code, hardware and versions of a computation on `device` here, as plain JSON values."""
    return {
        "code": asdict(code_version()),
        "hardware": asdict(Hardware(device, cpu_name(), os.cpu_count(), gpu_names(device))),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "libraries": dict(library_versions()),
    }


def code_version() -> Code:
    """The package's version; and in a git checkout of it, the commit, and whether the tree differs from it.

    Where the code runs from a copy without its git folder, `EVALENGINE_COMMIT` says which commit it is a copy of.
    """
    package = Path(__file__).parents[1]
    tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py")
    if not tracked:
        return Code(version.__version__, os.environ.get("EVALENGINE_COMMIT") or None, None)
    commit, status = _git(package, "rev-parse", "HEAD"), _git(package, "status", "--porcelain")
    return Code(version.__version__, commit, None if status is None else bool(status))


def cpu_name() -> str:
    """The processor's name, as the kernel gives it where it does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def gpu_names(device: str) -> list[str]:
    """The GPUs of a run on `device`, with their driver's CUDA version; empty on CPU."""
    if not device.startswith("cuda"):
        return []
    import torch

    chosen = torch.device(device)
    properties = torch.cuda.get_device_properties(chosen)
    return [f"{properties.name} (sm_{properties.major}{properties.minor}, CUDA {torch.version.cuda})"]


@cache  # the manifest and the results file ask the same
def _git(folder: Path, *arguments: str) -> str | None:
    """Git's answer, or None if it has none."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
