"""Where entries stand in a picture, what became of each token, and that the sentences say what the numbers say."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import ccviz
from ccviz.errors import UserError
from ccviz.metrics import (
    NO_REFRESH,
    ORDERS,
    comparison,
    fidelity_sentence,
    heatmap_sentence,
    lengths_sentence,
    lifetimes,
    overlap,
    overlap_matrix,
    overlap_sentence,
    presence,
    retention,
    retention_sentence,
    run_summary,
    scores_sentence,
    shared_states,
    slot_columns,
    slot_grid,
    states_sentence,
    survival_grid,
    survival_sentence,
    survivors,
    token_states,
)
from ccviz.network import LanguageModel
from ccviz.strategies import strategy_names
from ccviz.trace import COLUMNS, Trace

PROMPT = [(7 * place + place * place) % 97 for place in range(40)]
Entry = tuple[int, float, bool, str]  # position, score, kept, protected
NAN = float("nan")


def made(
    rows: Sequence[Sequence[Entry]],
    seen: Sequence[int],
    texts: Sequence[str],
    prompt: int | None = None,
    **config: Any,
) -> Trace:
    """A trace by hand: for each refresh its entries and the tokens seen by then; an answer after ``prompt`` tokens."""
    flat = [(refresh, slot, *entry) for refresh, row in enumerate(rows) for slot, entry in enumerate(row)]
    kept = [sum(entry[2] for entry in row) for row in rows]
    tables = {
        "tokens": {
            "position": range(len(texts)),
            "token_id": [0] * len(texts),
            "text": list(texts),
            "generated": [prompt is not None and place >= prompt for place in range(len(texts))],
            "logprob": [NAN] * len(texts),
        },
        "refreshes": {
            "refresh": range(len(rows)),
            "tokens_seen": list(seen),
            "phase": ["prefill"] * len(rows),
            "size_before": [len(row) for row in rows],
            "size_after": kept,
            "seconds": [0.5] * len(rows),
            "cache_bytes": [10 * count for count in kept],
        },
        "entries": {
            "refresh": [entry[0] for entry in flat],
            "position": [entry[2] for entry in flat],
            "slot": [entry[1] for entry in flat],
            "score": [entry[3] for entry in flat],
            "kept": [entry[4] for entry in flat],
            "protected": [entry[5] for entry in flat],
        },
    }
    frames = {name: pd.DataFrame(table).astype(COLUMNS[name]) for name, table in tables.items()}
    return Trace({"strategy": "importance", "cache_size": 4, "chunk_size": 2, "seconds": 2.0, **config}, **frames)


@st.composite
def histories(draw: st.DrawFn) -> Trace:
    """A run whose every refresh keeps an arbitrary part of what it finds, with scores that often tie."""
    cached: list[int] = []
    rows: list[list[Entry]] = []
    seen = [0]
    for _ in range(draw(st.integers(0, 6))):
        seen.append(seen[-1] + draw(st.integers(1, 6)))
        cached += range(seen[-2], seen[-1])
        rows.append([])
        for position in cached:
            protected = draw(st.sampled_from(["", "", "", "frozen", "recent"]))
            score = draw(st.sampled_from([-1.5, 0.0, 0.25, 2.0, NAN]))
            rows[-1].append((position, score, bool(protected) or draw(st.booleans()), protected))
        cached = [position for position, _, kept, _ in rows[-1] if kept]
    count = seen[-1] + 3
    return made(rows, seen[1:], ["x"] * count, draw(st.integers(0, count)), frozen_size=draw(st.integers(0, 4)))


def make(model: LanguageModel, strategy: str, **given: Any) -> Trace:
    return ccviz.generate(model, PROMPT, strategy, **{"cache_size": 16, "chunk_size": 8, "max_new_tokens": 20, **given})


@pytest.fixture(scope="session", params=strategy_names())
def run(request: pytest.FixtureRequest, tiny_llama: LanguageModel) -> Trace:
    return make(tiny_llama, request.param, frozen_size=3)


def rows_of(trace: Trace, order: str) -> dict[int, dict[int, int]]:
    """For each refresh the position in each column."""
    placed = slot_columns(trace, order)
    found: dict[int, dict[int, int]] = {refresh: {} for refresh in trace.refreshes["refresh"].tolist()}
    for refresh, column, position in zip(placed["refresh"], placed["column"], placed["position"], strict=True):
        assert column not in found[refresh]  # no two share one
        found[refresh][column] = position
    return found


def kept_of(trace: Trace) -> dict[int, list[int]]:
    entries = trace.all_entries()
    kept: dict[int, list[int]] = {refresh: [] for refresh in trace.refreshes["refresh"].tolist()}
    for refresh, position, lives in zip(entries["refresh"], entries["position"], entries["kept"], strict=True):
        if lives:
            kept[refresh].append(position)
    return kept


# Columns


def assert_by_position(trace: Trace) -> None:
    kept = kept_of(trace)
    for refresh, row in rows_of(trace, "position").items():
        assert [row[column] for column in range(len(row))] == sorted(kept[refresh])


def assert_by_rank(trace: Trace) -> None:
    kept = kept_of(trace)
    entries = {(row["refresh"], row["position"]): row for row in trace.all_entries().to_dict("records")}
    for refresh, row in rows_of(trace, "rank").items():
        positions = [row[column] for column in range(len(row))]
        assert sorted(positions) == sorted(kept[refresh])
        free = [entries[refresh, position]["protected"] == "" for position in positions]
        assert free == sorted(free)  # the protected come first
        scores = [entries[refresh, position]["score"] for position in positions[free.count(False) :]]
        numbers = [score for score in scores if not np.isnan(score)]
        assert numbers == sorted(numbers, reverse=True)
        assert scores[: len(numbers)] == numbers  # what has no score comes last


def assert_in_place(trace: Trace) -> None:
    held: dict[int, int] = {}
    kept = kept_of(trace)
    for refresh, row in rows_of(trace, "in place").items():
        held = {position: column for position, column in held.items() if position in kept[refresh]}
        for position in sorted(set(kept[refresh]) - set(held)):
            held[position] = next(column for column in range(len(trace.tokens)) if column not in held.values())
        assert {column: position for position, column in held.items()} == row


CHECKS = {"position": assert_by_position, "rank": assert_by_rank, "in place": assert_in_place}


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=60, deadline=None)
@given(trace=histories())
def test_columns_follow_their_definition_in_any_history(order: str, trace: Trace) -> None:
    CHECKS[order](trace)


@pytest.mark.parametrize("order", ORDERS)
def test_columns_follow_their_definition_in_real_runs(order: str, run: Trace) -> None:
    CHECKS[order](run)


@settings(max_examples=60, deadline=None)
@given(trace=histories())
def test_in_place_an_entry_keeps_its_column_while_it_lives_and_no_column_is_wasted(trace: Trace) -> None:
    rows = list(rows_of(trace, "in place").values())
    most = max([len(row) for row in rows], default=0)
    for before, after in itertools.pairwise(rows):
        old, new = ({position: column for column, position in row.items()} for row in (before, after))
        assert all(old[position] == new[position] for position in old.keys() & new.keys())
    assert all(0 <= column < most for row in rows for column in row)


def test_in_place_a_new_entry_takes_the_column_that_became_free() -> None:
    rows: list[list[Entry]] = [
        [(0, 1, True, ""), (1, 1, True, ""), (2, 1, True, "")],
        [(0, 1, True, ""), (1, 0, False, ""), (2, 1, True, ""), (3, 2, True, "")],
        [(0, 0, False, ""), (2, 1, True, ""), (3, 2, True, ""), (4, 3, True, "")],
    ]
    trace = made(rows, [3, 4, 5], ["x"] * 5)
    assert rows_of(trace, "in place") == {0: {0: 0, 1: 1, 2: 2}, 1: {0: 0, 1: 3, 2: 2}, 2: {0: 4, 1: 3, 2: 2}}
    assert rows_of(trace, "position")[2] == {0: 2, 1: 3, 2: 4}
    assert rows_of(trace, "rank")[2] == {0: 4, 1: 3, 2: 2}


@pytest.mark.parametrize("order", ORDERS)
def test_columns_are_the_survivors_with_one_column_more(order: str, run: Trace) -> None:
    placed, kept = slot_columns(run, order), survivors(run)
    again = placed.drop(columns="column").sort_values(["refresh", "position"]).reset_index(drop=True)
    assert again.equals(kept)
    assert placed["column"].dtype == np.int32


@pytest.mark.parametrize("order", ["score", "", "in-place", "RANK"])
def test_an_unknown_order_is_refused_with_those_there_are(order: str, run: Trace) -> None:
    for ask in (slot_columns, slot_grid):
        with pytest.raises(UserError) as raised:
            ask(run, order)
        assert repr(order) in str(raised.value)
        assert all(repr(known) in str(raised.value) for known in ORDERS)


# The grid


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=30, deadline=None)
@given(trace=histories())
def test_the_grid_holds_each_survivor_once_and_nothing_else(order: str, trace: Trace) -> None:
    grid = slot_grid(trace, order)
    rows = rows_of(trace, order)
    widest = max([max(row, default=-1) for row in rows.values()], default=-1) + 1
    assert grid.shape == (len(trace.refreshes), max(widest, 1))
    assert grid.dtype == np.float32
    for refresh, row in rows.items():
        filled = np.flatnonzero(~np.isnan(grid[refresh])).tolist()
        assert {column: int(grid[refresh, column]) for column in filled} == row


def test_the_grid_of_a_real_run_is_as_wide_as_its_budget(run: Trace) -> None:
    sizes = run.refreshes["size_after"].tolist()
    grid = slot_grid(run, "position")
    assert grid.shape == (7, 56 if run.strategy == "full" else 16)
    assert (~np.isnan(grid)).sum(axis=1).tolist() == sizes
    assert grid[0, : sizes[0]].tolist() == list(range(8))


# What became of each token


def test_every_token_is_kept_evicted_or_unseen_as_the_entries_say(run: Trace) -> None:
    entries = run.all_entries()
    survived = kept_of(run)
    for refresh, seen in zip(run.refreshes["refresh"], run.refreshes["tokens_seen"], strict=True):
        states = token_states(run, refresh)
        assert states["position"].tolist() == run.tokens["position"].tolist()
        assert states["text"].tolist() == run.tokens["text"].tolist()
        assert states["generated"].tolist() == run.tokens["generated"].tolist()
        kept = set(survived[refresh])
        for position, state in enumerate(states["state"]):
            assert state == ("kept" if position in kept else "evicted" if position < seen else "unseen")
        here = entries[entries["refresh"] == refresh]
        scores = dict(zip(here["position"], here["score"], strict=True))
        protected = dict(zip(here["position"], here["protected"], strict=True))
        expected = np.float32([scores.get(position, NAN) for position in range(len(states))])
        np.testing.assert_array_equal(states["score"], expected)
        assert states["protected"].tolist() == [protected.get(position, "") for position in range(len(states))]
        order = sorted(
            (position for position, score in scores.items() if not np.isnan(score)), key=lambda at: (-scores[at], -at)
        )
        ranks = {position: place for place, position in enumerate(order, start=1)}
        assert states["rank"].tolist() == [ranks.get(position, 0) for position in range(len(states))]


def test_a_token_says_at_which_refresh_it_was_lost(run: Trace) -> None:
    lost: dict[int, int] = {}
    for refresh in run.refreshes["refresh"].tolist():
        states = token_states(run, refresh)
        for position in states.loc[states["state"] == "evicted", "position"].tolist():
            lost.setdefault(position, refresh)
        assert states["evicted_at"].tolist() == [lost.get(position, -1) for position in range(len(states))]
    assert bool(lost) == (run.strategy != "full")


def test_tokens_not_yet_read_have_no_score_and_no_fate(run: Trace) -> None:
    states = token_states(run, 1)
    unseen = states[states["state"] == "unseen"]
    assert unseen["position"].tolist() == list(range(16, 60))
    assert unseen["score"].isna().all()
    assert set(unseen["rank"]) == {0}
    assert set(unseen["evicted_at"]) == {-1}


def test_the_full_cache_loses_nothing_and_scores_nothing(tiny_llama: LanguageModel) -> None:
    trace = make(tiny_llama, "full")
    states = token_states(trace, 3)
    assert states["state"].tolist() == ["kept"] * 32 + ["unseen"] * 28
    assert states["score"].isna().all()
    assert set(states["rank"]) == {0}


def test_among_equal_scores_the_one_that_was_kept_ranks_first() -> None:
    """Ties go to the later position when entries are chosen, so they must in the rank that explains the choice."""
    rows: list[list[Entry]] = [[(0, 1, False, ""), (1, 1, True, ""), (2, 1, True, ""), (3, NAN, False, "")]]
    states = token_states(made(rows, [4], ["x"] * 4), 0)
    assert states["rank"].tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize("refresh", [-1, 7, 100])
def test_an_unknown_refresh_is_refused_with_those_there_are(refresh: int, run: Trace) -> None:
    for ask in (token_states, states_sentence):
        with pytest.raises(UserError) as raised:
            ask(run, refresh)
        assert str(raised.value) == f"This run has refreshes 0 to 6, and none numbered {refresh}."


def test_a_run_without_a_refresh_says_so(tiny_llama: LanguageModel) -> None:
    trace = make(tiny_llama, "importance", chunk_size=1000)
    with pytest.raises(UserError, match=re.escape(NO_REFRESH)):
        token_states(trace, 0)
    assert heatmap_sentence(trace) == NO_REFRESH
    assert slot_grid(trace).shape == (0, 1)


# Sentences


def numbers(sentence: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", sentence)]


def test_the_heatmaps_sentence_counts_what_the_last_refresh_holds(run: Trace) -> None:
    said = heatmap_sentence(run)
    assert len(said.splitlines()) == 1
    kept = kept_of(run)[6]
    if run.strategy == "full":
        assert numbers(said) == [7, 56]
        assert "nothing was evicted" in said
    else:
        assert numbers(said) == [7, 16, 56, 3, sum(position >= 28 for position in kept if position >= 3)]
        assert "frozen" in said


def test_the_heatmaps_sentence_leaves_frozen_out_where_nothing_is(tiny_llama: LanguageModel) -> None:
    trace = make(tiny_llama, "importance")
    said = heatmap_sentence(trace)
    assert numbers(said) == [7, 16, 56, sum(position >= 28 for position in kept_of(trace)[6])]
    assert "frozen" not in said


def test_a_cache_that_never_filled_is_said_to_have_evicted_nothing(tiny_llama: LanguageModel) -> None:
    said = heatmap_sentence(make(tiny_llama, "importance", cache_size=100))
    assert numbers(said) == [7, 56]
    assert "nothing was evicted" in said


def test_the_texts_sentence_counts_states(run: Trace) -> None:
    for refresh in run.refreshes["refresh"].tolist():
        states = token_states(run, refresh)
        count = {state: int((states["state"] == state).sum()) for state in ("kept", "evicted", "unseen")}
        now = int((states["evicted_at"] == refresh).sum())
        expected = [count["kept"] + count["evicted"], count["kept"], count["evicted"], now, count["unseen"]]
        assert numbers(states_sentence(run, refresh)) == [
            number for place, number in enumerate(expected) if number or place < 3
        ]


# The summary


def test_the_summary_counts_tokens_refreshes_and_time(run: Trace) -> None:
    summary = run_summary(run)
    assert (summary["prompt_tokens"], summary["new_tokens"], summary["refreshes"]) == (40, 20, 7)
    assert 0 < summary["prompt_seconds"] < summary["seconds"] == run.config["seconds"]
    decoding = run.config["seconds"] - run.config["prompt_seconds"]
    assert summary["tokens_per_second"] == pytest.approx(19 / decoding)
    assert summary["refresh_share"] == pytest.approx(run.refreshes["seconds"].sum() / run.config["seconds"])
    assert 0 <= summary["refresh_share"] <= 1
    assert summary["peak_bytes"] == run.refreshes["cache_bytes"].max()


@pytest.mark.parametrize("mode", ["chunked", "prefill_end", "both"])
@pytest.mark.parametrize("strategy", ["full", "sliding_window"])
@pytest.mark.parametrize("chunk", [8, 7, 1000])
def test_the_peak_is_the_most_entries_that_were_cached_at_any_moment(strategy: str, mode: str, chunk: int) -> None:
    trace = make(tiny("llama"), strategy, refresh_mode=mode, chunk_size=chunk, max_new_tokens=40)
    processed = len(trace.tokens) - 1  # the last token is chosen and never fed
    after = dict(zip(trace.refreshes["tokens_seen"], trace.refreshes["size_after"], strict=True))
    cached = peak = 0
    for seen in range(1, processed + 1):
        cached += 1
        peak = max(peak, cached)
        cached = after.get(seen, cached)
    assert run_summary(trace)["peak_entries"] == peak


def test_the_summary_of_a_run_that_has_only_begun_divides_by_nothing() -> None:
    trace = made([], [], ["x"] * 5, seconds=0.0, prompt_seconds=0.0)
    summary = run_summary(trace)
    assert (summary["prompt_tokens"], summary["new_tokens"], summary["refreshes"]) == (5, 0, 0)
    assert (summary["tokens_per_second"], summary["refresh_share"], summary["peak_bytes"]) == (0, 0, 0)


# Several runs, of any history; `test_comparing` has the same of real ones


@settings(max_examples=60, deadline=None)
@given(trace=histories())
def test_what_became_of_each_token_follows_from_the_entries_in_any_history(trace: Trace) -> None:
    kept, there, grid = kept_of(trace), presence(trace), survival_grid(trace)
    lost: dict[int, int] = {}
    for row, (refresh, seen) in enumerate(zip(trace.refreshes["refresh"], trace.refreshes["tokens_seen"], strict=True)):
        for position in range(len(trace.tokens)):
            lives = position in kept[refresh]
            assert there[row, position] == lives
            assert grid[row, position] == (0 if position >= seen else 1 if lives else 2)
            if position < seen and not lives:
                lost.setdefault(position, row)
    lives_of = lifetimes(trace)
    for column, source in (("evicted_at", "refresh"), ("tokens_seen_at_loss", "tokens_seen")):
        values = trace.refreshes[source].tolist()
        expected = [values[lost[position]] if position in lost else -1 for position in range(len(trace.tokens))]
        assert lives_of[column].tolist() == expected


@settings(max_examples=60, deadline=None)
@given(trace=histories())
def test_every_token_is_retained_or_not_in_one_group_in_any_history(trace: Trace) -> None:
    frozen, generated = int(trace.config["frozen_size"]), trace.tokens["generated"].tolist()
    expected: dict[tuple[int, str], list[int]] = {}
    for refresh, seen in zip(trace.refreshes["refresh"], trace.refreshes["tokens_seen"], strict=True):
        for position in range(seen):
            region = "frozen" if position < frozen else "generated" if generated[position] else "prompt"
            count = expected.setdefault((refresh, region), [0, 0])
            count[0] += 1
            count[1] += position in kept_of(trace)[refresh]
    table = retention(trace, "region").set_index(["refresh", "group"])
    assert {key: [row["seen"], row["kept"]] for key, row in table.iterrows()} == expected
    aged = retention(trace, "age").groupby("refresh")[["seen", "kept"]].sum()
    assert aged["seen"].tolist() == trace.refreshes["tokens_seen"].tolist()
    assert aged["kept"].tolist() == trace.refreshes["size_after"].tolist()


@settings(max_examples=60, deadline=None)
@given(a=histories(), b=histories(), at=st.integers(0, 40), region=st.sampled_from(["all", "prompt"]))
def test_runs_are_compared_by_the_tokens_seen_and_not_by_the_refresh(a: Trace, b: Trace, at: int, region: str) -> None:
    prompt = min(int((~trace.tokens["generated"]).sum()) for trace in (a, b))

    def held(trace: Trace, moment: int) -> set[int]:
        rows = zip(trace.refreshes["refresh"], trace.refreshes["tokens_seen"], strict=True)
        last = [refresh for refresh, seen in rows if seen <= moment][-1:]
        return {place for place in (kept_of(trace)[last[0]] if last else []) if region == "all" or place < prompt}

    def jaccard(moment: int) -> float:
        one, other = held(a, moment), held(b, moment)
        return len(one & other) / len(one | other) if one | other else 1.0

    table = overlap(a, b, region)
    assert table["tokens_seen"].tolist() == sorted({*a.refreshes["tokens_seen"]} & {*b.refreshes["tokens_seen"]})
    for row in table.to_dict("records"):
        one, other = held(a, row["tokens_seen"]), held(b, row["tokens_seen"])
        assert (row["both"], row["only_a"], row["only_b"]) == (len(one & other), len(one - other), len(other - one))
        assert row["jaccard"] == pytest.approx(jaccard(row["tokens_seen"]))
    matrix = overlap_matrix({"a": a, "b": b}, at, region)
    assert np.diag(matrix).tolist() == [1.0, 1.0]
    assert matrix.loc["a", "b"] == matrix.loc["b", "a"] == pytest.approx(jaccard(at))
    if region == "all":
        states = shared_states(a, b, at)["state"]
        one, other = held(a, at), held(b, at)
        for position, state in enumerate(states):
            where = {(1, 1): "both", (1, 0): "only a", (0, 1): "only b", (0, 0): "neither"}
            assert state == ("unseen" if position >= at else where[position in one, position in other])


def test_a_run_of_another_program_may_say_little_of_itself() -> None:
    row: list[Entry] = [(0, 1.0, True, ""), (1, 0.5, False, "")]
    full = made([row], [2], ["ab", "c", "d"], prompt=2)
    bare = Trace({}, full.tokens, full.refreshes.assign(tokens_seen=0), full.entries.iloc[:0])
    (said,) = comparison({"a": bare}, None).to_dict("records")
    assert (said["strategy"], said["new_tokens"], said["characters"], said["stop_reason"]) == ("unknown", 1, 1, "")
    for column in ("full_bytes", "bytes_share", "departs_at", "mean_kl", "agreement"):
        assert pd.isna(said[column])
    assert not len(retention(Trace({}, full.tokens, bare.refreshes.assign(size_after=0), bare.entries), "age"))


# Sentences on several runs


@pytest.fixture(scope="session")
def story() -> Trace:
    """Eight tokens of prompt and four of an answer; 3, 4, 5 and 9 are lost, the first three at the second refresh."""
    scored = [(place, float(place % 7), place not in (3, 4, 5), "frozen" * (place < 2)) for place in range(8)]
    later = [(place, float(place % 7), place != 9, "frozen" * (place < 2)) for place in (0, 1, 2, 6, 7, 8, 9, 10)]
    first = [(place, NAN, True, "frozen" * (place < 2)) for place in range(4)]
    return made([first, scored, later], [4, 8, 11], list("abcdefghijkl"), prompt=8, frozen_size=2)


def test_sentences_count_what_was_lost(story: Trace) -> None:
    assert survival_sentence(story) == (
        "Of 11 tokens seen 4 were lost, 1 of them from the answer; half of them by the time 8 had been seen."
    )
    assert scores_sentence(story, 0) == "Nothing was scored at this refresh: nothing had to go."
    assert scores_sentence(story, 1) == "Of 8 entries 5 were kept; the best of those evicted scored 5."
    assert retention_sentence({"one": story}, "region") == "Share of the prompt still kept at the end: one 50%."
    assert "of age 0-31 still kept at the end: one 64%" in retention_sentence({"one": story}, "age")
    nothing = made([], [], ["x"] * 5)
    assert survival_sentence(nothing) == retention_sentence({"a": nothing}, "age") == NO_REFRESH
    whole = made([[(0, NAN, True, ""), (1, NAN, True, "")]], [2], ["x"] * 5)
    assert survival_sentence(whole) == "None of the 2 tokens seen was lost."


def test_sentences_name_the_pair_that_shares_most_and_the_means() -> None:
    matrix = pd.DataFrame([[1, 0.5, 0.2], [0.5, 1, 0.7], [0.2, 0.7, 1]], list("abc"), list("abc"))
    assert overlap_sentence(matrix, 96) == "After 96 tokens b and c share most (0.70), a and c least (0.20)."
    assert overlap_sentence(matrix.iloc[:2, :2], 96) == "After 96 tokens a and b share most (0.50)."
    assert overlap_sentence(matrix.iloc[:1, :1], 96) == "One run alone has nothing to share."
    run = made([], [], ["x"] * 4, prompt=2)
    harm = run.tokens.assign(kl=np.float32([NAN, NAN, 0.25, 0.75]), agrees=[False, False, True, False])
    followed = Trace(run.config, harm, run.refreshes, run.entries)
    assert fidelity_sentence({"a": followed}) == "Mean divergence from the full cache: a 0.5 nats, 50% agree."
    rows = [("a", 3, 30, "eos"), ("a", 5, 50, "length"), ("a", 9, 90, "eos"), ("b", 9, 20, "length")]
    table = pd.DataFrame(rows, columns=["lane", "tokens", "characters", "stop_reason"])
    assert lengths_sentence(table, "tokens") == "Median tokens: a 5, b 9; 2 of 4 answers stopped at the length limit."
