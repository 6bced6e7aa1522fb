"""The pages through AppTest, on the real built-in model: what is on them, what their widgets do, what a run shows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from ccviz import generate
from ccviz.jobs import Job, Runner, State
from ccviz.models import ModelSpec
from ccviz.network import LanguageModel
from ccviz.prompts import Sample, load_sample, sample_names
from ccviz.settings import Settings
from ccviz.tokens import encode_prompt
from ccviz.ui import server

ROOT = Path(__file__).parent.parent
PATIENCE = 600.0  # seconds; the first load may have to fetch and convert the model
FLOAT32 = ModelSpec("smollm2-135m", "cpu", "float32")  # exact enough for two runs to write the same text anywhere
LETTERS = "3-patient-letters"

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def own_runner() -> Iterator[None]:
    """A runner of these tests' own, let go with its model when they are over."""
    server.runner.clear()
    yield
    server.runner.clear()


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """The app's own model, loaded by the app's own runner."""
    runner = server.runner()
    assert runner.prepare(FLOAT32).wait(PATIENCE)
    loaded = runner.model(FLOAT32)
    assert loaded is not None
    return loaded


def explore(**address: str) -> AppTest:
    """The Explore page, opened at an address."""
    at = AppTest.from_file(str(ROOT / "app.py"), default_timeout=60)
    for key, value in {"device": "cpu", "dtype": "float32", **address}.items():
        at.query_params[key] = value
    return no_exception(at.run())


def players(at: AppTest) -> list[dict[str, Any]]:
    """What the players on the page were sent."""
    sent = [json.loads(element.proto.json or "null") for element in at.get("bidi_component")]
    return [data for data in sent if isinstance(data, dict) and "protections" in data]


def no_exception(at: AppTest) -> AppTest:
    assert [element.value for element in at.exception] == []
    return at


def poll(at: AppTest, arrived: Callable[[AppTest], bool]) -> AppTest:
    """Run the page until something is there, as a browser does."""
    end = time.monotonic() + PATIENCE
    while not arrived(at):
        assert time.monotonic() < end, f"never came; the page says {[e.value for e in (*at.caption, *at.error)]}"
        time.sleep(0.2)
        no_exception(at.run())
    return at


def plan_line(at: AppTest) -> str:
    """The line that says what the settings mean for the prompt, or nothing."""
    return next((element.value for element in at.markdown if "prompt tokens" in element.value), "")


def planned(at: AppTest) -> AppTest:
    return poll(at, lambda now: bool(plan_line(now)))


def has_ended(at: AppTest) -> bool:
    return any(element.value == "##### Answer" for element in at.markdown)


def finish(at: AppTest) -> AppTest:
    """Press Run and wait for the end."""
    no_exception(at.button(key="run_button").click().run())
    return poll(at, has_ended)


def run_id(at: AppTest) -> str:
    value = at.query_params["run"]
    return value if isinstance(value, str) else value[0]


def numbers(at: AppTest) -> tuple[int, int, int]:
    return at.number_input(key="J").value, at.number_input(key="h").value, at.number_input(key="new").value


def budgets(sample: Sample) -> tuple[int, int, int]:
    return sample.cache_size, sample.chunk_size, sample.max_new_tokens


def expected_plan(model: LanguageModel, sample: Sample, full: bool = False) -> str:
    """The plan line, from the real tokenizer and the engine's own arithmetic."""
    encoded = encode_prompt(model.tokenizer, sample.text, True, sample.system)
    size = len(encoded.token_ids)
    settings = Settings(*budgets(sample), frozen_size=0 if full else encoded.system_size)
    whole = (size + sample.max_new_tokens - 1) * model.entry_bytes / 1e6
    head = f"**{size}** prompt tokens · **{settings.prompt_refreshes(size)}** refreshes before the answer starts"
    if full:
        return f"{head} · the full cache grows to at most **{whole:.1f} MB**"
    most = settings.most_entries(size)
    held = most * model.entry_bytes / 1e6
    return f"{head} · cache at most **{most}** entries = **{held:.1f} MB** instead of up to {whole:.1f}"


def problems(at: AppTest) -> list[str]:
    """What the page's error boxes say, without the escapes that keep it from being read as Markdown."""
    return [element.value.replace("\\", "") for element in at.error]


def test_run_pressed_before_the_model_is_loaded_still_freezes_the_system_part() -> None:
    server.runner.clear()  # no model yet, as on a server that has just started
    at = finish(explore(new="4"))
    trace = server.runner().get(run_id(at)).trace()  # type: ignore[union-attr]
    sample = load_sample("1-recall-a-fact")
    loaded = server.runner().model(FLOAT32)
    assert loaded is not None
    wanted = encode_prompt(loaded.tokenizer, sample.text, True, sample.system).system_size
    assert trace.config["frozen_size"] == wanted


def test_the_first_view_has_a_sample_a_prompt_and_an_empty_state() -> None:
    at = explore()
    sample = load_sample("1-recall-a-fact")
    assert at.button_group(key="sample").value == sample.name
    assert at.text_area(key="prompt").value == sample.text
    assert numbers(at) == budgets(sample)
    assert at.text_input(key="frozen").value == "system"
    assert any("Nothing has run yet" in element.value for element in at.markdown)
    assert any(sample.look_at in element.value for element in at.caption)
    assert not at.error


@pytest.mark.parametrize("name", sample_names()[1:])
def test_choosing_a_sample_fills_prompt_and_budgets(name: str) -> None:
    at = explore()
    no_exception(at.button_group(key="sample").set_value(name).run())
    sample = load_sample(name)
    assert at.text_area(key="prompt").value == sample.text
    assert at.text_area(key="system").value == sample.system
    assert numbers(at) == budgets(sample)
    assert not at.error


def test_ones_own_text_is_kept_and_drops_the_samples_advice() -> None:
    at = explore()
    no_exception(at.text_area(key="prompt").set_value("My own words.").run())
    assert at.text_area(key="prompt").value == "My own words."
    assert not any("What to look at" in element.value for element in at.caption)


@pytest.mark.parametrize("name", sample_names())
def test_the_plan_line_says_what_the_engine_will_do(model: LanguageModel, name: str) -> None:
    at = planned(explore())
    no_exception(at.button_group(key="sample").set_value(name).run())
    assert plan_line(planned(at)) == expected_plan(model, load_sample(name))


def test_the_plan_line_is_right_for_the_full_cache(model: LanguageModel) -> None:
    at = planned(explore(strategy="Full cache"))
    assert plan_line(at) == expected_plan(model, load_sample("1-recall-a-fact"), full=True)


def test_an_address_reopens_its_settings() -> None:
    at = explore(
        sample="Patient letters", J="40", h="8", new="12", frozen="3", strategy="Sliding window", seed="7", chat="false"
    )
    assert at.button_group(key="sample").value == LETTERS
    assert at.text_area(key="prompt").value == load_sample(LETTERS).text
    assert numbers(at) == (40, 8, 12)
    assert at.text_input(key="frozen").value == "3"
    assert at.selectbox(key="strategy").value == "sliding_window"
    assert at.number_input(key="seed").value == 7
    assert at.toggle(key="chat").value is False


def test_an_address_with_nonsense_opens_all_the_same() -> None:
    at = explore(sample="no such", J="many", h="-1", new="1e9", strategy="none", order="up", refresh="-3", mode="x")
    assert at.selectbox(key="strategy").value == "counter_causal"
    assert len(at.error) <= 1


@pytest.fixture
def loaded_while_drawn(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load ends after the page has asked for it and before it has drawn what comes next."""
    prepare = Runner.prepare

    def prepare_and_wait(self: Runner, spec: ModelSpec) -> Job:
        job = prepare(self, spec)
        assert job.wait(PATIENCE)
        return job

    monkeypatch.setattr(Runner, "prepare", prepare_and_wait)


@pytest.mark.usefixtures("loaded_while_drawn")
def test_settings_of_an_address_survive_a_model_that_is_ready_while_the_page_is_drawn() -> None:
    server.runner.clear()
    at = explore(sample="Patient letters")
    assert numbers(at) == budgets(load_sample(LETTERS))
    assert at.text_input(key="frozen").value == "system"
    assert not at.error


@pytest.mark.usefixtures("loaded_while_drawn")
def test_settings_survive_another_precision_that_is_ready_while_the_page_is_drawn() -> None:
    at = planned(explore(sample="Patient letters", J="70"))
    no_exception(at.number_input(key="h").set_value(8).run())
    no_exception(at.text_input(key="frozen").set_value("5").run())
    no_exception(at.selectbox(key="dtype").set_value("bfloat16").run())
    assert numbers(at) == (70, 8, load_sample(LETTERS).max_new_tokens)
    assert at.text_input(key="frozen").value == "5"
    assert not at.error


def test_settings_survive_a_model_that_cannot_be_loaded() -> None:
    for attempt in range(8):  # the load may fail while the page is being drawn, or after
        at = explore(model=f"/no/such/folder/{attempt}")
        poll(at, lambda now: bool(now.error))
        assert len(at.error) == 1
        assert f"There is no model folder /no/such/folder/{attempt}" in problems(at)[0]
        assert numbers(at) == budgets(load_sample("1-recall-a-fact"))
        assert at.text_input(key="frozen").value == "system"


def test_the_full_cache_switches_off_what_it_ignores() -> None:
    at = explore()
    assert not at.number_input(key="J").disabled
    assert not at.text_input(key="frozen").disabled
    no_exception(at.selectbox(key="strategy").set_value("full").run())
    assert at.number_input(key="J").disabled
    assert at.text_input(key="frozen").disabled
    assert not at.number_input(key="h").disabled
    no_exception(at.selectbox(key="strategy").set_value("sliding_window").run())
    assert not at.number_input(key="J").disabled


def test_a_run_ends_with_the_engines_own_answer(model: LanguageModel) -> None:
    at = planned(explore(sample="Patient letters"))
    finish(at)
    sample = load_sample(LETTERS)
    encoded = encode_prompt(model.tokenizer, sample.text, True, sample.system)
    trace = generate(
        model,
        sample.text,
        "counter_causal",
        *budgets(sample),
        frozen_size=encoded.system_size,
        system=sample.system,
    )
    assert trace.text
    assert at.text[0].value == trace.text
    (sent,) = players(at)
    assert len(sent["seen"]) == len(trace.refreshes)
    assert sent["texts"] == trace.tokens["text"].tolist()


@pytest.mark.parametrize("strategy", ["full", "heavy_hitter", "importance", "sliding_window", "counter_causal_fast"])
def test_every_strategy_runs_through_the_page(strategy: str) -> None:
    at = planned(explore(new="4"))
    no_exception(at.selectbox(key="strategy").set_value(strategy).run())
    finish(at)
    trace = server.runner().get(run_id(at)).trace()  # type: ignore[union-attr]
    assert trace.strategy == strategy
    assert at.text[0].value == trace.text
    assert players(at)


def test_a_run_without_a_refresh_says_so() -> None:
    at = finish(planned(explore(h="4000", new="2")))
    assert any("No refresh yet" in element.value for element in at.info)
    assert not players(at)


def test_an_address_says_what_the_player_shows() -> None:
    at = finish(planned(explore(new="2", order="in-place", ramp="blue-yellow")))
    (sent,) = players(at)
    assert sent["view"] == {
        "refresh": None,
        "order": "in place",
        "pin": -1,
        "ramp": "blue-yellow",
        "highlight": None,
        "version": 0,
    }
    again = poll(explore(run=run_id(at), refresh="2", pin="40", order="rank"), players)
    (sent,) = players(again)
    assert (sent["view"]["refresh"], sent["view"]["pin"], sent["view"]["order"]) == (2, 40, "rank")
    first = run_id(again)
    finish(again)  # another run starts at its own end, with nothing pinned, in the same order
    assert run_id(again) != first
    (sent,) = players(again)
    assert (sent["view"]["refresh"], sent["view"]["pin"]) == (None, -1)


def test_the_guide_opens_and_the_way_back_keeps_the_settings() -> None:
    at = explore(sample="Patient letters", J="70", h="8", new="12", frozen="3")
    no_exception(at.switch_page("pages/guide.py").run())
    assert any(element.value == "## How to read it" for element in at.markdown)
    no_exception(at.switch_page("app.py").run())
    assert at.text_area(key="prompt").value == load_sample(LETTERS).text
    assert numbers(at) == (70, 8, 12)
    assert at.text_input(key="frozen").value == "3"


def test_a_run_that_the_server_does_not_know_is_said_to_be_gone() -> None:
    at = explore(run="0123456789")
    assert [element.value for element in at.info if "no longer in this server" in element.value]
    assert not at.error


def test_the_empty_prompt_is_named_and_nothing_starts() -> None:
    at = planned(explore())
    no_exception(at.text_area(key="prompt").set_value(" \n ").run())
    no_exception(at.button(key="run_button").click().run())
    assert problems(at) == ["The prompt is empty: type some text, or choose a sample."]
    assert "run" not in at.query_params


def test_two_visitors_share_one_runner() -> None:
    one, other = planned(explore(new="3")), explore()
    finish(one)
    other.query_params["run"] = run_id(one)
    no_exception(other.run())
    assert has_ended(other)
    assert other.text[0].value == one.text[0].value
    job = server.runner().get(run_id(one))
    assert job is not None
    assert job.state is State.DONE


def test_settings_that_were_not_drawn_come_back_and_an_emptied_field_stays_empty() -> None:
    at = explore(sample="Patient letters")
    no_exception(at.number_input(key="J").set_value(70).run())
    no_exception(at.switch_page("pages/guide.py").run())  # a pass without these widgets, as one cut short is
    at.query_params.clear()
    no_exception(at.switch_page("app.py").run())
    assert numbers(at) == (70, *budgets(load_sample(LETTERS))[1:])
    assert at.text_input(key="frozen").value == "system"
    no_exception(at.number_input(key="J").set_value(None).run())
    assert at.number_input(key="J").value is None
    assert problems(at) == ["Cache size J is empty: give a whole number."]
