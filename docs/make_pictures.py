"""Make the README's pictures from the real app, in a real browser.

    python docs/make_pictures.py

Starts the app, runs the first sample, moves to a refresh in the middle and saves docs/explore.png; compares the paper's
six strategies on it and saves docs/compare.png. Needs chromium and the packages of requirements-dev.txt.
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


def explore(browser: Browser, server: Server) -> None:
    """One run, at a refresh in its middle."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 1000})
    page.goto(f"{server.url}/?order=in+place")
    wait_ready(page)
    page.get_by_text("KB of cache a token").wait_for(timeout=300_000)
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("The text at this refresh").wait_for(timeout=300_000)
    slider = page.get_by_role("slider", name="Refresh")
    for _ in range(2):
        slider.press("ArrowLeft")
        wait_ready(page)
    save(page, page.get_by_text("The tokens as a table"), "explore.png")


def compare(browser: Browser, server: Server) -> None:
    """Six strategies side by side."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 1000})
    page.goto(f"{server.url}/compare")
    wait_ready(page)
    page.get_by_text("KB of cache a token").wait_for(timeout=300_000)
    page.get_by_role("button", name="Run all", exact=True).click()
    page.get_by_role("heading", name="Answers").wait_for(timeout=300_000)
    wait_ready(page)
    save(page, page.locator("p strong", has_text="Importance"), "compare.png")  # after the first two heatmaps


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
