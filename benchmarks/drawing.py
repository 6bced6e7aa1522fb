"""How long a finished run takes to be drawn, in a real Chromium, and how many bytes travel to the page for it.

    python benchmarks/drawing.py [ROUNDS]

Makes traces of the sizes that count (six strategies of 64 refreshes and 1,024 slots; one of 256 refreshes and 4,096
slots), opens them on the Compare page, and measures from the click that asks for the pictures to the moment when all of
them are drawn. Needs playwright and Chromium (requirements-dev.txt); prints a Markdown table.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
from playwright.sync_api import BrowserContext, Page, WebSocket, sync_playwright

from ccviz.trace import Trace

ROOT = Path(__file__).parent.parent
PORT = 8617
SIZES = [(6, 64, 1024), (1, 256, 4096)]  # strategies, refreshes, slots
CHUNK = 32


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        server = serve(Path(folder))
        try:
            print(
                "| strategies x refreshes x slots | a visit, page load included, s | on an open page, s | payload, MB |"
            )
            print("|---|---|---|---|")
            for strategies, refreshes, slots in SIZES:
                files = [
                    made(f"strategy_{at}", refreshes, slots, at).save(Path(folder) / f"{slots}-{at}.ccviz")
                    for at in range(strategies)
                ]
                visit, click, payload = drawn(files, rounds)
                print(f"| {strategies} x {refreshes} x {slots:,} | {visit:.2f} | {click:.2f} | {payload / 1e6:.2f} |")
        finally:
            server.terminate()


def made(strategy: str, refreshes: int, slots: int, seed: int, chunk: int = CHUNK) -> Trace:
    """A trace in which random entries are evicted, as large as a real one of this shape."""
    random = np.random.default_rng(seed)
    held = np.arange(slots)
    rows, entries = [], []
    for refresh in range(refreshes):
        seen = slots + refresh * chunk
        before = held if not refresh else np.concatenate([held, np.arange(seen - chunk, seen)])
        kept = np.zeros(len(before), bool)
        kept[np.sort(random.choice(len(before), slots, replace=False))] = True
        entries.append((np.full(len(before), refresh), before, random.random(len(before), np.float32), kept))
        held = before[kept]
        rows.append((refresh, seen, "prefill", len(before), slots, 0.01, 46080 * slots))
    last = slots + (refreshes - 1) * chunk
    columns = ["refresh", "tokens_seen", "phase", "size_before", "size_after", "seconds", "cache_bytes"]
    number, position, score, kept = (np.concatenate(part) for part in zip(*entries, strict=True))
    return Trace(
        {"strategy": strategy, "cache_size": slots, "chunk_size": chunk, "model": "none", "stop_reason": "length"},
        pd.DataFrame(
            {
                "position": np.arange(last, dtype="int32"),
                "token_id": np.zeros(last, "int32"),
                "text": [" word"] * last,
                "generated": np.arange(last) >= last - 8,
                "logprob": np.full(last, np.nan, "float32"),
            }
        ),
        pd.DataFrame(rows, columns=columns),
        pd.DataFrame(
            {
                "refresh": number.astype("int32"),
                "position": position.astype("int32"),
                "slot": np.concatenate([np.arange(len(part[1])) for part in entries]).astype("int32"),
                "score": score,
                "kept": kept,
                "protected": [""] * len(number),
            }
        ),
    )


def drawn(files: list[Path], rounds: int) -> tuple[float, float, float]:
    """Median seconds from finished runs to all pictures drawn, and the bytes received for them.

    First on a visit of its own, from opening the address, the app's own scripts included; then on the open page, from
    the click that asks for pictures which this browser has not seen.
    """
    with sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(120_000)
        page.goto(f"http://127.0.0.1:{PORT}/compare")
        page.get_by_role("button", name="Open saved runs").click()
        page.locator("input[type=file]").last.set_input_files(files)
        page.locator(".answers .card").nth(len(files) - 1).wait_for()
        _settled(page, len(files))
        address = page.url
        visits, clicks, payloads = [], [], []
        for _ in range(rounds):
            with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
                seconds, received, page = _visit(context, address, len(files))
                visits.append(seconds)
                before, began = received[0], time.perf_counter()
                page.get_by_role("radio", name="by score rank").click()  # pictures this browser has not seen
                _settled(page, len(files), "rank")
                clicks.append(time.perf_counter() - began)
                payloads.append(received[0] - before)
        browser.close()
    return statistics.median(visits), statistics.median(clicks), statistics.median(payloads)


def _visit(context: BrowserContext, address: str, count: int) -> tuple[float, list[int], Page]:
    """Seconds from opening an address to all drawn, and a count of the bytes that come over the page's socket."""
    received = [0]

    def add(frame: str | bytes) -> None:
        received[0] += len(frame)

    def watch(socket: WebSocket) -> None:
        socket.on("framereceived", add)

    page = context.new_page()
    page.set_default_timeout(120_000)
    page.on("websocket", watch)
    began = time.perf_counter()
    page.goto(address)
    _settled(page, count)
    return time.perf_counter() - began, received, page


def _settled(page: Page, count: int, order: str = "position") -> None:
    """Wait until that many players have drawn their pictures in this order of slots."""
    page.locator(f".player[data-drawn][data-order={order}]").nth(count - 1).wait_for()


def serve(folder: Path, wait: bool = True) -> subprocess.Popen[bytes]:
    """The app, with its data in this folder; given some seconds to come up unless told otherwise."""
    command = [sys.executable, "-m", "streamlit", "run", "app.py", "--server.headless", "true"]
    command += ["--server.port", str(PORT), "--server.fileWatcherType", "none"]
    environment = {**os.environ, "CCVIZ_DATA": str(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
    if wait:
        time.sleep(6)
    return process


if __name__ == "__main__":
    main()
