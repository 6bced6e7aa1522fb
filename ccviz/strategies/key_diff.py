"""KeyDiff: keep the keys that are unlike the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ccviz.strategies.base import Entries, Strategy
from ccviz.strategies.registry import register


@register
@dataclass(frozen=True)
class KeyDiff(Strategy):
    """Score each entry by minus the cosine between its key and the anchor, the mean over layers and KV heads.

    The anchor of a layer and KV head is the mean of all cached keys, each divided by its length; keys as they are
    cached, after the rotary embedding. No attention is computed.

    Source: Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction", arXiv 2504.15364.

    Differs from KeyDiff, which keeps a set of entries a head: here one set serves the whole model.
    """

    name: ClassVar[str] = "key_diff"
    title: ClassVar[str] = "KeyDiff"
    summary: ClassVar[str] = "Keeps the tokens whose keys are unlike the average key."
    source: ClassVar[str] = "arXiv 2504.15364"

    def scores(self, entries: Entries) -> Tensor:
        """(n,) float32, from -1 to 1."""
        cache = entries.cache
        total = torch.zeros(entries.size, device=cache.positions.device)
        for layer in range(cache.layers):
            entries.checkpoint()
            keys = normalize(cache.keys(layer).float(), dim=-1)
            anchor = normalize(keys.mean(1, keepdim=True), dim=-1)
            total -= (keys @ anchor.mT).squeeze(-1).mean(0).to(total.device)
        return total / cache.layers
