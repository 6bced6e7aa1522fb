"""TOVA: keep what the newest token attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ccviz.strategies.base import Entries, Strategy
from ccviz.strategies.registry import register


@register
@dataclass(frozen=True)
class TOVA(Strategy):
    """Score each entry by the attention the newest token pays to it, the mean over layers and query heads.

    The attention is the model's own: the newest token runs again over the stored keys and values.

    Source: Oren et al., "Transformers are Multi-State RNNs", arXiv 2401.06104.

    Differs from TOVA, which keeps a set of entries a layer (the mean over its heads) and drops one token a step: here
    one set serves the whole model, and a refresh drops as many as it must.
    """

    name: ClassVar[str] = "tova"
    title: ClassVar[str] = "TOVA"
    summary: ClassVar[str] = "Keeps the tokens that the newest one attends to."
    source: ClassVar[str] = "arXiv 2401.06104"

    def scores(self, entries: Entries) -> Tensor:
        """(n,) float32, adding up to 1 where the model has no attention sinks of its own."""
        return mean_attention(entries, queries=1)


def mean_attention(entries: Entries, queries: int) -> Tensor:
    """What the newest ``queries`` tokens attend to, meaned over layers, query heads and tokens: (n,) float32."""
    total = torch.zeros(entries.size, device=entries.cache.positions.device)

    def add(weights: Tensor) -> None:
        entries.checkpoint()
        total.add_(weights.mean((0, 1)).to(total.device))

    entries.model.recent_attention(entries.cache, queries, add)
    return total / entries.cache.layers
