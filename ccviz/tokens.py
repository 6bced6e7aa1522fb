"""From text to tokens and back, exactly: prompts, chat templates, and the text that each token adds.

Knows tokenizers only.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from ccviz.errors import UserError

UNFINISHED = "\ufffd"  # what decoding gives for bytes that are not (yet) a character


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model reads it.

    Attributes
    ----------
    token_ids
        All of it, template included.
    system_size
        How many of the first tokens the template writes before the user's own words, its system message among them;
        0 without a template.
    """

    token_ids: list[int]
    system_size: int


def encode_prompt(
    tokenizer: Any, prompt: str | Sequence[int], chat: bool = True, system: str | None = None
) -> EncodedPrompt:
    """Tokenize a prompt, through the tokenizer's chat template where it has one and ``chat`` is true.

    Parameters
    ----------
    prompt
        Text, or token ids that are taken as they are.
    system
        The system message; None leaves it to the template. Ignored without a template.

    Raises
    ------
    UserError
        If the prompt is empty, not text, or holds ids outside the vocabulary.
    """
    if not isinstance(prompt, str):
        return EncodedPrompt(_checked_ids(tokenizer, prompt), 0)
    check_text(prompt)
    if not (chat and getattr(tokenizer, "chat_template", None)):
        return EncodedPrompt(_encode(tokenizer, prompt, special=True), 0)
    ids = _encode(tokenizer, _render(tokenizer, system, prompt))
    # What a template writes before the user's words is what two other users' prompts would have in common.
    one, other = (_render(tokenizer, system, words) for words in ("\u2301", "\u2302"))
    head = one[: _shared(one, other)]
    return EncodedPrompt(ids, _shared(ids, _encode(tokenizer, head)) if head else 0)


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two sequences have in common at their start."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def check_text(prompt: str) -> None:
    """Raise `UserError` if a prompt has nothing in it."""
    if not prompt.strip():
        raise UserError("The prompt is empty: type some text, or choose a sample.")


def _render(tokenizer: Any, system: str | None, user: str) -> str:
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": user})
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"The model's chat template refuses this: {reason}. Leave the system message empty.") from None
    return text


def _encode(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError("The prompt holds half of a surrogate pair, which is not text: delete it.") from None
    ids = list(tokenizer(text, add_special_tokens=special)["input_ids"])
    if not ids:
        raise UserError("The prompt is empty: the tokenizer knows none of its characters.")
    return ids


def _checked_ids(tokenizer: Any, prompt: Iterable[Any]) -> list[int]:
    try:
        if isinstance(prompt, (bytes, bytearray)):
            raise TypeError
        ids = [operator.index(token) for token in prompt]
    except (TypeError, RuntimeError):
        raise UserError(f"The prompt must be text or a list of token ids, not {type(prompt).__name__}.") from None
    if not ids:
        raise UserError("The prompt is empty: give at least one token id.")
    outside = [token for token in ids if not 0 <= token < len(tokenizer)]
    if outside:
        raise UserError(f"Token id {outside[0]} is not in the vocabulary of {len(tokenizer)} tokens.")
    return ids


class TokenTexts:
    """The text each token adds, found as tokens arrive; joined, it is exactly what decoding them all gives.

    A character may take several tokens (an emoji up to eleven): those that complete none have ``""``, and the one
    that does has the whole of it. Each piece is decoded together with the one before it, since some tokenizers join
    pieces differently at the start of a text. Tokenizers with byte fallback read a run of byte tokens as text or, once
    one byte of it fits nothing, as no text at all; then the pieces read into that run are taken back.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._ends = [0]  # where settled pieces end
        self._start, self._prefix = 0, ""  # the first token that is decoded again; the settled text from there on

    def push(self, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            self._ids.append(token)
            self._texts.append("")
            text = self._decode(self._start)
            if text == self._prefix or text.endswith(UNFINISHED):
                continue
            if not text.startswith(self._prefix):
                self._ends = self._holding()
                self._texts[self._ends[-1] :] = [""] * (len(self._ids) - self._ends[-1])
                self._start, self._prefix = self._window(self._ends)
                text = self._decode(self._start)
            self._texts[-1] = text[len(self._prefix) :]
            self._ends.append(len(self._ids))
            self._start, self._prefix = self._window(self._ends)

    @property
    def texts(self) -> list[str]:
        """One string a token. Bytes that never became a character are shown, as U+FFFD, by the last token."""
        ends, start, prefix = self._ends, self._start, self._prefix
        if ends[-1] == len(self._ids):
            return list(self._texts)
        text = self._decode(start)
        if not text.startswith(prefix):
            ends = self._holding()
            start, prefix = self._window(ends)
            text = self._decode(start)
        unsettled = len(self._ids) - ends[-1]
        return [*self._texts[: ends[-1]], *[""] * (unsettled - 1), text[len(prefix) :]]

    def _window(self, ends: list[int]) -> tuple[int, str]:
        """From where to decode so that what follows ``ends`` joins as it does in the whole text; the text so far."""
        for start in reversed(ends[:-1]):
            text = self._decode(start, ends[-1])
            if text:
                return start, text
        return 0, ""

    def _holding(self) -> list[int]:
        """Those of the settled ends at which the text, read up to now, still begins as it did."""
        for count in range(len(self._ends) - 1, 1, -1):
            start, prefix = self._window(self._ends[:count])
            if prefix and self._decode(start).startswith(prefix):
                return self._ends[:count]
        return [0]

    def _decode(self, start: int, stop: int | None = None) -> str:
        return decode(self._tokenizer, self._ids[start:stop])


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """All the text of these tokens, special tokens included, nothing tidied."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The text each of these tokens adds; see `TokenTexts`."""
    texts = TokenTexts(tokenizer)
    texts.push(token_ids)
    return texts.texts
