"""Which layers share block tables: those that see the same window, a few at a time.

    L layers, W keys that a windowed layer's query sees (its own among them), `size` tokens a page.

A page of the pool holds the keys and values of `size` tokens for `layers_per_page` layers, whichever they are, so that
any group of layers may take any page. A group of n layers has ceil(n / layers_per_page) block tables; the pages that
they name for the same tokens are taken and given back together (a block). A group with a window gives back what no
query will see again: the memory of a long sequence then grows with its full layers alone.

A model whose layers all see the same has one group with one table, and pages of all its layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from evalengine.engine.settings import Settings
from evalengine.kernels.attention_batch import KVCache
from evalengine.models.spec import ModelSpec

SPARE = (
    6  # a group of n layers has at most n / 6 places in its pages that no layer takes: few block tables, little waste
)


class KVGroup(NamedTuple):
    """Layers that see the same keys."""

    window: int | None = None  # W; None: all before the query
    num_tables: int = 1

    def first_seen(self, position: int, size: int) -> int:
        """The first page that a query at this position sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window) // size

    def most_blocks(self, num_tokens: int, size: int, largest_step: int) -> int:
        """The most blocks that a sequence of so many tokens holds at once, computed in steps of up to `largest_step`.

        Pages are given back a step late (`BlockManager`), and neither end need lie on a page's border.
        """
        blocks = -(-num_tokens // size)
        if self.window is None:
            return blocks
        return min(blocks, (self.window - 1 + 2 * largest_step + size - 2) // size + 1)


@dataclass(frozen=True)
class KVLayout:
    """The groups of a model's layers, and where the pages have room for each layer."""

    layers_per_page: int
    groups: tuple[KVGroup, ...]
    # Of each layer: its block table, and its place among a page's layers. Of layers without attention neither counts.
    places: tuple[tuple[int, int], ...]

    @property
    def num_tables(self) -> int:
        """Block tables in all: the pages that `size` tokens take where no window has passed."""
        return sum(group.num_tables for group in self.groups)

    @property
    def table_of(self) -> list[int]:
        """Each layer's block table."""
        return [table for table, _ in self.places]

    def caches(self, pool: Tensor) -> list[KVCache]:
        """Each layer's keys and values in the pool [layers_per_page, 2, pages, size, Hkv, D]."""
        return [(pool[place, 0], pool[place, 1]) for _, place in self.places]

    def blocks_for(self, num_tokens: int, size: int, largest_step: int) -> int:
        """How much room one sequence of so many tokens needs at most, in `size` tokens of all layers, rounded up."""
        pages = sum(group.num_tables * group.most_blocks(num_tokens, size, largest_step) for group in self.groups)
        return -(-pages // self.num_tables)


ONE_TABLE = KVLayout(1, (KVGroup(),), ((0, 0),))  # of a model whose layers all see everything, up to their number


def kv_layout(spec: ModelSpec, settings: Settings) -> KVLayout:
    """The layout of a model's KV pool. A window that no sequence outgrows counts as none; so does every window under
    flash-attn, which multiplies what lies before it by zero instead of leaving it out."""
    kept = settings.attention_backend == "flash_attn"
    windows: dict[int, int | None] = {}
    for layer in range(spec.num_layers):
        window = spec.block(layer).window
        if spec.block(layer).attends:
            windows[layer] = None if kept or window is None or window >= settings.max_model_len else window
    distinct = sorted(set(windows.values()), key=lambda window: (window is not None, window))  # all keys first
    members = [[layer for layer, own in windows.items() if own == window] for window in distinct]
    size = _layers_per_page([len(layers) for layers in members])
    groups, places, first = [], {}, 0
    for window, layers in zip(distinct, members, strict=True):
        places.update({layer: (first + i // size, i % size) for i, layer in enumerate(layers)})
        groups.append(KVGroup(window, -(-len(layers) // size)))
        first += groups[-1].num_tables
    return KVLayout(size, tuple(groups), tuple(places.get(layer, (0, 0)) for layer in range(spec.num_layers)))


def _layers_per_page(counts: list[int]) -> int:
    """How many layers a page holds, for groups of these sizes: so that there are few block tables, then little room
    that no layer takes."""
    fitting = [size for size in range(1, max(counts) + 1) if all(-n % size <= n // SPARE for n in counts)]
    return min(fitting, key=lambda size: (sum(-(-n // size) for n in counts), size))
