"""Words with dashes, lm-eval's above all, in place of settings: which command line means the same here."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from itertools import takewhile

from evalengine.config.shipped import CONF, available
from evalengine.config.synonyms import DTYPES, LM_EVAL
from evalengine.util.command import PROGRAM

SHORT = {  # lm-eval's short names
    **dict.fromkeys(("-m", "-M"), "model"),
    "-t": "tasks",
    "-a": "model_args",
    "-L": "limit",
    "-f": "num_fewshot",
    "-b": "batch_size",
    "-o": "output_path",
    "-c": "use_cache",
    "-s": "log_samples",
    "-w": "write_out",
    "-v": "verbosity",
    "-x": "predict_only",
    "-C": "config",
    "-E": "samples",
}
OURS = ("-m", "-c", "-h", "--multirun", "--cfg", "--version", "--help", "--install-completion", "--show-completion")
FLAGS = {  # options that need no value -> ours
    **{name: name for name in ("apply_chat_template", "fewshot_as_multiturn", "batch_invariant")},
    "confirm_run_unsafe_code": "allow_code_execution",
}
LEFT_OUT = {  # what nothing has to be written for, and why
    "model": "the engine is this one",
    "log_samples": "samples are always written",
    "do_sample": "a temperature above 0 samples",
    "write_out": f"{PROGRAM} tasks NAME --show 3 prints prompts",
    "show_config": "--cfg prints the settings",
    "include_path": "a file is chosen by its path, task=FOLDER/NAME.yaml",
    "wandb_args": "log_to=wandb logs the run",
    **dict.fromkeys(("verbosity", "predict_only", "samples", "config", "metadata"), "it has no counterpart"),
    **dict.fromkeys(("trust_remote_code", "cache_requests", "check_integrity"), "it has no counterpart"),
    **dict.fromkeys(("wandb_config_args", "trackio_args", "hf_hub_log_args"), "it has no counterpart"),
}
MANY_VALUES = ("model_args", "gen_kwargs", "metadata", "wandb_args", "wandb_config_args", "trackio_args")


def in_our_words(argv: Sequence[str]) -> str | None:
    """What to write in place of `argv`, all words at once; None if all its options are ours."""
    options = [word for word in argv if word.startswith("-") and word.partition("=")[0] not in OURS]
    if not options:
        return None
    translation = _Translation()
    translation.read(argv[1:] if argv[:1] == ["run"] else argv)
    command = shlex.join([*PROGRAM.split(), *translation.words()])
    left = "; ".join(f"{name}: {why}" for name, why in translation.left_out.items())
    return (
        f"{' '.join(option.partition('=')[0] for option in options)}: settings have no dashes; write {command}"
        + (f" (left out: {left})" if left else "")
        + (f"; {PROGRAM} lm_eval takes lm-eval's words as they are" if translation.lm_evals else "")
    )


class _Translation:
    """Settings that mean what lm-eval's options mean."""

    def __init__(self) -> None:
        self.left_out: dict[str, str] = {}  # option -> why nothing is written for it
        self.lm_evals = False  # whether an option is lm-eval's
        self._settings: dict[str, str] = {}  # a setting's name -> its value in the grammar of settings
        self._kept: list[str] = []  # words that are ours

    def words(self) -> list[str]:
        """The command line's words after the program."""
        return [*self._kept, *(f"{name}={value}" for name, value in self._settings.items())]

    def read(self, argv: Sequence[str]) -> None:
        """Translates the words; those that are ours are kept."""
        left = list(argv)
        while left:
            word = left.pop(0)
            values = list(takewhile(lambda value: not re.match(r"--?[a-zA-Z]", value), left))
            bare = list(takewhile(lambda value: "=" not in value or value[:1] == "{", values))
            if not word.startswith("-") or (word in OURS and not (word in SHORT and bare)):
                self._kept.append(word)
                continue
            name, equals, value = word.removeprefix("--").partition("=")
            name = SHORT.get(word, name).replace("-", "_")
            if equals:
                values = [value]
            else:
                values = values if name in MANY_VALUES else bare if name == "tasks" else bare[:1]
                del left[: len(values)]
            self._option(f"--{name}", name, values)

    def _option(self, option: str, name: str, values: Sequence[str]) -> None:
        special: dict[str, Callable[[Sequence[str]], None]] = {
            "tasks": self._tasks,
            "model": self._model,
            "limit": self._limit,
            "seed": self._seed,
            "model_args": lambda given: self._entries(option, given),
            "gen_kwargs": lambda given: self._entries(option, given),
        }
        self.lm_evals |= name in {*special, *SHORT.values()} - {"limit", "model", "seed"}
        if name in special and values:
            special[name](values)
        elif name in FLAGS:
            no = bool(values) and values[0].lower() in ("false", "0", "no")
            self._settings[FLAGS[name]] = "false" if no else "true"
            if values and not no and values[0].lower() not in ("true", "1", "yes"):
                self.left_out[f"{option} {values[0]}"] = "a template has no name here"
        elif name == "batch_size" and values and values[0].startswith("auto"):
            self.left_out[option] = "the engine fills its batches itself"
        elif name in LEFT_OUT:
            self.left_out[option] = LEFT_OUT[name]
        else:
            self._settings[LM_EVAL.get(name, name)] = _written(values[0]) if values else "VALUE"

    def _tasks(self, values: Sequence[str]) -> None:
        names = [_task(name) for value in values for name in value.split(",") if name]
        self._settings["task"] = names[0] if len(names) == 1 else f"[{','.join(names)}]"

    def _model(self, values: Sequence[str]) -> None:
        if values[0] in available("model"):
            self._settings["model"] = values[0]
        elif "/" in values[0]:
            self._settings["model.path"] = _written(values[0])
        else:
            self.left_out["--model"] = LEFT_OUT["model"]

    def _limit(self, values: Sequence[str]) -> None:
        try:
            limit = float(values[0])
        except ValueError:
            limit = 0.0
        if 0 < limit < 1:
            self._settings["limit"] = "N"
            self.left_out[f"--limit {values[0]}"] = "N is a number of documents of each task, not a share"
        else:
            self._settings["limit"] = str(int(limit)) if limit >= 1 and limit == int(limit) else values[0]

    def _seed(self, values: Sequence[str]) -> None:
        """lm-eval's seeds: of Python, NumPy and torch, and of the exemplars; one is for all."""
        seeds = values[0].split(",")
        given = {"seed": seeds[min(2, len(seeds) - 1)], "fewshot_seed": seeds[-1]}
        self._settings.update({name: seed for name, seed in given.items() if seed not in ("", "None")})

    def _entries(self, option: str, values: Sequence[str]) -> None:
        """The entries `name=value,...` of an option, or those of a mapping in JSON."""
        for name, value in _mapping(values):
            if name in LM_EVAL:
                self._settings[LM_EVAL[name]] = DTYPES.get(value, value) if name == "dtype" else value
            else:
                self.left_out[f"{option} {name}"] = LEFT_OUT.get(name, "it has no counterpart")


def _mapping(values: Sequence[str]) -> Iterator[tuple[str, str]]:
    text = " ".join(values)
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if isinstance(given, dict):
        for name, value in given.items():
            yield name, _written(value) if isinstance(value, str) else json.dumps(value)
        return
    for name, value in re.findall(r"([\w.]+)=(\[[^\]]*\]|\{[^}]*\}|[^,\s]*)", text):
        yield name, value if value[:1] in ("[", "{") else _written(value)


def _task(name: str) -> str:
    """Our name of lm-eval's task: shipped (`mmlu_anatomy` is mmlu/anatomy), a file, or run by lm-eval itself."""
    if name in available("task") or name.endswith((".yaml", ".yml")):
        return _written(name)
    for folder in (entry.name for entry in (files(CONF) / "task").iterdir() if entry.is_dir()):
        own = name.removeprefix(f"{folder}_")
        if own != name and (files(CONF) / "task" / folder / f"{own}.yaml").is_file():
            return f"{folder}/{own}"
    return f"lm_eval/{name}"


def _written(value: str) -> str:
    """A value in the grammar of settings."""
    from evalengine.config.words import quoted

    return value if re.fullmatch(r"[\w./:@+-]+", value) else quoted(value)
