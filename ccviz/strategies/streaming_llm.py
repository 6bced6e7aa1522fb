"""StreamingLLM: the sliding window with attention sinks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ccviz.strategies.registry import register
from ccviz.strategies.sliding_window import SlidingWindow


@register
@dataclass(frozen=True)
class StreamingLLM(SlidingWindow):
    """Score each entry by its position and keep the first ones besides: models park spare attention on them.

    Parameters
    ----------
    sinks
        The first positions to protect; frozen ones count towards them, so max(frozen, sinks) are kept.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453.

    Differs from StreamingLLM, which numbers positions by their place inside the cache: here they stay true, so a text
    longer than the model's context is refused, not streamed.
    """

    name: ClassVar[str] = "streaming_llm"
    title: ClassVar[str] = "StreamingLLM"
    summary: ClassVar[str] = "Keeps the very first tokens, which draw attention whatever they say, and the newest."
    source: ClassVar[str] = "arXiv 2309.17453"

    sinks: int = field(default=4, metadata={"help": "How many of the first tokens are protected."})

    def protects_first(self, cache_size: int, frozen_size: int) -> int:
        return self.sinks
