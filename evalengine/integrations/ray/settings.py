"""The replicas that the settings give on this machine: whether Ray runs them, how many, what each reserves."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from evalengine.config.schema import Config, EngineConfig

INSTALL = "pip install 'evalengine[ray]'"


@dataclass(frozen=True)
class Share:
    """What one replica reserves on its machine."""

    gpus: int  # 0: it computes on the CPU
    cpus: int


def uses_ray(config: Config) -> bool:
    """Whether replicas on Ray answer the requests: if asked for, or if needed to use all GPUs of this machine."""
    return config.cluster.backend == "ray" or (config.cluster.replicas == "auto" and local_replicas(config) > 1)


def local_replicas(config: Config) -> int:
    """Replicas that this machine's GPUs suffice for; 1 without a GPU, or for a device that is named by number."""
    if not _on_gpu(config.engine) or ":" in config.engine.device:
        return 1
    return max(1, torch.cuda.device_count() // gpus_each(config.engine))


def gpus_each(engine: EngineConfig) -> int:
    """GPUs of one replica."""
    return int(getattr(engine, "tensor_parallel_size", 1) or 1)


def ray_problems(config: Config) -> Iterator[str]:
    """What this machine lacks for the run's replicas, a sentence each. What a Ray cluster elsewhere lacks shows once it
    is joined (`cluster_share`)."""
    cluster = config.cluster
    if cluster.audit > 0 and cluster.backend == "local" and not uses_ray(config):
        yield f"cluster.audit={cluster.audit}: it needs a second replica, and this machine's GPUs suffice for one"
    if not uses_ray(config):
        return
    if importlib.util.find_spec("ray") is None:
        asked = "cluster=ray" if cluster.backend == "ray" else "cluster.replicas=auto on a machine with several GPUs"
        yield f"{asked}: Ray is not installed; {INSTALL}, or set cluster=local cluster.replicas=1"
    replicas = cluster.replicas
    if cluster.address is None and replicas != "auto" and _on_gpu(config.engine):
        needed, present = replicas * gpus_each(config.engine), torch.cuda.device_count()
        if needed > present:
            yield (
                f"cluster.replicas={replicas}: needs {needed} GPUs ({gpus_each(config.engine)} a replica), and this "
                f"machine has {present}; lower it, or name a cluster by cluster.address"
            )


def local_share(config: Config, replicas: int, cpus: int) -> Share:
    """What a replica reserves on this machine, whose processors the replicas share."""
    if _on_gpu(config.engine):
        return Share(gpus_each(config.engine), 1)
    return Share(0, config.engine.num_threads or max(1, cpus // replicas))


def cluster_share(config: Config, nodes: list[dict[str, float]]) -> tuple[Share, int]:
    """(what a replica reserves, how many there are) on a Ray cluster whose machines have these resources.

    Raises ValueError, a sentence, if no machine has room for one.
    """
    device, configured = config.engine.device, config.cluster.replicas
    gpus = gpus_each(config.engine)
    if device.startswith("cuda") or (device == "auto" and any(node.get("GPU", 0) for node in nodes)):
        room = sum(int(node.get("GPU", 0)) // gpus for node in nodes)
        if not room:
            raise ValueError(f"no machine of it has the {gpus} GPUs that a replica needs")
        return Share(gpus, 1), room if configured == "auto" else int(configured)
    cpus = [int(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
    if not cpus:
        raise ValueError("no machine of it offers a CPU")
    replicas = len(cpus) if configured == "auto" else int(configured)
    threads = config.engine.num_threads or max(1, min(min(cpus), sum(cpus) // replicas))
    if threads > max(cpus):
        raise ValueError(f"no machine of it has the {threads} CPUs of engine.num_threads")
    return Share(0, threads), replicas


def _on_gpu(engine: EngineConfig) -> bool:
    return engine.device != "cpu" and torch.cuda.is_available()
