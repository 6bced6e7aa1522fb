"""Counter-causal surprise from the last layer alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ccviz.strategies.base import Entries
from ccviz.strategies.counter_causal import CounterCausal
from ccviz.strategies.registry import register


@register
@dataclass(frozen=True)
class CounterCausalFast(CounterCausal):
    """`CounterCausal` with only the last layer run, on the input it had when each token was first read.

    Attention over later cached entries, residual, final norm and head.

    Parameters
    ----------
    ffn
        Also run the last layer's feed-forward block. The released code skips it, and so does the default.
    """

    name: ClassVar[str] = "counter_causal_fast"
    title: ClassVar[str] = "Counter-causal, fast"
    summary: ClassVar[str] = "The same surprise, estimated from the last layer alone: cheaper, and close."
    source: ClassVar[str] = "arXiv 2607.27600 (fast form)"
    needs_layer_inputs: ClassVar[bool] = True

    ffn: bool = field(default=False, metadata={"help": "Also run the last layer's feed-forward block."})

    def counter_causal_rows(self, entries: Entries, start: int, stop: int) -> Tensor:
        with entries.model.last_layer_alone(entries.cache.layer_inputs[None, start:stop], self.ffn):
            return super().counter_causal_rows(entries, start, stop)
