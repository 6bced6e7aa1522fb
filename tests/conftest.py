"""What tests share: one thread for torch, tiny models of every family, and the built-in model loaded once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # so that tests can import the oracle and each other's helpers

import oracle

from ccviz import load_model
from ccviz.network import LanguageModel

ROOT = Path(__file__).parent.parent


def pytest_configure(config: pytest.Config) -> None:
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
