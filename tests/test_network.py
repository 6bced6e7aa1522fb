"""How a model is called: masks, grouped heads, one layer alone, the head; and what a scoring pass allocates."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ccviz.cache import BoundedCache
from ccviz.network import (
    CHUNKED,
    FULL,
    SLIDING,
    VOCABULARY_ROWS,
    LanguageModel,
    causal_mask,
    fold_rows,
    future_mask,
    layer_kinds,
)
from ccviz.strategies import Entries, make_strategy
from ccviz.strategies.counter_causal import ROW_BLOCK

VOCABULARY = 20_000
PLAIN = {"vocab_size": 97, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL: dict[str, Any] = {
    **PLAIN,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def as_loaded(stock: Any) -> LanguageModel:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in stock.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.2 * noise)
    stock = stock.float().eval().requires_grad_(False)
    return LanguageModel(stock, None, stock.config.model_type, torch.device("cpu"), torch.float32)


def granite() -> LanguageModel:
    scales = {"logits_scaling": 6.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
    return as_loaded(transformers.GraniteForCausalLM(transformers.GraniteConfig(**SMALL, **scales)))


def cohere() -> LanguageModel:
    return as_loaded(transformers.CohereForCausalLM(transformers.CohereConfig(**SMALL, logit_scale=0.25)))


def phi() -> LanguageModel:
    """Its head has a bias."""
    return as_loaded(transformers.PhiForCausalLM(transformers.PhiConfig(**SMALL)))


MAKERS: dict[str, Callable[[], LanguageModel]] = {
    "llama": lambda: tiny("llama"),
    "gemma2": lambda: tiny("gemma2"),
    "granite": granite,
    "cohere": cohere,
    "phi": phi,
}


def fill(model: LanguageModel, size: int, record_inputs: bool = False) -> BoundedCache:
    """A cache of ``size`` random tokens, read in slices."""
    cache = BoundedCache(record_inputs=record_inputs)
    generator = torch.Generator().manual_seed(size)
    ids = torch.randint(0, model.config.vocab_size, (1, size), generator=generator)
    for start in range(0, size, 128):
        stop = min(start + 128, size)
        model.forward(ids[:, start:stop], torch.arange(start, stop)[None], cache)
    return cache


def entries_of(model: LanguageModel, cache: BoundedCache) -> Entries:
    return Entries(cache.row(0), model, 0, cache.size // 2, 0, torch.full((cache.size,), torch.nan))


# Masks, against a plain definition

POSITIONS = st.lists(st.integers(1, 6), min_size=1, max_size=24).map(
    lambda steps: [sum(steps[: at + 1]) for at in range(len(steps))]
)
WINDOWS = SimpleNamespace(sliding_window=7, attention_chunk_size=5)


def near(kind: str, one: int, other: int) -> bool:
    """Whether two positions, whichever is later, may see each other in a layer of this kind."""
    if kind == SLIDING:
        return abs(one - other) < WINDOWS.sliding_window
    if kind == CHUNKED:
        return one // WINDOWS.attention_chunk_size == other // WINDOWS.attention_chunk_size
    return True


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(POSITIONS, min_size=1, max_size=2), data=st.data())
@pytest.mark.parametrize("kind", [FULL, SLIDING, CHUNKED])
def test_a_causal_mask_shows_the_past_within_reach(kind: str, rows: list[list[int]], data: st.DataObject) -> None:
    size = min(len(row) for row in rows)
    rows = [row[:size] for row in rows]
    queries = data.draw(st.integers(1, size))
    mask = causal_mask(torch.tensor(rows), queries, WINDOWS)(kind)
    assert mask.dtype == torch.bool
    assert mask.shape[0] in (1, len(rows))
    mask = mask.expand(len(rows), 1, queries, size)
    for at, row in enumerate(rows):
        expected = [
            [slot <= query and near(kind, row[query], row[slot]) for slot in range(size)]
            for query in range(size - queries, size)
        ]
        assert mask[at, 0].tolist() == expected


@settings(max_examples=150, deadline=None)
@given(row=POSITIONS, min_gap=st.integers(0, 4), data=st.data())
@pytest.mark.parametrize("kind", [FULL, SLIDING, CHUNKED])
def test_a_future_mask_shows_the_future_within_reach_or_the_row_itself(
    kind: str, row: list[int], min_gap: int, data: st.DataObject
) -> None:
    size = len(row)
    count = data.draw(st.integers(1, size))
    mask = future_mask(torch.tensor(row), count, min_gap, WINDOWS)(kind)
    assert mask.shape == (1, 1, count, size)
    for query in range(count):
        seen = {slot for slot in range(size) if slot > query + min_gap and near(kind, row[query], row[slot])}
        assert set(torch.nonzero(mask[0, 0, query])[:, 0].tolist()) == (seen or {query})


def test_folding_repeats_a_mask_once_a_group() -> None:
    mask = future_mask(torch.arange(5), 3, 0, WINDOWS)
    folded = fold_rows(mask, 2)(FULL)
    assert folded.shape == (1, 1, 6, 5)
    assert torch.equal(folded[:, :, :3], mask(FULL))
    assert torch.equal(folded[:, :, 3:], mask(FULL))


def test_layer_kinds_are_read_from_the_configuration() -> None:
    assert layer_kinds(tiny("llama").config) == (FULL,) * 3
    assert layer_kinds(tiny("mistral").config) == (SLIDING,) * 3
    assert layer_kinds(tiny("gemma2").config) == (SLIDING, FULL) * 2


# Grouped attention


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
def test_grouped_attention_is_the_stock_attention(family: str) -> None:
    model = tiny(family)
    row = fill(model, 40).row(0)
    for start, stop in ((0, 40), (8, 17), (39, 40)):
        mask = future_mask(row.positions[start:], stop - start, 0, model.config)
        ids, positions = row.token_ids[None, start:stop], row.positions[None, start:stop]
        stock = model.call(ids, positions, mask, row.from_slot(start))
        with model.grouped_queries() as groups:
            assert groups == 2
            grouped = model.call(ids, positions, fold_rows(mask, groups), row.from_slot(start))
        assert model.model.config._attn_implementation == "sdpa"
        torch.testing.assert_close(grouped, stock, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_heads_that_share_nothing_are_not_grouped(family: str) -> None:
    model = tiny(family)
    with model.grouped_queries() as groups:
        assert groups == 1
        assert model.model.config._attn_implementation == "sdpa"


def test_grouping_ends_where_its_body_raises() -> None:
    model = tiny("llama")
    with pytest.raises(KeyError), model.grouped_queries():
        raise KeyError
    assert model.model.config._attn_implementation == "sdpa"


# The last layer alone


def state_of(model: LanguageModel) -> dict[str, Any]:
    """Everything that can be hung on a module: its own forward, and hooks."""
    return {
        name: (module.__dict__.get("forward"), dict(module._forward_pre_hooks), dict(module._forward_hooks))
        for name, module in model.model.named_modules()
    }


@pytest.mark.parametrize("ffn", [True, False])
@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "gpt_neox"])
def test_the_last_layer_alone_leaves_the_model_as_it_was(family: str, raises: bool, ffn: bool) -> None:
    model = tiny(family)
    own: Any = model.layers[0].forward
    vars(model.layers[0])["forward"] = own  # as accelerate's dispatch leaves it
    before = state_of(model)
    ids, positions = torch.arange(7)[None], torch.arange(7)[None]
    expected = model.forward(ids, positions, BoundedCache())
    body: list[bool] = []
    try:
        with model.last_layer_alone(torch.zeros(1, 7, 48), ffn):
            body.append(state_of(model) != before)
            if raises:
                raise KeyError
    except KeyError:
        body.append(True)
    assert body == [True] * (1 + raises)
    assert state_of(model) == before
    assert vars(model.layers[0])["forward"] is own
    assert "forward" not in vars(model.layers[1])
    assert torch.equal(model.forward(ids, positions, BoundedCache()), expected)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neox"])
def test_the_last_layer_alone_on_its_own_input_gives_the_whole_models_output(family: str) -> None:
    model = tiny(family)
    cache = BoundedCache(record_inputs=True)
    ids, positions = torch.arange(3, 30)[None], torch.arange(27)[None]
    whole = model.forward(ids, positions, cache)
    row = cache.row(0)
    with model.last_layer_alone(row.layer_inputs[None], ffn=True):
        alone = model.call(torch.zeros_like(ids), positions, causal_mask(positions, 27, model.config), row.from_slot(0))
    torch.testing.assert_close(alone, whole, rtol=1e-4, atol=1e-4)


def test_without_its_feed_forward_block_the_last_layer_is_attention_and_residual() -> None:
    model = tiny("llama")
    cache = BoundedCache(record_inputs=True)
    ids, positions = torch.arange(3, 30)[None], torch.arange(27)[None]
    attended: list[Tensor] = []
    attention: Any = model.layers[-1].self_attn
    handle = attention.register_forward_hook(lambda _m, _a, output: attended.append(output[0]))
    model.forward(ids, positions, cache)
    handle.remove()
    row = cache.row(0)
    with model.last_layer_alone(row.layer_inputs[None], ffn=False):
        alone = model.call(ids, positions, causal_mask(positions, 27, model.config), row.from_slot(0))
    torch.testing.assert_close(alone, model.model.model.norm(row.layer_inputs[None] + attended[0]))


# The head


@pytest.mark.parametrize("family", MAKERS)
def test_a_tokens_logit_is_the_stock_models(family: str) -> None:
    model = MAKERS[family]()
    ids = torch.randint(0, 97, (1, 90), generator=torch.Generator().manual_seed(2))
    hidden = model.forward(ids, torch.arange(90)[None], BoundedCache())[0]
    stock = model.model(ids, use_cache=False).logits[0].float()
    asked = torch.randint(0, 97, (90,), generator=torch.Generator().manual_seed(3))
    expected = stock.gather(-1, asked[:, None])[:, 0]
    assert float(stock.std()) > 0.02
    torch.testing.assert_close(model.logits(hidden), stock, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.token_logits(hidden, asked), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", MAKERS)
@pytest.mark.parametrize("count", [1, VOCABULARY_ROWS, VOCABULARY_ROWS + 1, 90])
def test_a_tokens_log_probability_is_the_log_softmax(family: str, count: int) -> None:
    model = MAKERS[family]()
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, 48, generator=generator)
    asked = torch.randint(0, 97, (count,), generator=generator)
    expected = model.logits(hidden).double().log_softmax(-1).gather(-1, asked[:, None])[:, 0].float()
    torch.testing.assert_close(model.token_logprobs(hidden, asked), expected, rtol=1e-4, atol=1e-4)


def test_the_scales_and_the_cap_are_there_to_be_missed() -> None:
    """Each model's logits differ from the plain product with the head, so the tests above can fail."""
    for family, maker in MAKERS.items():
        model = maker()
        hidden = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
        plain = hidden @ model.model.get_output_embeddings().weight.T
        assert torch.allclose(model.logits(hidden), plain, atol=1e-3) == (family == "llama")


# What a scoring pass allocates


@pytest.fixture(scope="module")
def wide() -> LanguageModel:
    """Few parameters but for a wide vocabulary; two query heads share a key head."""
    config = transformers.LlamaConfig(
        **{
            **PLAIN,
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 20_000,
        }
    )
    return as_loaded(transformers.LlamaForCausalLM(config))


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most bytes that were allocated at one time while ``work`` ran, beyond those before it.

    Every allocation and release of torch's CPU allocator is an event of the profiler, those inside C++ operators too.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    assert seen.profiler is not None
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    running = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        running += event.nbytes()
        most = max(most, running)
    return most


def scoring_bytes(model: LanguageModel, strategy: str, options: dict[str, Any], size: int) -> int:
    entries = entries_of(model, fill(model, size, record_inputs=strategy.endswith("fast")))
    chosen = make_strategy(strategy, options)
    chosen.scores(entries)  # what is made once and kept (rotary tables, cached properties) is not the pass's
    return peak_bytes(lambda: chosen.scores(entries))


def test_the_measure_of_peak_bytes_measures() -> None:
    def work() -> None:
        first = torch.zeros(1000, 1000)
        del first
        second = torch.zeros(500, 1000)
        torch.nn.functional.softmax(second, -1).sum()

    assert 4_000_000 <= peak_bytes(work) < 4_100_000

    def inside_an_operator() -> Tensor:
        query, mask = torch.zeros(1, 1, 2000, 8), torch.ones(1, 1, 2000, 2000, dtype=torch.bool)
        return nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)

    assert peak_bytes(inside_an_operator) >= 2000 * 2000 * 5  # the mask, and its float copy that only C++ sees


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("counter_causal", {}),
        ("counter_causal", {"score": "probability"}),
        ("counter_causal_fast", {}),
        ("counter_causal_fast", {"ffn": True, "score": "probability"}),
    ],
    ids=str,
)
def test_a_counter_causal_pass_takes_one_row_blocks_memory(
    wide: LanguageModel, strategy: str, options: dict[str, Any]
) -> None:
    groups, (small, large) = 2, (1024, 4096)
    few, many = (scoring_bytes(wide, strategy, options, size) for size in (small, large))
    assert many < large * VOCABULARY * 4 / 10
    # What may grow with n: the mask of one block of rows, once a group (a bool; inside attention its negation and its
    # float copy besides), and vectors of n scores or positions.
    mask = ROW_BLOCK * (large - small) * groups * (1 + 1 + 4)
    vectors = 8 * 4 * (large - small)
    assert many - few <= mask + vectors


class Shapes(TorchDispatchMode):
    """Collects the shape of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= {tuple(leaf.shape) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
        return out


@pytest.mark.parametrize("score", ["logit", "probability"])
@pytest.mark.parametrize("strategy", ["counter_causal", "counter_causal_fast"])
def test_no_more_than_a_few_rows_of_vocabulary_exist(wide: LanguageModel, strategy: str, score: str) -> None:
    entries = entries_of(wide, fill(wide, 700, record_inputs=True))
    with Shapes() as shapes:
        make_strategy(strategy, {"score": score}).scores(entries)
    head = (VOCABULARY, 64)  # the weights themselves, seen from both sides
    wide_ones = [shape for shape in shapes.seen if VOCABULARY in shape and shape not in (head, head[::-1])]
    rows = [torch.Size(shape).numel() // VOCABULARY for shape in wide_ones]
    assert all(count <= VOCABULARY_ROWS for count in rows)
    assert bool(rows) == (score == "probability")


def test_the_forward_pass_of_a_chunk_makes_no_logits(wide: LanguageModel) -> None:
    with Shapes() as shapes:
        wide.forward(torch.arange(300)[None], torch.arange(300)[None], BoundedCache())
    assert not any(VOCABULARY in shape for shape in shapes.seen)
