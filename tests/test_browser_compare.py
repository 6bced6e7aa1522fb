"""Compare and Prompt sets as a person meets them: a real Chromium, a real server, the real built-in model."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from urllib.parse import urlencode

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright (requirements-dev.txt)")

from browser import PATIENCE, Server, Visitor, serve, wait_ready
from playwright.sync_api import Browser, Page, expect

from ccviz import Trace

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

MARKUP = "Say <b>bold</b> <img src=x onerror=window.pwned=1> $x^2$ :red[no] **stars** and go on."
THREE = {"strategies": ["Full cache", "Sliding window", "Counter-causal surprise"]}
LINES = [f"Name {what}." for what in ("a colour", "a river", "a city", "a fruit", "a planet", "an animal")]


def opened(page: Page, server: Server, name: str, **address: str | list[str]) -> None:
    """A page, once the model is loaded."""
    page.goto(f"{server.url}/{name}?{urlencode(address, doseq=True)}")
    wait_ready(page)
    page.get_by_text("of cache a token").wait_for()
    wait_ready(page)


def run_all(page: Page) -> None:
    page.get_by_role("button", name="Run all", exact=True).click()
    expect(page.get_by_role("heading", name="Answers")).to_be_visible()
    expect(page.get_by_role("button", name="Cancel", exact=True)).to_have_count(0)
    wait_ready(page)


def look(page: Page, title: str) -> None:
    page.get_by_role("radio", name=title).click()
    wait_ready(page)


def charts(page: Page, count: int) -> list[dict[str, object]]:
    """What Plotly has drawn, once that many charts are there."""
    expect(page.locator(".js-plotly-plot .main-svg").locator("xpath=..").locator("visible=true").first).to_be_visible()
    expect(page.locator(".js-plotly-plot")).to_have_count(count)
    told = page.evaluate(
        """() => JSON.stringify([...document.querySelectorAll('.js-plotly-plot')].map((plot) => ({
             zmin: plot.data[0].zmin, zmax: plot.data[0].zmax, type: plot.data[0].type,
             rows: plot._fullLayout.yaxis.range, pixels: plot._fullLayout.yaxis._length,
             axes: [plot._fullLayout.xaxis.title.text, plot._fullLayout.yaxis.title.text]})))"""
    )
    return list(json.loads(told))


@pytest.fixture(scope="module")
def compared(browser: Browser, server: Server) -> str:
    """The address of one finished comparison of three strategies, with everything recorded."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    opened(page, server, "compare", follow="true", observe="true", new="24", **THREE)
    run_all(page)
    address = page.url
    context.close()
    return address


def test_strategies_run_side_by_side_on_one_scale_with_rows_of_one_height(page: Page, server: Server) -> None:
    opened(page, server, "compare", **THREE)
    run_all(page)
    expect(page.locator(".answers .card")).to_have_count(3)
    expect(page.locator(".answers .card").nth(0)).to_contain_text("right: Lisbon")
    expect(page.locator(".answers .card").nth(1)).to_contain_text("wrong")
    expect(page.locator(".answers mark")).to_have_count(1)
    expect(page.locator(".player[data-drawn]")).to_have_count(3)
    drawn = page.locator(".player").evaluate_all(
        "all => all.map(({ player }) => [player.model.scale, player.map.height / player.model.rows])"
    )
    assert len({scale for scale, _ in drawn}) == 1
    heights = [height for _, height in drawn]
    assert max(heights) - min(heights) < 0.5
    assert "comparison=" in page.url


def test_every_look_is_there_and_an_address_reopens_it(page: Page, compared: str, browser: Browser) -> None:
    page.goto(compared)
    expect(page.locator(".answers .card")).to_have_count(3)
    wait_ready(page)
    for title, count in [
        ("Who keeps what", 2),
        ("When it was lost", 4),
        ("Harm to predictions", 1),
        ("Surprise", 1),
    ]:
        look(page, title)
        for chart in charts(page, count):
            assert all(chart["axes"]), (title, chart)  # type: ignore[arg-type]
    look(page, "Who keeps what")
    with browser.new_context() as context:
        context.set_default_timeout(PATIENCE)
        other = context.new_page()
        other.goto(page.url)
        expect(other.locator(".answers .card")).to_have_count(3)
        wait_ready(other)
        expect(other.get_by_role("radio", name="Who keeps what")).to_be_checked()


def test_the_text_says_who_kept_each_token(page: Page, compared: str) -> None:
    page.goto(compared)
    expect(page.locator(".answers .card")).to_have_count(3)
    wait_ready(page)
    look(page, "Who keeps what")
    page.locator(".tokens span").first.wait_for()
    counts = {state: page.locator(f".tokens span.{state}").count() for state in ("both", "a", "b", "neither")}
    assert counts["a"] == counts["b"] > 0  # both hold J entries
    caption = page.get_by_text(re.compile(r"^Tokens kept by both: ")).inner_text()
    assert f"kept by both: {counts['both']}," in caption
    assert f"by neither: {counts['neither']}," in caption
    page.locator(".tokens span.a").first.hover()
    expect(page.locator(".detail")).to_contain_text("only by A, Sliding window")


def test_what_was_compared_is_downloaded_and_opened_again(page: Page, compared: str, tmp_path: Path) -> None:
    page.goto(compared)
    expect(page.locator(".answers .card")).to_have_count(3)
    wait_ready(page)
    with page.expect_download() as started:
        page.get_by_role("button", name="All runs (.zip)").click()
    started.value.save_as(tmp_path / "all.zip")
    with zipfile.ZipFile(tmp_path / "all.zip") as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    assert names == ["full.ccviz", "sliding_window.ccviz", "counter_causal.ccviz"]
    assert Trace.open(tmp_path / "full.ccviz").text.strip().startswith("Bruno")
    page.get_by_role("button", name="Figures as files").click()
    with page.expect_download() as started:
        page.get_by_role("button", name="SVG", exact=True).click()
    started.value.save_as(tmp_path / "panels.svg")
    assert b"<svg" in (tmp_path / "panels.svg").read_bytes()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Open saved runs").click()
    page.locator("input[type=file]").last.set_input_files([tmp_path / name for name in names[:2]])
    expect(page.locator(".answers .card")).to_have_count(2)
    assert page.url.split("comparison=")[1][:10] != compared.split("comparison=")[1][:10]


def test_markup_in_a_prompt_stays_text_everywhere(page: Page, server: Server) -> None:
    opened(page, server, "compare", new="6", J="", sizes="32", frozen="0", strategies=["Full cache", "Importance"])
    field = page.get_by_label("Prompt", exact=True)
    field.fill(MARKUP)
    field.press("Control+Enter")
    wait_ready(page)
    run_all(page)
    look(page, "Who keeps what")
    page.locator(".tokens span").first.wait_for()
    assert "onerror=window.pwned=1" in page.locator(".tokens").inner_text().replace("⏎", "")
    assert page.evaluate("window.pwned") is None
    assert page.locator('img[src="x"], b:text("bold"), .katex').count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_cut_off_at_any_width(
    browser: Browser, compared: str, scheme: str, width: int, tmp_path: Path
) -> None:
    with browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme) as context:  # type: ignore[arg-type]
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.goto(compared)
        expect(page.locator(".answers .card")).to_have_count(3)
        wait_ready(page)
        for title in ("What each cache held", "Who keeps what", "When it was lost", "Harm to predictions"):
            look(page, title)
            page.locator(".js-plotly-plot .main-svg, .player[data-drawn]").first.wait_for()
            wide = page.evaluate(
                "(() => { const main = document.querySelector('[data-testid=stMain]');"
                " return main.scrollWidth - main.clientWidth })()"
            )
            assert wide <= 1, title
        page.screenshot(path=tmp_path / "compare.png")


def test_a_comparison_is_cancelled_and_keeps_its_part(page: Page, server: Server) -> None:
    strategies = ["Sliding window", "Importance"]
    opened(page, server, "compare", chat="false", sizes="64", h="16", frozen="0", new="2000", strategies=strategies)
    field = page.get_by_label("Prompt", exact=True)
    field.fill("tick tock " * 40)
    field.press("Control+Enter")
    wait_ready(page)
    page.get_by_role("button", name="Run all", exact=True).click()
    expect(page.get_by_text(re.compile(r"0 of 2 answers complete · \d+ of at most 4000 tokens"))).to_be_visible()
    page.get_by_role("button", name="Cancel", exact=True).click()
    expect(page.get_by_text("Cancelled. Below is what there was until then.")).to_be_visible()
    expect(page.locator(".answers .card")).to_have_count(2)
    expect(page.locator(".player[data-drawn]")).to_have_count(2)


def test_a_prompt_set_survives_the_death_of_its_server(browser: Browser, tmp_path: Path) -> None:
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        context.set_default_timeout(PATIENCE)
        visitor, page = Visitor(context), context.new_page()
        with serve(tmp_path) as first:
            opened(page, first, "prompt_sets", new="24", strategies=["Full cache", "Sliding window"])
            field = page.get_by_label("One prompt a line")
            field.fill("\n".join(LINES))
            field.press("Control+Enter")
            expect(page.get_by_text("6 prompts, 2 strategies and sizes: 12 answers")).to_be_visible()
            page.get_by_role("button", name="Run the set").click()
            expect(page.get_by_text(re.compile(r"^[1-5] of 6 prompts · about .* left"))).to_be_visible()
            address = page.url
        name = re.search(r"set=([^&]+)", address)
        assert name is not None
        (folder,) = (tmp_path / "data" / "sets").iterdir()
        done = len({json.loads(line)["item"] for line in (folder / "results.jsonl").read_text().splitlines()})
        assert 1 <= done < 6
        page.goto("about:blank")
        with serve(tmp_path) as second:
            opened(page, second, "prompt_sets", set=name.group(1))
            expect(page.get_by_text(re.compile(rf"{done} of 6 prompts are done"))).to_be_visible()
            page.get_by_role("button", name="Resume").click()
            expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()
            expect(page.get_by_role("button", name="Stop", exact=True)).to_have_count(0)
            expect(page.get_by_role("heading", name="Every answer")).to_be_visible()
            expect(page.get_by_role("button", name="Resume")).to_have_count(0)
            wait_ready(page)
            charts(page, 1)
            lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
            assert sorted((line["item"], line["lane"]) for line in lines) == sorted(
                (str(at), lane) for at in range(1, 7) for lane in ("full", "sliding_window")
            )
            page.get_by_role("radio", name="characters").click()
            wait_ready(page)
            page.get_by_role("button", name="Open in Compare").click()
            expect(page.get_by_role("heading", name="Compare strategies")).to_be_visible()
            expect(page.locator(".answers .card")).to_have_count(2)
            assert "Traceback" not in second.log()
        assert visitor.errors == []
