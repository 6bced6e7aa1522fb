"""The sliding window: keep what was read last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ccviz.strategies.base import Entries, Strategy
from ccviz.strategies.registry import register


@register
@dataclass(frozen=True)
class SlidingWindow(Strategy):
    """Score each entry by its position, so the newest survive (exact up to 2^24 positions, where float32 ends)."""

    name: ClassVar[str] = "sliding_window"
    title: ClassVar[str] = "Sliding window"
    summary: ClassVar[str] = "Keeps the newest tokens and forgets the oldest."
    source: ClassVar[str] = "arXiv 2607.27600 (baseline)"

    def scores(self, entries: Entries) -> Tensor:
        """The positions, (n,) float32."""
        return entries.cache.positions.float()
