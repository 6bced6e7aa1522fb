"""What a strategy is: options, a score for every cached entry, and which entries are kept without ranking.

Knows one refresh of one lane; knows nothing of the loop around it. A strategy object holds options only, never
state: what must live from one refresh to the next is the score itself, which survivors carry on (`Entries.previous`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from ccviz.cache import CacheRow
from ccviz.errors import UserError, check_whole_number
from ccviz.network import LanguageModel


@dataclass(frozen=True)
class Entries:
    """The entries of one lane at one refresh, as a strategy sees them.

    Attributes
    ----------
    cache
        Keys, values, positions and token ids, n entries in position order.
    model
        The model that computed them.
    frozen
        How many of the first entries are frozen.
    cache_size
        J, the entries that may survive.
    frozen_size
        How many positions are frozen in all; more than ``frozen`` while the prefix is still being read.
    previous
        (n,) float32: each entry's score at the refresh before, NaN where it had none.
    checkpoint
        Call it between blocks of long work; it raises when the run was cancelled.
    explain
        Where a run is to be explained, a counter-causal pass hands it the hidden states of each block of rows, in
        order, (rows, hidden size).
    """

    cache: CacheRow
    model: LanguageModel
    frozen: int
    cache_size: int
    frozen_size: int
    previous: Tensor
    checkpoint: Callable[[], None] = lambda: None
    explain: Callable[[Tensor], None] | None = None

    @property
    def size(self) -> int:
        return self.cache.size


@dataclass(frozen=True)
class Strategy(ABC):
    """A way to choose which entries survive. Subclasses are frozen dataclasses whose fields are the options.

    A field's ``metadata`` may hold ``help`` (one sentence), ``choices``, ``minimum``, ``maximum`` or ``odd``; they are
    checked when the object is made and become the controls of the app.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    evicts: ClassVar[bool] = True
    needs_layer_inputs: ClassVar[bool] = False
    scores_every_refresh: ClassVar[bool] = False
    loaded_from: ClassVar[str] = ""  # the user's file it came from, where it did

    @abstractmethod
    def scores(self, entries: Entries) -> Tensor:
        """A score for every entry, (n,); higher is kept, NaN ranks lowest, ties go to the later position."""

    def protects_first(self, cache_size: int, frozen_size: int) -> int:
        """How many of the first positions are kept without ranking, frozen ones counted in ("sink")."""
        return 0

    def protects_recent(self, cache_size: int, frozen_size: int) -> int:
        """How many of the newest entries are kept without ranking ("recent")."""
        return 0

    @property
    def protects_last(self) -> int:
        """How many of the newest entries cannot be scored and are kept for that ("last")."""
        return 0

    def __post_init__(self) -> None:
        for option in fields(self):
            _check_option(self.name, option, getattr(self, option.name))

    def check_budget(self, cache_size: int, frozen_size: int) -> None:
        """Raise `UserError` if what is protected does not fit into the cache."""
        tail = max(self.protects_recent(cache_size, frozen_size), self.protects_last)
        first = max(self.protects_first(cache_size, frozen_size), frozen_size)
        if first + tail > cache_size:
            kind = "frozen" if first == frozen_size else "first"
            raise UserError(
                f"{self.name} protects {tail} recent and {first} {kind} entries, more than the cache size "
                f"{cache_size}: raise cache_size or lower frozen_size or the option."
            )


def _check_option(strategy: str, option: Field[Any], value: object) -> None:
    label = f"option {option.name} of {strategy}"
    choices = option.metadata.get("choices")
    if choices is not None:
        if value not in choices:
            raise UserError(f"{label} must be one of {', '.join(map(repr, choices))}, not {value!r}.")
    elif isinstance(option.default, bool):
        if not isinstance(value, bool):
            raise UserError(f"{label} must be true or false, not {value!r}.")
    elif isinstance(option.default, str):
        if not isinstance(value, str):
            raise UserError(f"{label} must be text, not {value!r}.")
    elif value is not None or option.default is not None:
        number: float
        if isinstance(option.default, float):
            number = _check_number(label, value, option.metadata.get("minimum", -math.inf))
        else:
            number = check_whole_number(label, value, option.metadata.get("minimum", 0))
        most = option.metadata.get("maximum")
        if most is not None and number > most:
            raise UserError(f"{label} must be at most {most}, not {number}.")
        if option.metadata.get("odd") and number % 2 == 0:
            raise UserError(f"{label} must be an odd number, not {number}.")


def _check_number(label: str, value: object, minimum: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"{label} must be a number, not {value!r}.")
    if value < minimum:
        raise UserError(f"{label} must be at least {minimum}, not {value}.")
    return value


def keep_best(scores: Tensor, frozen: int, tail: int, cache_size: int) -> Tensor:
    """The slots that survive, ascending: (cache_size,) int64 on the scores' device, without asking the host.

    The first ``frozen`` and the last ``tail`` are never ranked, so they survive whatever the scores are. Of the rest
    the best survive in float32; ties go to the later slot and NaN ranks lowest.
    """
    n = scores.shape[0]
    rest = scores[frozen : n - tail].float()
    # Sorting the negated scores upwards puts NaN last; reversing first makes a stable sort prefer the later slot.
    order = torch.argsort(-rest.flip(0), stable=True)
    best = rest.shape[0] - 1 - order[: cache_size - frozen - tail]
    slots = torch.arange(n, device=scores.device)
    return torch.cat([slots[:frozen], frozen + best.sort().values, slots[n - tail :]])
