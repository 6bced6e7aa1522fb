"""Compare and Prompt sets through AppTest, on the real built-in model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest
from test_app import FLOAT32, PATIENCE, no_exception, players, poll, problems

from ccviz import compare
from ccviz.export import FIGURE_SUFFIXES, figure_bytes
from ccviz.jobs import Job
from ccviz.lessons import recorded_run
from ccviz.network import LanguageModel
from ccviz.prompts import load_sample
from ccviz.runs import Request, lane_requests
from ccviz.sets import PromptSet, items_of_lines, known_sets, sets_folder
from ccviz.settings import Settings
from ccviz.tokens import encode_prompt
from ccviz.ui import comparison, kept, server
from ccviz.ui.comparison import comparison_table

ROOT = Path(__file__).parent.parent
SAMPLE = load_sample("1-recall-a-fact")
THREE = ["full", "sliding_window", "counter_causal"]
LINES = "Name a colour.\nName a river.\nName a city."

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def own_runner() -> Iterator[None]:
    """A runner of these tests' own, let go with its model when they are over."""
    server.runner.clear()
    server.set_runs.clear()
    yield
    server.runner.clear()
    server.set_runs.clear()


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CCVIZ_DATA", str(tmp_path))


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    runner = server.runner()
    assert runner.prepare(FLOAT32).wait(PATIENCE)
    loaded = runner.model(FLOAT32)
    assert loaded is not None
    return loaded


def opened(name: str, **address: str | list[str]) -> AppTest:
    at = AppTest.from_file(str(ROOT / "app.py"), default_timeout=60).switch_page(f"pages/{name}")
    for key, value in {"device": "cpu", "dtype": "float32", **address}.items():
        at.query_params[key] = value
    return no_exception(at.run())


def comparing(strategies: list[str] = THREE, **address: str | list[str]) -> AppTest:
    """The Compare page, ready, with these strategies chosen."""
    at = poll(opened("compare.py", **address), lambda now: any("prompt tokens" in m.value for m in now.markdown))
    return no_exception(at.multiselect(key="strategies").set_value(strategies).run())


def compared(at: AppTest) -> Job:
    """Press Run all and wait for the end."""
    no_exception(at.button(key="run_all").click().run())
    poll(at, lambda now: any(element.value == "##### Answers" for element in now.markdown))
    job = server.runner().get(one(at, "comparison"))
    assert job is not None
    return job


def one(at: AppTest, key: str) -> str:
    value = at.query_params[key]
    return value if isinstance(value, str) else value[0]


def test_compare_opens_with_the_papers_six_on_a_sample(model: LanguageModel) -> None:
    at = poll(opened("compare.py"), lambda now: any("prompt tokens" in m.value for m in now.markdown))
    assert at.multiselect(key="strategies").value == [
        "full",
        "sliding_window",
        "importance",
        "heavy_hitter",
        "counter_causal",
        "counter_causal_fast",
    ]
    assert at.text_area(key="prompt").value == SAMPLE.text
    assert at.text_input(key="sizes").value == str(SAMPLE.cache_size)
    line = next(element.value for element in at.markdown if "prompt tokens" in element.value)
    size = len(encode_prompt(model.tokenizer, SAMPLE.text, True, SAMPLE.system).token_ids)
    held = (SAMPLE.cache_size + SAMPLE.chunk_size) * model.entry_bytes / 1e6
    assert line.startswith(f"**{size}** prompt tokens")
    assert f"**6** runs at once · each bounded cache at most **{held:.1f} MB**" in line
    assert any("Nothing has run yet" in element.value for element in at.markdown)


def test_a_comparison_shows_what_the_engine_gives(model: LanguageModel) -> None:
    at = comparing()
    job = compared(at)
    encoded = encode_prompt(model.tokenizer, SAMPLE.text, True, SAMPLE.system)
    expected = compare(
        model,
        SAMPLE.text,
        THREE,
        SAMPLE.cache_size,
        SAMPLE.chunk_size,
        SAMPLE.max_new_tokens,
        frozen_size=encoded.system_size,
        system=SAMPLE.system,
    )
    traces = job.traces()
    assert {name: trace.text for name, trace in traces.items()} == {name: t.text for name, t in expected.items()}
    table = at.dataframe[0].value
    assert table["lane"].tolist() == ["Full cache", "Sliding window", "Counter-causal surprise"]
    assert table["right"].tolist() == ["yes", "no", "yes"]
    assert table["new_tokens"].tolist() == [int(trace.tokens["generated"].sum()) for trace in expected.values()]
    assert table["departs_at"].isna().tolist()[0]
    assert table["departs_at"].notna().tolist()[1]
    assert len(players(at)) == 3
    shares = table["percent_of_full"].tolist()
    assert shares[1] < shares[0]


@pytest.mark.parametrize(("look", "charts"), [("overlap", 2), ("loss", 4)])
def test_every_look_is_drawn(look: str, charts: int) -> None:
    at = comparing(max_new="4")
    compared(at)
    no_exception(at.button_group(key="look").set_value(look).run())
    assert len(at.get("plotly_chart")) == charts
    for chart in at.get("plotly_chart"):
        assert chart.proto.alt


def test_harm_and_surprise_are_recorded_when_asked_for() -> None:
    at = comparing(follow="true", observe="true")
    job = compared(at)
    assert [("kl" in trace.tokens, "surprise" in trace.entries) for trace in job.traces().values()] == [
        (False, True),
        (True, True),
        (True, True),
    ]
    assert "mean_kl" in at.dataframe[0].value
    for look in ("harm", "surprise"):
        no_exception(at.button_group(key="look").set_value(look).run())
        assert len(at.get("plotly_chart")) == 1


@pytest.mark.parametrize("suffix", FIGURE_SUFFIXES)
def test_every_figure_that_is_offered_as_a_file_can_be_made(suffix: str, model: LanguageModel) -> None:
    budget = {"cache_size": 48, "chunk_size": 16, "max_new_tokens": 6}
    traces = compare(model, SAMPLE.text, THREE, follow="full", observe=True, **budget)
    kinds = comparison._kinds(traces)
    assert {"heatmap", "survival", "retention", "overlap", "lengths", "fidelity", "surprise"} == set(kinds)
    for kind in kinds:
        assert figure_bytes(comparison._shown_in(traces, kind), kind, suffix)
    plain = compare(model, SAMPLE.text, ["full"], **budget)
    for kind in comparison._kinds(plain):
        assert figure_bytes(comparison._shown_in(plain, kind), kind, suffix)


def test_a_prompt_that_is_too_long_is_said_once(model: LanguageModel) -> None:
    at = comparing(["full", "importance"], new="3")
    no_exception(at.text_area(key="prompt").set_value("word " * 9000).run())
    no_exception(at.button(key="run_all").click().run())
    poll(at, lambda now: bool(now.error))
    assert ["shorten the prompt" in problem for problem in problems(at)] == [True]
    assert not at.dataframe


def test_explore_records_surprise_when_asked() -> None:
    at = AppTest.from_file(str(ROOT / "app.py"), default_timeout=60)
    for key, value in {"device": "cpu", "dtype": "float32", "new": "3", "observe": "true"}.items():
        at.query_params[key] = value
    no_exception(at.run())
    poll(at, lambda now: any("prompt tokens" in element.value for element in now.markdown))
    no_exception(at.button(key="run_button").click().run())
    poll(at, lambda now: any(element.value == "##### Answer" for element in now.markdown))
    assert [expander.label for expander in at.expander if expander.label == "Surprise at this refresh"]
    job = server.runner().get(one(at, "run"))
    assert job is not None
    trace = job.trace()
    assert trace is not None
    assert trace.entries["surprise"].notna().any()


def test_several_sizes_run_side_by_side() -> None:
    at = comparing(["full", "sliding_window"], new="4")
    no_exception(at.text_input(key="sizes").set_value("48, 64").run())
    job = compared(at)
    assert list(job.traces()) == ["full", "sliding_window J=48", "sliding_window J=64"]
    assert at.dataframe[0].value["lane"].tolist()[1:] == ["Sliding window · J = 48", "Sliding window · J = 64"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda at: at.text_input(key="sizes").set_value(""), "Cache size J is empty"),
        (lambda at: at.text_input(key="sizes").set_value("64, big"), 'takes whole numbers, such as 48, 64, not "big"'),
        (lambda at: at.text_input(key="sizes").set_value("64, 20"), "frozen_size (24) must be below cache_size (20)"),
        (lambda at: at.multiselect(key="strategies").set_value([]), "No strategy is chosen"),
        (lambda at: at.text_area(key="prompt").set_value(" "), "The prompt is empty"),
    ],
)
def test_what_cannot_be_compared_is_said_and_nothing_starts(change: object, says: str) -> None:
    at = comparing()
    no_exception(change(at).run())  # type: ignore[operator]
    assert [says in problem for problem in problems(at)] == [True]
    no_exception(at.button(key="run_all").click().run())
    assert "comparison" not in at.query_params


def test_harm_without_the_full_cache_says_what_is_missing() -> None:
    at = comparing(["sliding_window"], follow="true")
    assert problems(at) == ["Harm is measured against the full cache: add Full cache to the strategies."]


# Prompt sets


def sets_page(**address: str) -> AppTest:
    """The Prompt sets page, with the model loaded."""
    at = opened("prompt_sets.py", new="3", **address)
    return poll(at, lambda now: any("of cache a token" in caption.value for caption in now.caption))


def finished(at: AppTest) -> AppTest:
    return poll(at, lambda now: any(element.value == "##### Every answer" for element in now.markdown))


def test_a_set_is_run_and_its_answers_are_there_on_another_visit(model: LanguageModel) -> None:
    at = sets_page()
    no_exception(at.multiselect(key="strategies").set_value(["full", "sliding_window"]).run())
    no_exception(at.text_area(key="set_lines").set_value(LINES).run())
    assert any("**3** prompts, **2** strategies and sizes: **6** answers" in m.value for m in at.markdown)
    no_exception(at.button(key="run_set").click().run())
    finished(at)
    (folder,) = known_sets()
    made = PromptSet.open(folder)
    assert made.pending() == []
    results = made.results()
    for item in made.items:
        expected = compare(
            model, item.prompt, ["full", "sliding_window"], SAMPLE.cache_size, SAMPLE.chunk_size, 3, frozen_size=24
        )
        rows = results[results["item"] == item.id].set_index("lane")
        assert rows["text"].to_dict() == {lane: trace.text for lane, trace in expected.items()}
    numbers = at.dataframe[0].value
    assert numbers["strategy"].tolist() == ["Full cache", "Sliding window"]
    assert numbers["prompts"].tolist() == [3, 3]
    assert len(at.get("plotly_chart")) == 1

    server.set_runs.clear()  # as after a restart
    again = finished(sets_page(set=folder.name))
    assert again.dataframe[-1].value["text"].tolist() == results["text"].tolist()


def test_an_interrupted_set_says_where_it_is_and_resumes() -> None:
    settings = Settings(16, 8, 3)
    folder = sets_folder() / "three-lines"
    lanes = lane_requests(Request("", settings), ["full", "importance"], [16])
    made = PromptSet.create(folder, "Three lines", FLOAT32, items_of_lines(LINES), lanes)
    at = sets_page(set="three-lines")
    assert any("**0** of 3 prompts are done." in element.value for element in at.markdown)
    no_exception(at.button(key="resume").click().run())
    finished(at)
    assert made.pending() == []
    lines = (folder / "results.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "results.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:10])
    server.set_runs.clear()
    at = sets_page(set="three-lines")
    assert any("**1** of 3 prompts are done." in element.value for element in at.markdown)
    no_exception(at.button(key="resume").click().run())
    poll(at, lambda now: not any(button.key in ("resume", "stop_set") for button in now.button))
    assert made.pending() == []


def test_one_prompt_of_a_set_opens_in_compare() -> None:
    lanes = lane_requests(Request("", Settings(16, 8, 3)), ["full", "importance"], [16])
    made = PromptSet.create(sets_folder() / "lines", "Lines", FLOAT32, items_of_lines(LINES), lanes)
    at = sets_page(set="lines")
    no_exception(at.button(key="resume").click().run())
    finished(at)
    no_exception(at.selectbox(key="set_item").set_value("2").run())
    no_exception(at.button(key="open_item").click().run())
    job = server.runner().get(str(at.session_state["comparison"]))
    assert job is not None
    traces = job.traces()
    assert list(traces) == ["full", "importance"]
    assert "Name a river." in traces["full"].prompt_text
    assert comparison_table(traces)["lane"].tolist() == ["Full cache", "Importance"]
    assert made.pending() == []


def test_what_is_no_set_is_said(tmp_path: Path) -> None:
    at = sets_page()
    no_exception(at.button_group(key="set_source").set_value("folder").run())
    no_exception(at.text_input(key="set_path").set_value(str(tmp_path / "none.jsonl")).run())
    assert "No such file" in problems(at)[0]
    (tmp_path / "a.jsonl").write_text('{"words": 1}')
    no_exception(at.text_input(key="set_path").set_value(str(tmp_path / "a.jsonl")).run())
    assert "has no prompt" in problems(at)[0]


def test_a_run_that_cannot_be_kept_is_shown_with_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder can be made here")
    monkeypatch.setenv("CCVIZ_DATA", str(tmp_path / "file"))
    at = comparing(["sliding_window"], new="3")
    job = compared(at)
    assert [trace.stop_reason for trace in job.traces().values()] == ["length"]
    (warning,) = at.warning
    assert "could not be kept in the library" in warning.value.replace("\\", "")
    assert players(at)


def test_the_next_to_go_is_named_before_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept.library(), "most_runs", 2)
    runs = [recorded_run(name) for name in ("full", "sliding_window")]
    for at, trace in enumerate(runs):
        kept.library().save({trace.strategy: trace}, f"run{at}")
    first = kept.library().cards()[-1]
    at = opened("library.py")
    assert any(f"Next to go, when another run is kept: {first.title}" in one.value for one in at.warning)
    at = comparing(["sliding_window"], new="3")
    assert any("The library is full (2 runs)" in one.value for one in at.caption)
