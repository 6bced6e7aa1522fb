"""The linked player as a person uses it: pointing, pinning, searching, stepping, by mouse and by keyboard alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright (requirements-dev.txt)")

from browser import PATIENCE, Server, serve, wait_ready
from playwright.sync_api import Browser, Locator, Page, expect

from ccviz.colours import BLUE_RED, BLUE_YELLOW
from ccviz.lessons import find_text, recorded_run, run_file
from ccviz.metrics import slot_grid
from ccviz.trace import Trace

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

NAME = "counter_causal"
LEFT = 44  # pixels before the first cell


@pytest.fixture(scope="module")
def trace() -> Trace:
    return recorded_run(NAME)


@pytest.fixture(scope="module")
def lisbon(trace: Trace) -> int:
    return find_text(trace, " Lisbon")[0]


@pytest.fixture(scope="module")
def address(browser: Browser, server: Server) -> Iterator[str]:
    """Where the recorded run is shown."""
    with browser.new_context() as context:
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.goto(server.url)
        page.get_by_text("of cache a token").wait_for()
        wait_ready(page)
        page.get_by_role("button", name="Open a saved run").click()
        page.locator("input[type=file]").last.set_input_files(run_file(NAME))
        page.locator(".player[data-drawn]").wait_for()
        page.wait_for_url(re.compile("run="))
        yield page.url


@pytest.fixture
def player(page: Page, address: str) -> Locator:
    page.goto(address)
    found = page.locator(".player[data-drawn]")
    found.wait_for()
    wait_ready(page)
    return found


def token(player: Locator, position: int) -> Locator:
    return player.locator(f".tokens span[data-position='{position}']")


def state(player: Locator) -> dict[str, Any]:
    return dict(json.loads(player.evaluate("root => JSON.stringify(root.player.state)")))


def cell(player: Locator, row: int, column: int) -> dict[str, float]:
    """The middle of a cell, in pixels of the picture."""
    width, height, columns, rows = player.evaluate(
        "({ player: { map } }) => [map.width, map.height, map.view.c1 - map.view.c0, map.view.r1 - map.view.r0]"
    )
    return {"x": LEFT + (column + 0.5) * width / columns, "y": (row + 0.5) * height / rows}


def pixel(player: Locator, row: int, column: int) -> tuple[int, int, int]:
    place = cell(player, row, column)
    script = """({ player: { map } }, [x, y]) => [...map.cells.getContext("2d")
        .getImageData(Math.round(x * map.ratio), Math.round(y * map.ratio), 1, 1).data]"""
    red, green, blue, _ = player.evaluate(script, [place["x"], place["y"]])
    return red, green, blue


def colour_of(position: int, last: int, stops: list[str]) -> np.ndarray[Any, Any]:
    parts = np.array([[int(stop[at : at + 2], 16) for at in (1, 3, 5)] for stop in stops])
    places = np.linspace(0, last, len(stops))
    return np.array([np.interp(position, places, parts[:, channel]) for channel in range(3)])


# Pointing


def test_the_picture_is_that_of_the_trace(player: Locator, trace: Trace, page: Page) -> None:
    last = len(trace.tokens) - 1
    for order, title in [("position", "by position"), ("rank", "by score rank"), ("in place", "in place")]:
        player.get_by_role("button", name=title, exact=True).click()
        grid = slot_grid(trace, order)
        for row, column in [(0, 0), (3, 60), (4, 30), (6, 63), (6, 1)]:
            expected = colour_of(int(grid[row, column]), last, BLUE_RED)
            np.testing.assert_allclose(pixel(player, row, column), expected, atol=4, err_msg=f"{order} {row} {column}")
    player.get_by_label("Colours").select_option("blue-yellow")
    expected = colour_of(int(grid[6, 63]), last, BLUE_YELLOW)
    np.testing.assert_allclose(pixel(player, 6, 63), expected, atol=4)
    page.wait_for_url(re.compile("ramp=blue-yellow"))


def test_pointing_at_a_cell_marks_its_word_and_the_reverse(player: Locator, trace: Trace, lisbon: int) -> None:
    grid = slot_grid(trace, "position")
    row = 4
    column = int(np.flatnonzero(grid[row] == lisbon)[0])
    player.locator(".marks").hover(position=cell(player, row, column))
    expect(token(player, lisbon)).to_have_class(re.compile(r"\bhere\b"))
    expect(player.locator(".pointed")).to_contain_text(f"“ Lisbon” · position {lisbon} · at refresh 5 · kept")
    player.locator(".title, .where").last.hover()
    expect(player.locator(".tokens .here")).to_have_count(0)
    other = find_text(trace, " bees")[0]
    token(player, other).hover()
    assert state(player)["hover"] == other
    expect(player.locator(".pointed")).to_contain_text(f"“ bees” · position {other} · evicted at refresh 5")
    marked = player.evaluate(
        """({ player: { map } }) => {
          const { width, height } = map.marks
          const { data } = map.marks.getContext("2d").getImageData(0, 0, width, height)
          const rows = new Set()
          const ink = getComputedStyle(map.marks).color.match(/\\d+/g).map(Number)
          for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {
            const at = 4 * (y * width + x)
            const near = ink.every((value, channel) => Math.abs(value - data[at + channel]) < 30)
            if (data[at + 3] > 200 && near) rows.add(Math.floor((y / height) * map.model.rows))
          }
          return [...rows]
        }"""
    )
    alive = trace.entries[(trace.entries["position"] == other) & trace.entries["kept"]]["refresh"].tolist()
    assert set(alive) <= set(marked)


def test_a_pinned_token_tells_its_life(player: Locator, trace: Trace, lisbon: int, page: Page) -> None:
    life = player.locator(".life")
    expect(life).to_contain_text("No token pinned")
    lost = find_text(trace, " bees")[0]
    token(player, lost).click()
    entry = trace.entries[(trace.entries["position"] == lost) & ~trace.entries["kept"]].iloc[0]
    refresh = int(entry["refresh"])
    here = trace.entries[trace.entries["refresh"] == refresh]
    rank = 1 + int((here["score"] > entry["score"]).sum())
    seen = int(trace.refreshes["tokens_seen"].iloc[refresh])
    expect(life).to_contain_text(
        f"Evicted at refresh {refresh + 1}, after {seen} tokens. It ranked {rank} of {len(here)}"
    )
    expect(life).to_contain_text("64 could stay")
    token(player, lisbon).click()
    expect(life).to_contain_text("Read before refresh 3, at 48 tokens.")
    expect(life).to_contain_text("Still in the cache after refresh 7.")
    expect(life.get_by_role("img")).to_have_attribute("aria-label", re.compile("Score from .* over 3 refreshes"))
    life.get_by_text("Score and rank at each refresh").click()
    rows = life.locator("tr")
    expect(rows).to_have_count(4)
    scores = trace.entries[trace.entries["position"] == lisbon]["score"].dropna()
    expect(rows.nth(1).locator("td").nth(1)).to_have_text(f"{scores.iloc[0]:.4g}")
    page.wait_for_url(re.compile(f"pin={lisbon}"))
    token(player, lisbon).click()
    expect(life).to_contain_text("No token pinned")


def test_why_was_it_evicted(player: Locator, trace: Trace) -> None:
    position = find_text(trace, " bees")[0]
    entry = trace.entries[(trace.entries["position"] == position) & ~trace.entries["kept"]].iloc[0]
    token(player, position).click()
    expected = player.locator(".life .expected")
    expect(player.locator(".life")).to_contain_text(
        f"What the future expected here, at refresh {int(entry['refresh']) + 1}"
    )
    words = expected.locator(".word").all_inner_texts()
    assert words[:5] == [f"“{entry[f'expected_{place}']}”".replace("\n", "⏎") for place in range(1, 6)]
    own = expected.locator(".own")
    expect(own).to_have_count(1)
    expect(own).to_contain_text("bees")


# Searching


def test_search_says_where_a_word_was_lost(player: Locator, trace: Trace, lisbon: int) -> None:
    field = player.get_by_role("searchbox", name="Find in the text")
    field.fill("CELLO")
    answer = player.locator(".finding span")
    first, last = find_text(trace, " cello")
    gone = trace.entries[trace.entries["position"].between(first, last) & ~trace.entries["kept"]]["refresh"]
    row = int(gone.min())
    assert 0 < len(gone) < last - first + 1
    expect(answer).to_contain_text(f"{len(gone)} of its {last - first + 1} tokens lost, the first at refresh {row + 1}")
    expect(player.locator(".tokens .found")).to_have_count(last - first + 1)
    player.get_by_role("button", name="Go to the loss").click()
    assert state(player)["refresh"] == row
    field.fill("bruno")
    expect(answer).to_contain_text("Match 1 of 3")
    field.press("Enter")
    expect(answer).to_contain_text("Match 2 of 3")
    field.press("Shift+Enter")
    expect(answer).to_contain_text("Match 1 of 3")
    field.fill("lisbon")
    expect(answer).to_contain_text("still in the cache after the last refresh")
    assert state(player)["pin"] == lisbon
    field.fill("<b>nowhere</b>")
    expect(answer).to_have_text("“<b>nowhere</b>” is not in this text.")
    expect(player.locator(".tokens .found")).to_have_count(0)


# Stepping


def test_step_play_and_pause(player: Locator, trace: Trace, page: Page) -> None:
    where = player.locator(".where")
    expect(where).to_have_text("refresh 7 of 7 · after 112 tokens")
    player.get_by_role("button", name="One refresh back").click()
    expect(where).to_have_text("refresh 6 of 7 · after 96 tokens")
    kept = trace.entries[(trace.entries["refresh"] == 5) & trace.entries["kept"]]
    expect(player.locator(".tokens .k")).to_have_count(len(kept))
    expect(player.locator(".spoken")).to_contain_text(
        "the cache holds 64 of 96 tokens seen and has lost 32, 16 of them"
    )
    page.wait_for_url(re.compile("refresh=6"))
    player.get_by_role("button", name="One refresh on").click()
    player.get_by_label("Speed").select_option("32")
    player.get_by_role("button", name="Play").click()  # at the end: from the beginning
    expect(where).to_have_text("refresh 7 of 7 · after 112 tokens")
    expect(player.get_by_role("button", name="Play")).to_be_visible()
    player.get_by_label("Speed").select_option("1")
    player.get_by_role("button", name="Play").click()
    player.get_by_role("button", name="Pause").click()
    expect(where).to_have_text(re.compile("refresh [12] of 7"))


def test_a_box_zooms_in_and_all_is_one_key_away(player: Locator, page: Page) -> None:
    marks = player.locator(".marks")
    frame = marks.bounding_box()
    assert frame is not None
    start, end = cell(player, 2, 8), cell(player, 5, 23)
    marks.scroll_into_view_if_needed()
    frame = marks.bounding_box()
    assert frame is not None
    page.mouse.move(frame["x"] + start["x"], frame["y"] + start["y"])
    page.mouse.down()
    page.mouse.move(frame["x"] + end["x"], frame["y"] + end["y"], steps=4)
    page.mouse.up()
    assert player.evaluate("root => root.player.map.zoom") == {"c0": 8, "c1": 24, "r0": 2, "r1": 6}
    assert state(player)["pin"] == -1
    player.get_by_role("button", name="All", exact=True).click()
    assert player.evaluate("root => root.player.map.zoom") is None


def test_everything_works_by_keyboard_alone(player: Locator, trace: Trace, page: Page) -> None:
    player.get_by_role("button", name="One refresh back").focus()
    page.keyboard.press("Home")
    expect(player.locator(".where")).to_contain_text("refresh 1 of 7")
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    expect(player.locator(".where")).to_contain_text("refresh 6 of 7")
    for _ in range(30):  # on by Tab, to the picture
        if player.evaluate("root => root.getRootNode().activeElement?.classList.contains('marks')"):
            break
        page.keyboard.press("Tab")
    outline = player.evaluate("root => getComputedStyle(root.querySelector('.marks')).outlineStyle")
    assert outline == "solid"
    for _ in range(30):
        page.keyboard.press("ArrowRight")
    position = int(slot_grid(trace, "position")[5, 30])
    expect(player.locator(".spoken")).to_contain_text(f"position {position}")
    page.keyboard.press("ArrowUp")
    expect(player.locator(".where")).to_contain_text("refresh 5 of 7")
    page.keyboard.press("Enter")
    pinned = int(slot_grid(trace, "position")[4, 30])
    assert state(player)["pin"] == pinned
    expect(token(player, pinned)).to_have_class(re.compile("pinned"))
    page.keyboard.press("+")
    assert player.evaluate("root => Boolean(root.player.map.zoom)")
    page.keyboard.press("0")
    assert player.evaluate("root => root.player.map.zoom") is None
    page.keyboard.press("o")
    assert state(player)["order"] == "in place"
    page.keyboard.press("/")
    page.keyboard.type("Lisbon")
    expect(player.locator(".finding span")).to_contain_text("Match 1 of 2")  # the note, and the answer
    page.keyboard.press("Escape")
    assert state(player)["pin"] == -1
    expect(player.locator(".finding")).to_be_hidden()
    player.locator(".tokens").focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert state(player)["pin"] == 30
    player.get_by_role("button", name="Play").focus()
    page.keyboard.press("[")
    page.keyboard.press("[")
    assert player.evaluate("root => root.player.speed") == 1


def test_reduced_motion_is_respected(browser: Browser, address: str) -> None:
    with browser.new_context(reduced_motion="reduce") as context:
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.goto(address)
        player = page.locator(".player[data-drawn]")
        player.wait_for()
        expect(player.get_by_label("Speed")).to_have_value("1")


# Links


def test_a_link_shows_the_same_refresh_order_and_token(
    player: Locator, page: Page, browser: Browser, lisbon: int
) -> None:
    player.get_by_role("button", name="in place").click()
    player.get_by_role("button", name="One refresh back").click()
    token(player, lisbon).click()
    page.wait_for_url(re.compile(f"order=in-place.*pin={lisbon}|pin={lisbon}.*order=in-place"))
    wait_ready(page)
    page.get_by_role("button", name="Share").click()
    link = page.get_by_test_id("stCode").first.inner_text().strip()
    with browser.new_context() as context:
        context.set_default_timeout(PATIENCE)
        other = context.new_page()
        other.goto(link)
        theirs = other.locator(".player[data-drawn]")
        theirs.wait_for()
        shown = {name: state(theirs)[name] for name in ("refresh", "order", "pin")}
        assert shown == {"refresh": 5, "order": "in place", "pin": lisbon}
        expect(token(theirs, lisbon)).to_have_class(re.compile("pinned"))


def test_two_players_go_in_step(browser: Browser, server: Server, lisbon: int) -> None:
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.goto(f"{server.url}/compare")
        wait_ready(page)
        page.get_by_role("button", name="Open saved runs").click()
        names = ["sliding_window", "heavy_hitter-small_chunks"]
        page.locator("input[type=file]").last.set_input_files([run_file(name) for name in names])
        expect(page.locator(".player[data-drawn]")).to_have_count(2)
        page.keyboard.press("Escape")
        wait_ready(page)
        page.get_by_role("radio", name="Step through two").click()
        whole = page.locator(".player[data-drawn][data-parts=all]")
        expect(whole).to_have_count(2)
        wait_ready(page)
        expect(page.locator(".player")).to_have_count(2)
        left, right = whole.all()
        expect(right.locator(".where")).to_have_text("refresh 14 of 14 · after 112 tokens")
        left.get_by_role("button", name="One refresh back").click()
        expect(right.locator(".where")).to_have_text("refresh 12 of 14 · after 96 tokens")
        token(left, lisbon).click()
        expect(token(right, lisbon)).to_have_class(re.compile("pinned"))
        token(right, 30).hover()
        expect(token(left, 30)).to_have_class(re.compile("here"))
        page.wait_for_url(re.compile(f"pin={lisbon}"))
        left.get_by_label("in step").uncheck()
        left.get_by_role("button", name="One refresh back").click()
        expect(left.locator(".where")).to_contain_text("refresh 5 of 7")
        expect(right.locator(".where")).to_have_text("refresh 12 of 14 · after 96 tokens")


def test_a_watch_link_follows_another_browser(browser: Browser, tmp_path: Path) -> None:
    with serve(tmp_path) as server, browser.new_context() as ours, browser.new_context() as theirs:
        for context in (ours, theirs):
            context.set_default_timeout(PATIENCE)
        teacher, pupil = ours.new_page(), theirs.new_page()
        teacher.goto(f"{server.url}/?new=24&dtype=float32")
        teacher.get_by_text("of cache a token").wait_for()
        wait_ready(teacher)
        teacher.get_by_role("button", name="Open a saved run").click()
        teacher.locator("input[type=file]").last.set_input_files(run_file(NAME))
        teacher.locator(".player[data-drawn]").wait_for()
        teacher.keyboard.press("Escape")
        wait_ready(teacher)
        teacher.get_by_role("button", name="Share").click()
        teacher.get_by_role("button", name="Show to others").click()
        wait_ready(teacher)
        if not teacher.get_by_test_id("stCode").first.is_visible():
            teacher.get_by_role("button", name="Share").click()
        link = teacher.get_by_test_id("stCode").filter(has_text="watch=").inner_text().strip()
        teacher.keyboard.press("Escape")
        pupil.goto(link)
        seen = pupil.locator(".player[data-drawn]")
        seen.wait_for()
        expect(pupil.get_by_role("heading", name="Watching")).to_be_visible()
        shown = teacher.locator(".player[data-drawn]")
        shown.get_by_role("button", name="One refresh back").click()
        token(shown, 40).click()
        expect(seen.locator(".where")).to_contain_text("refresh 6 of 7")
        expect(token(seen, 40)).to_have_class(re.compile("pinned"))
        shown.get_by_role("button", name="One refresh on").click()
        expect(seen.locator(".where")).to_contain_text("refresh 7 of 7")
        shown.get_by_role("button", name="One refresh back").click()
        expect(seen.locator(".where")).to_contain_text("refresh 6 of 7")
        assert "teach" not in teacher.url  # whoever is given the address must not be able to show
        teacher.reload()
        shown.wait_for()
        wait_ready(teacher)
        shown.get_by_role("button", name="One refresh back").click()
        expect(seen.locator(".where")).to_contain_text("refresh 5 of 7")
        teacher.get_by_role("radio", name="Patient letters").click()
        wait_ready(teacher)
        teacher.get_by_text("prompt tokens").first.wait_for()
        teacher.get_by_role("button", name="Run", exact=True).click()
        expect(
            pupil.get_by_text(re.compile("of at most 24 tokens|Reading the prompt|Loading|Waiting")).first
        ).to_be_visible()
        expect(seen.locator(".tokens")).to_contain_text("Mrs Adler")
        expect(teacher.get_by_role("button", name="Cancel", exact=True)).to_have_count(0)
        expect(pupil.get_by_test_id("stProgress")).to_have_count(0)
        assert "Traceback" not in server.log()
        pupil.goto(f"{server.url}/?watch=nobody")
        expect(pupil.get_by_text("Nothing is shown under this link now")).to_be_visible()
