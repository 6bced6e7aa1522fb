"""What a run is asked to do, checked before anything runs.

Knows budgets and refresh times; knows nothing of how a refresh is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ccviz.errors import UserError, check_whole_number
from ccviz.network import LanguageModel
from ccviz.strategies import Strategy

REFRESH_MODES = ("chunked", "prefill_end", "both")


@dataclass(frozen=True)
class Settings:
    """What a run is asked to do, whatever the strategy. Checked when made.

    Attributes
    ----------
    cache_size
        J, the entries that survive a refresh.
    chunk_size
        h, the tokens between two refreshes.
    max_new_tokens
        The most tokens to generate.
    frozen_size
        The first positions that are never evicted; they count towards J.
    refresh_mode
        "chunked": whenever the tokens seen divide by h; "prefill_end": once, after the prompt; "both".
    temperature, seed
        0 is greedy; above, tokens are sampled with the seed.
    logprobs
        Also record the log-probability of every token.
    observe
        Also record, at every refresh and whatever the strategy, the counter-causal surprise of every entry.
    explain
        Also record, at every refresh with a counter-causal pass (the strategy's own, or that of ``observe``), what the
        future expected in the place of every entry.
    """

    cache_size: int
    chunk_size: int
    max_new_tokens: int = 256
    frozen_size: int = 0
    refresh_mode: str = "chunked"
    temperature: float = 0.0
    seed: int = 0
    logprobs: bool = False
    observe: bool = False
    explain: bool = False

    def __post_init__(self) -> None:
        check_whole_number("cache_size (J)", self.cache_size, 2)
        check_whole_number("chunk_size (h)", self.chunk_size, 1)
        check_whole_number("max_new_tokens", self.max_new_tokens, 1)
        check_whole_number("frozen_size", self.frozen_size, 0)
        if check_whole_number("seed", self.seed, 0) >= 1 << 63:
            raise UserError(f"seed must be below 2^63, not {self.seed}.")
        if self.frozen_size >= self.cache_size:
            raise UserError(
                f"frozen_size ({self.frozen_size}) must be below cache_size ({self.cache_size}): frozen entries count "
                "towards the cache size and leave no room for others. Raise cache_size or freeze less."
            )
        if self.refresh_mode not in REFRESH_MODES:
            raise UserError(f"refresh_mode must be one of {', '.join(REFRESH_MODES)}, not {self.refresh_mode!r}.")
        number = isinstance(self.temperature, (int, float)) and not isinstance(self.temperature, bool)
        if not (number and 0 <= self.temperature < float("inf")):
            raise UserError(f"temperature must be a number of at least 0, not {self.temperature!r}.")

    def refresh_due(self, tokens_seen: int, prompt_size: int) -> bool:
        """Whether the cache is refreshed after this many tokens."""
        chunked = self.refresh_mode != "prefill_end" and tokens_seen % self.chunk_size == 0
        return chunked or (self.refresh_mode != "chunked" and tokens_seen == prompt_size)

    def prompt_refreshes(self, prompt_size: int) -> int:
        """How many refreshes happen before the answer starts."""
        chunks = 0 if self.refresh_mode == "prefill_end" else prompt_size // self.chunk_size
        at_end = self.refresh_mode == "prefill_end" or (
            self.refresh_mode == "both" and prompt_size % self.chunk_size != 0
        )
        return chunks + at_end

    def most_entries(self, prompt_size: int) -> int:
        """The most entries a bounded cache holds at any moment of this run."""
        seen = prompt_size + self.max_new_tokens - 1
        if self.refresh_mode == "prefill_end":
            return max(prompt_size, min(self.cache_size, prompt_size) + self.max_new_tokens - 1)
        return min(seen, self.cache_size + self.chunk_size)


def check_run(model: LanguageModel, prompt_size: int, strategies: Sequence[Strategy], settings: Settings) -> None:
    """Raise `UserError` if this model cannot run this prompt under these settings."""
    limit = model.context_length
    if limit is not None and prompt_size >= limit:
        raise UserError(
            f"The prompt has {prompt_size} tokens and {model.name} reads at most {limit}, its answer included: "
            "shorten the prompt, or choose a model with a longer context."
        )
    if limit is not None and prompt_size + settings.max_new_tokens > limit:
        raise UserError(
            f"The prompt has {prompt_size} tokens and {model.name} reads at most {limit} with its answer: "
            f"ask for at most {limit - prompt_size} new tokens, not {settings.max_new_tokens}."
        )
    for strategy in strategies:
        if strategy.evicts:
            strategy.check_budget(settings.cache_size, settings.frozen_size)
