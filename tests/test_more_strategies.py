"""The strategies beyond the paper's six, by hand on small caches, and strategies from a user's own file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Ccviz, assert_one_line
from conftest import ROOT, tiny
from test_strategies import cached
from torch import Tensor

import ccviz
from ccviz.errors import UserError
from ccviz.network import LanguageModel
from ccviz.strategies import keep_best, load_strategy, make_strategy, registry, strategy_class
from ccviz.trace import Trace

PROMPT = [(11 * at) % 97 for at in range(60)]
FAMILIES = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neox"]


def kept(scores: Tensor, tail: int, size: int) -> list[int]:
    return keep_best(scores, 0, tail, size).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_attention_reported_is_that_of_the_stock_model(family: str) -> None:
    model = tiny(family)
    entries = cached(model, 24)
    seen: list[Tensor] = []
    before = model.model.config._attn_implementation
    model.recent_attention(entries.cache, 5, lambda weights: seen.append(weights.clone()))
    assert model.model.config._attn_implementation == before
    model.model.set_attn_implementation("eager")
    with torch.no_grad():
        stock = model.model(torch.arange(24)[None] % model.config.vocab_size, use_cache=False, output_attentions=True)
    model.model.set_attn_implementation(before)
    assert len(seen) == len(stock.attentions)
    for ours, theirs in zip(seen, stock.attentions, strict=True):
        torch.testing.assert_close(ours, theirs[0, :, -5:].float(), atol=2e-5, rtol=1e-4)


def test_the_attention_is_put_back_when_something_fails(tiny_llama: LanguageModel) -> None:
    before = tiny_llama.model.config._attn_implementation

    def fail(_weights: Tensor) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        tiny_llama.recent_attention(cached(tiny_llama, 8).cache, 2, fail)
    assert tiny_llama.model.config._attn_implementation == before


def test_a_model_without_named_attention_is_told(tiny_llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(tiny_llama.model), "_supports_attention_backend", False)
    with pytest.raises(UserError, match=r"does not tell what its tokens attend to.*choose another strategy"):
        ccviz.generate(tiny_llama, PROMPT, "tova", cache_size=16, chunk_size=8)


def test_streaming_llm_keeps_sinks_and_window(tiny_llama: LanguageModel) -> None:
    trace = ccviz.generate(tiny_llama, PROMPT, "streaming_llm", cache_size=16, chunk_size=8, frozen_size=2)
    last = trace.entries[trace.entries["refresh"] == trace.entries["refresh"].max()]
    positions = last.loc[last["kept"], "position"].tolist()
    assert positions == [0, 1, 2, 3, *range(positions[-1] - 11, positions[-1] + 1)]
    assert last["protected"].tolist()[:5] == ["frozen", "frozen", "sink", "sink", ""]
    with pytest.raises(UserError, match="protects 0 recent and 20 first entries, more than the cache size 16"):
        ccviz.generate(tiny_llama, PROMPT, "streaming_llm", cache_size=16, options={"sinks": 20})


def test_snapkv_pools_over_neighbours_and_not_over_its_window(tiny_llama: LanguageModel) -> None:
    entries = cached(tiny_llama, 20)
    attention = torch.zeros(20)

    def add(weights: Tensor) -> None:
        attention.add_(weights.mean((0, 1)))

    tiny_llama.recent_attention(entries.cache, 4, add)
    before = (attention / entries.cache.layers)[:16].tolist()
    for pooling, pooled in (("avg", lambda near: sum(near) / 3), ("max", max)):
        scores = make_strategy("snapkv", {"window": 4, "kernel": 3, "pooling": pooling}).scores(entries)
        assert scores[16:].isnan().all()
        for slot in range(16):
            expected = pooled(before[max(slot - 1, 0) : slot + 2])  # what is beyond the border adds nothing
            assert scores[slot].item() == pytest.approx(expected, rel=1e-4)


def test_key_diff_is_the_cosine_with_the_mean_direction(tiny_llama: LanguageModel) -> None:
    entries = cached(tiny_llama, 12)
    expected = np.zeros(12)
    heads = 0
    for layer in range(entries.cache.layers):
        for keys in entries.cache.keys(layer).double().numpy():
            unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
            anchor = unit.mean(0)
            expected -= unit @ anchor / np.linalg.norm(anchor)
            heads += 1
    np.testing.assert_allclose(make_strategy("key_diff").scores(entries), expected / heads, atol=1e-5)


def test_random_repeats_and_differs_by_seed_and_moment(tiny_llama: LanguageModel) -> None:
    def run(seed: int) -> Trace:
        return ccviz.generate(tiny_llama, PROMPT, "random", cache_size=16, chunk_size=8, options={"seed": seed})

    once, again, other = run(0), run(0), run(1)
    assert once.entries.equals(again.entries)
    assert not once.entries["kept"].equals(other.entries["kept"])
    scores = [part["score"].dropna().tolist()[:8] for _, part in once.entries.groupby("refresh")]
    distinct = {tuple(part) for part in scores if part}
    assert len(distinct) == sum(bool(part) for part in scores) > 3


SPANS = "ab. cd, ef!gh\nij"  # the letters of the tiny tokenizer that end a sentence are . ! ? and for phrases , ; :


def spans_of(model: LanguageModel, text: str, unit: str, positions: list[int] | None = None) -> list[int]:
    ids = [ord(letter) - 33 for letter in text]
    cache = ccviz.cache.BoundedCache()  # type: ignore[attr-defined]
    at = torch.tensor([positions or list(range(len(ids)))])
    model.forward(torch.tensor([ids]), at, cache)
    entries = ccviz.Entries(cache.row(0), model, 0, len(ids), 0, torch.full((len(ids),), torch.nan))
    strategy = make_strategy("counter_causal_span", {"unit": unit})
    return strategy.spans(entries).tolist()  # type: ignore[attr-defined]


def test_spans_end_with_their_marks_and_at_gaps(tiny_llama: LanguageModel) -> None:
    assert spans_of(tiny_llama, "ab.cd,ef!g", "sentence") == [0, 0, 0, 1, 1, 1, 1, 1, 1, 2]
    assert spans_of(tiny_llama, "ab.cd,ef!g", "phrase") == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert spans_of(tiny_llama, "abcd", "sentence", [0, 1, 5, 6]) == [0, 0, 1, 1]
    assert spans_of(tiny_llama, "..a", "sentence") == [0, 1, 2]


@pytest.mark.parametrize("pool", ["mean", "max"])
def test_a_span_has_one_score_and_goes_as_a_whole(pool: str) -> None:
    model = tiny("llama", seed=3)
    letters = "abcde.fghij.klmno.pqrst.uvwxy."
    prompt = [ord(letter) - 33 for letter in letters]
    options = {"pool": pool}
    trace = ccviz.generate(model, prompt, "counter_causal_span", 16, 30, 1, options=options)
    plain = ccviz.generate(model, prompt, "counter_causal", 16, 30, 1)
    first = trace.entries[trace.entries["refresh"] == 0]
    surprise = plain.entries.loc[plain.entries["refresh"] == 0, "score"].to_numpy()
    sentences = np.repeat(np.arange(5), 6)
    for sentence in range(5):
        mine = sentences == sentence
        scored = surprise[mine & (np.arange(30) < 29)]
        expected = scored.mean() if pool == "mean" else scored.max()
        np.testing.assert_allclose(first["score"].to_numpy()[mine], expected, rtol=1e-5)
    counts = first["kept"].groupby(sentences).sum().tolist()
    whole = [count for count in counts if count in (0, 6)]
    assert len(whole) >= 3  # but for the border and the newest token, which is protected
    for sentence in range(4):  # what is left of a sentence at the border is its end
        part = first["kept"].to_numpy()[sentences == sentence]
        assert (np.diff(part.astype(int)) >= 0).all()


@pytest.mark.parametrize("recent", [0, 5])
def test_the_blend_ends_at_surprise_and_at_the_window(recent: int) -> None:
    model = tiny("llama", seed=5)
    for recency, twin in ((0, "counter_causal"), (100, "sliding_window")):
        entries = cached(model, 40)
        options = {"recency": recency, "recent": recent}
        blend = make_strategy("counter_causal_recent", options)
        other = make_strategy(twin, {"recent": recent} if twin == "counter_causal" else {})
        tail = max(recent, 1)
        assert kept(blend.scores(entries), tail, 17) == kept(other.scores(entries), tail, 17)


def test_the_blend_is_the_sum_of_two_ranks(tiny_llama: LanguageModel) -> None:
    entries = cached(tiny_llama, 25)
    surprise = [*make_strategy("counter_causal").scores(entries).tolist()[:-1], -np.inf]  # nothing predicts the newest
    order = sorted(range(25), key=lambda slot: (surprise[slot], slot))
    expected = [70 * order.index(slot) + 30 * slot for slot in range(25)]
    assert make_strategy("counter_causal_recent", {"recency": 30}).scores(entries).tolist() == expected


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("counter_causal_recent", {"recency": 101}, "at most 100, not 101"),
        ("snapkv", {"kernel": 4}, "an odd number, not 4"),
        ("snapkv", {"window": 0}, "at least 1"),
        ("snapkv", {"pooling": "sum"}, "'avg', 'max'"),
        ("counter_causal_span", {"unit": "word"}, "'sentence', 'phrase'"),
    ],
)
def test_options_are_held_to_their_bounds(name: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_strategy(name, options)


# A user's own


@pytest.fixture
def _registry_as_it_was() -> object:
    before = dict(registry._registry)
    yield
    registry._registry.clear()
    registry._registry.update(before)


EXAMPLE = ROOT / "examples" / "my_strategy.py"


@pytest.mark.usefixtures("_registry_as_it_was")
def test_the_example_is_ten_lines_and_runs(tiny_llama: LanguageModel) -> None:
    assert len(EXAMPLE.read_text().strip().splitlines()) <= 12
    assert EXAMPLE.read_text().split("import ccviz\n")[1].strip() in (ROOT / "docs" / "strategies.md").read_text()
    name = load_strategy(f"{EXAMPLE}:LoudKeys")
    cls = strategy_class(name)
    assert (name, cls.title, cls.source) == ("LoudKeys", "LoudKeys", "my_strategy.py")
    assert cls.summary == "Keeps the tokens whose last-layer keys are longest."
    trace = ccviz.generate(tiny_llama, PROMPT, name, cache_size=16, chunk_size=8, max_new_tokens=8)
    first = trace.entries[trace.entries["refresh"] == 2]
    assert first["kept"].sum() == 16
    kept_scores, lost = first.loc[first["kept"], "score"], first.loc[~first["kept"], "score"]
    assert kept_scores.min() >= lost.max()
    assert load_strategy(f"{EXAMPLE}:LoudKeys") == name  # again, as after an edit


@pytest.mark.usefixtures("_registry_as_it_was")
def test_the_command_line_runs_a_file(folder: str, ccviz_says: Ccviz, tmp_path: Path) -> None:
    asked = [
        "run",
        "--model",
        folder,
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--prompt",
        "The sun is out.",
        "--output",
    ]
    asked += [tmp_path / "mine.ccviz", "--cache-size", "16", "--chunk-size", "8", "--max-new-tokens", "4"]
    status, _, _ = ccviz_says(*asked, "--strategy", f"{EXAMPLE}:LoudKeys")
    assert status == 0
    assert Trace.open(tmp_path / "mine.ccviz").strategy == "LoudKeys"


HEAD = "import ccviz, torch\n\nclass Mine(ccviz.Strategy):\n    def scores(self, entries):\n        return "
WRONG = {
    "no such file": (None, "Mine", "there is no file"),
    "not Python": ("def (:\n", "Mine", "is not valid Python: .* in line 1"),
    "an error": ("x = 1\ny = 1 / 0\n", "Mine", "failed in line 2: ZeroDivisionError"),
    "another name": (HEAD + "1\n", "Yours", "has no class Yours of its own; it has Mine"),
    "no class": ("x = 1\n", "Mine", "has no class Mine of its own; it has no strategies"),
    "not a strategy": ("class Mine: pass\n", "Mine", "not a class derived from ccviz.Strategy"),
    "no method": (
        "import ccviz\nclass Mine(ccviz.Strategy): pass\n",
        "Mine",
        r"needs a method scores\(self, entries\)",
    ),
    "an exit": ("import sys\nsys.exit('bye')\n", "Mine", "failed in line 2: SystemExit: bye"),
    "null bytes": ("x = 1\0\n", "Mine", "is not valid Python"),
    "a built-in": (
        "from ccviz.strategies import CounterCausal\n",
        "CounterCausal",
        "has no class CounterCausal of its own",
    ),
    "a name that is a number": (
        HEAD.replace("    def", "    name = 3\n    def") + "1\n",
        "Mine",
        "letters, digits, _ and -, not 3",
    ),
    "a name with a comma": (HEAD.replace("    def", "    name = 'a,b'\n    def") + "1\n", "Mine", "not 'a,b'"),
    "an option without a default": (
        "from dataclasses import dataclass\n"
        + HEAD.replace("class", "@dataclass(frozen=True)\nclass").replace("    def", "    size: int\n    def")
        + "1\n",
        "Mine",
        "the option size of Mine needs a default",
    ),
    "a name that is taken": (
        "import ccviz\nclass Mine(ccviz.Strategy):\n    name = 'full'\n    def scores(self, entries): pass\n",
        "Mine",
        "'full' is registered already",
    ),
}


@pytest.mark.usefixtures("_registry_as_it_was")
@pytest.mark.parametrize("mistake", WRONG)
def test_a_file_that_cannot_be_loaded_is_said(mistake: str, tmp_path: Path) -> None:
    content, name, says = WRONG[mistake]
    file = tmp_path / "mine.py"
    if content is not None:
        file.write_text(content)
    before = dict(registry._registry)
    with pytest.raises(UserError, match=says):
        load_strategy(f"{file}:{name}")
    assert registry._registry == before


@pytest.mark.parametrize("spec", ["mine.py", "mine.py:", "mine.txt:Mine", "mine.py:My Name"])
def test_what_is_no_place_of_a_strategy_is_said(spec: str) -> None:
    with pytest.raises(UserError, match=r"is given as path/to/file\.py:Name"):
        load_strategy(spec)


@pytest.mark.usefixtures("_registry_as_it_was")
@pytest.mark.parametrize(
    ("result", "says"),
    [
        ("None", "must return one score for each of the 24 entries.* not NoneType"),
        ("torch.zeros(3)", r"shape \(24,\), not a tensor of shape \(3,\)"),
        ("entries.cache.keys(99)", "the strategy Mine failed in line 5 of .*mine.py: IndexError"),
        ("entries.nothing", "the strategy Mine failed in line 5 of .*mine.py: AttributeError"),
    ],
)
def test_what_ones_own_strategy_gets_wrong_is_one_sentence(
    result: str, says: str, folder: str, ccviz_says: Ccviz, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(HEAD + result + "\n")
    asked = ["run", "--model", folder, "--device", "cpu", "--dtype", "float32", "--prompt", "a" * 50, "--no-chat"]
    asked += ["--cache-size", "16", "--chunk-size", "8", "--strategy", f"{tmp_path}/mine.py:Mine"]
    line = assert_one_line(ccviz_says(*asked))
    with pytest.raises(UserError, match=says):
        raise UserError(line)


@pytest.mark.usefixtures("_registry_as_it_was")
def test_a_file_that_was_edited_is_loaded_anew_and_nothing_is_written_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = 'import ccviz\n@ccviz.register\nclass Mine(ccviz.Strategy):\n    """One."""\n    def scores(self, e): ...\n'
    file.write_text(text)
    name = load_strategy(f"{file}:Mine")
    assert strategy_class(name).summary == "One."
    file.write_text(text.replace("One.", "Two."))  # as long as before, and within the same second
    assert load_strategy(f"{file}:Mine") == name
    assert strategy_class(name).summary == "Two."
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.usefixtures("_registry_as_it_was")
def test_a_file_may_have_options_of_every_kind(tmp_path: Path, tiny_llama: LanguageModel) -> None:
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass, field\n"
        "from typing import ClassVar\n"
        "import ccviz\n"
        "@dataclass(frozen=True)\n"
        "class Mine(ccviz.Strategy):\n"
        "    title: ClassVar[str] = 'Mine alone'\n"
        "    weight: float = field(default=0.5, metadata={'minimum': 0, 'maximum': 1})\n"
        "    word: str = 'a'\n"
        "    size: int = 3\n"
        "    def scores(self, entries):\n"
        "        return self.weight * entries.cache.positions.float()\n"
    )
    name = load_strategy(f"{tmp_path}/mine.py:Mine")
    assert strategy_class(name).title == "Mine alone"
    for options in ({}, {"weight": 1}, {"weight": 0.25, "word": "b", "size": 0}):
        trace = ccviz.generate(tiny_llama, PROMPT, name, 16, 8, 4, options=options)
        assert trace.config["options"] == {"weight": 0.5, "word": "a", "size": 3, **options}
    wrong = [({"weight": "x"}, "must be a number"), ({"weight": 2}, "at most 1"), ({"weight": -0.1}, "at least 0")]
    for options, says in [*wrong, ({"weight": True}, "must be a number"), ({"word": 1}, "must be text")]:
        with pytest.raises(UserError, match=says):
            make_strategy(name, options)
