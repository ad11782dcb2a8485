"""A receipt of one item of a run."""

from __future__ import annotations

from collections.abc import Sequence

from evalengine.engine.request import GenerateRequest
from evalengine.errors import ConfigError, listed
from evalengine.receipts.of_run import planned
from evalengine.receipts.receipt import COMPUTED_BY, Receipt, plain_params
from evalengine.records.digest import merkle_path
from evalengine.records.folder import RECORDS
from evalengine.records.schema import read_records
from evalengine.report.read.names import named_item
from evalengine.report.read.run import Run


def prove(run: Run, item: str, places: Sequence[str] = ()) -> Receipt:
    """The receipt of an item, named as in `--item`. The rows are planned again to know what was asked; no weights are
    loaded. places: where rows and weights lie here.

    Raises ConfigError for a run that has no such item or cannot be proved.
    """
    provable(run, "prove")
    key = named_item(run, item, "prove")
    plan, llm = planned(run, places)
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


def provable(run: Run, command: str) -> None:
    """Raises ConfigError for a run whose items cannot be computed again one by one."""
    if run.kind != "run" or run.records is not None:
        what = "lm-eval ran it, so its requests are lm-eval's" if run.records is not None else f"it is a {run.kind}"
        raise ConfigError(f"{command}: {run.source}: {what}; give the folder of a run of evalengine's own")
    if lacking := [name for name in COMPUTED_BY if name not in run.identity and name != "gpu_architecture"]:
        raise ConfigError(f"{command}: {run.source}: its manifest does not say {listed(lacking, 3)}; run it again")
    if run.identity["numerics"] == "fast":
        raise ConfigError(
            f"{command}: {run.name} ran in fast numerics, whose bits depend on the batch: no item of it can be "
            "computed again by itself; run it with batch_invariant=true"
        )
