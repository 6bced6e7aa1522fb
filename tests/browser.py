"""A real server and a real Chromium, for tests of what a person sees and does."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

ROOT = Path(__file__).parent.parent
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--no-first-run"]
PATIENCE = 300_000  # milliseconds; a busy machine may be many times slower, and the first load may fetch the model


@dataclass(frozen=True)
class Server:
    """A running app: where it answers, and what it has written."""

    url: str
    log_file: Path

    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")


def chromium_path() -> str:
    """Where Chromium is; without one the test is skipped, or fails in CI."""
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        reason = f"no browser on this machine's PATH (looked for {', '.join(NAMES)})"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


class Visitor:
    """A browser of its own: what it asked the network for and which errors its pages raised."""

    def __init__(self, context: BrowserContext) -> None:
        self.context = context
        self.requests: list[str] = []
        self.errors: list[str] = []
        context.set_default_timeout(PATIENCE)
        context.on("request", lambda request: self.requests.append(request.url))
        context.on("weberror", lambda error: self.errors.append(str(error.error)))

    def foreign_requests(self) -> list[str]:
        return [url for url in self.requests if not re.match(r"(https?|wss?)://127\.0\.0\.1[:/]|data:|blob:", url)]


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """The app on a free port, its log in ``folder``; stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", folder / "server.log")
    command = [sys.executable, "-m", "streamlit", "run", "app.py", "--server.headless", "true"]
    command += ["--server.port", str(port), "--server.fileWatcherType", "none"]
    with server.log_file.open("ab") as log:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CCVIZ_DATA": str(folder / "data")}
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        _wait_for_health(server, process)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_health(server: Server, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE / 1000
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.url}/_stcore/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    pytest.fail(f"the server did not come up:\n{server.log()}")


@contextmanager
def chromium() -> Iterator[Browser]:
    path = chromium_path()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def wait_ready(page: Page) -> None:
    """Wait until the script has run and the page has drawn what it sent."""
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]', timeout=PATIENCE)
