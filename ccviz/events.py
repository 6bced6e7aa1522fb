"""What happens while a run goes on, as plain records: the engine yields them, everything else reads them.

Arrays are NumPy, on the host; nothing here refers to a model or a device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class PromptFed:
    """Part of the prompt was processed in one lane.

    ``logprobs`` holds the forward log-probability of each newly processed token (NaN for the first of all), or is
    None where they were not asked for.
    """

    lane: str
    tokens_seen: int
    logprobs: npt.NDArray[np.float32] | None


EXPECTED_TOKENS = 5  # what the future expected in an entry's place: how many of the likeliest are told


@dataclass(frozen=True)
class Expected:
    """What the future expected in each entry's place at one refresh; NaN and -1 where nothing later could say."""

    probability: npt.NDArray[np.float32]  # (n,) of the entry's own token
    token_ids: npt.NDArray[np.int32]  # (n, 5) the likeliest tokens, likeliest first
    chances: npt.NDArray[np.float32]  # (n, 5) their probabilities


@dataclass(frozen=True)
class Refreshed:
    """One lane's cache was scored and, where it was over its budget, evicted from."""

    lane: str
    refresh: int
    tokens_seen: int
    phase: str  # "prefill" or "decode"
    size_before: int
    size_after: int
    seconds: float
    cache_bytes: int
    positions: npt.NDArray[np.int32]  # (n,) before the refresh, ascending
    scores: npt.NDArray[np.float32] | None  # (n,), or None where nothing was scored
    kept: npt.NDArray[np.bool_]  # (n,)
    protected: npt.NDArray[np.str_]  # (n,) of "", "frozen", "sink", "recent", "last"
    surprise: npt.NDArray[np.float32] | None = None  # (n,) counter-causal score, where it was asked for
    expected: Expected | None = None  # where it was asked for and a counter-causal pass was made


@dataclass(frozen=True)
class TokenGenerated:
    """One lane chose its next token."""

    lane: str
    position: int
    token_id: int
    logprob: float  # NaN where log-probabilities were not asked for
    kl: float = math.nan  # nats, from the full cache's next-token distribution to the lane's; NaN unless following
    agrees: bool = False  # whether both distributions have the same most likely token; false unless following


@dataclass(frozen=True)
class Done:
    """One lane ended: "eos", "length", or "cancelled"."""

    lane: str
    stop_reason: str


Event = PromptFed | Refreshed | TokenGenerated | Done
