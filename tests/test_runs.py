"""The two calls that users make, generate and compare: same engine, same traces, same sentences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import tiny

import ccviz
from ccviz.cache import BoundedCache
from ccviz.errors import UserError
from ccviz.events import TokenGenerated
from ccviz.network import LanguageModel
from ccviz.runs import Request, Run, lane_requests
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


def assert_same_run(trace: ccviz.Trace, alone: ccviz.Trace) -> None:
    pd.testing.assert_frame_equal(trace.tokens, alone.tokens, atol=1e-4)
    pd.testing.assert_frame_equal(trace.entries, alone.entries, atol=1e-3, rtol=1e-3)


def test_several_cache_sizes_are_batches_of_their_own_and_the_full_cache_runs_once() -> None:
    model = tiny("llama", seed=4)
    budget = {**BUDGET, "cache_size": [16, 20]}
    traces = ccviz.compare(model, PROMPT, ["full", "importance", "sliding_window"], **budget)
    sizes = {"importance J=16": 16, "importance J=20": 20, "sliding_window J=16": 16, "sliding_window J=20": 20}
    assert list(traces) == ["full", *sizes]
    for name, size in sizes.items():
        assert traces[name].config["cache_size"] == size
        assert_same_run(traces[name], ccviz.generate(model, PROMPT, name.split()[0], **{**BUDGET, "cache_size": size}))


def test_batches_take_turns_token_by_token() -> None:
    model = tiny("llama", seed=4)
    settings = Settings(20, 8, 12)
    run = Run(model, lane_requests(Request(PROMPT, settings), ["full", "importance", "sliding_window"], [16, 20]))
    lead = 0
    for event in run.events():
        counts = [recorder.generated for recorder in run.recorders.values()]
        if isinstance(event, TokenGenerated) and min(counts):
            lead = max(lead, max(counts) - min(counts))
    assert counts == [12] * 5
    assert lead <= 1


@pytest.mark.parametrize("strategy", ["sliding_window", "counter_causal", "full"])
def test_a_lane_that_follows_is_fed_the_answer_and_says_how_far_its_predictions_moved(strategy: str) -> None:
    model = tiny("llama", seed=4)
    full = ccviz.generate(model, PROMPT, "full", **BUDGET)
    trace = ccviz.generate(model, PROMPT, strategy, follow=full, **{**BUDGET, "max_new_tokens": 3})
    assert trace.tokens["token_id"].tolist() == full.tokens["token_id"].tolist()
    assert trace.stop_reason == full.stop_reason
    assert trace.config["follows"] == "full"
    harm = trace.tokens[trace.tokens["generated"]]
    assert trace.tokens.loc[~trace.tokens["generated"], "kl"].isna().all()
    assert (harm["kl"] >= 0).all()
    if strategy == "full":
        assert harm["kl"].max() < 1e-5
        assert harm["agrees"].all()
    else:
        assert harm["kl"].max() > 1e-2
    together = ccviz.compare(
        model, PROMPT, ["full", strategy] if strategy != "full" else ["full"], follow="full", **BUDGET
    )
    assert_same_run(together["full"], full)
    if strategy != "full":
        assert_same_run(together[strategy], trace)


def test_observed_surprise_is_what_counter_causal_would_score() -> None:
    model = tiny("llama", seed=4)
    ours = ccviz.generate(model, PROMPT, "counter_causal", observe=True, **BUDGET).entries
    evicting = ours.dropna(subset=["score", "surprise"])
    assert len(evicting) > 100
    np.testing.assert_allclose(evicting["score"], evicting["surprise"], rtol=1e-6)
    for strategy in ("sliding_window", "full"):
        plain = ccviz.generate(model, PROMPT, strategy, **BUDGET)
        observed = ccviz.generate(model, PROMPT, strategy, observe=True, **BUDGET)
        assert observed.text == plain.text
        pd.testing.assert_frame_equal(observed.all_entries().drop(columns="surprise"), plain.all_entries())
        newest = observed.entries.groupby("refresh").tail(1)
        assert newest["surprise"].isna().all()
        assert observed.entries.drop(newest.index)["surprise"].notna().all()
        assert ccviz.Trace.open(observed.to_bytes()) == observed


@pytest.mark.parametrize(
    ("follow", "says"),
    [
        ("best", "follow must name one of the lanes sliding_window"),
        ([1, 2, 3], "answers another prompt \\(3 tokens\\) than sliding_window is given \\(60 tokens\\)"),
    ],
)
def test_what_cannot_be_followed_is_said(follow: Any, says: str, tiny_llama: LanguageModel) -> None:
    if not isinstance(follow, str):
        follow = ccviz.generate(tiny_llama, follow, "full", max_new_tokens=2)
    with pytest.raises(UserError, match=says):
        ccviz.compare(tiny_llama, PROMPT, ["sliding_window"], follow=follow, **BUDGET)


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
        request = Request("Hello there.", settings, strategy, system=system, freeze_system=True)
        return Run(built_in, {"lane": request})

    assert run(None).settings["lane"].frozen_size == 24
    assert run("Be brief.").settings["lane"].frozen_size < 24
    assert run(None, "full").settings["lane"].frozen_size == 0
    with pytest.raises(UserError, match="must be below cache_size"):
        run("Be brief. " * 40)


def test_five_lanes_hold_five_bounded_caches_and_one_prefix() -> None:
    model = tiny("llama", seed=4)
    names = ["sliding_window", "importance", "heavy_hitter", "counter_causal", "counter_causal_fast"]
    sizes: list[tuple[int, int]] = []  # rows and bytes of the one cache, at every step
    seen: list[BoundedCache] = []
    append = BoundedCache.append

    def watched(self: BoundedCache, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        append(self, token_ids, positions)
        if self.limit is not None:
            seen.append(self)
            sizes.append((token_ids.shape[0], self.bytes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundedCache, "append", watched)
        ccviz.compare(model, PROMPT, names, **BUDGET)
    assert len(set(map(id, seen))) == 1
    inputs = model.config.hidden_size * 4  # of the last layer, which counter_causal_fast needs
    one = (BUDGET["cache_size"] + BUDGET["chunk_size"]) * (model.entry_bytes + inputs)
    assert {rows for rows, _ in sizes} == {1, 5}
    assert max(size for rows, size in sizes if rows == 1) <= one
    assert one * 4 < max(size for rows, size in sizes if rows == 5) <= one * 5
