"""What the future expected in place of each token, against the oracle's own pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import tiny

import ccviz
from ccviz.errors import UserError
from ccviz.trace import EXPECTED_PLACES, Trace

PROMPT = "the sun is out and the sea is calm today, so they went out"
BUDGET: dict[str, Any] = {"cache_size": 20, "chunk_size": 8, "max_new_tokens": 10, "frozen_size": 3}
NEW = [f"expected_{place}" for place in EXPECTED_PLACES] + [f"chance_{place}" for place in EXPECTED_PLACES]


def scored(trace: Trace) -> Any:
    entries = trace.entries
    return entries[entries["refresh"].map(entries.groupby("refresh")["score"].apply(lambda s: s.notna().any()))]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt2"])
def test_probability_is_one_minus_the_oracles_score(family: str) -> None:
    model = tiny(family)
    options = {"score": "probability"}
    trace = ccviz.generate(model, PROMPT, "counter_causal", options=options, explain=True, **BUDGET)
    prompt = [(ord(letter) - 33) % 97 for letter in PROMPT]
    theirs = oracle.run(model.model, prompt, "counter_causal", 20, 8, 10, 3, options=options)
    entries = trace.entries
    checked = 0
    for refresh, told in enumerate(theirs.refreshes):
        here = entries[entries["refresh"] == refresh]
        if told.scores is None:
            assert here["probability"].isna().all()
            assert (here["expected_1"] == "").all()
            continue
        np.testing.assert_allclose(here["probability"][:-1], 1 - np.array(told.scores[:-1]), atol=2e-5)
        assert np.isnan(here["probability"].iloc[-1])
        checked += 1
    assert checked > 2


def test_the_likeliest_tokens_are_those_of_the_oracles_pass() -> None:
    model = tiny("llama")
    prompt = [(ord(letter) - 33) % 97 for letter in PROMPT[:32]]
    trace = ccviz.generate(model, prompt, "counter_causal", 24, 32, 1, explain=True)
    net = oracle.Net(model.model)
    entries, _ = oracle.feed(net, [], prompt, 0)
    x = net.embed(prompt, list(range(32)))
    for layer in range(net.layers):
        x = oracle.counter_layer(net, entries, layer, x, 0, ffn=True)
    likely = torch.softmax(net.head(x), -1)[:-1]
    best = likely.topk(5, -1)
    recorded = trace.entries.iloc[:-1]
    for at, place in enumerate(EXPECTED_PLACES):
        np.testing.assert_allclose(recorded[f"chance_{place}"], best.values[:, at], atol=2e-5)
        texts = [model.tokenizer.decode([token]) for token in best.indices[:, at].tolist()]
        assert recorded[f"expected_{place}"].tolist() == texts


def test_explaining_changes_nothing_else() -> None:
    model = tiny("llama")
    plain = ccviz.generate(model, PROMPT, "counter_causal_fast", **BUDGET)
    told = ccviz.generate(model, PROMPT, "counter_causal_fast", explain=True, **BUDGET)
    assert told.entries.drop(columns=["probability", *NEW]).equals(plain.entries)
    assert told.text == plain.text
    assert scored(told)["chance_1"].notna().any()


def test_other_strategies_are_explained_by_what_observes_them() -> None:
    lanes = ccviz.compare(
        tiny("llama"), PROMPT, ["full", "sliding_window", "counter_causal"], observe=True, explain=True, **BUDGET
    )
    first = lanes["sliding_window"].entries
    assert first["probability"].notna().any()
    alone = ccviz.generate(tiny("llama"), PROMPT, "counter_causal", explain=True, **BUDGET).entries
    both = scored(lanes["counter_causal"])
    assert both["expected_1"].tolist() == alone.loc[both.index, "expected_1"].tolist()


def test_lanes_without_a_pass_stay_as_they_are() -> None:
    lanes = ccviz.compare(tiny("llama"), PROMPT, ["sliding_window", "counter_causal"], explain=True, **BUDGET)
    assert "probability" not in lanes["sliding_window"].entries
    assert "probability" in lanes["counter_causal"].entries


def test_a_run_that_cannot_be_explained_is_refused() -> None:
    with pytest.raises(UserError, match=r"heavy_hitter makes none.*observe"):
        ccviz.generate(tiny("llama"), PROMPT, "heavy_hitter", explain=True, **BUDGET)


def test_an_explained_trace_can_be_saved_and_opened(tmp_path: Any) -> None:
    trace = ccviz.generate(tiny("llama"), PROMPT, "counter_causal", explain=True, **BUDGET)
    assert Trace.open(trace.save(tmp_path / "run.ccviz")) == trace


def test_the_full_cache_beside_an_explained_lane_records_nothing() -> None:
    lanes = ccviz.compare(tiny("llama"), PROMPT, ["full", "counter_causal"], explain=True, **BUDGET)
    assert len(lanes["full"].entries) == 0
    assert "probability" in lanes["counter_causal"].entries
