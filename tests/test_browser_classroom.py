"""Lessons and the library as a person uses them: predictions, presenting, handouts, and every run that is kept."""

from __future__ import annotations

import base64
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright (requirements-dev.txt)")

from browser import PATIENCE, Server, serve, wait_ready
from playwright.sync_api import Browser, Locator, Page, expect

from ccviz.lessons import lesson_names, load_lesson, recorded_run, run_file, solve
from ccviz.trace import SUFFIX, Trace

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(900)]

MARKUP = "<b>bold</b> <script>window.pwned=1</script> <img src=x onerror=window.pwned=1> $x^2$ :red[no] **stars**"


@pytest.fixture
def shelf(browser: Browser, tmp_path: Path) -> Iterator[tuple[Server, Page]]:
    """A server with a library of its own, and a page on it."""
    with serve(tmp_path) as server, browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        context.set_default_timeout(PATIENCE)
        yield server, context.new_page()
        assert "Traceback" not in server.log()


def kept(tmp_path: Path) -> list[str]:
    return sorted(file.name for file in (tmp_path / "data" / "runs").glob(f"*{SUFFIX}"))


def button(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def at_step(page: Page, number: int) -> None:
    expect(page.get_by_text(re.compile(rf"step {number} of \d"))).to_be_visible()
    wait_ready(page)


# Lessons


def test_the_classroom_opens_with_the_network_cut_off(page: Page, server: Server) -> None:
    page.context.route(re.compile(r"^https?://(?!127\.0\.0\.1)"), lambda route: route.abort())
    page.goto(f"{server.url}/classroom")
    page.locator(".player[data-drawn]").wait_for()
    for name in lesson_names():
        expect(page.get_by_text(load_lesson(name).title)).to_be_visible()


def test_a_lesson_from_start_to_end_with_a_right_and_a_wrong_prediction(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/classroom")
    wait_ready(page)
    button(page, "Start").nth(3).click()
    at_step(page, 1)
    expect(page.get_by_role("heading", name="What could be guessed need not be kept")).to_be_visible()
    expect(page.locator(".player .where").first).to_contain_text("refresh 4 of 7")
    button(page, "Next").click()
    at_step(page, 2)
    for _ in range(4):
        button(page, "Next stage").click()
    expect(page.locator(".stages")).to_contain_text("P(“cat”) = 0.32, so its surprise is 1 − 0.32 = 0.68")
    button(page, "mat").click()
    expect(page.locator(".stages")).to_contain_text("“mat” is the last token: nothing comes after")
    button(page, "Next").click()
    at_step(page, 3)

    # A wrong prediction of the eight that survive, and not before it is complete
    solved = solve(load_lesson("4-surprise").steps[2])
    wrong = [position for position in solved.options if position not in solved.right]
    chosen = [*wrong, *sorted(solved.right)][:8]
    expect(button(page, "Reveal")).to_be_disabled()
    expect(page.locator(".player .where").first).to_contain_text("refresh 4 of 4")
    expect(page.locator(".player .sentence")).not_to_contain_text("Refresh 5")
    for position in chosen:
        page.locator(f".picker button[data-position='{position}']").click()
    expect(page.locator(".picker")).to_contain_text("8 of 8 chosen")
    page.locator(f".picker button[data-position='{max(solved.right)}']").click()
    expect(page.locator(".picker")).to_contain_text("8 are chosen already: take one back first.")
    button(page, "Reveal").click()
    expect(page.get_by_text(f"{solved.score(chosen)} of 8 right. A blind choice gets 4.9 on average.")).to_be_visible()
    expect(page.locator(".picker .line .kept")).to_have_count(8)
    expect(page.locator(".picker .line .evicted")).to_have_count(5)
    expect(page.locator(".picker .wrong[aria-pressed=true]")).to_have_count(len(wrong))
    expect(page.locator(".player .where").first).to_contain_text("refresh 5 of 7")
    button(page, "Try again").click()
    expect(page.locator(".picker")).to_contain_text("0 of 8 chosen")
    for position in sorted(solved.right):
        page.locator(f".picker button[data-position='{position}']").click()
    expect(page.locator(".picker")).to_contain_text("8 of 8 chosen")
    button(page, "Reveal").click()
    expect(page.get_by_text("8 of 8 right.")).to_be_visible()

    button(page, "Next").click()
    at_step(page, 4)
    expect(page.locator(".life")).to_contain_text("What the future expected here")
    button(page, "Next").click()
    at_step(page, 5)
    page.get_by_role("radio", name="no", exact=True).click(force=True)
    button(page, "Reveal").click()
    expect(page.get_by_text("Not so: yes.")).to_be_visible()
    expect(page.get_by_text("The run answered: Bruno lives in Lisbon.")).to_be_visible()
    button(page, "Next lesson").click()
    at_step(page, 1)
    expect(page.get_by_text("Lesson 5: Budgets, chunk sizes and frozen prompts")).to_be_visible()


def test_a_prediction_of_when_and_the_address_of_a_step(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/classroom?lesson=2-a-sliding-window-forgets&step=2")
    at_step(page, 2)
    page.get_by_role("radio", name="refresh 6", exact=True).click(force=True)
    button(page, "Reveal").click()
    expect(page.get_by_text("Right: refresh 6.")).to_be_visible()
    expect(page.locator(".player .where").first).to_contain_text("refresh 6 of 7")
    page.goto(f"{server.url}/classroom?lesson=2-a-sliding-window-forgets&step=99")
    at_step(page, 4)
    page.goto(f"{server.url}/classroom?lesson=nothing")
    expect(page.get_by_text("There is no lesson 'nothing'; choose one of")).to_be_visible()


def test_presenting_by_keyboard(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/classroom?lesson=2-a-sliding-window-forgets")
    at_step(page, 1)
    page.locator(".keys[data-listens]").wait_for(state="attached")
    page.keyboard.press("p")
    expect(page.get_by_test_id("stSidebar")).to_be_hidden()
    page.wait_for_url(re.compile("present=1"))
    wait_ready(page)
    size = page.locator(".st-key-lesson_text p").first.evaluate(
        "element => parseFloat(getComputedStyle(element).fontSize)"
    )
    assert size >= 20
    page.keyboard.press("PageDown")
    at_step(page, 2)
    page.get_by_role("radio", name="never", exact=True).click(force=True)
    wait_ready(page)
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Not so: refresh 6.")).to_be_visible()
    page.keyboard.press("ArrowRight")
    at_step(page, 3)
    page.keyboard.press("ArrowLeft")
    at_step(page, 2)
    page.keyboard.press("Escape")
    expect(page.get_by_test_id("stSidebar")).to_be_visible()


def test_a_handout_prints(page: Page, server: Server, browser: Browser, tmp_path: Path) -> None:
    page.goto(f"{server.url}/classroom?lesson=4-surprise")
    at_step(page, 1)
    for who, notes in [("For the class", False), ("For the teacher, with notes and answers", True)]:
        button(page, "Handout").click()
        with page.expect_download() as started:
            button(page, who).click()
        path = tmp_path / started.value.suggested_filename
        started.value.save_as(path)
        page.keyboard.press("Escape")
        paper = browser.new_page()
        paper.goto(path.as_uri())
        expect(paper.get_by_role("heading", name="Surprise: predicting the past from the future")).to_be_visible()
        assert paper.locator("figure svg").count() == 4
        assert (paper.get_by_text("For the teacher").count() > 0) == notes
        assert paper.pdf(format="A4").startswith(b"%PDF")
        paper.close()


def test_the_notes_are_there_for_the_teacher(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/classroom?lesson=1-what-a-kv-cache-is&step=3")
    at_step(page, 3)
    note = page.get_by_text("is 2 × 12 × 12 × 64 × 2 = 36,864 bytes")
    expect(note).to_have_count(0)
    page.get_by_text("Teacher's notes").click()
    expect(note).to_be_visible()
    page.get_by_text("Another model: paste its config.json").click()
    field = page.get_by_label("config.json", exact=True)
    field.fill('{"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}')
    field.press("Control+Enter")
    expect(page.get_by_text("yours: 2 × 2 × 4 × 8 × 2 = 256 bytes a token")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_lessons_and_library_fit_the_screen(browser: Browser, server: Server, width: int, scheme: str) -> None:
    with browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme) as context:  # type: ignore[arg-type]
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        for address in (
            "classroom",
            "classroom?lesson=4-surprise&step=2",
            "classroom?lesson=4-surprise&step=3",
            "classroom?lesson=5-budgets-chunks-frozen",
            "classroom?lesson=1-what-a-kv-cache-is&step=3",
            "classroom?lesson=4-surprise&step=3&present=1",
            "library",
        ):
            page.goto(f"{server.url}/{address}")
            wait_ready(page)
            if "step=2" not in address and "step=3" not in address and address != "library":
                page.locator(".player[data-drawn]").first.wait_for()
            wide = page.evaluate("(e => e.scrollWidth - e.clientWidth)(document.querySelector('[data-testid=stMain]'))")
            assert wide <= 0, address
            inside = page.locator(".player, .row, .picker").evaluate_all(
                "all => all.map((one) => one.scrollWidth - one.clientWidth)"
            )
            assert all(extra <= 1 for extra in inside), (address, inside)


# The library


def test_a_file_is_kept_named_pinned_and_deleted(shelf: tuple[Server, Page], tmp_path: Path) -> None:
    server, page = shelf
    page.goto(f"{server.url}/library")
    expect(page.get_by_role("heading", name="Nothing kept yet")).to_be_visible()
    button(page, "Add files").click()
    page.locator("input[type=file]").last.set_input_files([run_file("full"), run_file("heavy_hitter-small_chunks")])
    expect(page.get_by_role("checkbox")).to_have_count(2)
    page.keyboard.press("Escape")
    wait_ready(page)
    assert len(kept(tmp_path)) == 2
    expect(page.get_by_text("Heavy hitter · J = 48, h = 8")).to_be_visible()
    expect(page.get_by_text("Bruno lives in Lisbon.").first).to_be_visible()
    button(page, "Rename").first.click()
    field = page.get_by_label("Name", exact=True)
    field.fill(MARKUP[:80])
    field.press("Enter")
    wait_ready(page)
    page.keyboard.press("Escape")
    expect(page.get_by_text(MARKUP[:80])).to_have_count(1)
    assert page.evaluate("window.pwned") is None
    button(page, "Pin").first.click()
    expect(button(page, "Unpin")).to_have_count(1)
    page.get_by_role("checkbox", name="Choose full").check(force=True)
    expect(page.get_by_text("1 chosen")).to_be_visible()
    button(page, "Delete").click()
    button(page, "Delete for good").click()
    expect(page.get_by_role("checkbox")).to_have_count(1)
    assert len(kept(tmp_path)) == 1
    page.get_by_role("link", name="Open").click()
    page.locator(".player[data-drawn]").wait_for()
    page.get_by_role("link", name="Library").click()
    wait_ready(page)
    field = page.get_by_label("Find runs")
    field.fill("no such words")
    field.press("Enter")
    expect(page.get_by_text("None of the 1 runs holds these words.")).to_be_visible()


def test_files_dropped_anywhere_are_kept_and_opened(shelf: tuple[Server, Page], tmp_path: Path) -> None:
    server, page = shelf
    page.goto(server.url)
    wait_ready(page)
    drop = """([name, text]) => {
      const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))
      const data = new DataTransfer()
      data.items.add(new File([bytes], name))
      for (const kind of ["dragenter", "dragover", "drop"]) {
        const event = new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true, composed: true })
        document.querySelector("h2").dispatchEvent(event)
      }
    }"""
    page.locator(".drop[data-listens]").wait_for(state="attached")
    page.evaluate(drop, ["broken.ccviz", base64.b64encode(b"PK no").decode()])
    expect(page.get_by_text(re.compile(r"broken\.ccviz is not a \.ccviz file"))).to_be_visible()
    page.evaluate(drop, ["mine.ccviz", base64.b64encode(run_file("counter_causal").read_bytes()).decode()])
    page.locator(".player[data-drawn]").wait_for()
    expect(page.locator(".player .tokens")).to_contain_text("Bruno lives in Lisbon")
    assert len(kept(tmp_path)) == 1
    page.goto(f"{server.url}/library")
    expect(page.get_by_role("checkbox", name="Choose mine")).to_have_count(1)


def test_several_runs_are_compared_and_exported(shelf: tuple[Server, Page], tmp_path: Path) -> None:
    server, page = shelf
    page.goto(f"{server.url}/library")
    wait_ready(page)
    button(page, "Add files").click()
    page.locator("input[type=file]").last.set_input_files([run_file("full"), run_file("sliding_window")])
    expect(page.get_by_role("checkbox")).to_have_count(2)
    page.keyboard.press("Escape")
    wait_ready(page)
    for name in ("full", "sliding_window"):
        page.get_by_role("checkbox", name=f"Choose {name}").check(force=True)
    expect(page.get_by_text("2 chosen")).to_be_visible()
    wait_ready(page)
    with page.expect_download() as started:
        button(page, "Export as .zip").click()
    started.value.save_as(tmp_path / "runs.zip")
    with zipfile.ZipFile(tmp_path / "runs.zip") as archive:
        texts = sorted(Trace.open(archive.read(name)).text for name in archive.namelist())
    assert texts == sorted(recorded_run(name).text for name in ("full", "sliding_window"))
    button(page, "Compare").click()
    expect(page.get_by_role("heading", name="Compare strategies")).to_be_visible()
    expect(page.locator(".answers .card")).to_have_count(2)
    expect(page.locator(".player[data-drawn]")).to_have_count(2)


@pytest.mark.model
def test_a_finished_run_is_kept_and_outlives_its_server(browser: Browser, tmp_path: Path) -> None:
    with browser.new_context() as context:
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        with serve(tmp_path) as first:
            page.goto(f"{first.url}/?new=4&J=48")
            wait_ready(page)
            page.get_by_text("prompt tokens").first.wait_for()
            button(page, "Run").click()
            page.locator(".player[data-drawn]").wait_for()
            expect(button(page, "Cancel")).to_have_count(0)
            page.locator(".player").get_by_role("button", name="One refresh back").click()
            page.wait_for_url(re.compile("refresh="))
            address = page.url.removeprefix(first.url)
            assert len(kept(tmp_path)) == 1
            page.goto(f"{first.url}/library")
            expect(page.get_by_text("Counter-causal surprise · J = 48, h = 16")).to_be_visible()
            page.goto("about:blank")
        with serve(tmp_path) as second:
            page.goto(f"{second.url}{address}")
            page.locator(".player[data-drawn]").wait_for()
            expect(page.locator(".player .where").first).to_contain_text("refresh 5 of 6")
