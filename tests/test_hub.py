"""Models from the hub, for real: transformers downloads from a small server that answers as the hub does."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
from conftest import ROOT
from test_models import save

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ID = "team/tiny-llama"
LOAD = """
import sys, ccviz
try:
    model = ccviz.load_model(sys.argv[1], device="cpu", dtype="float32")
    print(len(model.layers), ccviz.generate(model, "Hello", "full", 8, 4, 3).stop_reason)
except ccviz.UserError as error:
    print("refused:", error)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves one folder as the repository ``team/tiny-llama``; a gated and a missing one besides."""

    folder: Path

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0]
        file = self.folder / path.removeprefix(f"/{ID}/resolve/").partition("/")[2]
        if path.startswith(f"/api/models/{ID}/tree"):
            listed = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": COMMIT}
                for file in self.folder.iterdir()
            ]
            self.send(200, json.dumps(listed).encode(), with_body)
        elif path.startswith(f"/api/models/{ID}"):
            names = [{"rfilename": file.name} for file in self.folder.iterdir()]
            self.send(200, json.dumps({"id": ID, "sha": COMMIT, "siblings": names}).encode(), with_body)
        elif path.startswith(f"/{ID}/resolve/") and file.is_file():
            self.send(200, file.read_bytes(), with_body)
        elif path.startswith(f"/{ID}/resolve/"):
            self.send(404, b"", with_body, {"X-Error-Code": "EntryNotFound"})
        elif "/team/locked" in path:
            self.send(401, b"", with_body, {"X-Error-Code": "GatedRepo"})
        else:
            self.send(404, b"", with_body, {"X-Error-Code": "RepoNotFound"})

    def send(self, status: int, body: bytes, with_body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing on standard error."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    Hub.folder = save(tmp_path_factory.mktemp("hub"), oracle.tiny_model("llama"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def load(name: str, endpoint: str, home: Path) -> str:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", LOAD, name], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert not run.stderr.strip(), run.stderr
    return run.stdout.strip()


@pytest.mark.slow
def test_a_hub_id_is_downloaded_and_runs_and_later_needs_no_hub(hub: str, tmp_path: Path) -> None:
    assert load(ID, hub, tmp_path) == "3 length"
    assert load(ID, "http://127.0.0.1:9", tmp_path) == "3 length"


@pytest.mark.slow
def test_an_id_that_is_not_there_a_gated_one_and_a_hub_that_does_not_answer_are_told_apart(
    hub: str, tmp_path: Path
) -> None:
    assert "was not found on the hub" in load("team/no-such-model", hub, tmp_path)
    assert "only for those who log in" in load("team/locked", hub, tmp_path)
    assert "hub cannot be reached" in load(ID, "http://127.0.0.1:9", tmp_path)
