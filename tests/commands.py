"""Calling the command line in tests: in this process and in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parent.parent
TEMPLATE = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}<|assistant|>"
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n.,:?-'\"()|<>_=+[]{}"
SMALL = ["--cache-size", "16", "--chunk-size", "8", "--max-new-tokens", "12"]
Said = tuple[int, str, str]
Ccviz = Callable[..., Said]


def small_tokenizer() -> PreTrainedTokenizerFast:
    """A token a character, a chat template, no token that ends a text; the rest of the 97 tokens are not ASCII."""
    stand_ins = {" ": "Ġ", "\n": "Ċ"}
    words = [stand_ins.get(letter, letter) for letter in LETTERS]
    words += [f"Ã{chr(letter)}" for letter in range(0xAE, 0xAE + 97 - len(words))]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)


def process(*arguments: Any, **given: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ccviz", *map(str, arguments)]
    environment = {**os.environ, **given.pop("environment", {})}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, **given)


def assert_one_line(said: Said) -> str:
    """Exit status 2 and one line on standard error; that line."""
    status, out, err = said
    assert (status, out) == (2, "")
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1
    assert err.startswith("ccviz")
    assert "Traceback" not in err
    return err
