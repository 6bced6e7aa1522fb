"""Eviction strategies, one file each, and the registry that finds them by name.

Importing this package registers the paper's six, then the others, in the order in which users meet them.
"""

from ccviz.strategies.full import Full  # isort: skip
from ccviz.strategies.sliding_window import SlidingWindow  # isort: skip
from ccviz.strategies.importance import Importance  # isort: skip
from ccviz.strategies.heavy_hitter import HeavyHitter  # isort: skip
from ccviz.strategies.counter_causal import CounterCausal  # isort: skip
from ccviz.strategies.counter_causal_fast import CounterCausalFast  # isort: skip
from ccviz.strategies.counter_causal_span import CounterCausalSpan  # isort: skip
from ccviz.strategies.counter_causal_recent import CounterCausalRecent  # isort: skip
from ccviz.strategies.streaming_llm import StreamingLLM  # isort: skip
from ccviz.strategies.tova import TOVA  # isort: skip
from ccviz.strategies.snapkv import SnapKV  # isort: skip
from ccviz.strategies.key_diff import KeyDiff  # isort: skip
from ccviz.strategies.random_control import RandomControl  # isort: skip
from ccviz.strategies.base import Entries, Strategy, keep_best
from ccviz.strategies.registry import load_strategy, make_strategy, register, strategy_class, strategy_names

__all__ = [
    "TOVA",
    "CounterCausal",
    "CounterCausalFast",
    "CounterCausalRecent",
    "CounterCausalSpan",
    "Entries",
    "Full",
    "HeavyHitter",
    "Importance",
    "KeyDiff",
    "RandomControl",
    "SlidingWindow",
    "SnapKV",
    "Strategy",
    "StreamingLLM",
    "keep_best",
    "load_strategy",
    "make_strategy",
    "register",
    "strategy_class",
    "strategy_names",
]
