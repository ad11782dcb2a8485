"""Two runs compared, if they are alike enough, with the weights in which they differ, where these can be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from evalengine.errors import ConfigError
from evalengine.report.compare.comparability import incomparable
from evalengine.report.compare.compare import Comparison, compare
from evalengine.report.compare.weight_tensors import in_words, weights_difference
from evalengine.report.read.asked import asked_of
from evalengine.report.read.identities import short
from evalengine.report.read.run import Run
from evalengine.util.plain_files import fingerprint, read_json

AT_MOST = 2_000_000_000  # most bytes of a run's weights that `compare` reads, twice: two such take half a minute
INDEX = "model.safetensors.index.json"


def compared(a: Run, b: Run, allow: bool) -> Comparison:
    """Two runs compared, with their weights where they differ and can be read, and what the changed documents asked.

    Raises `ConfigError` for unlike runs (unless `allow`), and for runs that share no request.
    """
    why = incomparable(a, b)
    if not a.items.keys() & b.items.keys():
        raise _refusal(a, b, why, "They have no request in common.")
    if why and not allow:
        raise _refusal(a, b, why, "--allow compares them on the requests that they share.")
    return replace(with_questions(compare(a, b)), tensors=differing_weights(a, b))


def with_questions(c: Comparison) -> Comparison:
    """The comparison, with what the documents asked whose output or answer differs."""
    changed = {(flip.task, flip.doc_id) for flip in c.flips} | {d.key[:2] for d in c.differences if "output" in d.kinds}
    return replace(c, asked=asked_of((c.a, c.b), changed))


def _refusal(a: Run, b: Run, why: Sequence[str], cure: str) -> ConfigError:
    what = f"{a.source} (A) and {b.source} (B) are not comparable{':' if why else '.'}"
    return ConfigError(what, *(f"  - {line}" for line in why), cure)


def differing_weights(a: Run, b: Run, at_most: int = AT_MOST) -> list[str]:
    """Which tensors differ, a sentence each without its full stop; or why that is not known.

    Empty where a run recorded no hash of its weights, or both recorded the same.
    """
    hashes = [run.identity.get("weights") for run in (a, b)]
    if None in hashes or hashes[0] == hashes[1]:
        return []
    weights = []
    for label, run in (("A", a), ("B", b)):
        try:
            weights.append(_weights_of(run, at_most))
        except (OSError, ValueError) as error:
            return [f"which tensors differ is not known: {label}'s weights {error}"]
    try:
        return in_words(weights_difference(*weights))
    except (OSError, ValueError) as error:
        return [f"which tensors differ is not known: {error}"]


def _weights_of(run: Run, at_most: int) -> list[Path]:
    """The files with the recorded hash. Raises `ValueError` (after "A's weights"), or OSError."""
    model, recorded_sha256 = run.manifest.model, str(run.identity["weights"])
    source = model.source
    if source is None:
        raise ValueError("are not named in its manifest")
    if model.format == "dummy":
        raise ValueError("are made up (dummy), and lie in no file")
    place = Path(str(files("evalengine"))) / "assets" / source[6:] if source.startswith("asset:") else Path(source)
    sets = list(_sets(place.expanduser()))
    if not sets:
        raise ValueError(f"are not at {source} on this machine")
    if (size := min(sum(file.stat().st_size for file in candidate) for candidate in sets)) > at_most:
        raise ValueError(f"take {size / 1e9:.1f} GB, which `explain` reads, and this command does not")
    recorded = next((candidate for candidate in sets if fingerprint(candidate) == recorded_sha256), None)
    if recorded is None:
        raise ValueError(f"at {source} are others now (their hash is not {short(recorded_sha256)})")
    return recorded


def _sets(place: Path) -> Iterator[list[Path]]:
    """Every set of files that a loader may take as the weights of this place; the hash tells which one it took."""
    if place.is_file():
        yield [place]
    if not place.is_dir():
        return
    if (single := place / "model.safetensors").is_file():
        yield [single]
    if (index := place / INDEX).is_file():
        named = read_json(index).get("weight_map")
        shards = [place / Path(str(name)).name for name in sorted({*named.values()})] if isinstance(named, dict) else []
        if shards and all(file.is_file() for file in shards):
            yield shards
    for pattern in ("*.safetensors", "*.gguf"):
        if every := sorted(place.glob(pattern)):
            yield every
