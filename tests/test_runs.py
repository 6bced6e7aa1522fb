"""The two calls that users make, generate and compare: same engine, same traces, same sentences."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from conftest import tiny

import ccviz
from ccviz.errors import UserError
from ccviz.network import LanguageModel
from ccviz.runs import Request, Run
from ccviz.settings import Settings

PROMPT = [(11 * at) % 97 for at in range(60)]
BUDGET: dict[str, Any] = {"cache_size": 20, "chunk_size": 8, "max_new_tokens": 24, "frozen_size": 3}


@pytest.mark.parametrize("logprobs", [False, True])
def test_compare_gives_for_each_strategy_what_generate_gives(logprobs: bool) -> None:
    model = tiny("llama", seed=4)
    options = {"counter_causal": {"min_gap": 1}}
    traces = ccviz.compare(model, PROMPT, ccviz.strategy_names(), options=options, logprobs=logprobs, **BUDGET)
    assert list(traces) == ccviz.strategy_names()
    for name, trace in traces.items():
        alone = ccviz.generate(model, PROMPT, name, options=options.get(name), logprobs=logprobs, **BUDGET)
        pd.testing.assert_frame_equal(trace.tokens, alone.tokens, atol=1e-4)
        pd.testing.assert_frame_equal(trace.entries, alone.entries, atol=1e-3, rtol=1e-3)
        measured = ["seconds", "cache_bytes"]  # lanes that share one row until they part allocate less each
        pd.testing.assert_frame_equal(trace.refreshes.drop(columns=measured), alone.refreshes.drop(columns=measured))
        assert trace.config["options"] == alone.config["options"]
        assert trace.stop_reason == "length"
        assert trace.config["seconds"] > trace.config["prompt_seconds"] > 0


@pytest.mark.parametrize(
    ("strategies", "options", "says"),
    [
        ([], None, "at least one"),
        (["full", "full"], None, "each once"),
        (["full", "best"], None, "there is no strategy 'best'"),
        (["full"], {"importance": {"queries": "all"}}, "not among the strategies full"),
    ],
)
def test_compare_says_what_is_wrong(strategies: list[str], options: Any, says: str, tiny_llama: LanguageModel) -> None:
    with pytest.raises(UserError, match=says):
        ccviz.compare(tiny_llama, PROMPT, strategies, options=options)


@pytest.mark.model
def test_the_system_part_is_frozen_by_name_whatever_its_size(built_in: LanguageModel) -> None:
    def run(system: str | None, strategy: str = "importance") -> Run:
        settings = Settings(40, 8, 2)
        return Run(built_in, Request("Hello there.", settings, strategy, system=system, freeze_system=True))

    assert run(None).settings.frozen_size == 24
    assert run("Be brief.").settings.frozen_size < 24
    assert run(None, "full").settings.frozen_size == 0
    with pytest.raises(UserError, match="must be below cache_size"):
        run("Be brief. " * 40)
