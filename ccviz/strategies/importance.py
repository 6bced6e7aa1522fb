"""Importance: keep what the newest token's key points at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ccviz.strategies.base import Entries, Strategy
from ccviz.strategies.registry import register


@register
@dataclass(frozen=True)
class Importance(Strategy):
    """Score entries by how strongly keys of the last layer answer to one another; keys stand in for queries.

    Parameters
    ----------
    queries
        ``"last"``: the mean over KV heads of k_n . k_i, k_n the newest key. ``"all"``: the mean over KV heads and
        over all keys as queries of their softmax attention, causal, scaled by the square root of the head size.

    Frozen entries are neither queries nor keys and score NaN.
    """

    name: ClassVar[str] = "importance"
    title: ClassVar[str] = "Importance"
    summary: ClassVar[str] = "Keeps the tokens whose last-layer keys resemble the newest one."
    source: ClassVar[str] = "arXiv 2607.27600 (baseline)"

    queries: str = field(
        default="last",
        metadata={"choices": ("last", "all"), "help": "Which keys act as queries: the newest one, or all of them."},
    )

    def scores(self, entries: Entries) -> Tensor:
        """(n,) float32, NaN for frozen entries."""
        cache = entries.cache
        scores = torch.full((entries.size,), torch.nan, device=cache.positions.device)
        if entries.frozen == entries.size:
            return scores
        keys = cache.keys(cache.layers - 1)[:, entries.frozen :].float()
        ranked = keys @ keys[:, -1:].mT if self.queries == "last" else _mean_attention(keys)
        scores[entries.frozen :] = ranked.squeeze(-1).mean(0).to(scores.device)
        return scores


def _mean_attention(keys: Tensor) -> Tensor:
    """Mean over queries of causal softmax attention of keys (KV heads, m, d) on themselves: (KV heads, m, 1)."""
    m, size = keys.shape[1:]
    future = torch.ones(m, m, dtype=torch.bool, device=keys.device).triu(1)
    weights: Tensor = (keys @ keys.mT / size**0.5).masked_fill_(future, -torch.inf).softmax(-1)
    return weights.mean(1)[..., None]
