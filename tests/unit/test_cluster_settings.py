"""Settings of replicas: what is refused at start, and what a replica reserves."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import evalengine
from evalengine.config.compose import compose_jobs
from evalengine.config.schema import ClusterConfig, Config, EngineConfig
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.protocol import EngineFacts
from evalengine.engine.settings import Settings, local_replicas, uses_ray
from evalengine.engine.submission import RequestLimits
from evalengine.errors import ConfigError
from evalengine.harness.identity import deferred_llm
from evalengine.harness.plan import prepare
from evalengine.integrations.ray.engines import RayEngines
from evalengine.integrations.ray.pool import (
    ActorState,
    Pool,
    Share,
    cluster_share,
    local_share,
    ray_problems,
    unlike,
)
from evalengine.integrations.ray.replica import ReplicaFacts, tokenizer_sha256
from evalengine.records.manifest import IDENTITY_KEYS, run_identity
from evalengine.records.manifest_data import Hardware
from tests.e2e.command import call

CPU, GPU = {"CPU": 16.0}, {"CPU": 16.0, "GPU": 8.0}


@functools.cache
def compose(*words: str) -> Config:
    (job,) = compose_jobs(words)
    return job.config


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many GPUs this machine seems to have."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


def test_the_default_is_one_engine_here_without_ray() -> None:
    config = compose()
    assert config.cluster == ClusterConfig(), "conf/cluster/local.yaml repeats the schema's values"
    assert config.cluster.backend == "local" and config.cluster.replicas == 1 and not uses_ray(config)
    assert compose("cluster=ray").cluster.replicas == "auto" and uses_ray(compose("cluster=ray"))


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (("cluster.replicas=2",), ["cluster.replicas=2: several replicas run on Ray; add cluster=ray"]),
        (("cluster.address=h:1",), ["cluster.address=h:1: it is a Ray cluster's; add cluster=ray"]),
        (("cluster=ray", "cluster.replicas=0"), ["cluster.replicas=0: must be auto or a number from 1 to 4096"]),
        (("cluster=ray", "cluster.replicas=some"), ["cluster.replicas=some: must be auto or a number from 1 to 4096"]),
        (("cluster=ray", "cluster.address=nowhere"), ["cluster.address='nowhere': must be host:port"]),
        (("cluster=ray", "engine.device=cuda:1"), ["engine.device=cuda:1: Ray chooses each replica's GPUs"]),
        (("cluster=ray", "cluster.audit=1.5"), ["cluster.audit=1.5: must be in 0 .. 1"]),
        (("cluster.audit=0.1",), ["cluster.audit=0.1: it needs a second replica"]),
        (
            ("cluster=ray", "cluster.audit=0.1", "cluster.replicas=1", "batch_invariant=false"),
            ["cluster.audit=0.1: compares bits", "cluster.audit=0.1: it needs a second replica"],
        ),
    ],
)
def test_what_is_refused_all_at_once(words: tuple[str, ...], messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(*words)
    assert len(caught.value.problems) == len(messages)
    assert all(problem.startswith(start) for problem, start in zip(caught.value.problems, messages, strict=True))


def test_without_ray_one_sentence_beside_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's absence is one problem among the others, and cluster=local does not need Ray."""
    monkeypatch.setattr("evalengine.util.plugins.find_spec", lambda name: None)
    done = call("cluster=ray", "engine.device=cpu", "engine.max_model_len=999999")
    assert done.code == 2
    assert "cluster=ray: ray is not installed: pip install 'evalengine[ray]', or set cluster=local" in done.err
    assert "engine.max_model_len=999999" in done.err
    assert prepare(compose("engine.device=cpu")), "cluster=local needs none"


def test_auto_takes_all_gpus_of_this_machine(gpus: Any) -> None:
    config = compose("cluster.replicas=auto")
    for count, replicas in ((0, 1), (1, 1), (4, 4)):
        gpus(count)
        assert local_replicas(config) == replicas and uses_ray(config) == (replicas > 1)
    assert not uses_ray(compose("cluster.replicas=auto", "engine.device=cuda:0"))
    assert not uses_ray(compose("cluster.replicas=auto", "engine.device=cpu"))
    assert local_share(config, 4, 16) == Share(1, 1)


def test_more_replicas_than_gpus_are_refused(gpus: Any) -> None:
    gpus(4)
    (message,) = ray_problems(compose("cluster=ray", "cluster.replicas=5"))
    assert message.startswith("cluster.replicas=5: needs 5 GPUs (1 a replica), and this machine has 4")
    assert not [*ray_problems(compose("cluster=ray", "cluster.replicas=5", "cluster.address=h:1"))]
    assert not [*ray_problems(compose("cluster=ray", "cluster.replicas=5", "engine.device=cpu"))]


def test_a_replica_of_several_gpus(gpus: Any) -> None:
    """A replica of four GPUs is placed only where one machine has four."""
    gpus(8)
    config = compose("cluster=ray", "engine.tensor_parallel_size=4")
    assert local_replicas(config) == 2
    assert cluster_share(config, [GPU, {"GPU": 6.0}, CPU]) == (Share(4, 1), 3)
    with pytest.raises(ValueError, match="no machine of it has the 4 GPUs that a replica needs"):
        cluster_share(config, [{"GPU": 2.0}, {"GPU": 3.0}])


def test_processors_are_shared_out() -> None:
    """Replicas share a machine's cores, at least one each, or take `engine.num_threads` of them."""
    config = compose("cluster=ray", "engine.device=cpu")
    assert local_share(config, 2, 16) == Share(0, 8) and local_share(config, 32, 16) == Share(0, 1)
    assert cluster_share(config, [CPU, CPU]) == (Share(0, 16), 2)
    threads = compose("cluster=ray", "cluster.replicas=3", "engine.device=cpu", "engine.num_threads=4")
    assert cluster_share(threads, [CPU, GPU]) == (Share(0, 4), 3)
    with pytest.raises(ValueError, match=r"engine\.num_threads"):
        cluster_share(threads, [{"CPU": 2.0}])


def test_the_cluster_is_no_part_of_a_runs_identity() -> None:
    extra = dict.fromkeys(IDENTITY_KEYS, "x")
    single, several = compose(), compose("cluster=ray", "cluster.replicas=4", "cluster.audit=0.5")
    assert run_identity(single, extra) == run_identity(several, extra) != run_identity(replace(single, seed=1), extra)


def test_a_lent_llm_has_no_replicas(tmp_path: Path) -> None:
    with evalengine.LLM("asset:tinymath", device="cpu", num_kv_blocks=64) as llm:
        with pytest.raises(ConfigError) as caught:
            evalengine.evaluate(llm, "arithmetic", output_dir=tmp_path, cluster="ray")
        assert caught.value.problems[0].startswith("cluster: this LLM is loaded with its own settings")


LIBRARIES: dict[str, str | None] = {
    "torch": "2.11.0", "cuda": "13.0", "triton": "3.6.0", "tokenizers": "0.23.2", "transformers": "5.17.0"
}  # fmt: skip


def replica_facts(checkpoint: Checkpoint) -> ReplicaFacts:
    native = Settings(torch.device("cuda"), "native", torch.bfloat16, "triton", 512, 64, 1)
    limits = RequestLimits(512, checkpoint.spec.vocab_size, 64, 100, True)
    engine = EngineFacts(EngineConfig(), native, limits, True, 100, "sm_90", LIBRARIES)
    return ReplicaFacts(
        *("hosta", "node", 1, ("0",), engine, evalengine.CONTRACT_VERSION, checkpoint.spec, "abc"),
        hardware=Hardware("cuda", "Xeon", 64, ["H100"]),
    )


def like_but(facts: ReplicaFacts, **engine: Any) -> ReplicaFacts:
    """A replica whose engine differs in these facts."""
    return replace(facts, engine=replace(facts.engine, **engine))


def test_a_replica_unlike_the_first_is_named() -> None:
    checkpoint = prepare(compose("engine.device=cpu"))[0]
    like = replica_facts(checkpoint)
    native = like.engine.settings
    assert [*unlike(like, like, checkpoint.spec, "abc")] == []
    assert like.where == "hosta GPU 0 (H100)"
    spec = replace(checkpoint.spec, vocab_size=checkpoint.spec.vocab_size + 1)
    others = {
        "its contract version is 0": replace(like, contract_version=0),
        "its model's configuration": replace(like, spec=spec),
        "its tokenizer is not": replace(like, tokenizer="abd"),
        "its numerics is fast, that of hosta GPU 0 (H100) is native": like_but(
            like, settings=replace(native, numerics="fast")
        ),
        "its dtype is float16": like_but(like, settings=replace(native, dtype=torch.float16)),
        "its GPU is sm_80, that of hosta GPU 0 (H100) is sm_90": like_but(like, gpu_architecture="sm_80"),
        "its triton is 3.5.0, that of hosta GPU 0 (H100) is 3.6.0": like_but(
            like, libraries={**LIBRARIES, "triton": "3.5.0"}
        ),
        "its tokenizers is None, that of hosta GPU 0 (H100) is 0.23.2": like_but(
            like, libraries={**LIBRARIES, "tokenizers": None}
        ),
    }
    for message, unlike_first in others.items():
        (problem,) = unlike(unlike_first, like, checkpoint.spec, "abc")
        assert problem.startswith(message)
    elsewhere = like_but(like, gpu_architecture="x", libraries={**LIBRARIES, "torch": "2.12.0", "cuda": None})
    exact = [like_but(facts, settings=replace(native, numerics="exact")) for facts in (like, elsewhere)]
    assert [*unlike(exact[1], exact[0], checkpoint.spec, "abc")] == [], "exact has equal bits everywhere"


def test_a_replica_with_other_files_in_the_same_place_is_hashed_before_it_joins() -> None:
    """Each machine's files are hashed once, but a replica that replaces a lost one may have loaded the next step's."""
    stamp, later = (("model.safetensors", 1, 2, 3, 4),), (("model.safetensors", 1, 5, 3, 9),)
    asked: list[str] = []
    actor = SimpleNamespace(weights_sha256=SimpleNamespace(remote=lambda: asked.append("hash") or "call"))
    pool = Pool.__new__(Pool)
    pool._known, pool.first, pool._tokenizer, pool.members = {("node", stamp): None}, None, None, {}
    pool._checkpoint = SimpleNamespace(spec=None)
    pool.remove = lambda name, replace: None  # type: ignore[method-assign]
    same, other = (
        ActorState(str(own), actor, "wait", facts=ReplicaFacts("host", "node", 1, (), None,
                   evalengine.CONTRACT_VERSION, None, None, Hardware("cpu", "x", 1, []), own))
        for own in (stamp, later)
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evalengine.integrations.ray.pool.unlike", lambda *facts: iter(()))
        patch.setattr("evalengine.integrations.ray.pool.weights_fingerprint", lambda checkpoint: "the driver's")
        assert [event.kind for event in pool._check(same)] == ["joined"]
        pool.members = {"other": other}
        assert [*pool._check(other)] == [] and other.doing == "wait"
        pool._hash_files()
        assert asked == ["hash"] and other.doing == "hash"
        pool._known[other.facts.files], other.doing = "another's", "wait"
        (event,) = pool._check(other)
    assert event.kind == "refused" and "its weights have the hash another's" in event.why


def test_replicas_tokenizers_are_alike_in_all_they_decode_by() -> None:
    tokenizer = prepare(compose("engine.device=cpu"))[0].tokenizer
    other = copy.deepcopy(tokenizer)
    other.eos_token = "."
    assert tokenizer_sha256(tokenizer) != tokenizer_sha256(other)
    assert tokenizer_sha256(tokenizer) == tokenizer_sha256(copy.deepcopy(tokenizer)) and tokenizer_sha256(None) is None


def test_the_facts_of_replicas_are_those_of_their_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose("engine.device=cpu")
    checkpoint = prepare(config)[0]
    fleet = RayEngines(config, checkpoint)
    fleet._hash_weights()
    monkeypatch.setattr(
        RayEngines, "first", like_but(replica_facts(checkpoint), libraries={**LIBRARIES, "triton": "3.5.0"})
    )
    theirs = fleet.facts()
    assert (theirs.libraries["triton"], theirs.gpu_architecture) == ("3.5.0", "sm_90")
    assert theirs.cluster["hardware"]["device"] == "cuda" and "replicas" in theirs.cluster["cluster"]
    here = deferred_llm(config, checkpoint).facts()
    assert here.libraries["torch"] == torch.__version__ and not here.cluster and here.gpu_architecture is None
    assert checkpoint.hashes, "hashed while the replicas load"
