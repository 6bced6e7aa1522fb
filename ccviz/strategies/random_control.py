"""Random: the control that every other strategy has to beat."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ccviz.strategies.base import Entries, Strategy
from ccviz.strategies.registry import register

SEED_STEP = 1_000_003  # a prime beyond any context length in use, so that no two seeds share a refresh's numbers


@register
@dataclass(frozen=True)
class RandomControl(Strategy):
    """Score each entry by a uniform random number, drawn on the CPU so that it is the same on every device.

    A refresh whose newest entry stands at position p draws with the generator seeded by seed * `SEED_STEP` + p, so
    refreshes differ and runs repeat.

    Parameters
    ----------
    seed
        Another seed keeps other tokens.

    Differs from a random subset of the text: an entry must survive every refresh, so old ones are rare.
    """

    name: ClassVar[str] = "random"
    title: ClassVar[str] = "Random (control)"
    summary: ClassVar[str] = "Keeps tokens at random; a strategy that does no better has learned nothing."
    source: ClassVar[str] = "a control, not from a paper"

    seed: int = field(default=0, metadata={"maximum": 10**12, "help": "Another seed keeps other tokens."})

    def scores(self, entries: Entries) -> Tensor:
        """(n,) float32 from [0, 1)."""
        newest = entries.cache.positions[-1]
        generator = torch.Generator().manual_seed(self.seed * SEED_STEP + int(newest))
        return torch.rand(entries.size, generator=generator).to(newest.device)
