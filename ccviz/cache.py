"""The bounded key-value store, and the read-only view of it that a counter-causal pass attends to.

Knows tensors and the small protocol by which Hugging Face models talk to a cache (``update``); knows nothing of
strategies, prompts or scores. One store holds several *rows*, one per lane; all rows hold the same number of entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

FIRST_CAPACITY = 64  # entries allocated at first; doubled when full, so that appending costs O(1) on average


@dataclass
class _Buffer:
    """A tensor with room to grow along one axis; ``data[..., :size, ...]`` is in use."""

    axis: int
    data: Tensor | None = None

    def room(self, like: Tensor, size: int, capacity: int) -> Tensor:
        """The underlying tensor, with ``capacity`` places, the first ``size`` of them preserved."""
        if self.data is None or self.data.shape[self.axis] != capacity:
            shape = list(like.shape)
            shape[self.axis] = capacity
            grown = torch.empty(shape, dtype=like.dtype, device=like.device)
            if self.data is not None:
                grown.narrow(self.axis, 0, size).copy_(self.data.narrow(self.axis, 0, size))
            self.data = grown
        return self.data

    def write(self, new: Tensor, start: int, capacity: int) -> Tensor:
        """Store ``new`` at ``start`` and return everything up to its end."""
        room = self.room(new, start, capacity)
        count = new.shape[self.axis]
        room.narrow(self.axis, start, count).copy_(new)
        return room.narrow(self.axis, 0, start + count)

    def keep(self, slots: Tensor, capacity: int) -> None:
        """Move the entries at ``slots`` (rows, J), ascending, to the front of ``capacity`` places; the rest is free."""
        assert self.data is not None
        index = slots.to(self.data.device)
        kept = torch.stack([row.index_select(self.axis - 1, at) for row, at in zip(self.data, index, strict=True)])
        if capacity < self.data.shape[self.axis]:
            self.data = None
        self.write(kept, 0, capacity)

    def select_rows(self, rows: Tensor) -> None:
        if self.data is not None:
            self.data = self.data.index_select(0, rows.to(self.data.device))

    @property
    def bytes(self) -> int:
        return 0 if self.data is None else self.data.numel() * self.data.element_size()


@dataclass
class _Layer:
    keys: _Buffer = field(default_factory=lambda: _Buffer(axis=2))
    values: _Buffer = field(default_factory=lambda: _Buffer(axis=2))


class BoundedCache(Cache):
    """Keys and values of every layer for ``size`` entries in position order, with their positions and token ids.

    Parameters
    ----------
    limit
        The most entries the store may ever hold (J + h for a bounded run), or None for no bound. Appending past it
        is a defect of the engine and raises ``RuntimeError``.
    record_inputs
        Also keep the input of the last decoder layer for every entry (``counter_causal_fast`` scores from it).

    Memory is allocated in powers of two up to ``limit`` and reused after an eviction; ``bytes`` reports what is
    allocated, not what is in use.
    """

    def __init__(self, limit: int | None = None, record_inputs: bool = False) -> None:
        super().__init__(layers=[])
        self.limit = limit
        self.record_inputs = record_inputs
        self.size = 0
        self.capacity = 0
        self._pending = 0  # entries announced by `append` whose keys the forward pass is about to write
        self._layers: list[_Layer] = []
        self._token_ids = _Buffer(axis=1)
        self._positions = _Buffer(axis=1)
        self._inputs = _Buffer(axis=1)

    # What the engine calls

    def append(self, token_ids: Tensor, positions: Tensor) -> None:
        """Announce ``token_ids`` (rows, q) at ``positions`` (rows, q); the next forward pass writes their keys."""
        start = self.size
        self._pending = token_ids.shape[1]
        self.size = start + self._pending
        if self.limit is not None and self.size > self.limit:
            raise RuntimeError(f"the cache may hold {self.limit} entries and was asked to hold {self.size}")
        if self.size > self.capacity:
            self.capacity = max(self.size, FIRST_CAPACITY, 2 * self.capacity)
            if self.limit is not None:
                self.capacity = min(self.capacity, self.limit)
        self._token_ids.write(token_ids, start, self.capacity)
        self._positions.write(positions, start, self.capacity)

    def write_inputs(self, hidden: Tensor) -> None:
        """Keep the last layer's input (rows, q, hidden size) of the tokens being appended."""
        self._inputs.write(hidden, self.size - self._pending, self.capacity)

    def keep(self, slots: Tensor) -> None:
        """Evict all but ``slots`` (rows, J), ascending in each row. Kept keys and values stay bitwise as they were.

        A bounded store keeps its memory for the next chunk; an unbounded one, cut down once, gives it back.
        """
        self.size = slots.shape[1]
        if self.limit is None:
            self.capacity = max(self.size, FIRST_CAPACITY)
        for buffer in self._buffers():
            buffer.keep(slots, self.capacity)

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows, in this order; a row may be named several times (lanes that part) or never (finished)."""
        index = torch.tensor(rows, device=self.positions.device)
        for buffer in self._buffers():
            buffer.select_rows(index)

    def row(self, row: int) -> CacheRow:
        """What one lane's cache holds."""
        return CacheRow(self, row)

    @property
    def positions(self) -> Tensor:
        """Positions (rows, n), ascending."""
        assert self._positions.data is not None
        return self._positions.data[:, : self.size]

    @property
    def bytes(self) -> int:
        """Bytes allocated for keys, values and, where recorded, last-layer inputs, over all rows."""
        return sum(layer.keys.bytes + layer.values.bytes for layer in self._layers) + self._inputs.bytes

    def _buffers(self) -> Iterator[_Buffer]:
        yield from (self._token_ids, self._positions)
        if self._inputs.data is not None:
            yield self._inputs
        for layer in self._layers:
            yield from (layer.keys, layer.values)

    # What a Hugging Face model calls

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values (rows, KV heads, q, head size); return all of that layer's."""
        while len(self._layers) <= layer_idx:
            self._layers.append(_Layer())
        layer, start = self._layers[layer_idx], self.size - self._pending
        return (
            layer.keys.write(key_states, start, self.capacity),
            layer.values.write(value_states, start, self.capacity),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.size - self._pending

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.size, 0

    def __len__(self) -> int:
        return len(self._layers)


@dataclass(frozen=True)
class CacheRow:
    """One lane's entries: what a strategy sees of the cache, without copying it."""

    cache: BoundedCache
    row: int

    @property
    def size(self) -> int:
        return self.cache.size

    @property
    def layers(self) -> int:
        return len(self.cache)

    @property
    def positions(self) -> Tensor:
        """(n,) int64, ascending."""
        return self.cache.positions[self.row]

    @property
    def token_ids(self) -> Tensor:
        """(n,) int64."""
        assert self.cache._token_ids.data is not None
        return self.cache._token_ids.data[self.row, : self.size]

    @property
    def layer_inputs(self) -> Tensor:
        """(n, hidden size): the input of the last decoder layer when each entry was first computed."""
        assert self.cache._inputs.data is not None
        return self.cache._inputs.data[self.row, : self.size]

    def keys(self, layer: int) -> Tensor:
        """(KV heads, n, head size), as first computed: after the rotary embedding, where the model has one."""
        data = self.cache._layers[layer].keys.data
        assert data is not None
        return data[self.row, :, : self.size]

    def values(self, layer: int) -> Tensor:
        """(KV heads, n, head size)."""
        data = self.cache._layers[layer].values.data
        assert data is not None
        return data[self.row, :, : self.size]

    def from_slot(self, start: int) -> FutureCache:
        """The entries from slot ``start`` on, for a pass that must not write."""
        return FutureCache(self, start)


class FutureCache(Cache):
    """A cache that answers every layer with stored keys and values and throws the new ones away (paper section 3.1).

    A counter-causal pass over rows ``start..`` attends to what *was* cached from ``start`` on; what the pass itself
    computes for its rows must not leak into it. From slot 0 on it also serves to ask again what cached tokens attend
    to.
    """

    def __init__(self, entries: CacheRow, start: int) -> None:
        super().__init__(layers=[])
        self._entries = entries
        self._start = start

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """One layer's stored keys and values (1, KV heads, n - start, head size)."""
        keys, values = self._entries.keys(layer_idx), self._entries.values(layer_idx)
        return keys[None, :, self._start :], values[None, :, self._start :]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._entries.size - self._start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._entries.size - self._start, 0

    def __len__(self) -> int:
        return self._entries.layers
