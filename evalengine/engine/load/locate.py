"""Finds the files of a `model.path`: a directory, a Hub id, a .gguf file, `package:...` or `asset:...`."""

from __future__ import annotations

import importlib.util
import logging
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from evalengine.config.schema import ModelConfig
from evalengine.engine.load.shards import has_named_weights
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.models.file_values import one_line, plain
from evalengine.util.hub import offline_if_unreachable

logger = logging.getLogger(__name__)

CONFIG_FILES = ("*.json", "*.jinja", "tokenizer*", "*.txt")  # files of the configuration and the tokenizer
WEIGHT_FILES = ("*.safetensors",)
PYTORCH_FILES = ("pytorch_model*.bin",)  # where there are no files of the other kind
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Absent(Exception):
    """Nothing is at this path; the error names the expected content."""


@dataclass(frozen=True)
class Located:
    """A path that exists, and where it came from."""

    path: Path
    source: str  # the path as configured, e.g. the Hub id
    revision: str | None = None  # the Hub commit; None for a local path


def locate_model(model: ModelConfig) -> Located:
    """The first of `model.path` and `model.alternatives` that exists; `ConfigError` names all that were tried."""
    files = {"dummy": (), "pytorch": PYTORCH_FILES}.get(model.load_format, WEIGHT_FILES)
    patterns = CONFIG_FILES + files
    tried = []
    for path in [model.path, *model.alternatives]:
        try:
            located = locate(path, model.revision, patterns)
        except Absent as error:
            tried.append(str(error))
            continue
        if tried:
            logger.warning("model.path=%s is absent, using %s", model.path, path)
        return located
    raise ConfigError(
        f"model.path={model.path}: no model found. Tried: {'; '.join(tried)}. "
        "Set model.path to a folder with config.json and *.safetensors, a .gguf file, or a reachable Hub id"
    )


def locate(path: str, revision: str | None, patterns: tuple[str, ...], setting: str = "model.path") -> Located:
    """Finds one path. A Hub snapshot is downloaded (only files matching `patterns`) or taken from the Hub's cache.
    setting: names the path in messages.

    Raises `Absent`, or `EvalEngineError` for a download that broke off.
    """
    try:
        if path.startswith("asset:"):
            return Located(_asset(path), path)
        if path.startswith("package:"):
            return Located(_package_file(path), path)
        local = Path(path).expanduser()
        if path and local.exists():
            return Located(local, path)
    except (OSError, RuntimeError, ValueError, ImportError) as error:  # e.g. a path too long, an unknown ~user
        raise Absent(f"{plain(path)} ({one_line(error)})") from error
    if path.lower().endswith((".gguf", ".json")) or not _HUB_ID.fullmatch(path) or path.startswith("."):
        raise Absent(f"{path} (no such file or folder)")
    return _hub(path, revision, patterns, setting)


def _asset(path: str) -> Path:
    root = Path(str(resources.files("evalengine"))) / "assets"
    folder = root / path.removeprefix("asset:")
    if not folder.is_dir():
        bundled = ", ".join(sorted(p.parent.name for p in root.glob("*/config.json"))) or "none"
        raise Absent(f"{path} (bundled models: {bundled})")
    return folder


def _package_file(path: str) -> Path:
    """The file of `package:<module>/<file>`, without importing the package, which may have side effects."""
    module, _, file = path.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise Absent(f"{path} (Python package {module} is not installed)")
    for folder in spec.submodule_search_locations:
        if (candidate := Path(folder) / file).exists():
            return candidate
    raise Absent(f"{path} (package {module} has no file {file})")


def _hub(repo_id: str, revision: str | None, patterns: tuple[str, ...], setting: str) -> Located:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with offline_if_unreachable():
            for wanted in (patterns, (*patterns, *PYTORCH_FILES)):
                found = snapshot_download(repo_id, revision=revision, allow_patterns=list(wanted), etag_timeout=5)
                folder = Path(found)
                if not {*WEIGHT_FILES} <= {*patterns} or has_named_weights(folder, "safetensors"):
                    break
    except LocalEntryNotFoundError as error:
        raise Absent(f"{repo_id} (no such folder; the Hub is unreachable and its cache does not hold it)") from error
    except (HfHubHTTPError, HFValidationError) as error:
        at = f" at revision {revision}" if revision else ""
        raise Absent(f"{repo_id}{at} (no such folder; the Hub says: {str(error).strip().splitlines()[0]})") from error
    except Exception as error:  # the Hub's client lets its HTTP library's own errors through
        raise EvalEngineError(f"{setting}={repo_id}: the download broke off ({error}); run it again") from error
    return Located(folder, repo_id, folder.name)
