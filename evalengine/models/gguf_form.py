"""How llama.cpp writes a family's GGUF files: what their metadata are in a config.json, and how their tensors differ.

A file's metadata are read as the config.json of the model that it was made from, so that a family describes both by the
same code. The keys and what they mean are those of llama.cpp's converters (`conversion/`), and the values that a file
may leave out those of its `load_arch_hparams` (`src/models/`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class FieldReader(Protocol):
    """Metadata by type: a value of another type is an error that names its key."""

    def integer(self, key: str, default: Any) -> Any: ...
    def number(self, key: str, default: Any) -> Any: ...
    def boolean(self, key: str, default: Any) -> Any: ...
    def any(self, key: str) -> Any: ...


class Metadata:
    """A file's metadata below its architecture's name. It remembers which keys were read: others that would change
    the numbers are refused."""

    def __init__(
        self, fields: FieldReader, tensors: Iterable[str], factors: Callable[[str], list[float] | None]
    ) -> None:
        """tensors: all names; factors: a tensor's numbers by its name, None if there is none."""
        self._fields, self._tensors, self.factors = fields, frozenset(tensors), factors
        self.read: set[str] = set()

    def integer(self, key: str, default: int | None = None) -> Any:
        self.read.add(key)
        return self._fields.integer(key, default)

    def number(self, key: str, default: float | None = None) -> Any:
        self.read.add(key)
        return self._fields.number(key, default)

    def boolean(self, key: str, default: bool | None = None) -> Any:
        self.read.add(key)
        return self._fields.boolean(key, default)

    def value(self, key: str) -> Any:
        """The value of any type; None without it."""
        self.read.add(key)
        value = self._fields.any(key)
        return self._fields.number(key, None) if isinstance(value, float) else value

    def biased(self, role: str) -> bool:
        """Whether a layer's tensor has a bias."""
        return any(name.endswith(f".{role}.bias") for name in self._tensors)


Config = dict[str, Any]


@dataclass(frozen=True)
class GGUFForm:
    """The GGUF files of one family.

    complete: adds to a config.json, which has what all families have, this family's additional fields. when: the key,
    above 0, that tells its files from those of another family of the same architecture. eps: config.json's name of the
    norms' epsilon, if they are layer norms. permuted: whether q's and k's rows have the pairs of RoPE side by side, and
    the folder's do not. norms_plus_one: whether 1 was added to the norms' weights. names: roles of tensors that are
    another part of a layer than elsewhere.
    """

    architecture: str  # general.architecture
    complete: Callable[[Metadata, Config], None] = lambda metadata, config: None
    when: str | None = None
    eps: str | None = None
    permuted: bool = False
    norms_plus_one: bool = False
    names: Mapping[str, str] = field(default_factory=dict)


def named(**fields: str) -> Callable[[Metadata, Config], None]:
    """A `complete` for fields that are metadata by other names (`__`: a dot); those that a file lacks are left out."""

    def complete(metadata: Metadata, config: Config) -> None:
        for key, name in fields.items():
            if (value := metadata.value(key.replace("__", "."))) is not None:
                config[name] = value

    return complete


def add_windows(metadata: Metadata, config: Config, period: int, default: int | None = None) -> None:
    """`sliding_window` and `layer_types`. period: without a pattern, every such layer, the last of each, sees all keys;
    default: the window of a file that names none."""
    window, name = metadata.integer("attention.sliding_window", default), "attention.sliding_window_pattern"
    slides = metadata.value(name)
    if not isinstance(slides, list):
        period = metadata.integer(name, period)
        slides = [i % max(period, 1) < period - 1 for i in range(config["num_hidden_layers"])]
    config["sliding_window"] = window or None
    config["layer_types"] = ["sliding_attention" if window and s else "full_attention" for s in slides]


def add_windowed_rope(metadata: Metadata, config: Config, theta: float | None = None) -> None:
    """A RoPE for the layers with a window, different from the others': never scaled. theta: its default; None: the
    others'."""
    full = config["rope_parameters"]
    theta = metadata.number("rope.freq_base_swa", full["rope_theta"] if theta is None else theta)
    config["rope_parameters"] = {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
    }
