"""Decode rate of the full cache against the stock ``generate``, and what recording costs; both in one run, as ratios.

    python benchmarks/decode.py [rounds] [dtype]

Both sides decode the same tokens of the same prompt on the same model, in turn, after one round to warm up.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

import ccviz
from ccviz.engine import stream
from ccviz.settings import Settings
from ccviz.strategies import make_strategy

PROMPT = (
    "The lighthouse keeper wrote in his diary every evening. This is what he wrote on the longest night of the year:"
)
NEW_TOKENS = 128


def seconds(work: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def ratios(one: Callable[[], object], other: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median seconds of each, and the median of the ratio one / other pair by pair."""
    seconds(one), seconds(other)
    pairs = [(seconds(one), seconds(other)) for _ in range(rounds)]
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(a / b for a, b in pairs),
    )


def main(rounds: int, dtype: str) -> None:
    """Print the two tables as Markdown."""
    model = ccviz.load_model(dtype=dtype)
    ids = model.tokenizer(PROMPT, return_tensors="pt")["input_ids"].to(model.device)
    prompt = ids[0].tolist()

    def stock() -> list[int]:
        mask = torch.ones_like(ids)
        out = model.model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS)
        tokens: list[int] = out[0, ids.shape[1] :].tolist()
        return tokens

    def ours(strategy: str = "full") -> ccviz.Trace:
        return ccviz.generate(model, prompt, strategy=strategy, cache_size=64, chunk_size=16, max_new_tokens=NEW_TOKENS)

    def unrecorded(strategy: str) -> None:
        settings = Settings(cache_size=64, chunk_size=16, max_new_tokens=NEW_TOKENS)
        for _event in stream(model, prompt, {strategy: make_strategy(strategy)}, settings):
            pass

    tokens = ours().tokens
    if tokens.loc[tokens["generated"], "token_id"].tolist() != stock():
        raise SystemExit("the two sides did not decode the same tokens; nothing was measured")
    print(f"{model.device.type}, {dtype}, {torch.get_num_threads()} threads, {len(prompt)} + {NEW_TOKENS} tokens, ")
    print(f"median of {rounds} rounds, the two sides in turn.\n")
    print("| full cache | seconds | tokens/s | time, ccviz / stock |\n|---|---|---|---|")
    a, b, ratio = ratios(ours, stock, rounds)
    print(f"| ccviz, recorded | {a:.2f} | {NEW_TOKENS / a:.1f} | {ratio:.3f} |")
    print(f"| stock `generate` | {b:.2f} | {NEW_TOKENS / b:.1f} | 1 |\n")
    print("| recording | with, s | without, s | with / without |\n|---|---|---|---|")
    for strategy in ("full", "sliding_window", "heavy_hitter"):
        a, b, ratio = ratios(partial(ours, strategy), partial(unrecorded, strategy), rounds)
        print(f"| {strategy}, J = 64, h = 16 | {a:.2f} | {b:.2f} | {ratio:.3f} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, sys.argv[2] if len(sys.argv) > 2 else "float32")
