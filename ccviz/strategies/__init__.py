"""Eviction strategies, one file each, and the registry that finds them by name.

Importing this package registers the paper's six, in the order in which users meet them.
"""

from ccviz.strategies.full import Full  # isort: skip
from ccviz.strategies.sliding_window import SlidingWindow  # isort: skip
from ccviz.strategies.importance import Importance  # isort: skip
from ccviz.strategies.heavy_hitter import HeavyHitter  # isort: skip
from ccviz.strategies.counter_causal import CounterCausal  # isort: skip
from ccviz.strategies.counter_causal_fast import CounterCausalFast  # isort: skip
from ccviz.strategies.base import Entries, Strategy, keep_best
from ccviz.strategies.registry import make_strategy, register, strategy_class, strategy_names

__all__ = [
    "CounterCausal",
    "CounterCausalFast",
    "Entries",
    "Full",
    "HeavyHitter",
    "Importance",
    "SlidingWindow",
    "Strategy",
    "keep_best",
    "make_strategy",
    "register",
    "strategy_class",
    "strategy_names",
]
