"""`python two_nodes.py FOLDER EVENT setting=value ...`: a run on a Ray cluster of two machines (simulated on this one).

EVENT: remove (the second machine goes in mid-run), join (it comes in mid-run), weights (it has other weights).
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ray.cluster_utils import Cluster

from evalengine.__main__ import main
from evalengine.integrations.ray import pool
from evalengine.integrations.ray.replica import Replica

MACHINE = {"num_cpus": 1, "object_store_memory": 100 << 20}


def once_begun(folder: Path, act: Callable[[], object], lines: int = 3) -> threading.Thread:
    """Calls `act` in a thread as soon as the run's journal has so many lines."""

    def wait() -> None:
        while sum(path.read_bytes().count(b"\n") for path in folder.glob("*/journal.jsonl")) < lines:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def replica_of_other_weights() -> type[Replica]:
    """The class of replicas whose machine has other weights than the driver's."""

    class OtherWeights(Replica):
        """A replica on a machine with other weights; the class is made in a function so that Ray sends its code
        along."""

        def weights_sha256(self) -> str:
            return "0" * 64

    return OtherWeights


def join(address: str) -> subprocess.Popen[bytes]:
    """Starts one more machine from another process, because Ray makes nodes in the main thread only."""
    words = ["ray", "start", f"--address={address}", "--num-cpus=1", "--object-store-memory=100000000", "--block"]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    folder, event = Path(sys.argv[1]), sys.argv[2]
    cluster = Cluster(initialize_head=True, head_node_args=MACHINE)
    second = None if event == "join" else cluster.add_node(**MACHINE)
    acting: threading.Thread | None = None
    joined: list[subprocess.Popen[bytes]] = []
    if event == "remove":
        acting = once_begun(folder, lambda: cluster.remove_node(second))
    elif event == "join":
        acting = once_begun(folder, lambda: joined.append(join(cluster.address)))
    else:
        pool.REPLICA = replica_of_other_weights()
    words = [f"output_dir={folder}", "cluster=ray", "cluster.replicas=2", f"cluster.address={cluster.address}"]
    code = main([*words, *sys.argv[3:]])
    if acting is not None:
        acting.join(60)
    for process in joined:
        process.terminate()
        process.wait()
    cluster.shutdown()
    sys.exit(code)
