"""Counter-causal surprise of whole sentences or phrases."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ccviz.strategies.base import Entries
from ccviz.strategies.counter_causal import CounterCausal
from ccviz.strategies.registry import register
from ccviz.tokens import decode

SENTENCE_MARKS = frozenset(".!?。！？\n")
PHRASE_MARKS = frozenset(",;:、，；：–—")

# What each token ends, by tokenizer and id: "sentence", "phrase" or "". It is the same whoever asks.
_ends: MutableMapping[Any, dict[int, str]] = WeakKeyDictionary()


@register
@dataclass(frozen=True)
class CounterCausalSpan(CounterCausal):
    """Give every entry the mean or maximum of `CounterCausal` over its span, so that whole spans are evicted.

    A span ends after a token whose own text holds one of `SENTENCE_MARKS` (for phrases, `PHRASE_MARKS` as well), and
    wherever the next cached position is not the next one. Entries that cannot be scored (the newest min_gap + 1) do
    not count; a span of only those scores NaN. Exactly J entries survive, so the span at the border loses its
    earliest tokens.

    Parameters
    ----------
    unit
        ``"sentence"`` or ``"phrase"``.
    pool
        ``"mean"`` or ``"max"``.

    Source: named as future work in arXiv 2607.27600; spans and pooling are ours.

    Differs from ``counter_causal`` in that a predictable word inside a surprising sentence stays.
    """

    name: ClassVar[str] = "counter_causal_span"
    title: ClassVar[str] = "Counter-causal, whole spans"
    summary: ClassVar[str] = "Evicts whole sentences or phrases that what came after them could have predicted."
    source: ClassVar[str] = "after arXiv 2607.27600 (future work)"

    unit: str = field(
        default="sentence",
        metadata={"choices": ("sentence", "phrase"), "help": "What stays or goes together."},
    )
    pool: str = field(
        default="mean",
        metadata={"choices": ("mean", "max"), "help": "Rank a span by its mean surprise, or by its greatest."},
    )

    def scores(self, entries: Entries) -> Tensor:
        """(n,) float32, equal within a span."""
        surprise = super().scores(entries)
        spans = self.spans(entries)
        scored = max(entries.size - self.protects_last, 0)
        # On the CPU, where the order of a sum, and with it the last bit of a mean, is the same every time.
        pooled = torch.full((int(spans[-1]) + 1,), torch.nan, dtype=torch.float64).scatter_reduce(
            0,
            spans[:scored],
            surprise[:scored].cpu().double(),
            reduce="mean" if self.pool == "mean" else "amax",
            include_self=False,
        )
        return pooled[spans].float().to(surprise.device)

    def spans(self, entries: Entries) -> Tensor:
        """The number of each entry's span, (n,) int64 on the CPU, ascending from 0."""
        units = (self.unit,) if self.unit == "sentence" else ("sentence", "phrase")
        known = _ends.setdefault(entries.model.tokenizer, {})
        ends = [_end(entries.model.tokenizer, known, token) in units for token in entries.cache.token_ids.tolist()]
        gaps = entries.cache.positions.cpu().diff() != 1
        last = torch.tensor(ends)[:-1] | gaps
        return torch.cat([torch.zeros(1, dtype=torch.long), last.cumsum(0)])


def _end(tokenizer: Any, known: dict[int, str], token_id: int) -> str:
    """What a token ends, looked up in ``known`` or added to it."""
    if token_id not in known:
        letters = set(decode(tokenizer, [token_id]))
        known[token_id] = "sentence" if letters & SENTENCE_MARKS else "phrase" if letters & PHRASE_MARKS else ""
    return known[token_id]
