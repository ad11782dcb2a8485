"""Which package may import which, and which wing of the report: the table that `test_architecture` holds."""

from __future__ import annotations

# package -> the packages of evalengine that it may import, besides itself and `plain_text`, by which all print
ARROWS: dict[str, set[str]] = {
    "plain_text": set(),
    "errors": set(),
    "plain_files": set(),
    "hub": {"waiting"},
    "endings": set(),
    "waiting": set(),
    "command": {"errors"},
    "commands": {"bench", "compose_words", "shipped", "command", "errors"},
    "shipped": {"errors", "plain_files"},
    "tables": set(),
    "arguments": {"errors"},
    "config": {"arguments", "errors"},
    "config_values": {"arguments"},
    "config_engine": {"config", "config_values", "arguments", "errors"},
    "config_tasks": {"config", "config_values"},
    "config_run": {"config", "config_engine", "config_tasks", "config_values", "arguments", "errors"},
    "compose_globs": {"errors"},
    "compose": {"compose_files", "compose_globs", "compose_node", "compose_texts", "compose_words", "task_files"}
    | {"config", "config_run", "shipped", "errors", "plain_files"},
    "compose_texts": set(),
    "compose_words": {"compose_files", "compose_texts", "config", "errors"},
    "compose_files": {"errors", "plain_files"},
    "compose_node": {"config", "errors"},
    "task_files": {"compose_files", "task_outline", "tasks", "config", "config_tasks", "errors", "plain_files"},
    "task_outline": {"shipped", "compose_files", "compose_node", "config", "plain_files"},
    "contract": set(),
    "version": set(),
    "line_worker": set(),
    "beside": {"errors"},
    "garbage": set(),
    "kernels": set(),
    "verification": {"kernels"},
    "layers": {"kernels", "verification", "contract", "errors"},
    "models": {"kernels", "layers", "arguments", "errors", "plain_files"},
    "engine": {"hub", "models", "layers", "kernels", "config", "config_engine", "config_values", "arguments", "errors"}
    | {"endings", "line_worker", "plain_files", "shipped"},
    "invariant": {"layers", "kernels", "verification", "errors"},
    "estimators": set(),
    "programs": {"errors"},
    "tasks": {"hub", "estimators", "programs", "line_worker", "waiting", "config", "errors", "plain_files"},
    "records": {"beside", "contract", "config", "errors", "plain_files", "version"},
    "report": {"tables", "records", "beside", "estimators", "command", "config", "config_run", "errors", "plain_files"}
    | {"version"},
    "cluster": {"contract", "engine", "models", "records", "config", "errors"},
    "cache": {"tables", "engine", "models", "records", "command", "errors", "plain_files"},
    "harness": {"cache", "cluster", "engine", "models", "tasks", "programs", "records"}
    | {"beside", "garbage", "config", "errors", "plain_files", "version"},
    "certify": {"tables", "harness", "engine", "models", "layers", "kernels", "verification", "tasks", "records"}
    | {"contract", "compose", "config", "command", "errors", "plain_files"},
    "explain": {"harness", "engine", "layers", "records", "report", "compose", "config", "command", "errors"}
    | {"plain_files"},
    "receipts": {"harness", "engine", "models", "records", "report", "compose", "config", "command", "errors"}
    | {"contract"},
    "bench": {"cache", "compose", "harness", "certify", "engine", "models", "layers", "kernels", "records", "report"}
    | {"tables", "invariant", "verification", "config", "command", "errors", "garbage", "plain_files"},
    "lm_eval_model": {"cache", "harness", "engine", "records", "compose_node", "arguments", "errors"}
    | {"contract", "config", "config_engine", "config_run"},
    "assets": set(),
    "__init__": {"contract", "api", "engine", "invariant", "report", "config", "errors", "version"},
    "api": {"shipped", "arguments", "command", "compose", "config", "errors", "engine", "harness", "report"}
    | {"compose_texts"},
    "jobs": {"api", "beside", "command", "compose", "config", "contract", "errors", "experiment", "launch", "report"}
    | {"task_outline", "version"},
    "launch": {"api", "command", "compose", "errors"},
    "checkpoints": {"compose", "report"},
    "experiment": {"checkpoints", "command", "compose", "config", "errors", "plain_files", "engine", "harness"}
    | {"records", "report"},
    "task_list": {"tables", "command", "compose", "task_files", "task_outline", "tasks", "harness", "config", "errors"}
    | {"shipped"},
    "plan": {"command", "errors", "report", "shipped", "task_outline"},
    "__main__": {"command", "commands", "endings", "garbage"},
}
# wing of `report` -> the other wings that it may import
WINGS: dict[str, set[str]] = {
    "numbers": set(),
    "read": {"numbers"},
    "stats": {"read", "numbers"},
    "terminal": {"read", "numbers"},
    "compare": {"stats", "terminal", "read", "numbers"},
    "html": {"compare", "stats", "read", "numbers"},
    "sweep": {"html", "compare", "terminal", "read", "numbers"},
    "leaderboard": {"sweep", "html", "compare", "stats", "terminal", "read", "numbers"},
    "export": {"leaderboard", "compare", "read"},
    "gate": {"compare", "stats", "read", "numbers"},
    "python": {"gate", "leaderboard", "compare", "html", "terminal", "read"},
    "cli": {"gate", "export", "leaderboard", "compare", "html", "terminal", "read"},
}
