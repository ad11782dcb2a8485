"""Which layers share block tables: those that see the same window, a few at a time.

    L layers, W keys that a windowed layer's query sees (its own among them), `size` tokens a page.

A page of the pool holds the keys and values of `size` tokens for `layers_per_page` layers, whichever they are, so that
any group of layers may take any page. A group of n layers has ceil(n / layers_per_page) block tables; the pages that
they name for the same tokens are taken and given back together (a block). A group with a window gives back what no
query will see again: the memory of a long sequence then grows with its full layers alone.

A model whose layers all see the same has one group with one table, and pages of all its layers.

Where layers' heads differ in number or size, a page has room for so many numbers a token, and each layer takes as many
as it needs, from its own place on: a page holds fewer wide layers than narrow ones. A layer's keys and values then
have a stride, where else they are contiguous.
"""

from __future__ import annotations

import math
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
    # Where heads differ: how many numbers a token has in a page; and of each layer its first, the heads and their size.
    width: int = 0
    slots: tuple[tuple[int, int, int], ...] = ()

    @property
    def num_tables(self) -> int:
        """Block tables in all: the pages that `size` tokens take where no window has passed."""
        return sum(group.num_tables for group in self.groups)

    @property
    def table_of(self) -> list[int]:
        """Each layer's block table."""
        return [table for table, _ in self.places]

    def pool_shape(self, pages: int, size: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """The pool's: pages are its third dimension. kv_heads, head_dim: those of all layers, where they are alike."""
        if self.slots:
            return 1, 1, pages, size, self.width
        return self.layers_per_page, 2, pages, size, kv_heads, head_dim

    def caches(self, pool: Tensor) -> list[KVCache]:
        """Each layer's keys and values [pages, size, Hkv, D] in the pool."""
        if not self.slots:
            return [(pool[place, 0], pool[place, 1]) for _, place in self.places]

        def cut(first: int, heads: int, size: int) -> Tensor:
            return pool[0, 0, ..., first : first + heads * size].unflatten(-1, (heads, size))

        return [(cut(at, heads, size), cut(at + heads * size, heads, size)) for at, heads, size in self.slots]

    def blocks_for(self, num_tokens: int, size: int, largest_step: int) -> int:
        """How much room one sequence of so many tokens needs at most, in `size` tokens of all layers, rounded up."""
        pages = sum(group.num_tables * group.most_blocks(num_tokens, size, largest_step) for group in self.groups)
        return -(-pages // self.num_tables)


ONE_TABLE = KVLayout(1, (KVGroup(),), ((0, 0),))  # of a model whose layers all see everything, up to their number


def kv_layout(spec: ModelSpec, settings: Settings) -> KVLayout:
    """The layout of a model's KV pool. A window that no sequence outgrows counts as none; so does every window under
    flash-attn, which multiplies what is before it by zero instead of leaving it out."""
    keeps_all = settings.attention_backend == "flash_attn"
    kinds: dict[
        int, tuple[int | None, int, int]
    ] = {}  # of each layer that attends: its window, KV heads and their size
    for layer in range(spec.num_layers):
        block = spec.block(layer)
        window, heads = block.window, spec.heads_of(block)
        if block.attends:
            seen = None if keeps_all or window is None or window >= settings.max_model_len else window
            kinds[layer] = seen, max(1, heads.keys // settings.tensor_parallel_size), heads.size
    distinct = sorted(set(kinds.values()), key=lambda kind: (kind[0] is not None, kind))  # all keys first
    members = [[layer for layer, own in kinds.items() if own == kind] for kind in distinct]
    unit = math.gcd(*(heads * size for _, heads, size in distinct))
    widths = [heads * size // unit for _, heads, size in distinct]
    room = _room([len(layers) for layers in members], widths)
    tables: dict[int | None, int] = {}
    places: dict[int, tuple[int, int]] = {}
    for (window, *_), layers, width in zip(distinct, members, widths, strict=True):
        first, per_page = sum(tables.values()), room // width
        places.update({layer: (first + i // per_page, i % per_page) for i, layer in enumerate(layers)})
        tables[window] = tables.get(window, 0) + -(-len(layers) // per_page)
    groups = tuple(KVGroup(window, count) for window, count in tables.items())
    of_layers = tuple(places.get(layer, (0, 0)) for layer in range(spec.num_layers))
    if len({(heads, size) for _, heads, size in distinct}) == 1:
        return KVLayout(room, groups, of_layers)
    sizes = [kinds[layer][1:] for layer in range(spec.num_layers)]  # transformers' modules attend in every layer
    slots = tuple((2 * place * h * d, h, d) for (_, place), (h, d) in zip(of_layers, sizes, strict=True))
    return KVLayout(room, groups, of_layers, 2 * room * unit, slots)


def _room(counts: list[int], widths: list[int]) -> int:
    """How wide a page is, for so many layers of each width: so that there are few block tables, then little room that
    no layer takes. Of layers that are alike, whose width is 1, it is how many a page holds."""
    taken = [count * width for count, width in zip(counts, widths, strict=True)]

    def tables(room: int) -> list[int]:
        return [-(-count // (room // width)) for count, width in zip(counts, widths, strict=True)]

    def spare(room: int) -> list[int]:
        return [number * room - own for number, own in zip(tables(room), taken, strict=True)]

    rooms = range(max(widths), max(taken) + 1)
    fitting = [r for r in rooms if all(left <= own // SPARE for left, own in zip(spare(r), taken, strict=True))]
    return min(fitting or rooms, key=lambda room: (0 if fitting else sum(spare(room)), sum(tables(room)), room))
