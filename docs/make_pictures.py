"""Make the pictures of the README and the tour from the real app, in a real browser.

    python docs/make_pictures.py

Starts the app, runs the first sample and saves docs/explore.png and docs/player.png; compares the paper's six
strategies on it and saves docs/compare.png and docs/step.png; then docs/library.png and docs/classroom.png. Needs
chromium and the packages of requirements-dev.txt.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import Server, chromium, serve, wait_ready  # noqa: E402  (the tests' own helper, found through the line above)
from playwright.sync_api import Browser, Locator, Page  # noqa: E402

WIDTH = 1280


def main() -> None:
    """Save the pictures."""
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as server, chromium() as browser:
        explore(browser, server)
        compare(browser, server)
        library(browser, server)
        classroom(browser, server)


def opened(browser: Browser, server: Server, address: str) -> Page:
    page = browser.new_page(viewport={"width": WIDTH, "height": 1000})
    page.goto(f"{server.url}/{address}")
    wait_ready(page)
    return page


def explore(browser: Browser, server: Server) -> None:
    """One run, with the word that answers the question pinned."""
    page = opened(browser, server, "?dtype=float32")
    page.get_by_text("KB of cache a token").wait_for(timeout=300_000)
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("heading", name="What the cache held, and what became of the text").wait_for(timeout=300_000)
    wait_ready(page)
    page.locator(".tokens span", has_text=" Lisbon").first.click()
    page.wait_for_timeout(1000)
    wait_ready(page)
    save(page, page.get_by_text("The tokens as a table"), "explore.png")
    page.locator(".player").screenshot(path=str(ROOT / "docs" / "player.png"))


def compare(browser: Browser, server: Server) -> None:
    """Six strategies side by side, and two of them in step."""
    page = opened(browser, server, "compare?dtype=float32")
    page.get_by_text("KB of cache a token").wait_for(timeout=300_000)
    page.get_by_role("button", name="Run all", exact=True).click()
    page.get_by_role("heading", name="Answers").wait_for(timeout=300_000)
    wait_ready(page)
    page.locator(".player[data-drawn]").nth(5).wait_for()
    save(page, page.locator(".player .title", has_text="Importance"), "compare.png")  # after the first two
    page.set_viewport_size({"width": WIDTH, "height": 1000})
    page.get_by_role("radio", name="Step through two").click()
    page.locator(".player[data-parts=all][data-drawn]").nth(1).wait_for()
    wait_ready(page)
    page.get_by_role("combobox", name="Right").click()
    page.get_by_role("option", name="Counter-causal surprise").click()
    wait_ready(page)
    page.locator(".player[data-drawn]", has_text="Counter-causal surprise").wait_for()
    page.locator(".player").nth(1).locator(".tokens span", has_text=" Lisbon").first.click()
    page.wait_for_timeout(1000)
    wait_ready(page)
    page.set_viewport_size({"width": WIDTH, "height": 3200})
    page.wait_for_timeout(1500)
    page.get_by_test_id("stHorizontalBlock").filter(has=page.locator(".player")).last.screenshot(
        path=str(ROOT / "docs" / "step.png")
    )


def library(browser: Browser, server: Server) -> None:
    """What those runs left in the library."""
    page = opened(browser, server, "library")
    page.get_by_role("checkbox").nth(3).wait_for()
    wait_ready(page)
    page.get_by_role("button", name="Pin", exact=True).nth(1).click()
    wait_ready(page)
    page.wait_for_timeout(1000)
    page.screenshot(path=str(ROOT / "docs" / "library.png"))


def classroom(browser: Browser, server: Server) -> None:
    """A prediction, revealed."""
    page = opened(browser, server, "classroom?lesson=4-surprise&step=3")
    page.locator(".picker button").nth(12).wait_for()
    for at in (0, 4, 5, 6, 7, 9, 11, 12):
        page.locator(".picker button").nth(at).click()
    page.get_by_text("8 of 8 chosen").wait_for()
    wait_ready(page)
    page.get_by_role("button", name="Reveal").click()
    page.get_by_text("A blind choice gets").wait_for()
    wait_ready(page)
    page.wait_for_timeout(1000)
    page.screenshot(path=str(ROOT / "docs" / "classroom.png"))


def save(page: Page, end: Locator, name: str) -> None:
    """Save the page down to an element."""
    page.mouse.move(0, 0)
    height = page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
    page.set_viewport_size({"width": WIDTH, "height": height + 40})
    page.wait_for_timeout(2000)  # charts draw themselves anew at the new size
    box = end.last.bounding_box()
    assert box is not None
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] - 16}
    page.screenshot(path=str(ROOT / "docs" / name), clip=clip)


if __name__ == "__main__":
    main()
