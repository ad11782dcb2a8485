"""Which package may import which, and which wing of the report: the table that `test_architecture` holds.

No package imports an integration, but one integration another; the core loads them by name (`util.plugins`).

`benchmarks`, outside the wheel, may import the package and `tests.references`; the package imports neither."""

from __future__ import annotations

# package -> the packages of evalengine that it may import, besides itself and `plain_text`, by which all print
ARROWS: dict[str, set[str]] = {
    "plain_text": set(),
    "errors": set(),
    "version": set(),
    "util": {"errors"},
    "config": {"tasks", "util", "errors"},  # of the tasks only their names, when a setting is one
    "kernels": set(),
    "verification": {"kernels", "util"},
    "layers": {"kernels", "verification", "errors", "version"},
    "models": {"invariant", "kernels", "layers", "config", "util", "errors", "version"},
    "engine": {"records", "models", "layers", "verification", "kernels", "config", "util", "errors", "version"},
    "invariant": {"kernels", "verification", "errors"},
    "tasks": {"config", "util", "errors"},
    "records": {"config", "util", "errors", "version"},
    "report": {"records", "tasks", "config", "util", "errors", "version"},
    "cache": {"engine", "models", "records", "config", "util", "errors"},
    "harness": {"cache", "engine", "models", "tasks", "records", "config", "util", "errors"},
    "certify": {"harness", "engine", "models", "layers", "verification", "tasks", "records", "config", "util"}
    | {"errors", "version"},
    "explain": {"harness", "engine", "layers", "records", "report", "config", "util", "errors"},
    "receipts": {"harness", "engine", "models", "records", "report", "config", "util", "errors"},
    "bench": {"certify", "harness", "engine", "models", "records", "config", "util", "errors"},
    "integrations": set(),
    "integrations.endpoint": {"harness", "tasks", "records", "report", "config", "util", "errors"},
    "integrations.exports": {"report", "records", "config", "util", "errors", "version"},
    "integrations.inspect_ai": {"integrations.openai_server", "engine", "report", "records", "config"}
    | {"util", "errors"},
    "integrations.lm_eval": {"cache", "harness", "engine", "models", "records", "config", "util", "errors"},
    "integrations.lm_eval_tasks": {"tasks", "config", "util", "errors"},
    "integrations.openai_server": {"harness", "engine", "models", "records", "config", "util", "errors"},
    "integrations.ray": {"engine", "models", "records", "config", "util", "errors"},
    "integrations.sandbox": {"tasks", "errors"},
    "assets": set(),
    "benchmarks": {"bench", "cli", "cache", "harness", "certify", "engine", "models", "layers", "kernels", "invariant"}
    | {"verification", "records", "report", "config", "util", "errors"},
    "__init__": {"api", "engine", "invariant", "report", "config", "errors", "version"},
    "api": {"engine", "harness", "report", "config", "util", "errors"},
    "cli": {"api", "engine", "harness", "report", "records", "tasks", "config"} | {"util", "errors", "version"},
    "__main__": {"cli", "util"},
}
# wing of `report` -> the other wings that it may import
WINGS: dict[str, set[str]] = {
    "numbers": set(),
    "read": {"numbers"},
    "stats": {"read", "numbers"},
    "run_table": {"stats", "read", "numbers"},
    "compare": {"stats", "read", "numbers"},
    "html": {"compare", "stats", "read", "numbers"},
    "sweep": {"stats", "html", "compare", "read", "numbers"},
    "leaderboard": {"sweep", "html", "compare", "stats", "read", "numbers"},
    "gate": {"html", "compare", "stats", "read", "numbers"},
    "python": {"gate", "leaderboard", "compare", "html", "run_table", "stats", "read"},
    "cli": {"gate", "leaderboard", "compare", "html", "read", "numbers"},
}
