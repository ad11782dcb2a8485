"""A finished run's files as one piece of evidence: none can be edited, exchanged or added unnoticed.

`manifest.json` lists the SHA-256 of every other file of the run, and carries the hash of its own content. `report.html`
is a view of the others that may be written anew at any time, so it is bound the other way round: its last line holds
the manifest's hash and its own (`sealed_page`). All this finds damage and edits; it is no signature: an edit that
rewrites every hash passes.

A run that was written before manifests had the list is read too; `is_bound` tells, and readers say that edits of it
would pass unseen. The files that a command's options name must not be among these files: `file_problems`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError, EvalEngineError, readable
from evalengine.records.folder import DIGEST, IDENTITY, JOURNAL, LOCK, RECORDS
from evalengine.records.lm_eval_file import ISO
from evalengine.records.manifest_data import MANIFEST, Manifest, load_manifest
from evalengine.records.sealed import content_sha256, sha256_of
from evalengine.util.plain_files import file_sha256

CONFIG, PAGE, TOKENS = "config.yaml", "report.html", "tokens.json"
CLIENT_REQUESTS = "asked.jsonl"  # of a run whose requests came from clients
FILES, SHA256 = "files", "sha256"  # keys of the manifest
# Files of a finished run.
OURS = (DIGEST, RECORDS, TOKENS, CONFIG, CLIENT_REQUESTS, "results_*.json", "samples_*.jsonl")
NEEDED = (DIGEST, RECORDS)  # every run has them; results files are checked where they are read
AGAIN = "run its command again, or take the folder from where it was copied"
SINCE_BOUND = "model_spec"  # a key of the identity: every evalengine that writes the key binds the files, too
STANDARD_STREAMS = ("/dev/fd/1", "/dev/fd/2")  # output and error
_BOUND_PAGE = re.compile(rb"<!-- evalengine manifest [0-9a-f]{64}, page [0-9a-f]{64} -->\n\Z")


def bind(manifest: Manifest, folder: Path, digest: str) -> Manifest:
    """The manifest with the hashes of the files in `folder` now, and of the digest file to come.

    Raises EvalEngineError if one cannot be read.
    """
    assert not {FILES, SHA256} & {*manifest.content}, "a manifest is bound once"
    try:
        files = {name: file_sha256(folder / name) for name in _ours(folder)}
    except OSError as error:
        raise EvalEngineError(
            f"could not read {error.filename or folder} back: {error.strerror or error}; fix this and rerun the "
            "command to resume"
        ) from error
    files[DIGEST] = hashlib.sha256(f"{digest}\n".encode()).hexdigest()
    bound = {**manifest.content, FILES: dict(sorted(files.items()))}
    return Manifest({**bound, SHA256: content_sha256(bound)})


def is_run_folder(path: Path) -> bool:
    """Whether this is a run of ours, finished or not, whole or not."""
    return any((path / name).is_file() for name in (DIGEST, RECORDS, JOURNAL, IDENTITY, MANIFEST, LOCK))


def file_problems(
    words: str,
    path: Path,
    endings: Collection[str] = (),
    inputs: Iterable[str | Path] = (),
    new_folder: bool = False,
    append: bool = False,
) -> Iterator[str]:
    """Yield why an option must not, or cannot, write the file that it names.

    words: the option and its value. endings: those that the file may have. inputs: what the command reads. new_folder:
    whether missing folders are made. append: whether the file is added to, not replaced. The files of a run are never
    written over, be it an input or not.
    """
    with readable(words):
        real = Path(os.path.realpath(path))
        above = next(place for place in real.parents if place.exists())
        if endings and path.suffix not in endings:
            yield f"{words}: name a file that ends in {', '.join(endings)}"
        elif path.is_dir():
            yield f"{words}: a folder; name a file in it"
        elif _of_a_run(real):
            yield f"{words}: a file of the run in {real.parent}; name another file"
        elif any(_same_file(path, Path(source)) for source in inputs):
            yield f"{words}: this command reads that file; name another one"
        elif append and path.is_file() and path.stat().st_nlink > 1:
            yield f"{words}: hard links give this file other names, which would change, too; name another file"
        elif path.is_file() and any(os.path.exists(out) and path.samefile(out) for out in STANDARD_STREAMS):
            yield f"{words}: what this command prints goes to that file; name another one"
        elif path.exists() and (append or not path.is_file()):  # it is opened, not replaced: a pipe or a device, too
            if not os.access(path, os.W_OK):
                yield f"{words}: no permission to write to it; name another file"
        elif above != real.parent and not new_folder and above.is_dir():
            yield f"{words}: there is no folder {path.parent}; make it, or name another file"
        elif not (above.is_dir() and os.access(above, os.W_OK)):
            yield f"{words}: {above} is not a writable folder; name another place"


def repeated(command: str, paths: Iterable[Path]) -> list[str]:
    """Return a problem for each file that two of a command's options name. They may share a pipe or a device."""
    files = [path for path in paths if path.is_file() or not path.exists()]
    twice = [path for number, path in enumerate(files) if any(_same_file(path, other) for other in files[:number])]
    return [f"{command}: {path}: two options name this file; name another for one of them" for path in twice]


def _same_file(path: Path, other: Path) -> bool:
    """Whether two paths are of one file, or will be once it is written."""
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)  # also by a hard link, or where names differ in case alone
    return os.path.realpath(path) == os.path.realpath(other)


def _of_a_run(path: Path) -> bool:
    """Whether a run of ours has files of this name in this folder, or lm-eval wrote the file."""
    if any((path.parent / name).is_file() for name in (DIGEST, RECORDS, JOURNAL, IDENTITY)):
        return any(fnmatch(path.name, name) for name in (*OURS, MANIFEST, PAGE, JOURNAL, IDENTITY, LOCK))
    return path.is_file() and re.search(rf"_{ISO}\.jsonl?$", path.name) is not None


def is_bound(manifest: Manifest) -> bool:
    """Whether the manifest lists the run's files."""
    return FILES in manifest.content


def open_run(folder: Path, page: bool = True, judge: bool = True) -> Manifest:
    """The manifest of a finished run whose files are those that it was finished with. Every reader of runs begins here.

    page: whether `report.html` is checked; a command that writes it anew need not. judge: whether the run of its judge
    is; it hashes all files of that run, which only a reader of scores needs.
    Raises `ConfigError` that names every file that is missing, edited, damaged or added, with the fix.
    """
    if not (folder / DIGEST).is_file():
        raise ConfigError(
            f"{folder}: this run is not finished ({DIGEST} is missing); run its command again: it resumes"
        )
    manifest = load_manifest(folder / MANIFEST, AGAIN)
    if not is_bound(manifest) and SHA256 not in manifest.content and not _page_of_a_bound_run(folder / PAGE):
        if SINCE_BOUND in manifest.identity:
            raise ConfigError(f"{folder / MANIFEST}: the hashes of the run's files were taken out of it; {AGAIN}")
        return manifest
    problems = _manifest_problem(folder, manifest) or [*_problems(folder, manifest.content[FILES])]
    if not problems and page:
        problems = _page_problem(folder, manifest.content[SHA256])
    if not problems and judge:
        problems = [*_judge_problems(folder, manifest)]
    if problems:
        raise ConfigError(problems)
    return manifest


def sealed_page(text: str, manifest: Manifest) -> bytes:
    """A page's file: its text, and a last line that binds it to the run whose manifest this is."""
    content = text.encode("utf-8")
    return content + _page_seal(content, manifest.sha256 or "none")


def _ours(folder: Path) -> Iterator[str]:
    names = sorted(entry.name for entry in folder.iterdir())
    return (name for name in names if any(fnmatch(name, pattern) for pattern in OURS))


def _manifest_problem(folder: Path, manifest: Manifest) -> list[str]:
    """Problems of the manifest itself."""
    where, recorded = folder / MANIFEST, str(manifest.content.get(SHA256))
    if recorded != (actual := sha256_of(manifest.unsealed)):
        return [f"{where}: its content gives sha256 {actual}, not {recorded[:64]}: it was edited or damaged; {AGAIN}"]
    files = manifest.content.get(FILES)
    if not isinstance(files, dict) or any(Path(name).name != name for name in files):
        return [f"{where}: its list of files is none: it was edited; {AGAIN}"]
    if missing := [name for name in NEEDED if name not in files]:
        return [f"{where}: it does not list {' and '.join(missing)}: it was edited; {AGAIN}"]
    return []


def _problems(folder: Path, files: Mapping[str, Any]) -> Iterator[str]:
    for name, listed in files.items():
        path = folder / name
        try:
            if not path.is_file():
                yield f"{path}: missing, but {MANIFEST} lists it; {AGAIN}"
            elif (actual := file_sha256(path)) != listed:
                yield (
                    f"{path}: not the file that the run wrote (its SHA-256 is {actual[:12]}..., {MANIFEST} lists "
                    f"{str(listed)[:12]}...): it was edited or damaged; {AGAIN}"
                )
        except OSError as error:
            yield f"{path}: {error.strerror or error}; mend its permissions, or {AGAIN}"
    for name in _ours(folder):
        if name not in files:
            yield f"{folder / name}: not a file of this run ({MANIFEST} does not list it); take it out of the folder"

    if (folder / JOURNAL).exists() and not (folder / IDENTITY).exists():  # a run that ends removes the journal first
        yield f"{folder / JOURNAL}: not a file of a finished run; take it out of the folder"


def _judge_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Problems of the run of the judge that scored the answers. A judge behind an API has no digest."""
    judge = manifest.judge
    if judge is None:
        return
    path = folder / judge.run
    try:
        if not path.is_dir():
            yield f"{path}: missing: the run of the judge that scored these answers; {AGAIN}"
        elif judge.digest is not None and (digest := open_run(path, page=False, judge=False).digest) != judge.digest:
            yield f"{path}: its digest is {digest[:12]}..., {folder / MANIFEST} names {judge.digest[:12]}...; {AGAIN}"
    except ConfigError as error:
        yield from error.problems
    except OSError as error:
        yield f"{path}: {error.strerror or error}; mend its permissions, or {AGAIN}"


def _page_problem(folder: Path, manifest_sha256: str) -> list[str]:
    path = folder / PAGE
    try:
        content = path.read_bytes() if path.is_file() else None
    except OSError as error:
        return [f"{path}: {error.strerror or error}; mend its permissions, or delete it"]
    if content is None:  # a run is whole without its page
        return []
    text = content[: content.rfind(b"<!-- evalengine manifest ")]
    if content == text + _page_seal(text, manifest_sha256):
        return []
    return [
        f"{path}: not the page that was written of this run: it was edited, damaged or copied here; write it anew: "
        f"python -m evalengine report {folder}, or delete it"
    ]


def _page_of_a_bound_run(path: Path) -> bool:
    """Whether the page names a bound manifest: where the manifest is unbound, its hashes were taken out."""
    try:
        return path.is_file() and _BOUND_PAGE.search(path.read_bytes()) is not None
    except OSError:
        return False


def _page_seal(content: bytes, manifest_sha256: str) -> bytes:
    """The last line of a page with this content."""
    page_sha256 = hashlib.sha256(manifest_sha256.encode() + b"\n" + content).hexdigest()
    return f"<!-- evalengine manifest {manifest_sha256}, page {page_sha256} -->\n".encode()
