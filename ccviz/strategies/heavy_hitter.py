"""Heavy hitter: keep what recent tokens have attended to, summed over time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ccviz.strategies.base import Entries, Strategy
from ccviz.strategies.registry import register


@register
@dataclass(frozen=True)
class HeavyHitter(Strategy):
    """A running total, over refreshes, of the attention that recent keys pay to each entry.

    At every refresh, evicting or not, each entry gains the mean over layers and KV heads of its column sum in
    softmax(Q K^T / sqrt d), Q the ``recent`` newest keys, without a mask. Survivors carry their total on.

    Parameters
    ----------
    recent
        The newest entries that act as queries and are protected; by default half of what is not frozen,
        (J - frozen) // 2.

    Differs from H2O (arXiv 2306.14048), which keeps a set of entries a head and sums true attention weights: here
    keys stand in for queries and one set serves the whole model, as in the paper's released code. Frozen entries are
    neither queries nor keys and score NaN.
    """

    name: ClassVar[str] = "heavy_hitter"
    title: ClassVar[str] = "Heavy hitter"
    summary: ClassVar[str] = "Keeps the tokens that have drawn most attention so far, and the most recent ones."
    source: ClassVar[str] = "arXiv 2607.27600 (baseline), after H2O, arXiv 2306.14048"
    scores_every_refresh: ClassVar[bool] = True

    recent: int | None = field(
        default=None,
        metadata={"help": "How many of the newest tokens are protected; empty means half of what is not frozen."},
    )

    def protects_recent(self, cache_size: int, frozen_size: int) -> int:
        return (cache_size - frozen_size) // 2 if self.recent is None else self.recent

    def scores(self, entries: Entries) -> Tensor:
        """(n,) float32, NaN for frozen entries."""
        cache, frozen = entries.cache, entries.frozen
        scores = torch.full((entries.size,), torch.nan, device=cache.positions.device)
        m = entries.size - frozen
        if m == 0:
            return scores
        recent = min(self.protects_recent(entries.cache_size, entries.frozen_size), m)
        total = entries.previous[frozen:].nan_to_num(0.0)
        for layer in range(cache.layers):
            entries.checkpoint()
            keys = cache.keys(layer)[:, frozen:].float()
            weights = (keys[:, m - recent :] @ keys.mT / keys.shape[-1] ** 0.5).softmax(-1)
            total = total + weights.sum(1).mean(0).to(total.device) / cache.layers
        scores[frozen:] = total
        return scores
