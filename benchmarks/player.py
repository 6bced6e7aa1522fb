"""How smoothly the player steps through long traces, and how soon the classroom shows a picture, in a real Chromium.

    python benchmarks/player.py

Opens traces of 32,000 tokens and 512 refreshes on the Explore page and measures, in the page: the time from the upload
to the drawn player; frames while it plays 32 refreshes a second; and the time that one step, one pointed-at cell, one
pinned token, one zoom and one change of order take. Then it starts servers anew and measures the first visit of the
Classroom page, with the network cut off, in a browser that has never seen the app. Needs playwright and Chromium
(requirements-dev.txt); prints a Markdown table.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from drawing import PORT, made, serve
from playwright.sync_api import Browser, sync_playwright
from playwright.sync_api import Error as PlaywrightError

from ccviz.trace import Trace

TRACES = {"1,024 slots": (1024, 61), "4,096 slots": (4096, 55), "full cache": (1024, 61)}
REFRESHES = 512
MEASURE = """async ({ player }) => {
  const timed = (count, act) => {
    const took = []
    for (let at = 0; at < count; at++) {
      const began = performance.now()
      act(at)
      took.push(performance.now() - began)
    }
    took.sort((a, b) => a - b)
    return { median: took[took.length >> 1], worst: took.at(-1) }
  }
  const { map, model } = player
  const told = { step: timed(200, (at) => player.step((at * 131) % model.rows)) }
  told.hover = timed(200, (at) => player.hover((at * 997) % model.tokens, { row: at, from: "map" }))
  told.pin = timed(20, (at) => player.pin(500 + at * 7))
  player.pin(-1)
  told.zoom = timed(50, (at) => map.zoomCells(at, at + 200, at, at + 60))
  map.unzoom()
  const began = performance.now()
  player.order("rank")
  told.rank = performance.now() - began
  const then = performance.now()
  player.order("in place")
  told.place = performance.now() - then
  player.order("position")
  player.step(0)
  player.faster(9)
  const frames = []
  await new Promise((done) => {
    let last = performance.now()
    const end = last + 6000
    player.play()
    const frame = (now) => {
      frames.push(now - last)
      last = now
      if (now < end) requestAnimationFrame(frame)
      else done()
    }
    requestAnimationFrame(frame)
  })
  player.stop()
  frames.sort((a, b) => a - b)
  const place = (share) => frames[Math.min(frames.length - 1, Math.floor(frames.length * share))]
  told.frame = { median: place(0.5), p95: place(0.95), worst: frames.at(-1) }
  told.stepped = player.state.refresh
  return JSON.stringify(told)
}"""


def main() -> None:
    """Measure and print."""
    print(
        "| trace | tokens | drawn after, s | frame while playing: median, 95 %, worst, ms | refreshes in 6 s | "
        "step, ms | pointing, ms | pin, ms | zoom, ms | to rank order, ms | to in-place order, ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        server = serve(Path(folder))
        path = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            for name, (slots, chunk) in TRACES.items():
                trace = made("full" if name == "full cache" else "counter_causal", REFRESHES, slots, 0, chunk)
                if name == "full cache":
                    trace = Trace(trace.config, trace.tokens, trace.refreshes, trace.entries.iloc[:0])
                seconds, told = measured(browser, trace.save(Path(folder) / "trace.ccviz"))
                print(row(name, len(trace.tokens), seconds, told))
        finally:
            browser.close()
            server.terminate()
            server.wait()
    with tempfile.TemporaryDirectory() as folder:
        whole, visit = first_picture(Path(folder))
    print(f"\nClassroom, first picture: {visit:.2f} s after the first request, {whole:.2f} s after the server's start.")


def first_picture(folder: Path, rounds: int = 3) -> tuple[float, float]:
    """Median seconds to the Classroom's first picture: from the start of the server, and from the first request."""
    whole, visit = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        server = serve(folder, wait=False)
        with sync_playwright() as playwright:
            path = os.environ.get("CHROMIUM", "/usr/bin/chromium")
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.route(re.compile(r"^https?://(?!127\.0\.0\.1)"), lambda route: route.abort())
            while True:
                asked = time.perf_counter()
                try:
                    page.goto(f"http://127.0.0.1:{PORT}/classroom")
                    break
                except PlaywrightError:
                    time.sleep(0.05)
            page.locator(".player[data-drawn]").wait_for()
            visit.append(time.perf_counter() - asked)
            whole.append(time.perf_counter() - began)
            browser.close()
        server.terminate()
        server.wait()
    return statistics.median(whole), statistics.median(visit)


def measured(browser: Browser, file: Path) -> tuple[float, dict[str, Any]]:
    """Seconds from the upload to the drawn player, and what the page measured."""
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        page.set_default_timeout(300_000)
        page.goto(f"http://127.0.0.1:{PORT}/")
        page.get_by_role("button", name="Open a saved run").click()
        began = time.perf_counter()
        page.locator("input[type=file]").last.set_input_files(file)
        player = page.locator(".player[data-drawn]")
        player.wait_for()
        seconds = time.perf_counter() - began
        page.keyboard.press("Escape")
        page.wait_for_timeout(3000)
        return seconds, dict(json.loads(player.evaluate(MEASURE)))


def row(name: str, tokens: int, seconds: float, told: dict[str, Any]) -> str:
    """A row of the table: medians, with the worst in brackets."""
    pairs = [f"{told[key]['median']:.1f} ({told[key]['worst']:.0f})" for key in ("step", "hover", "pin", "zoom")]
    frame = told["frame"]
    frames = f"{frame['median']:.0f}, {frame['p95']:.0f}, {frame['worst']:.0f}"
    cells = [name, f"{tokens:,}", f"{seconds:.1f}", frames, str(told["stepped"]), *pairs]
    cells += [f"{told['rank']:.0f}", f"{told['place']:.0f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
