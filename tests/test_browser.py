"""What a person sees and does on the pages: a real Chromium, a real server, the real built-in model."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright (requirements-dev.txt)")

from browser import PATIENCE, Server, Visitor, serve, wait_ready
from playwright.sync_api import Browser, FilePayload, Locator, Page, expect

from ccviz import Trace

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

MARKUP = (
    "<b>bold</b> <script>window.pwned=1</script> <img src=x onerror=window.pwned=1> $x^2$ :red[no] **stars** "
    "![dot](http://example.invalid/dot.png)"
)
# The built-in model goes on for hundreds of tokens after this, without the chat template.
ENDLESS = "tick tock " * 40
ENDLESS_ADDRESS = {"chat": "false", "J": "64", "h": "16", "frozen": "0", "new": "2000"}


@pytest.fixture(scope="module")
def letters(browser: Browser, server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """One finished run, shared by the tests that only look at it: its address and its trace as downloaded."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    explore(page, server, sample="Patient letters")
    run_to_the_end(page)
    path = tmp_path_factory.mktemp("letters") / "letters.ccviz"
    download(page, "Trace (.ccviz)", path)
    address = page.url
    context.close()
    return address, path


# What a person does


def explore(page: Page, server: Server, **address: str) -> None:
    """Open the Explore page and wait for the model."""
    page.goto(f"{server.url}/?{urlencode(address)}")
    wait_ready(page)
    main(page).get_by_text("prompt tokens").or_(alerts(page)).first.wait_for()


def main(page: Page) -> Locator:
    return page.get_by_role("main")


def alerts(page: Page) -> Locator:
    """The sentences of the errors on the page, without their icons."""
    return page.get_by_test_id("stAlertContentError").get_by_test_id("stMarkdownContainer")


def button(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def fill_in(page: Page, label: str, value: str) -> None:
    field = page.get_by_label(label, exact=True)
    field.fill(value)
    field.press("Control+Enter" if label == "Prompt" else "Enter")
    wait_ready(page)


def choose_model(page: Page, name: str) -> None:
    field = page.get_by_role("combobox", name="Model")
    field.fill(name)
    field.press("Enter")
    wait_ready(page)


def run_to_the_end(page: Page) -> None:
    button(page, "Run").click()
    expect(page.get_by_role("heading", name="What the cache held, and what became of the text")).to_be_visible()
    expect(button(page, "Cancel")).to_have_count(0)
    wait_ready(page)


def start_endless(page: Page, server: Server) -> None:
    """Begin a run that does not end by itself, and wait until it writes."""
    explore(page, server, **ENDLESS_ADDRESS)
    fill_in(page, "Prompt", ENDLESS)
    button(page, "Run").click()
    expect(main(page).get_by_text(re.compile(r"\d+ of at most 2000 tokens · \d+ refreshes"))).to_be_visible()


def choose_order(page: Page, title: str) -> None:
    button(page, title).click()
    expect(button(page, title)).to_have_attribute("aria-pressed", "true")
    told(page)


def choose_refresh(page: Page, key: str) -> None:
    slider = page.get_by_role("slider", name="Refresh")
    slider.focus()
    slider.press(key)


def told(page: Page) -> None:
    """Wait until the player has told the page what it shows, and the page has drawn it."""
    page.wait_for_timeout(600)
    wait_ready(page)


def download(page: Page, name: str, path: Path) -> None:
    with page.expect_download() as started:
        button(page, name).click()
    started.value.save_as(path)


def upload(page: Page, opener: str, file: Path | FilePayload) -> None:
    button(page, opener).click()
    page.locator("input[type=file]").last.set_input_files(file)
    wait_ready(page)


# What a person sees


def drawn(page: Page) -> np.ndarray[Any, Any]:
    """The positions in the player's heatmap, refreshes by columns, NaN where a column is empty."""
    rows = page.locator(".player[data-drawn]").evaluate(
        "({ player }) => player.model.seen.map((_, row) => [...player.model.columns(player.state.order, row)])"
    )
    grid = np.full((len(rows), max(map(len, rows))), np.nan)
    for row, positions in zip(grid, rows, strict=True):
        row[: len(positions)] = [np.nan if position < 0 else position for position in positions]
    return grid


def caption(page: Page) -> tuple[int, int, int, int]:
    """The refresh shown, of how many, the tokens seen and the entries left, as the page's caption has them."""
    text = f"{page.locator('.where').first.inner_text()} {page.locator('.sentence').inner_text()}"
    found = re.match(r"refresh (\d+) of (\d+) · after (\d+) tokens Refresh .*: the cache holds (\d+) of", text)
    assert found, text
    shown, count, seen, kept = map(int, found.groups())
    return shown, count, seen, kept


def tokens(page: Page, state: str = "") -> Locator:
    return page.locator(f".tokens span{state}")


def answer(page: Page) -> str:
    return main(page).get_by_test_id("stText").first.inner_text()


def no_trace_of_markup(page: Page) -> None:
    assert page.evaluate("window.pwned") is None
    for selector in ('img[src="x"]', 'img[alt="dot"]', 'script:has-text("pwned")', 'b:text("bold")'):
        assert page.locator(selector).count() == 0, selector
    assert page.locator('strong:text-is("stars")').count() == 0
    assert page.locator(".katex").count() == 0


# The main path


def test_a_sample_runs_and_its_refreshes_can_be_walked_by_keyboard(page: Page, server: Server) -> None:
    explore(page, server)
    expect(page.get_by_role("radio", name="Recall a fact")).to_be_checked()
    page.get_by_role("radio", name="Patient letters").click()
    expect(page.get_by_label("Prompt", exact=True)).to_have_value(re.compile("Mrs Adler"))
    run_to_the_end(page)
    assert answer(page).strip()
    shown, count, seen, kept = caption(page)
    assert (shown, drawn(page).shape[0]) == (count, count)
    everything = tokens(page).count()
    expect(tokens(page, ".e")).to_have_count(seen - kept)
    assert seen - kept > 0
    choose_refresh(page, "Home")
    expect(main(page).get_by_text(f"refresh 1 of {count} · after")).to_be_visible()
    _, _, seen, kept = caption(page)
    expect(tokens(page, ".u")).to_have_count(everything - seen)
    assert everything - seen > 0
    expect(tokens(page, ".e")).to_have_count(0)
    for _ in range(6):
        choose_refresh(page, "ArrowRight")
    expect(main(page).get_by_text(f"refresh 7 of {count} · after")).to_be_visible()
    _, _, seen, kept = caption(page)
    expect(tokens(page, ".e")).to_have_count(seen - kept)
    expect(tokens(page, ".u")).to_have_count(everything - seen)
    expect(tokens(page, ".k")).to_have_count(kept)
    page.wait_for_url(re.compile("refresh=7"))


def test_a_cancelled_run_keeps_its_part_and_its_address(page: Page, server: Server) -> None:
    start_endless(page, server)
    button(page, "Cancel").click()
    expect(main(page).get_by_text("Cancelled. Below is what there was until then.")).to_be_visible()
    expect(tokens(page).first).to_be_visible()
    wait_ready(page)
    partial, count, text = tokens(page).count(), caption(page)[1], answer(page)
    assert "run=" in page.url
    assert drawn(page).shape[0] == count
    page.reload()
    expect(main(page).get_by_text("Cancelled. Below is what there was until then.")).to_be_visible()
    expect(tokens(page)).to_have_count(partial)
    assert (caption(page)[1], answer(page)) == (count, text)


def test_a_run_goes_on_while_its_reader_is_on_another_page(page: Page, server: Server) -> None:
    start_endless(page, server)
    run = re.search(r"run=(\w+)", page.url)
    page.get_by_role("link", name="How to read it").click()
    expect(page.get_by_role("heading", name="The strategies")).to_be_visible()
    page.get_by_role("link", name="Explore").click()
    expect(main(page).get_by_text(re.compile("of at most 2000 tokens"))).to_be_visible()
    button(page, "Cancel").click()
    expect(main(page).get_by_text("Cancelled. Below is what there was until then.")).to_be_visible()
    assert run is not None
    assert run.group() in page.url


def test_settings_and_prompt_survive_a_visit_to_another_page(page: Page, server: Server) -> None:
    explore(page, server)
    fill_in(page, "Cache size J", "70")
    fill_in(page, "Chunk size h", "8")
    fill_in(page, "Prompt", "My own words.")
    page.get_by_role("link", name="How to read it").click()
    expect(page.get_by_role("heading", name="The strategies")).to_be_visible()
    page.get_by_role("link", name="Explore").click()
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("My own words.")
    wait_ready(page)
    assert alerts(page).all_inner_texts() == []
    expect(page.get_by_label("Cache size J", exact=True)).to_have_value("70", timeout=10_000)
    expect(page.get_by_label("Chunk size h", exact=True)).to_have_value("8", timeout=10_000)


def test_a_link_shows_another_person_the_same(
    page: Page, browser: Browser, letters: tuple[str, Path], visitor: Visitor
) -> None:
    page.goto(letters[0])
    expect(tokens(page).first).to_be_visible()
    wait_ready(page)
    choose_order(page, "by score rank")
    choose_refresh(page, "Home")
    choose_refresh(page, "ArrowRight")
    expect(main(page).get_by_text(re.compile("^refresh 2 of"))).to_be_visible()
    told(page)
    with browser.new_context() as context:
        context.set_default_timeout(PATIENCE)
        other = context.new_page()
        other.goto(page.url)
        expect(tokens(other).first).to_be_visible()
        wait_ready(other)
        expect(button(other, "by score rank")).to_have_attribute("aria-pressed", "true")
        expect(other.get_by_role("radio", name="Patient letters")).to_be_checked()
        assert caption(other) == caption(page)
        assert answer(other) == answer(page)
        np.testing.assert_array_equal(drawn(other), drawn(page))
    assert visitor.requests


def test_a_second_run_starts_at_its_own_last_refresh_in_the_chosen_order(page: Page, server: Server) -> None:
    explore(page, server, new="3")
    run_to_the_end(page)
    choose_order(page, "in place")
    choose_refresh(page, "Home")
    expect(main(page).get_by_text(re.compile("^refresh 1 of"))).to_be_visible()
    told(page)
    first = re.search(r"run=(\w+)", page.url)
    button(page, "Run").click()
    page.wait_for_url(lambda url: first is not None and "run=" in url and first.group() not in url)
    expect(tokens(page).first).to_be_visible()
    expect(button(page, "Cancel")).to_have_count(0)
    wait_ready(page)
    expect(main(page).get_by_text(re.compile(r"^refresh (\d+) of \1 "))).to_be_visible(timeout=10_000)
    expect(button(page, "in place")).to_have_attribute("aria-pressed", "true", timeout=10_000)


def test_the_three_orders_redraw_the_heatmap(page: Page, letters: tuple[str, Path]) -> None:
    page.goto(letters[0])
    expect(tokens(page).first).to_be_visible()
    pictures = []
    for title in ("by position", "by score rank", "in place"):
        choose_order(page, title)
        pictures.append(drawn(page))
    held = [[sorted(row[~np.isnan(row)].tolist()) for row in picture] for picture in pictures]
    assert held[0] == held[1] == held[2]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert not np.array_equal(pictures[one], pictures[other], equal_nan=True)


def test_pointing_at_a_token_shows_its_position_and_score(page: Page, letters: tuple[str, Path]) -> None:
    page.goto(letters[0])
    detail = page.locator(".pointed")
    expect(detail).to_have_text("Point at a cell or a word; click to pin it.")
    kept = page.locator(".tokens span.k:not(.safe)").nth(3)
    position = kept.get_attribute("data-position")
    kept.click()
    expect(detail).to_have_text(re.compile(rf"position {position} · kept · score -?[\d.e-]+, rank \d+ of \d+"))
    lost = tokens(page, ".e").nth(5)
    position = lost.get_attribute("data-position")
    lost.hover()
    expect(detail).to_have_text(re.compile(rf"position {position} · evicted at refresh \d+"))


# Text is data


def test_a_prompt_that_looks_like_markup_stays_text(page: Page, server: Server) -> None:
    explore(page, server, new="2", J="40", h="8", frozen="0", chat="false")
    fill_in(page, "Prompt", MARKUP)
    run_to_the_end(page)
    assert MARKUP in page.locator(".tokens").inner_text()
    no_trace_of_markup(page)


def test_an_opened_trace_that_looks_like_markup_stays_text(
    page: Page, server: Server, letters: tuple[str, Path], tmp_path: Path
) -> None:
    trace = Trace.open(letters[1])
    first = int((~trace.tokens["generated"]).sum())
    trace.tokens.loc[0, "text"] = trace.tokens.loc[first, "text"] = MARKUP
    for key in ("stop_reason", "label", "model"):
        trace.config[key] = MARKUP
    explore(page, server)
    upload(page, "Open a saved run", trace.save(tmp_path / "markup.ccviz"))
    expect(tokens(page).first).to_be_visible()
    page.keyboard.press("Escape")
    wait_ready(page)
    assert MARKUP in answer(page)
    assert page.locator(".tokens").inner_text().count(MARKUP) == 2
    page.locator(".marks").hover(position={"x": 47, "y": 5})
    expect(page.locator(".pointed")).to_contain_text("<b>bold</b> <script>window.pwned=1</script>", timeout=30_000)
    page.locator(".marks").click(position={"x": 47, "y": 5})
    expect(page.locator(".life h6").first).to_contain_text("<script>window.pwned=1</script>")
    no_trace_of_markup(page)


def test_a_model_name_that_looks_like_markup_stays_text(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/?{urlencode({'model': f'/no/{MARKUP}'})}")
    expect(alerts(page).first).to_be_visible()
    wait_ready(page)
    no_trace_of_markup(page)


# Files


def test_a_trace_goes_to_a_file_and_comes_back(
    page: Page, server: Server, letters: tuple[str, Path], browser: Browser
) -> None:
    address, path = letters
    page.goto(address)
    expect(tokens(page).first).to_be_visible()
    trace = Trace.open(path)
    assert trace.text.strip() == answer(page).strip()
    assert len(trace.tokens) == tokens(page).count()
    with browser.new_context() as context:
        context.set_default_timeout(PATIENCE)
        other = context.new_page()
        explore(other, server)
        upload(other, "Open a saved run", path)
        expect(tokens(other)).to_have_count(len(trace.tokens))
        assert answer(other) == answer(page)
        assert caption(other)[1] == len(trace.refreshes)


@pytest.mark.parametrize("kind", ["Heatmap", "Overlay"])
def test_a_figure_downloads_as_svg(page: Page, letters: tuple[str, Path], tmp_path: Path, kind: str) -> None:
    page.goto(letters[0])
    expect(tokens(page).first).to_be_visible()
    button(page, f"{kind} as a file").click()
    download(page, "SVG", tmp_path / "figure.svg")
    root = ElementTree.parse(tmp_path / "figure.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(list(root.iter())) > 50


def test_a_file_that_is_no_trace_gets_one_sentence(page: Page, server: Server) -> None:
    explore(page, server)
    broken: FilePayload = {"name": "broken.ccviz", "mimeType": "application/zip", "buffer": b"PK\x03\x04 no"}
    upload(page, "Open a saved run", broken)
    expect(alerts(page)).to_have_count(1)
    expect(alerts(page)).to_contain_text("broken.ccviz")


def test_a_text_file_fills_the_prompt(page: Page, server: Server) -> None:
    explore(page, server)
    words = "Zoë's café: größer, 東京 🙂\nsecond line"
    upload(page, "Upload a .txt", {"name": "words.txt", "mimeType": "text/plain", "buffer": words.encode()})
    expect(page.get_by_label("Prompt", exact=True)).to_have_value(words)
    assert alerts(page).count() == 0


def test_a_binary_text_file_gets_one_sentence_and_the_prompt_stays(page: Page, server: Server) -> None:
    explore(page, server)
    upload(page, "Upload a .txt", {"name": "photo.txt", "mimeType": "text/plain", "buffer": b"\xff\xd8\x00\x9c" * 99})
    expect(alerts(page)).to_have_count(1)
    expect(alerts(page)).to_have_text(re.compile(r"photo\.txt is not UTF-8 text; save it as UTF-8 and upload it again"))
    expect(page.get_by_label("Prompt", exact=True)).to_have_value(re.compile("Bruno lives in Lisbon"))


# A newcomer's mistakes


def one_clear_sentence(page: Page, pattern: str) -> None:
    """One error on the page, which says what is wrong; no exception; the prompt is still there."""
    expect(alerts(page)).to_have_count(1)
    expect(alerts(page)).to_have_text(re.compile(pattern))
    wait_ready(page)
    assert alerts(page).count() == 1
    assert page.get_by_test_id("stException").count() == 0
    text = alerts(page).inner_text()
    assert "Traceback" not in text
    assert "Error" not in text
    assert "\n" not in text.strip()


@pytest.mark.parametrize(
    ("label", "value", "pattern"),
    [
        ("Cache size J", "0", r"\bJ\b.*at least 2.*0"),
        ("Cache size J", "", r"Cache size J is empty"),
        ("Chunk size h", "0", r"\bh\b.*at least 1.*0"),
        ("Frozen prefix", "64", r"64.*must be below.*64"),
        ("Frozen prefix", "many", r"Frozen prefix takes a whole number.*many"),
        ("New tokens, at most", "0", r"at least 1.*0"),
    ],
)
def test_a_setting_that_cannot_be_gets_one_sentence(
    page: Page, server: Server, label: str, value: str, pattern: str
) -> None:
    explore(page, server)
    fill_in(page, "Prompt", "Keep these words.")
    fill_in(page, label, value)
    one_clear_sentence(page, pattern)
    button(page, "Run").click()
    wait_ready(page)
    one_clear_sentence(page, pattern)
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("Keep these words.")
    assert "run=" not in page.url


def test_an_empty_prompt_gets_one_sentence(page: Page, server: Server) -> None:
    explore(page, server)
    fill_in(page, "Prompt", "")
    button(page, "Run").click()
    one_clear_sentence(page, "The prompt is empty: type some text, or choose a sample")


def test_a_prompt_longer_than_the_context_gets_one_sentence(page: Page, server: Server) -> None:
    explore(page, server)
    long = "word " * 9000
    fill_in(page, "Prompt", long)
    button(page, "Run").click()
    one_clear_sentence(page, r"The prompt has \d+ tokens and .* reads at most 8,?192")
    expect(page.get_by_label("Prompt", exact=True)).to_have_value(long)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("/no/such/folder", "There is no model folder /no/such/folder"),
        ("{folder}/empty", "holds no model: it has no config.json"),
        ("nobody/no-such-model-at-all", "nobody/no-such-model-at-all"),
        ("{folder}/mamba", "mamba.*has no key-value cache"),
    ],
)
def test_a_model_that_cannot_be_gets_one_sentence(
    page: Page, server: Server, tmp_path: Path, name: str, pattern: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba" / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    explore(page, server, sample="Patient letters")
    fill_in(page, "Prompt", "Keep these words.")
    choose_model(page, name.format(folder=tmp_path))
    one_clear_sentence(page, pattern)
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("Keep these words.")
    for label, value in [("Cache size J", "80"), ("Chunk size h", "16"), ("Frozen prefix", "system")]:
        expect(page.get_by_label(label, exact=True)).to_have_value(value)


def test_choosing_another_model_while_one_loads_keeps_the_settings(browser: Browser, tmp_path: Path) -> None:
    with serve(tmp_path) as fresh, browser.new_context() as context:
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.goto(f"{fresh.url}/?sample=Patient+letters")
        wait_ready(page)
        choose_model(page, "/no/such/folder")
        expect(alerts(page).get_by_text("There is no model folder")).to_be_visible()
        wait_ready(page)
        assert alerts(page).count() == 1
        for label, value in [("Cache size J", "80"), ("Chunk size h", "16"), ("Frozen prefix", "system")]:
            expect(page.get_by_label(label, exact=True)).to_have_value(value, timeout=30_000)


def test_a_bad_model_takes_nothing_from_another_visitor(page: Page, server: Server, visitor: Visitor) -> None:
    explore(page, server)
    other = visitor.context.new_page()
    for _ in range(3):
        other.goto(f"{server.url}/?model=/no/such/folder")
        expect(alerts(other)).to_be_visible()
        explore(page, server)
        expect(main(page).get_by_text("prompt tokens")).to_be_visible()
        assert alerts(page).all_inner_texts() == []
        expect(page.get_by_label("Cache size J", exact=True)).to_have_value("64")


# The page itself


def test_no_request_leaves_the_machine(visitor: Visitor, server: Server) -> None:
    page = visitor.context.new_page()
    explore(page, server, new="2")
    run_to_the_end(page)
    page.get_by_text("The tokens as a table").click()
    expect(page.get_by_test_id("stDataFrame")).to_be_visible()
    page.get_by_role("link", name="How to read it").click()
    expect(page.get_by_role("heading", name="The strategies")).to_be_visible()
    assert len(visitor.requests) > 20
    assert visitor.foreign_requests() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits_the_screen(
    browser: Browser, letters: tuple[str, Path], server: Server, width: int, scheme: str
) -> None:
    with browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme) as context:  # type: ignore[arg-type]
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        for address in (f"{server.url}/", letters[0], f"{server.url}/guide"):
            page.goto(address)
            wait_ready(page)
            if address == letters[0]:
                expect(tokens(page).first).to_be_attached()
            if not address.endswith("guide"):
                expect(button(page, "Run")).to_be_visible()
            widths = "(e => [e.scrollWidth, e.clientWidth])"
            for element in ("document.documentElement", "document.querySelector('[data-testid=stMain]')"):
                needed, given = page.evaluate(f"{widths}({element})")
                assert needed <= given, (address, element)
        background = page.evaluate("getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor")
        red = int(re.findall(r"\d+", background)[0])
        assert (red < 128) == (scheme == "dark")
