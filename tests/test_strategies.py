"""Options, the registry, and what ranking promises whatever the scores are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from conftest import tiny
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ccviz.cache import BoundedCache
from ccviz.engine import stream
from ccviz.errors import UserError
from ccviz.events import Refreshed
from ccviz.network import LanguageModel
from ccviz.settings import Settings
from ccviz.strategies import Entries, Strategy, counter_causal, keep_best, make_strategy, register, strategy_names

PARTS = st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 20), st.integers(0, 20))
NUMBERS = st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -3.5, float("inf"), float("-inf"), float("nan")])


@given(parts=PARTS, data=st.data())
def test_the_best_survive_ties_go_to_the_later_and_nan_ranks_lowest(
    parts: tuple[int, int, int, int], data: st.DataObject
) -> None:
    frozen, tail, ranked, lost = parts
    size = frozen + tail + ranked + lost
    scores = data.draw(st.lists(NUMBERS, min_size=size, max_size=size))
    kept = keep_best(torch.tensor(scores), frozen, tail, frozen + tail + ranked).tolist()

    def rank(slot: int) -> tuple[bool, float, int]:
        score = float(np.float32(scores[slot]))
        return (score == score, score if score == score else 0.0, slot)

    candidates = range(frozen, size - tail)
    best = sorted(candidates, key=rank, reverse=True)[:ranked]
    assert kept == [*range(frozen), *sorted(best), *range(size - tail, size)]


@given(
    prompt=st.integers(1, 60),
    cache=st.integers(2, 20),
    chunk=st.integers(1, 12),
    frozen=st.integers(0, 19),
    strategy=st.sampled_from([name for name in strategy_names() if name != "full"]),
)
@settings(max_examples=60, deadline=None)
def test_every_refresh_keeps_exactly_the_budget_in_order(
    prompt: int, cache: int, chunk: int, frozen: int, strategy: str
) -> None:
    frozen = min(frozen, cache - 1)
    assume(max(frozen, 4 if strategy == "streaming_llm" else 0) <= cache)  # its sinks have to fit
    ids = [(7 * at) % 97 for at in range(prompt)]
    events = stream(SHARED, ids, {"lane": make_strategy(strategy)}, Settings(cache, chunk, 6, frozen))
    for event in events:
        if isinstance(event, Refreshed):
            survivors = event.positions[event.kept]
            assert event.size_after == len(survivors) == min(event.size_before, cache)
            assert (np.diff(survivors) > 0).all()
            assert event.kept[event.protected != ""].all()
            assert (event.protected == "frozen").sum() == min(frozen, event.size_before)


SHARED = tiny("llama")


@dataclass(frozen=True)
class _Constant(Strategy):
    """All entries score the same."""

    name: ClassVar[str] = "constant"
    title: ClassVar[str] = "Constant"
    summary: ClassVar[str] = "For tests."
    source: ClassVar[str] = "tests"
    value: int = 0
    nan: bool = False

    def protects_recent(self, cache_size: int, frozen_size: int) -> int:
        return 3

    def scores(self, entries: Entries) -> Tensor:
        return torch.full((entries.size,), float("nan") if self.nan else float(self.value))


@pytest.mark.parametrize("nan", [False, True])
def test_protected_entries_survive_when_nothing_tells_entries_apart(nan: bool, tiny_llama: LanguageModel) -> None:
    events = stream(tiny_llama, list(range(50)), {"lane": _Constant(nan=nan)}, Settings(12, 5, 8, 4))
    for event in events:
        if isinstance(event, Refreshed):
            survivors = event.positions[event.kept].tolist()
            assert survivors[:4] == [0, 1, 2, 3]
            if event.size_before > 12:  # ties go to the later position: the newest fill the rest
                assert survivors[4:] == event.positions[-8:].tolist()


def test_the_sliding_window_is_exact_after_twenty_refreshes(tiny_llama: LanguageModel) -> None:
    events = stream(tiny_llama, list(range(90)), {"lane": make_strategy("sliding_window")}, Settings(10, 6, 60, 3))
    refreshed = [event for event in events if isinstance(event, Refreshed)]
    assert len(refreshed) > 20
    for event in refreshed[2:]:
        expected = [0, 1, 2, *range(event.tokens_seen - 7, event.tokens_seen)]
        assert event.positions[event.kept].tolist() == expected


def test_kept_keys_are_bitwise_the_keys_first_computed(tiny_llama: LanguageModel) -> None:
    cache = BoundedCache(limit=24)
    ids = torch.arange(20)[None]
    tiny_llama.forward(ids, ids, cache)
    before = [cache.row(0).keys(layer).clone() for layer in range(cache.row(0).layers)]
    cache.keep(torch.tensor([[0, 3, 4, 19]]))
    assert cache.positions.tolist() == [[0, 3, 4, 19]]
    assert cache.row(0).token_ids.tolist() == [0, 3, 4, 19]
    for layer, keys in enumerate(before):
        assert torch.equal(cache.row(0).keys(layer), keys[:, [0, 3, 4, 19]])


def test_a_token_stays_with_its_own_key_while_decoding(tiny_llama: LanguageModel) -> None:
    """The released code stores the next token beside each key during decode; the paper, and we, do not."""
    seen: list[tuple[list[int], list[int]]] = []

    @dataclass(frozen=True)
    class Spy(_Constant):
        def scores(self, entries: Entries) -> Tensor:
            seen.append((entries.cache.positions.tolist(), entries.cache.token_ids.tolist()))
            return super().scores(entries)

    prompt = [5, 17, 3, 88, 41]
    events = list(stream(tiny_llama, prompt, {"lane": Spy()}, Settings(8, 3, 20)))
    sequence = prompt + [event.token_id for event in events if hasattr(event, "token_id")]
    assert seen
    for positions, tokens in seen:
        assert tokens == [sequence[position] for position in positions]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("name", ["counter_causal", "counter_causal_fast"])
def test_row_blocks_change_nothing(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family)

    def scores() -> Tensor:
        return make_strategy(name, {"min_gap": 1}).scores(cached(model, 50))

    whole = scores()
    monkeypatch.setattr(counter_causal, "ROW_BLOCK", 7)
    torch.testing.assert_close(scores(), whole, atol=1e-4, rtol=1e-4)


def cached(model: LanguageModel, size: int) -> Entries:
    """``size`` entries in a cache, as a strategy sees them."""
    cache = BoundedCache(record_inputs=True)
    ids = torch.arange(size)[None] % model.config.vocab_size
    model.forward(ids, torch.arange(size)[None], cache)
    return Entries(cache.row(0), model, 0, size, 0, torch.full((size,), torch.nan))


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_only_earlier_rows_move_when_an_entry_changes(family: str) -> None:
    model = tiny(family)
    entries = cached(model, 20)
    before = make_strategy("counter_causal").scores(entries)
    entries.cache.keys(0)[:, 12] += 1.0
    moved = (make_strategy("counter_causal").scores(entries) - before).abs() > 1e-6
    assert moved[:12].any()
    assert not moved[12:-1].any()  # the last row sees itself and is protected


def test_options_are_checked_by_name_and_value() -> None:
    for name, options, says in [
        ("counter_causal", {"scores": "logit"}, "has no option 'scores'; its options are score, min_gap, recent"),
        ("full", {"x": 1}, "it has none"),
        ("counter_causal", {"score": "loud"}, "must be one of 'logit', 'probability'"),
        ("counter_causal", {"min_gap": -1}, "at least 0"),
        ("counter_causal_fast", {"ffn": 1}, "true or false"),
        ("heavy_hitter", {"recent": "many"}, "whole number"),
        ("best", {}, "choose one of full, sliding_window"),
    ]:
        with pytest.raises(UserError, match=says):
            make_strategy(name, options)


def test_a_strategy_of_ones_own_is_registered_once_and_found() -> None:
    from ccviz.strategies import registry

    register(_Constant)
    try:
        assert make_strategy("constant", {"value": 3}) == _Constant(3)
        with pytest.raises(UserError, match="registered already"):
            register(type("Other", (_Constant,), {"name": "constant"}))
    finally:
        del registry._registry["constant"]
    with pytest.raises(UserError, match="not a class derived from"):
        register(int)  # type: ignore[type-var]  # the mistake under test


def test_every_strategy_says_what_it_is_in_words() -> None:
    for name in strategy_names():
        cls = type(make_strategy(name))
        assert cls.summary.endswith(".")
        assert "arXiv" in cls.source or name == "random"
        assert cls.__doc__
        for option in cls.__dataclass_fields__.values():
            if option.init and not str(option.type).startswith("ClassVar"):
                assert option.metadata["help"].endswith(".")
