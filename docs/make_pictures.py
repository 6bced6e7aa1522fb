"""Make the README's picture from the real app, in a real browser.

    python docs/make_pictures.py

Starts the app, runs the first sample, moves to a refresh in the middle and saves docs/explore.png. Needs chromium and
the packages of requirements-dev.txt.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import chromium, serve, wait_ready  # noqa: E402  (the tests' own helper, found through the line above)

WIDTH = 1280


def main() -> None:
    """Save the picture."""
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as server, chromium() as browser:
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
        page.mouse.move(0, 0)
        height = page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
        page.set_viewport_size({"width": WIDTH, "height": height + 40})
        page.wait_for_timeout(2000)  # the chart draws itself anew at the new size
        end = page.get_by_text("The tokens as a table").bounding_box()
        assert end is not None
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": end["y"] - 12}
        page.screenshot(path=str(ROOT / "docs" / "explore.png"), clip=clip)


if __name__ == "__main__":
    main()
