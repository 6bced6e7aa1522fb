"""Record the runs that the lessons show, with the built-in model in float32 on the CPU.

Run ``python sample_prompts/lessons/record_runs.py`` from the project's folder; it writes ``runs/`` beside this file.
Running it again gives the same survivors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ccviz
from ccviz.prompts import load_sample

RUNS = Path(__file__).parent / "runs"
NOTES: dict[str, Any] = {"sample": "1-recall-a-fact", "cache_size": 64, "chunk_size": 16, "max_new_tokens": 24}
RECORDED: dict[str, dict[str, Any]] = {
    "full": {"strategy": "full"},
    "sliding_window": {"strategy": "sliding_window"},
    "counter_causal": {"strategy": "counter_causal", "explain": True},
    "heavy_hitter-small_chunks": {"strategy": "heavy_hitter", "cache_size": 48, "chunk_size": 8},
    "sliding_window-large": {"strategy": "sliding_window", "cache_size": 96},
    "counter_causal-small": {"strategy": "counter_causal", "cache_size": 40},
    "counter_causal-small_chunks": {"strategy": "counter_causal", "chunk_size": 4},
    "counter_causal-unfrozen": {"strategy": "counter_causal", "frozen": False},
}


def record(names: list[str] | None = None) -> dict[str, ccviz.Trace]:
    """The runs of these names, or all of them."""
    model = ccviz.load_model("smollm2-135m", device="cpu", dtype="float32")
    return {name: _record(model, **{**NOTES, **RECORDED[name]}) for name in names or RECORDED}


def _record(model: Any, sample: str, strategy: str, frozen: bool = True, **given: Any) -> ccviz.Trace:
    from dataclasses import replace

    from ccviz.runs import Request, Run
    from ccviz.settings import Settings

    chosen = load_sample(sample)
    request = Request(
        prompt=chosen.text,
        settings=Settings(**given),
        strategy=strategy,
        system=chosen.system,
        label=chosen.title,
        freeze_system=frozen,
    )
    if strategy == "full":
        request = replace(request, freeze_system=False)
    run = Run(model, {strategy: request})
    for _ in run.events():
        pass
    return run.traces()[strategy]


def main() -> None:
    """Write all runs."""
    RUNS.mkdir(exist_ok=True)
    for name, trace in record().items():
        path = trace.save(RUNS / f"{name}.ccviz")
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} KB, {trace.text!r}")


if __name__ == "__main__":
    main()
