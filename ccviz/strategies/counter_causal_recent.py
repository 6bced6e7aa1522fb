"""Counter-causal surprise blended with recency."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ccviz.strategies.base import Entries
from ccviz.strategies.counter_causal import CounterCausal
from ccviz.strategies.registry import register


@register
@dataclass(frozen=True)
class CounterCausalRecent(CounterCausal):
    """Score each entry by (100 - recency) * its rank by `CounterCausal` + recency * its slot.

    Both run from 0 to n - 1 over all n entries, so that neither outweighs the other by its unit; exact in float32 up
    to 167,000 entries. Entries that no later one can predict rank lowest by surprise; they are protected. At 0 it
    keeps what ``counter_causal`` keeps, at 100 what ``sliding_window`` keeps, besides the same protected entries.

    Parameters
    ----------
    recency
        The weight of recency, in percent.

    Source: named as future work in arXiv 2607.27600; the blend is ours.

    Differs from ``recent``, which protects the newest tokens outright.
    """

    name: ClassVar[str] = "counter_causal_recent"
    title: ClassVar[str] = "Counter-causal and recency"
    summary: ClassVar[str] = "Ranks by surprise and by age together, in a proportion you choose."
    source: ClassVar[str] = "after arXiv 2607.27600 (future work)"

    recency: int = field(
        default=50,
        metadata={"maximum": 100, "help": "How much recency weighs against surprise, in percent."},
    )

    def scores(self, entries: Entries) -> Tensor:
        """(n,) float32 whole numbers, at most 100 (n - 1)."""
        surprise = super().scores(entries)
        surprise[-self.protects_last :] = torch.nan  # they see themselves, and must not come between the others
        surprise = ranks(surprise)
        slots = torch.arange(entries.size, device=surprise.device)
        return ((100 - self.recency) * surprise + self.recency * slots).float()


def ranks(scores: Tensor) -> Tensor:
    """The place of each score among all in ascending order, (n,) int64, ties and NaN as `keep_best` has them."""
    n = scores.shape[0]
    # As in keep_best: negated, NaN comes last; reversed first, a stable sort puts the later of equals before.
    descending = n - 1 - torch.argsort(-scores.float().flip(0), stable=True)
    places = torch.empty_like(descending)
    places[descending] = torch.arange(n - 1, -1, -1, device=scores.device)
    return places
