"""What tests share: one thread for torch, tiny models of every family, and the built-in model loaded once."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # so that tests can import the oracle and each other's helpers

import commands
import oracle

from ccviz import generate, load_model
from ccviz.cli import main
from ccviz.network import LanguageModel

ROOT = Path(__file__).parent.parent


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("CCVIZ_DATA", tempfile.mkdtemp(prefix="ccviz-tests-"))  # not the library of who runs them
    torch.set_num_threads(1)  # two threads on a busy machine were seen seven times slower than one


class LetterTokenizer:
    """Enough of a tokenizer for tiny models: token i is the i-th character from "!" on."""

    chat_template = None
    eos_token_id = None

    def __len__(self) -> int:
        return 97

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [(ord(letter) - 33) % 97 for letter in text]}

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(33 + token) for token in ids)


def tiny(family: str, seed: int = 0, device: str = "cpu") -> LanguageModel:
    """A small random float32 model as `load_model` would return it."""
    stock = oracle.tiny_model(family, seed).to(device)
    return LanguageModel(stock, LetterTokenizer(), f"tiny-{family}", torch.device(device), torch.float32)


@pytest.fixture(scope="session")
def tiny_llama() -> LanguageModel:
    return tiny("llama")


@pytest.fixture(scope="session")
def built_in() -> LanguageModel:
    """The built-in model in float32 on the CPU."""
    return load_model("smollm2-135m", device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder: the tiny llama, which reads at most 512 tokens."""
    place = tmp_path_factory.mktemp("models") / "tiny"
    oracle.tiny_model("llama").save_pretrained(place)
    commands.small_tokenizer().save_pretrained(place)
    return str(place)


@pytest.fixture(scope="session")
def saved(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a run of that model."""
    model = load_model(folder, device="cpu", dtype="float32")
    trace = generate(model, "The sun is out.", cache_size=16, chunk_size=8, max_new_tokens=12)
    return trace.save(tmp_path_factory.mktemp("runs") / "run.ccviz")


@pytest.fixture
def ccviz_says(capsys: pytest.CaptureFixture[str]) -> commands.Ccviz:
    """Call the command line in this process: exit status, standard output, standard error."""

    def call(*arguments: Any) -> commands.Said:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else -1
        out, err = capsys.readouterr()
        return status, out, err

    return call


# Browser tests: one Chromium and one server a file, a visitor of one's own a test.


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from browser import PATIENCE, chromium
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE)
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def server(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from browser import serve

    with serve(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def visitor(browser: Any, server: Any) -> Iterator[Any]:
    """One visitor; at the end nothing may have left the machine, and neither page nor server may have raised."""
    from browser import Visitor

    before = len(server.log())
    visitor = Visitor(browser.new_context(viewport={"width": 1280, "height": 900}))
    yield visitor
    visitor.context.close()
    log = server.log()[before:]
    print(log)
    assert "Traceback" not in log
    assert visitor.foreign_requests() == []
    assert visitor.errors == []


@pytest.fixture
def page(visitor: Any) -> Any:
    return visitor.context.new_page()
