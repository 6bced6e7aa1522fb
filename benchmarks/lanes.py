"""What five strategies at once cost against one alone, and how much memory their caches take.

    python benchmarks/lanes.py [ROUNDS] [DTYPE]

Runs the built-in model for 256 new tokens under one bounded strategy alone, under five in one batch, and under five
one after the other, in turn in one process, warm. The time that counter-causal strategies take to score is told apart,
since it is the strategies' own and not the lanes'. Prints Markdown tables.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import torch

import ccviz
from ccviz.network import LanguageModel
from ccviz.trace import Trace

FIVE = ["sliding_window", "importance", "heavy_hitter", "counter_causal", "counter_causal_fast"]
PROMPT = "tick tock " * 40
BUDGET: dict[str, Any] = {"cache_size": 64, "chunk_size": 16, "max_new_tokens": 256, "chat": False}


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    model = ccviz.load_model("smollm2-135m", dtype=sys.argv[2] if len(sys.argv) > 2 else "auto")
    ccviz.compare(model, PROMPT, FIVE, **{**BUDGET, "max_new_tokens": 32})  # warm
    alone: dict[str, list[float]] = {name: [] for name in FIVE}
    together: list[float] = []
    scoring: list[float] = []
    for _ in range(rounds):
        for name in FIVE:
            trace = ccviz.generate(model, PROMPT, name, **BUDGET)
            assert trace.stop_reason == "length", "the prompt must not end by itself"
            alone[name].append(without_scoring(trace))
        traces = ccviz.compare(model, PROMPT, FIVE, **BUDGET)
        seconds = max(trace.config["seconds"] for trace in traces.values())
        of_refreshes = sum(float(trace.refreshes["seconds"].sum()) for trace in traces.values())
        scoring.append(sum(refreshing(traces[name]) for name in FIVE if name.startswith("counter_causal")))
        together.append(seconds - scoring[-1])
        print(f"round: {seconds:.2f} s together, of it {of_refreshes:.2f} s in refreshes", file=sys.stderr)
    report_time(model, alone, together, scoring)
    report_memory(model, traces)


def refreshing(trace: Trace) -> float:
    """Seconds in refreshes."""
    return float(trace.refreshes["seconds"].sum())


def without_scoring(trace: Trace) -> float:
    """Seconds of a run, without a counter-causal strategy's refreshes."""
    return trace.number("seconds") - (refreshing(trace) if trace.strategy.startswith("counter_causal") else 0.0)


def report_time(
    model: LanguageModel, alone: dict[str, list[float]], together: list[float], scoring: list[float]
) -> None:
    """Print the table of times."""
    one = {name: statistics.median(times) for name, times in alone.items()}
    five = statistics.median(together)
    mean = statistics.mean(one.values())
    dtype = str(model.dtype).removeprefix("torch.")
    print(f"{dtype}, {torch.get_num_threads()} threads, {len(together)} rounds, medians\n")
    print("| 256 new tokens, counter-causal scoring apart | seconds | five together / this |")
    print("|---|---|---|")
    for name, seconds in one.items():
        print(f"| {name} alone | {seconds:.2f} | {five / seconds:.2f} |")
    print(f"| one strategy alone, mean | {mean:.2f} | {five / mean:.2f} |")
    print(f"| all five, one after the other | {sum(one.values()):.2f} | {five / sum(one.values()):.2f} |")
    print(f"| all five together | {five:.2f} | 1 |")
    print(f"\nCounter-causal scoring took {statistics.median(scoring):.2f} s more.\n")


def report_memory(model: LanguageModel, traces: dict[str, Trace]) -> None:
    """Print what the caches of the five lanes took at their largest."""
    peaks = {name: int(trace.refreshes["cache_bytes"].max()) for name, trace in traces.items()}
    bound = (BUDGET["cache_size"] + BUDGET["chunk_size"]) * model.entry_bytes
    last = sum(int(trace.refreshes["cache_bytes"].iloc[-1]) for trace in traces.values())
    print("| caches | MB |")
    print("|---|---|")
    print(f"| one bounded cache, J + h entries | {bound / 1e6:.2f} |")
    print(f"| five lanes, allocated at the end | {last / 1e6:.2f} |")
    print(f"| the largest of one lane | {max(peaks.values()) / 1e6:.2f} |")


if __name__ == "__main__":
    main()
