"""The full cache: the baseline that forgets nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ccviz.strategies.base import Entries, Strategy
from ccviz.strategies.registry import register


@register
@dataclass(frozen=True)
class Full(Strategy):
    """Keep every entry; memory grows with the text. Ignores the cache size."""

    name: ClassVar[str] = "full"
    title: ClassVar[str] = "Full cache"
    summary: ClassVar[str] = "Keeps every token; the yardstick for all others."
    source: ClassVar[str] = "arXiv 2607.27600 (baseline)"
    evicts: ClassVar[bool] = False

    def scores(self, entries: Entries) -> Tensor:
        """No scores: NaN for every entry."""
        return torch.full((entries.size,), torch.nan, device=entries.cache.positions.device)
