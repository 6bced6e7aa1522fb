"""Tables of several runs against plain loops over their entries, on real runs of a tiny model and on made-up ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import tiny
from hypothesis import given
from hypothesis import strategies as st

import ccviz
from ccviz import metrics
from ccviz.errors import UserError
from ccviz.trace import Trace

PROMPT = [(11 * at) % 97 for at in range(60)]
BUDGET: dict[str, Any] = {"chunk_size": 8, "max_new_tokens": 24, "frozen_size": 3}
NAMES = ["full", "sliding_window", "counter_causal"]


@pytest.fixture(scope="module")
def runs() -> dict[str, Trace]:
    return ccviz.compare(tiny("llama", seed=4), PROMPT, NAMES, cache_size=20, follow="full", observe=True, **BUDGET)


@pytest.fixture(scope="module")
def free() -> dict[str, Trace]:
    """Runs that wrote their own answers, at two sizes."""
    return ccviz.compare(tiny("llama", seed=4), PROMPT, NAMES, cache_size=[16, 20], **BUDGET)


def made_up(rows: list[list[int]], seen: list[int], strategy: str = "mine", prompt: int = 0) -> Trace:
    """A trace that keeps these positions after refreshes at these moments."""
    count = max(max(seen) + 2, max((at + 1 for row in rows for at in row), default=0))
    refreshes = pd.DataFrame(
        {
            "refresh": range(len(rows)),
            "tokens_seen": seen,
            "phase": "prefill",
            "size_before": [len(row) for row in rows],
            "size_after": [len(row) for row in rows],
            "seconds": 0.0,
            "cache_bytes": 1,
        }
    )
    entries = pd.DataFrame(
        [(at, position, slot, 0.5, True, "") for at, row in enumerate(rows) for slot, position in enumerate(row)],
        columns=["refresh", "position", "slot", "score", "kept", "protected"],
    )
    tokens = pd.DataFrame(
        {
            "position": range(count),
            "token_id": range(count),
            "text": "a",
            "generated": [at >= (prompt or count) for at in range(count)],
            "logprob": np.nan,
        }
    )
    return Trace({"strategy": strategy}, tokens, refreshes, entries)


def held(trace: Trace) -> dict[int, set[int]]:
    """The positions cached after each refresh, by the tokens seen then."""
    kept: dict[int, set[int]] = {}
    entries = trace.all_entries()
    for refresh, seen in zip(trace.refreshes["refresh"], trace.refreshes["tokens_seen"], strict=True):
        here = entries[(entries["refresh"] == refresh) & entries["kept"]]
        kept[int(seen)] = set(here["position"].tolist())
    return kept


@pytest.mark.parametrize("name", NAMES)
def test_a_token_is_unread_kept_or_lost_as_the_entries_say(runs: dict[str, Trace], name: str) -> None:
    trace = runs[name]
    grid, there = metrics.survival_grid(trace), metrics.presence(trace)
    for row, (seen, kept) in enumerate(held(trace).items()):
        for position in range(len(trace.tokens)):
            assert there[row, position] == (position in kept)
            assert grid[row, position] == (0 if position >= seen else 1 if position in kept else 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_life_ends_at_the_first_refresh_without_it(runs: dict[str, Trace], name: str) -> None:
    trace = runs[name]
    lives = metrics.lifetimes(trace).set_index("position")
    moments = list(held(trace).items())
    for position in range(len(trace.tokens)):
        lost = [at for at, (seen, kept) in enumerate(moments) if position < seen and position not in kept]
        assert lives.loc[position, "evicted_at"] == (lost[0] if lost else -1)
        assert lives.loc[position, "tokens_seen_at_loss"] == (moments[lost[0]][0] if lost else -1)
    assert (name == "full") == (lives["evicted_at"] == -1).all()


@pytest.mark.parametrize("name", NAMES)
def test_retention_counts_every_token_in_its_group(runs: dict[str, Trace], name: str) -> None:
    trace = runs[name]
    generated = trace.tokens["generated"].tolist()

    def region(position: int, _seen: int) -> str:
        frozen = 3 if name != "full" else 0
        return "generated" if generated[position] else "frozen" if position < frozen else "prompt"

    def age(position: int, seen: int) -> str:
        back, low, high = seen - 1 - position, 0, 32
        while back >= high:
            low, high = high, 2 * high
        return f"{low}-{high - 1}"

    for by, group_of in (("region", region), ("age", age)):
        table = metrics.retention(trace, by).set_index(["tokens_seen", "group"])
        counted: dict[tuple[int, str], list[int]] = {}
        for seen, kept in held(trace).items():
            for position in range(seen):
                count = counted.setdefault((seen, group_of(position, seen)), [0, 0])
                count[0] += 1
                count[1] += position in kept
        assert {key: [row["seen"], row["kept"]] for key, row in table.iterrows()} == counted
        np.testing.assert_allclose(table["share"], table["kept"] / table["seen"])
    with pytest.raises(UserError, match="'region' or 'age'"):
        metrics.retention(trace, "size")


@pytest.mark.parametrize("region", ["all", "prompt"])
def test_overlap_is_that_of_sets(free: dict[str, Trace], region: str) -> None:
    width = len(PROMPT) if region == "prompt" else 10**6
    for a in free:
        for b in free:
            ours, theirs = held(free[a]), held(free[b])
            table = metrics.overlap(free[a], free[b], region)
            assert table["tokens_seen"].tolist() == sorted(set(ours) & set(theirs))
            for row in table.to_dict("records"):
                one = {at for at in ours[row["tokens_seen"]] if at < width}
                other = {at for at in theirs[row["tokens_seen"]] if at < width}
                assert (row["both"], row["only_a"], row["only_b"]) == (
                    len(one & other),
                    len(one - other),
                    len(other - one),
                )
                assert row["jaccard"] == pytest.approx(len(one & other) / len(one | other) if one | other else 1)
            end = int(max(max(ours), max(theirs)))
            matrix = metrics.overlap_matrix({a: free[a], b: free[b]}, end, region)
            last = [{at for at in moments[max(moments)] if at < width} for moments in (ours, theirs)]
            union = last[0] | last[1]
            assert matrix.loc[a, b] == pytest.approx(len(last[0] & last[1]) / len(union) if union else 1)
    with pytest.raises(UserError, match="'all' or 'prompt'"):
        metrics.overlap(free["full"], free["full"], "answer")


POSITIONS = st.lists(st.integers(0, 19), unique=True, max_size=8).map(sorted)


@given(
    a=st.lists(POSITIONS, min_size=1, max_size=4), b=st.lists(POSITIONS, min_size=1, max_size=4), at=st.integers(0, 30)
)
def test_shared_states_of_any_two_caches(a: list[list[int]], b: list[list[int]], at: int) -> None:
    # Two chunk sizes: refreshes fall on other moments, and the last one before the chosen moment counts.
    one, other = made_up(a, [7 * (n + 1) for n in range(len(a))]), made_up(b, [5 * (n + 1) for n in range(len(b))])

    def before(rows: list[list[int]], step: int) -> set[int]:
        done = min(at // step, len(rows))
        return set(rows[done - 1]) if done else set()

    states = metrics.shared_states(one, other, at)
    mine, theirs = before(a, 7), before(b, 5)
    for position, state in zip(states["position"], states["state"], strict=True):
        expected = {(True, True): "both", (True, False): "only a", (False, True): "only b", (False, False): "neither"}
        where = (position in mine, position in theirs)
        assert state == ("unseen" if position >= at else expected[where])


def test_answers_part_where_their_tokens_first_differ(free: dict[str, Trace]) -> None:
    full = free["full"]
    for trace in free.values():
        answers = [t.tokens.loc[t.tokens["generated"], "token_id"].tolist() for t in (trace, full)]
        pairs = zip(*answers, strict=False)
        expected = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        assert metrics.first_divergence(trace, full) == expected
    assert metrics.first_divergence(full, full) is None
    short = made_up([[0]], [8], prompt=6)
    longer = made_up([[0]], [10], prompt=6)
    assert metrics.first_divergence(short, longer) == 4
    assert metrics.first_divergence(longer, short) == 4


def test_the_comparison_has_the_numbers_of_each_run(runs: dict[str, Trace], free: dict[str, Trace]) -> None:
    table = metrics.comparison(runs, runs["full"]).set_index("lane")
    for name, trace in runs.items():
        numbers = metrics.run_summary(trace)
        row = table.loc[name]
        assert row["strategy"] == trace.strategy
        assert row["new_tokens"] == numbers["new_tokens"] == 24
        assert row["characters"] == len(trace.text)
        assert row["peak_bytes"] == trace.refreshes["cache_bytes"].max()
        assert row["bytes_share"] == pytest.approx(row["peak_bytes"] / runs["full"].refreshes["cache_bytes"].max())
        harm = trace.tokens[trace.tokens["generated"]]
        assert pd.isna(row["mean_kl"]) == (name == "full")
        if name != "full":
            assert row["mean_kl"] == pytest.approx(float(harm["kl"].mean()))
            assert row["agreement"] == pytest.approx(float(harm["agrees"].mean()))
    assert pd.isna(table.loc["full", "cache_size"])
    assert table.loc["counter_causal", "cache_size"] == 20
    alone = metrics.comparison({"a": free["sliding_window J=16"]}, None).set_index("lane").loc["a"]
    assert pd.isna(alone["departs_at"])
    model = tiny("llama", seed=4)
    assert alone["full_bytes"] == (60 + 24 - 1) * model.entry_bytes


def test_harm_lengths_and_scores_are_the_tables_own_numbers(runs: dict[str, Trace]) -> None:
    trace = runs["sliding_window"]
    harm = metrics.fidelity(trace)
    assert harm["step"].tolist() == list(range(24))
    assert harm["kl"].tolist() == trace.tokens.loc[trace.tokens["generated"], "kl"].tolist()
    with pytest.raises(UserError, match="did not record harm: run it with follow"):
        metrics.fidelity(runs["full"])
    lengths = metrics.lengths(runs.items())
    assert lengths["tokens"].tolist() == [24, 24, 24]
    assert lengths["characters"].tolist() == [len(t.text) for t in runs.values()]
    refresh = int(trace.refreshes["refresh"].iloc[-1])
    scores = metrics.score_table(trace, refresh)
    entries = trace.entries[trace.entries["refresh"] == refresh]
    assert scores["position"].tolist() == entries["position"].tolist()
    assert scores["text"].tolist() == trace.tokens["text"].to_numpy()[entries["position"]].tolist()
    pd.testing.assert_series_equal(scores["surprise"], entries["surprise"].reset_index(drop=True))
    with pytest.raises(UserError, match="none numbered 99"):
        metrics.score_table(trace, 99)


@pytest.mark.parametrize(
    ("configs", "names"),
    [
        ([("full", 8, 4), ("importance", 8, 4)], ["full", "importance"]),
        ([("a", 8, 4), ("a", 16, 4)], ["a J=8", "a J=16"]),
        ([("a", 8, 4), ("a", 8, 2), ("b", 8, 4)], ["a J=8 h=4", "a J=8 h=2", "b"]),
        ([("a", 8, 4), ("a", 8, 4)], ["a J=8 h=4", "a J=8 h=4 (2)"]),
        ([("a", 0, 0), ("a", 0, 0)], ["a", "a (2)"]),
    ],
)
def test_lanes_are_named_apart_and_no_longer_than_needed(configs: list[tuple[str, int, int]], names: list[str]) -> None:
    traces = []
    for strategy, size, chunk in configs:
        trace = made_up([[0]], [4], strategy)
        trace.config |= {"cache_size": size, "chunk_size": chunk}
        traces.append(trace)
    assert metrics.lane_names(traces) == names
