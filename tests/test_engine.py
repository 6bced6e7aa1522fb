"""Which entries survive and which tokens follow, against the oracle; and what the loop promises besides."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import tiny
from torch.utils._python_dispatch import TorchDispatchMode

from ccviz.engine import stream
from ccviz.errors import UserError
from ccviz.events import Done, PromptFed, Refreshed, TokenGenerated
from ccviz.network import LanguageModel
from ccviz.settings import Settings
from ccviz.strategies import make_strategy, strategy_names

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neox")
STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("sliding_window", {}),
    ("importance", {}),
    ("importance", {"queries": "all"}),
    ("heavy_hitter", {}),
    ("heavy_hitter", {"recent": 3}),
    ("counter_causal", {}),
    ("counter_causal", {"score": "probability"}),
    ("counter_causal", {"min_gap": 2, "recent": 5}),
    ("counter_causal_fast", {}),
    ("counter_causal_fast", {"ffn": True}),
]
# These read token ids or a position on the host at each refresh (not at each step), as docs/strategies.md says.
ASK_NOTHING = [name for name in strategy_names() if name not in ("random", "counter_causal_span")]
BUDGETS = [
    # prompt tokens, J, h, frozen, refresh mode
    (40, 16, 8, 0, "chunked"),
    (40, 16, 8, 6, "chunked"),
    (37, 20, 5, 13, "both"),  # frozen longer than the first chunks
    (30, 12, 7, 3, "prefill_end"),
    (9, 14, 1, 2, "chunked"),  # prompt below J, a refresh a token
    (11, 16, 32, 0, "both"),  # a chunk longer than the prompt
]


def prompt_of(size: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 97, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


def collect(model: LanguageModel, prompt: list[int], name: str, options: dict[str, Any], settings: Settings) -> Any:
    lanes = {name: make_strategy(name, options)}
    events = list(stream(model, prompt, lanes, settings))
    tokens = [event.token_id for event in events if isinstance(event, TokenGenerated)]
    return tokens, [event for event in events if isinstance(event, Refreshed)]


def assert_same(ours: Any, theirs: oracle.OracleRun) -> None:
    tokens, refreshes = ours
    assert [event.tokens_seen for event in refreshes] == [refresh.tokens_seen for refresh in theirs.refreshes]
    for event, refresh in zip(refreshes, theirs.refreshes, strict=True):
        assert event.positions.tolist() == refresh.before
        if refresh.scores is not None:
            np.testing.assert_allclose(event.scores, refresh.scores, rtol=2e-4, atol=2e-3)
        assert event.positions[event.kept].tolist() == refresh.kept
        assert (event.size_before, event.size_after) == (len(refresh.before), len(refresh.kept))
    assert tokens == theirs.tokens


@pytest.mark.parametrize(("strategy", "options"), STRATEGIES, ids=lambda value: str(value))
@pytest.mark.parametrize("family", FAMILIES)
def test_survivors_scores_and_tokens_equal_the_oracle(family: str, strategy: str, options: dict[str, Any]) -> None:
    model = tiny(family)
    for size, cache, chunk, frozen, mode in BUDGETS:
        settings = Settings(cache, chunk, 20, frozen, mode)
        if (strategy, options.get("recent")) == ("counter_causal", 5) and frozen + 5 > cache:
            continue
        ours = collect(model, prompt_of(size), strategy, options, settings)
        theirs = oracle.run(model.model, prompt_of(size), strategy, cache, chunk, 20, frozen, mode, options)
        assert_same(ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("strategy", ["full", "importance", "heavy_hitter", "counter_causal", "counter_causal_fast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_survivors_on_cuda_equal_the_oracle(family: str, strategy: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = tiny(family, device="cuda")
    ours = collect(model, prompt_of(40), strategy, {}, Settings(16, 8, 20, 6))
    theirs = oracle.run(oracle.tiny_model(family, 0), prompt_of(40), strategy, 16, 8, 20, 6)
    assert_same(ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_decode_step_on_cuda_waits_on_the_host_once() -> None:
    model = tiny("llama", device="cuda")
    events = stream(model, prompt_of(40), {"s": make_strategy("counter_causal")}, Settings(16, 4, 20))
    while not isinstance(next(events), TokenGenerated):
        pass
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as seen:
            steps = sum(isinstance(event, TokenGenerated) for event in events)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(seen) <= steps


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("strategy", strategy_names())
def test_the_built_in_model_equals_the_oracle(built_in: LanguageModel, strategy: str) -> None:
    text = "Monday: milk. Tuesday: bread and 12 eggs. Wednesday: nothing. Thursday: soap, twice. What on Tuesday?"
    prompt = built_in.tokenizer(text)["input_ids"] * 2
    ours = collect(built_in, prompt, strategy, {}, Settings(32, 12, 12, 5))
    eos, decode = set(built_in.eos_ids), lambda token: built_in.tokenizer.decode([token])
    theirs = oracle.run(built_in.model, prompt, strategy, 32, 12, 12, 5, eos_ids=eos, decode=decode)
    assert_same(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_full_equals_generate_whatever_the_chunk_size(family: str) -> None:
    model = tiny(family, seed=1)
    prompt = prompt_of(40, seed=3)
    ids = torch.tensor([prompt])
    expected = model.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    for chunk in (1, 7, 40, 1000):
        tokens, refreshes = collect(model, prompt, "full", {}, Settings(8, chunk, 24))
        assert tokens == expected[0, 40:].tolist()
        assert len(refreshes) == 63 // chunk
        assert all(event.kept.all() for event in refreshes)


@pytest.mark.model
def test_full_equals_generate_on_the_built_in_model(built_in: LanguageModel) -> None:
    ids = built_in.tokenizer("The three primary colours are", return_tensors="pt")["input_ids"]
    expected = built_in.model.generate(ids, do_sample=False, max_new_tokens=40)
    tokens, _ = collect(built_in, ids[0].tolist(), "full", {}, Settings(16, 8, 40))
    assert tokens == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lanes_give_what_each_run_alone_gives(temperature: float) -> None:
    model = tiny("llama", seed=2)
    settings = Settings(16, 8, 30, 4, temperature=temperature, seed=7)
    names = [name for name in strategy_names() if name != "full"]
    together = list(stream(model, prompt_of(50), {name: make_strategy(name) for name in names}, settings))
    for name in names:
        tokens, refreshes = collect(model, prompt_of(50), name, {}, settings)
        ours = [event for event in together if getattr(event, "lane", None) == name]
        assert [event.token_id for event in ours if isinstance(event, TokenGenerated)] == tokens
        kept = [event.positions[event.kept].tolist() for event in ours if isinstance(event, Refreshed)]
        assert kept == [event.positions[event.kept].tolist() for event in refreshes]


def test_lanes_that_finish_leave_the_batch() -> None:
    model = tiny("llama", seed=2)
    settings = Settings(16, 8, 40)
    alone = {name: collect(model, prompt_of(50), name, {}, settings)[0] for name in ("importance", "sliding_window")}
    differ = [token for token in alone["importance"][5:20] if token not in alone["sliding_window"][:30]]
    vars(model)["eos_ids"] = frozenset(differ[:1])
    events = list(stream(model, prompt_of(50), {name: make_strategy(name) for name in alone}, settings))
    done = {event.lane: event.stop_reason for event in events if isinstance(event, Done)}
    assert done["importance"] == "eos"
    after = events.index(Done("importance", "eos"))
    rest = [event for event in events[after + 1 :] if isinstance(event, TokenGenerated)]
    assert rest
    assert {event.lane for event in rest} == {"sliding_window"}
    ours = [e.token_id for e in events if isinstance(e, TokenGenerated) and e.lane == "sliding_window"]
    assert ours == alone["sliding_window"][: len(ours)]


@pytest.mark.parametrize("strategy", strategy_names())
def test_the_cache_never_holds_more_than_its_budget_and_one_chunk(strategy: str, tiny_llama: LanguageModel) -> None:
    cache, chunk = 16, 8
    _, refreshes = collect(tiny_llama, prompt_of(60), strategy, {}, Settings(cache, chunk, 40))
    config = tiny_llama.config
    head = config.hidden_size // config.num_attention_heads
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * head * 4
    assert tiny_llama.entry_bytes == entry
    for event in refreshes:
        allocated = event.cache_bytes / entry
        assert event.size_after == event.size_before if strategy == "full" else event.size_after <= cache
        if strategy == "full":
            assert event.size_after <= allocated < max(64, 2 * event.size_after) + 1
        elif strategy == "counter_causal_fast":  # its recorded inputs are part of what it allocates
            assert allocated <= (cache + chunk) * (entry + 4 * config.hidden_size) / entry
        else:
            assert allocated <= cache + chunk


def test_a_cache_cut_down_once_gives_its_memory_back(tiny_llama: LanguageModel) -> None:
    settings = Settings(16, 8, 12, refresh_mode="prefill_end")
    _, refreshes = collect(tiny_llama, prompt_of(400), "sliding_window", {}, settings)
    assert refreshes[0].size_before == 400
    assert refreshes[0].cache_bytes <= 64 * tiny_llama.entry_bytes


def test_a_strategy_object_used_again_gives_what_a_fresh_one_gives(tiny_llama: LanguageModel) -> None:
    for name in strategy_names():
        used = make_strategy(name)
        settings = Settings(16, 8, 12, 2)
        list(stream(tiny_llama, prompt_of(90), {"lane": used}, settings))
        again = list(stream(tiny_llama, prompt_of(30, seed=5), {"lane": used}, settings))
        fresh = list(stream(tiny_llama, prompt_of(30, seed=5), {"lane": make_strategy(name)}, settings))
        for one, other in zip(again, fresh, strict=True):
            assert type(one) is type(other)
            if isinstance(one, Refreshed) and isinstance(other, Refreshed):
                np.testing.assert_array_equal(one.kept, other.kept)
                np.testing.assert_array_equal(one.positions, other.positions)
            elif isinstance(one, TokenGenerated) and isinstance(other, TokenGenerated):
                assert one.token_id == other.token_id


def test_log_probabilities_are_the_models_own(tiny_llama: LanguageModel) -> None:
    prompt = prompt_of(150)  # more than one slice of the prompt
    events = list(stream(tiny_llama, prompt, {"full": make_strategy("full")}, Settings(8, 200, 10, logprobs=True)))
    recorded = np.concatenate([e.logprobs for e in events if isinstance(e, PromptFed) and e.logprobs is not None])
    generated = [event for event in events if isinstance(event, TokenGenerated)]
    ids = torch.tensor([prompt + [event.token_id for event in generated]])
    with torch.no_grad():
        expected = tiny_llama.model(ids).logits[0].log_softmax(-1)
    of_tokens = expected[:-1].gather(-1, ids[0, 1:, None])[:, 0].numpy()
    assert math.isnan(recorded[0])
    np.testing.assert_allclose(recorded[1:], of_tokens[:149], atol=1e-4)
    np.testing.assert_allclose([event.logprob for event in generated], of_tokens[149:], atol=1e-4)


def test_sampling_follows_its_seed(tiny_llama: LanguageModel) -> None:
    def tokens(seed: int) -> list[int]:
        return collect(tiny_llama, prompt_of(20), "full", {}, Settings(8, 8, 30, temperature=2.0, seed=seed))[0]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


@pytest.mark.parametrize("when", ["prompt", "scoring", "decode"])
def test_cancel_stops_within_one_step_and_says_so(when: str) -> None:
    model = tiny("llama")
    asked = 0
    stop_at = {"prompt": 3, "scoring": 2, "decode": 9}[when]

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > stop_at

    size, settings = {
        "prompt": (400, Settings(390, 395, 20)),  # cancelled between slices of the first chunk
        "scoring": (40, Settings(16, 39, 20)),  # inside the first eviction
        "decode": (10, Settings(16, 8, 100)),
    }[when]
    name = "heavy_hitter" if when == "scoring" else "sliding_window"
    events = list(stream(model, prompt_of(size), {"lane": make_strategy(name)}, settings, cancelled))
    assert events[-1] == Done("lane", "cancelled")
    assert asked == stop_at + 1
    assert sum(isinstance(event, TokenGenerated) for event in events) == (7 if when == "decode" else 0)


class _WhatTheHostAsks(TorchDispatchMode):
    """Counts operations whose result the host must wait for."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(func.__name__.startswith(word) for word in self.WAITING)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("strategy", ASK_NOTHING)
def test_nothing_but_the_one_transfer_asks_the_device(
    strategy: str, tiny_llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA half of this needs a GPU (above); here: no operation that waits, and one transfer a token."""
    engine = importlib.import_module("ccviz.engine")
    fetched = 0

    def counting(tensors: Any, fetch: Any = engine.fetch) -> Any:
        nonlocal fetched
        fetched += 1
        return fetch(tensors)

    monkeypatch.setattr(engine, "fetch", counting)
    events = stream(tiny_llama, prompt_of(40), {"lane": make_strategy(strategy)}, Settings(16, 4, 30))
    while not isinstance(next(events), TokenGenerated):
        pass
    fetched = 0
    with _WhatTheHostAsks() as asks:
        steps = sum(isinstance(event, TokenGenerated) for event in events)
    assert steps == 29
    assert fetched == steps
    assert asks.count == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cache_size": 0}, "cache_size"),
        ({"cache_size": 1}, "at least 2"),
        ({"cache_size": 8.5}, "whole number"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"frozen_size": -1}, "frozen_size"),
        ({"frozen_size": 16}, "must be below cache_size"),
        ({"frozen_size": 17}, "must be below cache_size"),
        ({"refresh_mode": "sometimes"}, "prefill_end"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"seed": -1}, "seed"),
    ],
)
def test_settings_say_what_is_wrong_in_one_sentence(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as raised:
        Settings(**{"cache_size": 16, "chunk_size": 8, **given})
    assert "\n" not in str(raised.value)


def test_a_prompt_over_the_context_is_refused_before_anything_runs(tiny_llama: LanguageModel) -> None:
    lanes = {"full": make_strategy("full")}
    with pytest.raises(UserError, match="reads at most 512"):
        next(stream(tiny_llama, prompt_of(512), lanes, Settings(16, 8)))
    with pytest.raises(UserError, match="at most 12 new tokens"):
        next(stream(tiny_llama, prompt_of(500), lanes, Settings(16, 8, 13)))


def test_more_protected_than_fits_is_refused(tiny_llama: LanguageModel) -> None:
    lanes = {"lane": make_strategy("counter_causal", {"recent": 14})}
    with pytest.raises(UserError, match="protects 14 recent and 3 frozen"):
        next(stream(tiny_llama, prompt_of(40), lanes, Settings(16, 8, 10, 3)))


def test_the_plan_counts_what_the_run_does(tiny_llama: LanguageModel) -> None:
    for size, cache, chunk, frozen, mode in BUDGETS:
        settings = Settings(cache, chunk, 20, frozen, mode)
        _, refreshes = collect(tiny_llama, prompt_of(size), "sliding_window", {}, settings)
        assert settings.prompt_refreshes(size) == sum(event.phase == "prefill" for event in refreshes)
        if refreshes:
            assert max(event.size_before for event in refreshes) <= settings.most_entries(size)
