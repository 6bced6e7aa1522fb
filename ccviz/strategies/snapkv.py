"""SnapKV: keep what the newest tokens attend to, and its neighbours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from ccviz.strategies.base import Entries, Strategy
from ccviz.strategies.registry import register
from ccviz.strategies.tova import mean_attention

LARGEST_WINDOW = 32  # of the automatic choice; SnapKV's own observation window


@register
@dataclass(frozen=True)
class SnapKV(Strategy):
    """Score each entry by the attention of the newest ``window`` tokens, smoothed over its neighbours.

    The mean over layers, query heads and window tokens of the model's own attention (its softmax runs over all a token
    sees, window included), then pooled with stride 1 over the slots before the window. Pooling keeps words whole.

    Parameters
    ----------
    window
        The newest tokens that act as queries and are protected; by default half of what is not frozen,
        (J - frozen) // 2, at least 1 and at most `LARGEST_WINDOW`.
    kernel
        How many neighbouring slots are pooled, an odd number. 1 pools nothing.
    pooling
        ``"avg"``: the mean; what lies beyond the border counts as zero. ``"max"``: the greatest.

    Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv 2404.14469.

    Differs from SnapKV, which selects once, at the end of the prompt (``refresh_mode="prefill_end"`` does that), and a
    set of entries a head. The window's own entries score NaN.
    """

    name: ClassVar[str] = "snapkv"
    title: ClassVar[str] = "SnapKV"
    summary: ClassVar[str] = "Keeps what the newest tokens attend to together with its neighbours, and those tokens."
    source: ClassVar[str] = "arXiv 2404.14469"

    window: int | None = field(
        default=None,
        metadata={
            "minimum": 1,
            "help": "How many of the newest tokens act as queries and are protected; empty means half of what is not "
            "frozen, at most 32.",
        },
    )
    kernel: int = field(
        default=5,
        metadata={
            "minimum": 1,
            "maximum": 999,
            "odd": True,
            "help": "Over how many neighbouring tokens the attention is pooled, an odd number.",
        },
    )
    pooling: str = field(
        default="avg", metadata={"choices": ("avg", "max"), "help": "Pool by the mean, or by the greatest."}
    )

    def protects_recent(self, cache_size: int, frozen_size: int) -> int:
        if self.window is not None:
            return self.window
        return max(min(LARGEST_WINDOW, (cache_size - frozen_size) // 2), 1)

    def scores(self, entries: Entries) -> Tensor:
        """(n,) float32, NaN for the window."""
        window = min(self.protects_recent(entries.cache_size, entries.frozen_size), entries.size)
        attention = mean_attention(entries, window)
        scores = torch.full_like(attention, torch.nan)
        if window < entries.size:
            before = attention[None, : entries.size - window]
            pool = avg_pool1d if self.pooling == "avg" else max_pool1d
            scores[: entries.size - window] = pool(before, self.kernel, stride=1, padding=self.kernel // 2)[0]
        return scores
