"""Counter-causal surprise: evict what the future can predict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ccviz.network import fold_rows, future_mask
from ccviz.strategies.base import Entries, Strategy
from ccviz.strategies.registry import register

ROW_BLOCK = 256  # rows of a counter-causal pass that are computed together; bounds its memory


@register
@dataclass(frozen=True)
class CounterCausal(Strategy):
    """Score each entry by how badly the entries after it predict its token (paper section 3.1, equation 5).

    The stock model runs over the cached tokens at their true positions; row i attends only to the cached keys and
    values of later entries, and the logit of its own token x_i at row i says how expected it was. Rows are
    independent, so they run in blocks of `ROW_BLOCK`, each against the keys from its block on.

    Parameters
    ----------
    score
        ``"logit"``: minus the logit of x_i. ``"probability"``: 1 - P(x_i), equation 5.
    min_gap
        Row i sees only slots j > i + min_gap. The newest min_gap + 1 entries then see nothing and are protected.
    recent
        The newest entries to protect besides.

    Differs from the released code, which stores the *next* token beside each key while decoding: here, as in the
    paper, a key and its token stay together. Layers with a sliding window see the same window mirrored.
    """

    name: ClassVar[str] = "counter_causal"
    title: ClassVar[str] = "Counter-causal surprise"
    summary: ClassVar[str] = "Evicts the tokens that what came after them could have predicted."
    source: ClassVar[str] = "arXiv 2607.27600, section 3.1"

    score: str = field(
        default="logit",
        metadata={"choices": ("logit", "probability"), "help": "Rank by minus the logit, or by 1 - probability."},
    )
    min_gap: int = field(
        default=0, metadata={"help": "How many of the tokens right after it are hidden from each token's prediction."}
    )
    recent: int = field(default=0, metadata={"help": "How many of the newest tokens are protected."})

    def protects_recent(self, cache_size: int, frozen_size: int) -> int:
        return self.recent

    @property
    def protects_last(self) -> int:
        return self.min_gap + 1

    def scores(self, entries: Entries) -> Tensor:
        """(n,) float32: high where the token was a surprise."""
        blocks = []
        for start in range(0, entries.size, ROW_BLOCK):
            entries.checkpoint()
            stop = min(start + ROW_BLOCK, entries.size)
            hidden = self.counter_causal_rows(entries, start, stop)[0]
            if entries.explain is not None:
                entries.explain(hidden)
            blocks.append(self._surprise(entries, hidden, entries.cache.token_ids[start:stop]))
        return torch.cat(blocks).to(entries.cache.positions.device)

    def counter_causal_rows(self, entries: Entries, start: int, stop: int) -> Tensor:
        """Hidden states (1, stop - start, hidden size) of these rows, each seeing only cached later entries."""
        cache, model = entries.cache, entries.model
        mask = future_mask(cache.positions[start:], stop - start, self.min_gap, model.config)
        ids, positions = cache.token_ids[None, start:stop], cache.positions[None, start:stop]
        with model.grouped_queries() as groups:
            return model.call(ids, positions, fold_rows(mask, groups), cache.from_slot(start))

    def _surprise(self, entries: Entries, hidden: Tensor, token_ids: Tensor) -> Tensor:
        if self.score == "logit":
            return -entries.model.token_logits(hidden, token_ids)
        return -torch.expm1(entries.model.token_logprobs(hidden, token_ids))
